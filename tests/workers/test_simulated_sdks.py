"""What a simulated worker answers on /v1/messages and /v1/responses, straight and through a router.

The shapes are those that SGLang 0.5.23 answered to the same calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest

from tests.e2e.router_process import client_of as client_of_router
from tests.e2e.router_process import router_process, until_ready
from tests.workers.conftest import StartWorker, client_of, until
from workers.sim.server import SimulatedServer

MODEL = "sim-8b"
HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
MESSAGE = {"model": MODEL, "max_tokens": 3, "messages": HELLO}
RESPONSE = {"model": MODEL, "max_output_tokens": 5, "input": "hello there"}
LONG = {"output_median_tokens": 100_000}  # all answers end at their limit


@pytest.fixture
async def endless(start_worker: StartWorker) -> SimulatedServer:
    return await start_worker(**LONG)


@pytest.fixture(params=["straight", "routed"])
async def url(request: pytest.FixtureRequest, endless: SimulatedServer) -> AsyncIterator[str]:
    """Of the worker, and of a router before it."""
    if request.param == "straight":
        yield endless.url
        return
    async with (
        router_process("--worker-urls", endless.url) as router,
        client_of_router(router) as client,
    ):
        await until_ready(client)
        yield router.url


def claude(url: str) -> anthropic.AsyncAnthropic:
    client = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, http_client=client)


def gpt(url: str) -> openai.AsyncOpenAI:
    client = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=client
    )


def named_events(text: str) -> list[tuple[str, Any]]:
    """Each event's name and document."""
    events = [event.split("\n") for event in text.split("\n\n") if event]
    return [
        (name.removeprefix("event: "), orjson.loads(data.removeprefix("data: ")))
        for name, data in events
    ]


# -- /v1/messages ---------------------------------------------------------------------------


async def test_the_anthropic_sdk_gets_messages_plain_and_streamed(url: str) -> None:
    async with claude(url) as client:
        plain = await client.messages.create(
            model=MODEL, max_tokens=7, system="Be brief.", messages=HELLO
        )
        counted = await client.messages.count_tokens(
            model=MODEL, system="Be brief.", messages=HELLO
        )
        async with client.messages.stream(model=MODEL, max_tokens=9, messages=HELLO) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
    assert plain.usage.input_tokens == counted.input_tokens > 0
    assert (plain.usage.output_tokens, plain.stop_reason) == (7, "max_tokens")
    assert plain.content[0].type == "text"
    assert texts
    assert final.content[0].type == "text"
    assert final.content[0].text == "".join(texts)
    assert (final.usage.output_tokens, final.stop_reason) == (9, "max_tokens")
    assert 0 < final.usage.input_tokens < counted.input_tokens


async def test_a_stream_of_a_message_has_sglangs_events_in_order(
    endless: SimulatedServer,
) -> None:
    async with client_of(endless) as client:
        answer = await client.post("/v1/messages", json={**MESSAGE, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    start, block, *deltas, stop, end, last = named_events(answer.text)
    assert all(name == document["type"] for name, document in named_events(answer.text))
    message = start[1]["message"]
    assert message.pop("id").startswith("msg_")
    assert message.pop("usage") == {"input_tokens": 22, "output_tokens": 0}
    assert message == {"type": "message", "role": "assistant", "content": [], "model": MODEL}
    assert block[1]["content_block"] == {"type": "text", "text": ""}
    assert {document["delta"]["type"] for _, document in deltas} == {"text_delta"}
    assert stop[1] == {"type": "content_block_stop", "index": 0}
    assert end[1] == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens"},
        "usage": {"output_tokens": 3},
    }
    assert last[1] == {"type": "message_stop"}


async def test_what_is_cached_of_a_prompt_is_counted_apart(endless: SimulatedServer) -> None:
    body = {**MESSAGE, "messages": [{"role": "user", "content": "again " * 2_000}]}
    async with client_of(endless) as client:
        first, second = [(await client.post("/v1/messages", json=body)).json() for _ in range(2)]
        streamed = await client.post("/v1/messages", json={**body, "stream": True})
    whole = first["usage"]["input_tokens"]
    cached = second["usage"]["cache_read_input_tokens"]
    assert cached > 1_000
    assert second["usage"]["input_tokens"] == whole - cached
    usage = named_events(streamed.text)[0][1]["message"]["usage"]
    assert usage == {**second["usage"], "output_tokens": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens: Value error, max_tokens must be positive"),
        ({"messages": []}, "Messages cannot be empty."),
        ({"model": None}, "model: Field required"),
        (
            {"messages": [{"role": "x", "content": "a"}]},
            "messages.0.role: Input should be 'user', 'assistant' or 'system'",
        ),
        (
            {"max_tokens": 200_000},
            "max_completion_tokens is too large: 200000."
            "This model supports at most 131072 completion tokens.",
        ),
    ],
)
async def test_a_message_that_cannot_be_is_told_in_anthropics_shape(
    http: httpx.AsyncClient, changes: dict[str, Any], message: str
) -> None:
    answer = await http.post("/v1/messages", json={**MESSAGE, **changes})
    assert answer.status_code == 400
    error = {"type": "invalid_request_error", "message": message}
    assert answer.json() == {"type": "error", "error": error}


