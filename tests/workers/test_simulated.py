"""What a simulated worker answers, compared with what SGLang 0.5.23 answered to the same calls."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import httpx
import orjson
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from router.contract import decode_report
from tests.workers.conftest import StartWorker, client_of, until
from workers.sim.server import SimulatedServer

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
ENDLESS = {**CHAT, "max_tokens": 100_000, "ignore_eos": True, "stream": True}


def events_of(body: str) -> list[Any]:
    """The JSON of each event; [DONE] as that text."""
    events = [event.removeprefix("data: ") for event in body.split("\n\n") if event]
    return [event if event == "[DONE]" else orjson.loads(event) for event in events]


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(answer.text)


# -- the OpenAI SDK -----------------------------------------------------------------------


@pytest.fixture
def openai(worker: SimulatedServer) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{worker.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    )


async def test_the_openai_sdk_gets_a_plain_answer_of_exactly_the_tokens_asked(
    openai: AsyncOpenAI,
) -> None:
    async with openai:
        answer = await openai.chat.completions.create(
            **CHAT, max_tokens=7, extra_body={"ignore_eos": True}
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content


async def test_the_openai_sdk_streams_with_usage(openai: AsyncOpenAI) -> None:
    async with openai:
        stream = await openai.chat.completions.create(
            **CHAT,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


async def test_the_openai_sdk_lists_models_and_embeds(openai: AsyncOpenAI) -> None:
    async with openai:
        models = await openai.models.list()
        vectors = await openai.embeddings.create(
            model="m", input=["one text", "another"], encoding_format="float"
        )
    assert [model.id for model in models.data] == ["sim-8b"]
    assert len(vectors.data) == 2


# -- shapes -------------------------------------------------------------------------------


async def test_a_chat_stream_has_sglangs_events_in_order(http: httpx.AsyncClient) -> None:
    body = {**CHAT, "max_tokens": 2, "ignore_eos": True, "stream": True, "rid": "r-1"}
    events = await streamed(http, "/v1/chat/completions", body)
    role, *texts, end, done = events
    assert done == "[DONE]"
    assert list(role) == ["id", "object", "created", "model", "choices"]
    assert role["id"] == "r-1"
    assert role["object"] == "chat.completion.chunk"
    assert role["choices"] == [
        {
            "index": 0,
            "delta": {"reasoning_content": None, "role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
        }
    ]
    assert all(list(c["choices"][0]["delta"]) == ["reasoning_content", "content"] for c in texts)
    assert end["choices"][0]["delta"] == {"reasoning_content": None}
    assert end["choices"][0]["finish_reason"] == "length"


async def test_completions_carry_the_finish_reason_on_the_last_text(
    http: httpx.AsyncClient,
) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "stream": True}
    *chunks, done = await streamed(http, "/v1/completions", body)
    assert done == "[DONE]"
    assert [c["choices"][0]["finish_reason"] for c in chunks][:-1] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert list(chunks[0]["choices"][0]) == [
        "index",
        "text",
        "logprobs",
        "finish_reason",
        "matched_stop",
    ]


async def test_generate_events_repeat_the_text_so_far(http: httpx.AsyncClient) -> None:
    body = {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 5, "ignore_eos": True},
        "stream": True,
    }
    *events, done = await streamed(http, "/generate", body)
    assert done == "[DONE]"
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    meta = events[-1]["meta_info"]
    assert len(events[-1]["output_ids"]) == meta["completion_tokens"] == 5
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert {"queue_time", "e2e_latency", "first_token_latency", "num_retractions"} <= set(meta)


async def test_plain_and_streamed_text_are_the_same_for_one_seed(
    start_worker: StartWorker,
) -> None:
    texts = []
    for stream in (False, True):
        async with client_of(await start_worker(seed=7)) as client:
            body = {**CHAT, "max_tokens": 30, "ignore_eos": True, "stream": stream}
            if stream:
                events = await streamed(client, "/v1/chat/completions", body)
                deltas = [event["choices"][0]["delta"] for event in events[:-1]]
                texts.append("".join(delta.get("content") or "" for delta in deltas))
            else:
                answer = (await client.post("/v1/chat/completions", json=body)).json()
                texts.append(answer["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]


async def test_several_samples_and_prompts_give_a_choice_each(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["a b", "c"], "n": 3, "max_tokens": 4, "ignore_eos": True}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == 2
    events = await streamed(http, "/v1/completions", {**body, "stream": True})
    ends = [c["choices"][0]["index"] for c in events[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == list(range(6))


async def test_a_repeated_prompt_is_reported_as_cached(http: httpx.AsyncClient) -> None:
    body = {"prompt": "word " * 1_000, "max_tokens": 1}
    first = (await http.post("/v1/completions", json=body)).json()
    again = (await http.post("/v1/completions", json=body)).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 1_000


async def test_output_lengths_vary_but_stay_within_max_tokens(http: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "max_tokens": 200}
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(20)))
    lengths = [answer.json()["usage"]["completion_tokens"] for answer in answers]
    assert max(lengths) <= 200
    assert len(set(lengths)) > 5
    reasons = {answer.json()["choices"][0]["finish_reason"] for answer in answers}
    assert reasons == {"length", "stop"}


async def test_missing_limits_are_sglangs_defaults(http: httpx.AsyncClient) -> None:
    completion = await http.post("/v1/completions", json={"prompt": "a", "ignore_eos": True})
    assert completion.json()["usage"]["completion_tokens"] == 16
    body = {"text": "a", "sampling_params": {"ignore_eos": True}}
    assert (await http.post("/generate", json=body)).json()["meta_info"]["completion_tokens"] == 128


async def test_max_tokens_zero_is_an_empty_answer(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 0})
    assert answer.json()["usage"]["completion_tokens"] == 0
    body = {**CHAT, "max_tokens": 0, "stream": True}
    assert len(await streamed(http, "/v1/chat/completions", body)) == 3


# -- errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content", "kind"),
    [
        ("/v1/chat/completions", b'{"model":', "Bad Request"),
        ("/v1/chat/completions", b"[1]", "Bad Request"),
        ("/v1/chat/completions", b'{"model":"m"}', "Bad Request"),
        ("/v1/chat/completions", b'{"messages":[]}', "BadRequestError"),
        ("/v1/chat/completions", b'{"messages":[{"content":"a"}]}', "Bad Request"),
        ("/v1/chat/completions", orjson.dumps({**CHAT, "max_tokens": "x"}), "Bad Request"),
        ("/v1/chat/completions", orjson.dumps({**CHAT, "max_tokens": 1.5}), "Bad Request"),
        ("/v1/chat/completions", orjson.dumps({**CHAT, "max_tokens": -1}), "BadRequestError"),
        ("/v1/chat/completions", orjson.dumps({**CHAT, "max_tokens": 10**7}), "BadRequestError"),
        ("/v1/chat/completions", orjson.dumps({**CHAT, "stream": "yes"}), "Bad Request"),
        ("/v1/chat/completions", orjson.dumps({**CHAT, "n": 0}), "BadRequestError"),
        ("/v1/completions", b"{}", "Bad Request"),
        ("/v1/completions", b'{"prompt":5}', "Bad Request"),
        ("/v1/completions", b'{"prompt":"a","max_tokens":-1}', "Bad Request"),
        ("/v1/completions", b'{"prompt":"a","max_tokens":1000000}', "BadRequestError"),
        ("/generate", b"{", "Bad Request"),
    ],
)
async def test_a_bad_body_is_400_with_sglangs_shape(
    http: httpx.AsyncClient, path: str, content: bytes, kind: str
) -> None:
    answer = await http.post(path, content=content)
    assert answer.status_code == 400
    assert answer.json()["type"] == kind
    assert list(answer.json()) == ["object", "message", "type", "param", "code"]


async def test_generate_has_its_own_error_shape_and_streams_it(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"text": "a", "sampling_params": {"max_new_tokens": 10**6}}
    plain = await http.post("/generate", json=body)
    assert plain.status_code == 400
    assert list(plain.json()["error"]) == ["message"]
    event, done = await streamed(http, "/generate", {**body, "stream": True})
    assert (event["error"]["code"], event["error"]["retryable"], done) == (400, False, "[DONE]")
    assert (await http.post("/generate", json={})).status_code == 400


async def test_paths_methods_and_models_that_do_not_exist(http: httpx.AsyncClient) -> None:
    assert (await http.get("/nope")).json() == {"detail": "Not Found"}
    wrong = await http.delete("/generate")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST, PUT")
    assert (await http.get("/v1/models/sim-8b")).json()["id"] == "sim-8b"
    unknown = await http.get("/v1/models/org%2Fname")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "org/name" in unknown.json()["error"]["message"]


async def test_a_live_id_cannot_be_used_twice(http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "rid": "one"}) as first:
        pieces = first.aiter_bytes()  # kept: dropping it would close the stream
        await anext(pieces)
        again = await http.post("/v1/chat/completions", json={**ENDLESS, "rid": "one"})
    assert again.status_code == 400
    assert "Duplicate request ID detected" in again.json()["message"]


async def test_keys_are_asked_for_on_all_but_the_health_routes(start_worker: StartWorker) -> None:
    worker = await start_worker(api_key="w-key")
    async with client_of(worker) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        refused = await client.get("/v1/models")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        key = {"authorization": "Bearer w-key"}
        assert (await client.get("/v1/loads", headers=key)).status_code == 200


# -- a full queue -------------------------------------------------------------------------


async def fill(client: httpx.AsyncClient, count: int) -> list[asyncio.Task[httpx.Response]]:
    """Start `count` endless requests, each known to the worker before the next is sent."""
    tasks = []
    for number in range(count):
        body = {**ENDLESS, "stream": False, "rid": f"fill-{number}"}
        tasks.append(asyncio.create_task(client.post("/v1/chat/completions", json=body)))
        await until(client, lambda load, n=number: load["running"] + load["waiting"] > n)
    return tasks


async def test_a_full_queue_is_a_plain_503_and_an_event_in_a_stream(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(engine={"max_running_requests": 1, "max_queued_requests": 1})
    async with client_of(worker) as client:
        tasks = await fill(client, 2)
        plain = await client.post("/v1/chat/completions", json=CHAT)
        assert plain.status_code == 503
        assert plain.json() == {
            "object": "error",
            "message": "The request queue is full.",
            "type": "503",
            "param": None,
            "code": 503,
        }
        assert "retry-after" not in plain.headers
        event, done = await streamed(client, "/v1/chat/completions", {**CHAT, "stream": True})
        assert done == "[DONE]"
        assert event == {
            "error": {
                "object": "error",
                "message": "The request queue is full.",
                "type": "SERVICE_UNAVAILABLE",
                "param": None,
                "code": 503,
            }
        }
        native = {"text": "a", "stream": True}
        event, done = await streamed(client, "/generate", native)
        assert event["meta_info"]["finish_reason"]["status_code"] == 503
        await client.post("/abort_request", json={"abort_all": True})
        for task in tasks:
            assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_a_higher_priority_evicts_the_lowest_of_a_full_queue(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(
        engine={
            "max_running_requests": 1,
            "max_queued_requests": 1,
            "enable_priority_scheduling": True,
        }
    )
    async with client_of(worker) as client:
        tasks = await fill(client, 2)
        body = {**CHAT, "max_tokens": 2, "ignore_eos": True, "priority": 5}
        urgent = await client.post("/v1/chat/completions", json=body)
        assert urgent.status_code == 200  # preempted the running one, which had no priority
        evicted = await tasks[1]
        assert evicted.status_code == 503
        assert evicted.json()["message"] == "The request is aborted by a higher priority request."
        await client.post("/abort_request", json={"abort_all": True})
        await tasks[0]


# -- aborts, disconnects, draining --------------------------------------------------------


async def test_abort_by_id_ends_a_stream_with_abort_and_done(http: httpx.AsyncClient) -> None:
    async with http.stream(
        "POST", "/v1/chat/completions", json={**ENDLESS, "rid": "one"}
    ) as answer:
        lines = answer.aiter_text()
        text = await anext(lines)
        await http.post("/abort_request", json={"rid": "unknown"})
        aborted = await http.post("/abort_request", json={"rid": "one"})
        assert (aborted.status_code, aborted.content) == (200, b"")
        text += "".join([piece async for piece in lines])
    *_, end, done = events_of(text)
    assert (end["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")


async def test_an_id_aborts_all_that_begin_with_it(http: httpx.AsyncClient) -> None:
    tasks = []
    for rid in ("q1", "q10", "q2"):
        body = {**ENDLESS, "stream": False, "rid": rid, "max_tokens": 3_000}
        tasks.append(asyncio.create_task(http.post("/v1/chat/completions", json=body)))
    await until(http, lambda load: load["running"] == 3)
    await http.post("/abort_request", json={"rid": "q1"})
    answers = await asyncio.gather(*tasks)
    reasons = [answer.json()["choices"][0]["finish_reason"] for answer in answers]
    assert reasons == ["abort", "abort", "length"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(
    worker: SimulatedServer, http: httpx.AsyncClient, stream: bool
) -> None:
    reader, writer = await asyncio.open_connection(worker.host, worker.port)
    content = orjson.dumps({**ENDLESS, "stream": stream})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    if stream:
        await reader.readuntil(b"content")
    await until(http, lambda load: load["running"] == 1 and load["used"] > 0)
    writer.close()
    await until(http, lambda load: load == {"running": 0, "waiting": 0, "used": 0})
    assert worker.worker.idle.is_set()


async def test_a_client_that_leaves_the_queue_frees_its_place(start_worker: StartWorker) -> None:
    worker = await start_worker(engine={"max_running_requests": 1})
    async with client_of(worker) as client:
        running, queued = await fill(client, 2)
        await until(client, lambda load: load["waiting"] == 1)
        queued.cancel()
        await until(client, lambda load: load["waiting"] == 0)
        await client.post("/abort_request", json={"abort_all": True})
        await running


async def test_draining_is_not_ready_but_serves_until_the_last_answer(
    worker: SimulatedServer, http: httpx.AsyncClient
) -> None:
    body = {**ENDLESS, "max_tokens": 2_000, "stream": False}
    running = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    await until(http, lambda load: load["running"] == 1)
    drain = asyncio.create_task(worker.drain())
    await until(http, lambda _: worker.worker.draining)
    assert (await http.get("/ready")).status_code == 503
    assert decode_report((await http.get("/health")).content).ready is False
    assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert not drain.done()
    assert (await running).status_code == 200
    await drain


async def test_flush_cache_fails_while_requests_run(http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=ENDLESS) as answer:
        pieces = answer.aiter_bytes()  # kept: dropping it would close the stream
        await anext(pieces)
        assert (await http.post("/flush_cache")).status_code == 400
    await until(http, lambda load: load["running"] == 0)
    assert (await http.post("/flush_cache")).status_code == 200
