"""What clients see through the router: the SDKs, SGLang's native API, and errors of the server."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from .client import CHAT, COMPLETIONS, GENERATE, PROMPT, chat_body, generate_body, open_stream, post
from .cluster import Router
from .conftest import Pair
from .kit import MODEL_NAME

pytestmark = pytest.mark.real_sglang

# A byte of a text is a token, and so is each byte or mark that the chat template adds to it.
PROMPT_TOKENS = len(PROMPT)
CHAT_TOKENS = len("_user\n") + PROMPT_TOKENS + len("_\n") + len("_assistant\n")
FIXED_LENGTH = {"ignore_eos": True}


@pytest.fixture
def sdk(router: Router) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_sdk_gets_a_chat_answer_with_usage(sdk: OpenAI, router: Router) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=12,
        extra_body=FIXED_LENGTH,
    )
    answer = raw.parse()
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (CHAT_TOKENS, 12)
    assert raw.headers["x-laneway-worker"] in router.workers()


def test_the_openai_sdk_streams_a_chat_answer_that_ends_with_usage(sdk: OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": PROMPT}],
        max_completion_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=FIXED_LENGTH,
    )
    first, *middle, finish, last = list(stream)
    assert first.choices[0].delta.role == "assistant"
    assert len([chunk for chunk in middle if chunk.choices[0].delta.content]) > 5
    assert finish.choices[0].finish_reason == "length"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (CHAT_TOKENS, 40)


def test_the_openai_sdk_gets_completions_plain_and_streamed(sdk: OpenAI) -> None:
    plain = sdk.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=FIXED_LENGTH
    )
    assert plain.usage is not None
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (PROMPT_TOKENS, 12)
    stream = sdk.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        extra_body=FIXED_LENGTH,
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text


def test_the_openai_sdk_sees_an_error_of_the_server_as_the_server_worded_it(sdk: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length of 2048 tokens"):
        sdk.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=2040)


def test_the_anthropic_sdk_gets_messages_plain_and_streamed(router: Router) -> None:
    with Anthropic(base_url=router.url, api_key="none", max_retries=0) as client:
        plain = client.messages.create(
            model=MODEL_NAME, max_tokens=12, messages=[{"role": "user", "content": PROMPT}]
        )
        assert plain.usage.input_tokens == CHAT_TOKENS
        assert 0 < plain.usage.output_tokens <= 12
        with client.messages.stream(
            model=MODEL_NAME, max_tokens=12, messages=[{"role": "user", "content": PROMPT}]
        ) as stream:
            final = stream.get_final_message()
        assert final.stop_reason in ("max_tokens", "end_turn")
        assert 0 < final.usage.output_tokens <= 12


def test_the_openai_sdk_gets_responses_plain_and_streamed(sdk: OpenAI) -> None:
    plain = sdk.responses.create(model=MODEL_NAME, input=PROMPT, max_output_tokens=12)
    assert plain.usage is not None
    assert plain.usage.input_tokens == CHAT_TOKENS
    assert 0 < plain.usage.output_tokens <= 12
    *_, last = sdk.responses.create(
        model=MODEL_NAME, input=PROMPT, max_output_tokens=12, stream=True
    )
    assert last.type in ("response.incomplete", "response.completed")
    assert last.response.usage is not None
    assert 0 < last.response.usage.output_tokens <= 12


def test_native_generate_gives_the_tokens_that_the_server_itself_gives(
    router: Router, pair: Pair
) -> None:
    body = generate_body(24)
    direct = post(pair[0].url + GENERATE, body).json()
    _forget(pair)
    plain = post(router.url + GENERATE, body).json()
    assert plain["output_ids"] == direct["output_ids"]
    assert plain["meta_info"]["finish_reason"] == {"type": "length", "length": 24}
    _forget(pair)
    with open_stream(router.url + GENERATE, body) as stream:
        events = stream.json_events()
    # Native events are cumulative.
    lengths = [event["meta_info"]["completion_tokens"] for event in events]
    assert lengths == sorted(lengths)
    assert len(events) > 5
    assert events[-1]["output_ids"] == direct["output_ids"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_what_the_servers_own_stream_says(
    path: str, router: Router, pair: Pair
) -> None:
    body = chat_body(24, temperature=0, stream_options={"include_usage": True}, prompt=PROMPT)
    direct = _streamed(pair[0].url + path, body)
    _forget(pair)
    routed = _streamed(router.url + path, body)
    assert routed == direct
    assert routed[1]["completion_tokens"] == 24


def test_a_stream_names_the_worker_that_runs_it_while_it_runs(router: Router, pair: Pair) -> None:
    with (
        pair[0].slowed(0.02),
        pair[1].slowed(0.02),
        open_stream(router.url + CHAT, chat_body(1000)) as stream,
    ):
        next(stream.events)
        running = {server.url: server.loads().running for server in pair}
        assert running.pop(router.workers()[stream.worker_id].url) == 1
        assert list(running.values()) == [0]


def test_tokenize_and_detokenize_pass_through(router: Router) -> None:
    text = "Grüße, 世界"
    answer = post(f"{router.url}/v1/tokenize", {"model": MODEL_NAME, "prompt": text}).json()
    assert answer["count"] == len(text.encode())
    back = {"model": MODEL_NAME, "tokens": answer["tokens"]}
    assert post(f"{router.url}/v1/detokenize", back).json()["text"] == text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": MODEL_NAME, "input": PROMPT}),
        (CHAT, {"model": MODEL_NAME, "messages": []}),
        (GENERATE, generate_body(5000)),
    ],
)
def test_a_refusal_by_the_server_passes_through_unchanged(
    path: str, body: dict[str, object], router: Router, pair: Pair
) -> None:
    direct, routed = post(pair[0].url + path, body), post(router.url + path, body)
    assert (routed.status_code, routed.content) == (400, direct.content)


def _forget(pair: Pair) -> None:
    """Empty the caches of prompts: the same prompt then takes the same steps to the same answer."""
    for server in pair:
        server.flush_cache()


def _streamed(url: str, body: dict[str, object]) -> tuple[str, dict[str, Any]]:
    """Return text and usage of a streamed answer."""
    with open_stream(url, body) as stream:
        *chunks, last = stream.json_events()
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for choice in choices
    ]
    return "".join(texts), last["usage"]