# -- /v1/responses --------------------------------------------------------------------------


async def test_the_openai_sdk_gets_responses_plain_and_streamed(url: str) -> None:
    async with gpt(url) as client:
        plain = await client.responses.create(
            model=MODEL, input="hello", instructions="Be brief.", max_output_tokens=8
        )
        stream = await client.responses.create(
            model=MODEL, input="hello", max_output_tokens=12, stream=True
        )
        events = [event async for event in stream]
    assert plain.usage is not None
    assert (plain.usage.output_tokens, plain.status) == (6, "incomplete")  # SGLang keeps two
    assert plain.output_text
    assert plain.instructions == "Be brief."
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 10
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas
    assert last.response.output_text == "".join(deltas)


async def test_an_answer_that_ends_by_itself_is_complete(start_worker: StartWorker) -> None:
    worker = await start_worker(output_median_tokens=5, output_sigma=0.01)
    async with (
        gpt(worker.url) as client,
        client.responses.stream(model=MODEL, input="hello") as stream,
    ):
        final = await stream.get_final_response()
    assert (final.status, final.error, final.incomplete_details) == ("completed", None, None)
    assert final.output_text
    async with claude(worker.url) as client_of_claude:
        message = await client_of_claude.messages.create(
            model=MODEL, max_tokens=100, messages=HELLO
        )
    assert message.stop_reason == "end_turn"


async def test_a_stream_of_a_response_has_sglangs_events_in_order(
    endless: SimulatedServer,
) -> None:
    async with client_of(endless) as client:
        body = {**RESPONSE, "stream": True, "request_id": "resp_mine", "metadata": {"a": "b"}}
        events = named_events((await client.post("/v1/responses", json=body)).text)
    assert all(name == document["type"] for name, document in events)
    assert [document["sequence_number"] for _, document in events] == list(range(len(events)))
    created, begun, item, part, *deltas, text, whole_part, whole_item, last = [
        document for _, document in events
    ]
    assert created["response"] == begun["response"]
    assert created["response"].pop("created_at") > 1e9
    assert created["response"] == {
        "id": "resp_mine", "object": "response", "model": MODEL, "output": [],
        "status": "in_progress", "usage": None, "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": [], "error": None, "incomplete_details": None, "instructions": None,
        "max_output_tokens": 5, "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None}, "store": True, "temperature": None,
        "text": None, "top_p": None, "truncation": "disabled", "user": None,
        "metadata": {"a": "b"},
    }  # fmt: skip
    assert item["item"]["content"] == []
    assert part["part"] == {"annotations": [], "text": "", "type": "output_text", "logprobs": None}
    said = "".join(delta["delta"] for delta in deltas)
    assert text["text"] == whole_part["part"]["text"] == said
    assert whole_item["item"]["content"] == [whole_part["part"]]
    final = last["response"]
    assert last["type"] == "response.incomplete"
    assert final["output"] == [whole_item["item"]]
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["usage"] == {
        "input_tokens": 22,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 25,
    }
    assert final["text"] == {"format": {"type": "text"}}


async def test_a_response_of_no_tokens_has_no_message(endless: SimulatedServer) -> None:
    async with client_of(endless) as client:
        body = (
            await client.post("/v1/responses", json={**RESPONSE, "max_output_tokens": 2})
        ).json()
    assert (body["output"], body["status"], body["text"]) == ([], "incomplete", None)


async def test_what_a_client_sends_back_of_tools_is_read(http: httpx.AsyncClient) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "what time is it?"}]},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "noon"},
    ]
    answer = await http.post("/v1/responses", json={**RESPONSE, "input": items})
    assert answer.status_code == 200
    blocks = [{"type": "tool_result", "tool_use_id": "c", "content": "noon " * 400}]
    body = {**MESSAGE, "messages": [*HELLO, {"role": "user", "content": blocks}]}
    answer = await http.post("/v1/messages", json=body)
    assert answer.json()["usage"]["input_tokens"] > 400


