"""What goes wrong: clients that leave, servers that die in mid-stream and come back."""

import json
from contextlib import ExitStack

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk as Chunk

from .client import CHAT, GENERATE, PROMPT, Stream, chat_body, generate_body, open_stream, post
from .cluster import Router, SGLangServer
from .conftest import Pair, StartRouter
from .kit import MODEL_NAME
from .service import eventually

pytestmark = pytest.mark.real_sglang

# With steps of 20 ms this takes half a minute; what ends it sooner is the event under test.
ENDLESS = 1500
STREAMED = 200


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat_body(ENDLESS)), (GENERATE, generate_body(ENDLESS))]
)
def test_a_client_that_leaves_a_stream_ends_the_request_on_the_server(
    path: str, body: dict[str, object], router: Router, pair: Pair
) -> None:
    with pair[0].slowed(0.02), pair[1].slowed(0.02):
        with open_stream(router.url + path, body) as stream:
            next(stream.events)
            server = _server_of(router, stream.worker_id, pair)
            server.wait_requests(1)
        server.wait_requests(0, within_s=3)
        _wait_nothing_in_flight(router)


def test_a_client_that_gives_up_a_plain_request_ends_it_on_the_server(
    router: Router, pair: Pair
) -> None:
    with pair[0].slowed(0.02), pair[1].slowed(0.02):
        with pytest.raises(httpx.ReadTimeout):
            post(router.url + CHAT, chat_body(ENDLESS), timeout_s=1.0)
        # SGLang looks every four seconds whether a client without a stream is still there.
        for server in pair:
            server.wait_requests(0, within_s=10)
        _wait_nothing_in_flight(router)


def test_a_server_killed_in_mid_stream_breaks_only_its_own_streams_and_rejoins_by_itself(
    pair: Pair, start_router: StartRouter
) -> None:
    # Round robin puts one stream of each kind on each server.
    router = start_router(*pair, flags=("--policy", "round_robin"))
    victim, survivor = pair
    victim_id, survivor_id = router.worker(victim).id, router.worker(survivor).id
    with ExitStack() as stack:
        stack.enter_context(victim.slowed(0.02))
        stack.enter_context(survivor.slowed(0.02))
        raw = _two_raw_streams(router, stack)
        parsed = _two_sdk_streams(router, stack)
        assert raw.keys() == parsed.keys() == {victim_id, survivor_id}
        for worker_id in (victim_id, survivor_id):
            next(raw[worker_id].events)
            next(parsed[worker_id])
        victim.service.kill()
        _check_broken_raw(raw[victim_id])
        _check_broken_sdk(parsed[victim_id])
        assert _finish_reason_sdk(parsed[survivor_id]) == "length"
        assert list(raw[survivor_id].events)[-1] == "[DONE]"
    # From the first moment on, and also while the router has not yet ejected the server.
    for _ in range(6):
        answer = post(router.url + CHAT, chat_body(4)).raise_for_status()
        assert answer.headers["x-laneway-worker"] == survivor_id
    router.wait_state(victim, "ejected", within_s=10)
    victim.start()
    victim.wait_ready()
    router.wait_state(victim, "active", within_s=10)
    eventually(
        lambda: post(router.url + CHAT, chat_body(4)).headers.get("x-laneway-worker"),
        lambda worker_id: worker_id == victim_id,
        within_s=20,
        what="the restarted server gets requests",
    )


def _server_of(router: Router, worker_id: str, pair: Pair) -> SGLangServer:
    (server,) = (s for s in pair if s.url == router.workers()[worker_id].url)
    return server


def _two_raw_streams(router: Router, stack: ExitStack) -> dict[str, Stream]:
    """Open two streams and return them by worker."""
    streams = [
        stack.enter_context(open_stream(router.url + CHAT, chat_body(STREAMED))) for _ in range(2)
    ]
    return {stream.worker_id: stream for stream in streams}


def _two_sdk_streams(router: Router, stack: ExitStack) -> dict[str, openai.Stream[Chunk]]:
    """Open two streams of the SDK and return them by worker."""
    sdk = stack.enter_context(OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0))
    streams = [
        stack.enter_context(
            sdk.chat.completions.create(
                model=MODEL_NAME,
                messages=[{"role": "user", "content": PROMPT}],
                max_tokens=STREAMED,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
        for _ in range(2)
    ]
    return {stream.response.headers["x-laneway-worker"]: stream for stream in streams}


def _check_broken_raw(stream: Stream) -> None:
    """The stream ends with an error and without anything that claims success."""
    *chunks, last = list(stream.events)
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert json.loads(last)["error"]["type"] == "server_error"


def _check_broken_sdk(stream: openai.Stream[Chunk]) -> None:
    """The SDK raises the error that the router sent, not one about a lost connection."""
    with pytest.raises(openai.APIError) as caught:
        _finish_reason_sdk(stream)
    assert caught.type is openai.APIError


def _finish_reason_sdk(stream: openai.Stream[Chunk]) -> str | None:
    """Read to the end; only the last chunk may say why it ended."""
    *others, last = [chunk.choices[0].finish_reason for chunk in stream]
    assert not any(others)
    return last


def _wait_nothing_in_flight(router: Router) -> None:
    eventually(
        lambda: [worker.streams for worker in router.workers().values()],
        lambda streams: not any(streams),
        within_s=3,
        what="the router has nothing in flight",
    )
