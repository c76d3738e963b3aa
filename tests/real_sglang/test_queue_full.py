"""A full server answers a streamed request with 200 and an event that says 503, for some behind
events that begin an answer; a plain one of /v1/responses with 400.

Behind the router that is either a second try elsewhere or an honest 503, never a stream of nothing.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PROMPT,
    RESPONSES,
    chat_body,
    generate_body,
    open_stream,
    post,
)
from .cluster import Router, SGLangServer
from .conftest import QUEUED_MAX, RUNNING_MAX, Pair, StartRouter
from .kit import MODEL_NAME

pytestmark = pytest.mark.real_sglang

REQUESTS = [
    (CHAT, chat_body(8)),
    (COMPLETIONS, {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}),
    (GENERATE, generate_body(8)),
    (MESSAGES, chat_body(8)),
    (RESPONSES, {"model": MODEL_NAME, "input": PROMPT, "max_output_tokens": 8}),
]


@pytest.fixture
def full_server(pair: Pair) -> Iterator[SGLangServer]:
    """The first server of the pair with all its places taken by direct requests, in slow motion."""
    server, _ = pair
    with server.slowed(0.05), server.filled(RUNNING_MAX + QUEUED_MAX):
        yield server


def test_a_full_server_alone_is_a_503_with_retry_after(
    full_server: SGLangServer, start_router: StartRouter
) -> None:
    router = _unaware_router(full_server, start_router=start_router)
    for path, body in REQUESTS:
        for stream in (False, True):
            before = full_server.received(path)
            answer = post(router.url + path, body | {"stream": stream})
            assert full_server.received(path) > before, "refused by the router, not by the server"
            assert answer.status_code == 503, answer.text
            assert answer.headers["content-type"].startswith("application/json")
            assert int(answer.headers["retry-after"]) >= 1
            # A plain answer is the server's own, whose error is not nested; a stream that would
            # hold nothing but an error is answered in our words.
            error = answer.json()
            assert error.get("error", error)["message"]


def test_what_a_full_server_refuses_is_tried_on_another(
    full_server: SGLangServer, pair: Pair, start_router: StartRouter
) -> None:
    _, free = pair
    router = _unaware_router(full_server, free, start_router=start_router)
    free_id = router.worker(free).id
    for path, body in REQUESTS:
        before = full_server.received(path)
        # Round robin: of two in a row, one comes to the full server first.
        for _ in range(2):
            with open_stream(router.url + path, body) as stream:
                assert stream.response.status_code == 200
                assert stream.worker_id == free_id
                assert _finished(stream.json_events()[-1])
        assert full_server.received(path) > before, "the full server was never tried"
        before = full_server.received(path)
        for _ in range(2):
            answer = post(router.url + path, body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-laneway-worker"] == free_id
        assert full_server.received(path) > before, "the full server was never tried"


def test_a_client_that_leaves_before_the_first_token_frees_its_place(
    pair: Pair, start_router: StartRouter
) -> None:
    server, _ = pair
    router = _unaware_router(server, start_router=start_router)
    with server.slowed(0.05), server.filled(RUNNING_MAX), ThreadPoolExecutor() as threads:
        body = chat_body(8, stream=True)
        impatient = threads.submit(post, router.url + CHAT, body, timeout_s=2.0)
        server.wait_requests(RUNNING_MAX + 1, within_s=2)
        assert isinstance(impatient.exception(), httpx.ReadTimeout)
        server.wait_requests(RUNNING_MAX, within_s=3)


def _unaware_router(*servers: SGLangServer, start_router: StartRouter) -> Router:
    """Start a router that believes that each server has room, so that the server must say no.

    Its retries do not run out, as half of all requests need one.
    """
    roomy = [{"url": server.url, "concurrency_max": 100} for server in servers]
    return start_router(
        config={
            "workers": roomy,
            "policy": {"name": "round_robin"},
            "retry": {"budget_ratio": 1.0},
        }
    )


def _finished(event: dict[str, Any]) -> bool:
    """Whether this last event of a stream says that the answer is whole."""
    if "meta_info" in event:
        return bool(event["meta_info"]["finish_reason"]["type"] == "length")
    if "choices" in event:
        return bool(event["choices"][0]["finish_reason"] == "length")
    return event["type"] in ("message_stop", "response.completed", "response.incomplete")