STORE = (
    "Response store is disabled. Stateful Responses require --enable-response-store on a "
    "standalone server; response storage is unavailable in PD mode."
)


@pytest.mark.parametrize(
    ("changes", "status", "param", "message"),
    [
        ({"previous_response_id": "resp_x"}, 400, "previous_response_id", STORE),
        ({"background": True}, 400, "background", STORE),
        ({"model": "other"}, 404, "model", "The model 'other' does not exist"),
        ({"max_output_tokens": 1}, 400, None, "max_new_tokens must be at least 0, got -1."),
    ],
)
async def test_a_response_that_cannot_be_is_told_in_openais_shape(
    http: httpx.AsyncClient, changes: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    answer = await http.post("/v1/responses", json={**RESPONSE, **changes})
    assert answer.status_code == status
    kind = {"type": "invalid_request_error", "param": param, "code": status}
    assert answer.json() == {"error": {"message": message, **kind}}


@pytest.mark.parametrize("changes", [{"model": None}, {"input": None}, {"input": []}])
async def test_a_response_of_the_wrong_form_is_refused(
    http: httpx.AsyncClient, changes: dict[str, Any]
) -> None:
    answer = await http.post("/v1/responses", json={**RESPONSE, **changes})
    assert answer.status_code == answer.json()["error"]["code"] == 400


async def test_nothing_is_kept_of_a_response(http: httpx.AsyncClient) -> None:
    made = (await http.post("/v1/responses", json=RESPONSE)).json()["id"]
    for answer in (
        await http.get(f"/v1/responses/{made}"),
        await http.post(f"/v1/responses/{made}/cancel"),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": STORE, "type": "invalid_request_error", "param": "response_id", "code": 400
        }  # fmt: skip


# -- both -----------------------------------------------------------------------------------


async def test_a_full_queue_is_told_as_sglang_tells_it(start_worker: StartWorker) -> None:
    worker = await start_worker(engine={"max_running_requests": 1, "max_queued_requests": 1})
    fill = {"prompt": "a", "max_tokens": 50_000, "ignore_eos": True}
    async with client_of(worker) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(client.post("/v1/completions", json=fill))
        await until(client, lambda load: load["running"] == 1)
        tasks.create_task(client.post("/v1/completions", json=fill))
        await until(client, lambda load: load["waiting"] == 1)
        plain = await client.post("/v1/messages", json=MESSAGE)
        streamed = await client.post("/v1/messages", json={**MESSAGE, "stream": True})
        response = await client.post("/v1/responses", json=RESPONSE)
        response_streamed = await client.post("/v1/responses", json={**RESPONSE, "stream": True})
        await client.post("/abort_request", json={"abort_all": True})
    why = "The request queue is full."
    assert plain.status_code == 503
    assert plain.json()["error"] == {"type": "overloaded_error", "message": "Internal server error"}
    start, error, stop = named_events(streamed.text)
    assert start[1]["message"]["usage"] == {"input_tokens": 0, "output_tokens": 0}
    assert error[1]["error"] == {"type": "overloaded_error", "message": why}
    assert stop[0] == "message_stop"
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"503: {why}"
    events = named_events(response_streamed.text)
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created", "in_progress", "failed"
    ]  # fmt: skip
    last = events[-1][1]
    assert last["response"]["error"] == {"code": "server_error", "message": why}
    assert last["response"]["usage"]["total_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/messages", {**MESSAGE, "max_tokens": 50_000}, "message_stop"),
        ("/v1/responses", {**RESPONSE, "max_output_tokens": 50_000}, "response.failed"),
    ],
)
async def test_an_aborted_stream_is_whole(
    endless: SimulatedServer, path: str, body: dict[str, Any], last: str
) -> None:
    text = ""
    async with (
        client_of(endless) as client,
        client.stream("POST", path, json={**body, "stream": True}) as answer,
    ):
        async for piece in answer.aiter_text():
            if not text.count("delta") and piece.count("delta"):
                await client.post("/abort_request", json={"abort_all": True})
            text += piece
    events = named_events(text)
    assert events[-1][0] == last
    begun = [name for name, _ in events if name.endswith(("_start", ".added"))]
    ended = [name for name, _ in events if name.endswith(("_stop", ".done"))]
    assert begun
    assert ended
