"""Streams: bytes pass as they are, faults are told, leavers are noticed."""

from __future__ import annotations

import asyncio
import json
import random
import zlib

import openai
import pytest

from tests.field.harness import Field, assert_error
from tests.field.mock_worker import (
    DONE,
    SSE,
    Call,
    chat_event,
    good,
    held,
    plain,
    silent,
    status,
    usage_event,
)
from tests.field.wire import Answer, events, eventually, texts

FIRST_BYTE_S = 1.5
IDLE_S = 0.8
CONFIG = {
    "upstream": {
        "connect_timeout_s": 1.0,
        "first_byte_timeout_s": FIRST_BYTE_S,
        "idle_chunk_timeout_s": IDLE_S,
    }
}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_byte_ends_the_call(
    field: Field, *, stream: bool
) -> None:
    """ST01."""
    worker = await field.worker()
    worker.answer = silent(asyncio.Event())
    failures = (await field.shown(worker))["failures"]
    answer = await field.open() if stream else await field.post("/v1/chat/completions", BODY)
    await eventually(lambda: worker.calls)
    assert await field.in_flight() == 1
    answer.close()
    async with asyncio.timeout(1):
        await worker.calls[0].gone.wait()
    await eventually(field.is_idle)
    shown = await field.shown(worker)
    assert (shown["failures"], shown["breaker"]) == (failures, "closed")
    assert shown["kv_reserved_tokens"] == 0


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(field: Field) -> None:
    """ST01, with the cut at many places."""
    worker = await field.worker()
    gate = asyncio.Event()
    rng = random.Random(1)

    async def slow(call: Call) -> None:
        await asyncio.sleep(rng.uniform(0, 0.02))  # the worker's pace is part of the case
        await held(gate)(call)

    async def leaver() -> None:
        answer = await field.open()
        await asyncio.sleep(rng.uniform(0, 0.04))  # and so is the moment of leaving
        answer.reset() if rng.random() < 0.5 else answer.close()

    worker.answer = slow
    await asyncio.gather(*(leaver() for _ in range(60)))
    await eventually(lambda: worker.running == 0, what="every call left by the router")
    await eventually(field.is_idle)
    assert (await field.shown(worker))["breaker"] == "closed"


async def test_characters_split_over_chunks_arrive_whole(field: Field) -> None:
    """ST03."""
    worker = await field.worker()
    text = "\u4f60\u597d + \U0001f600"
    event = {"choices": [{"index": 0, "delta": {"content": text}}]}
    body = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
    body += usage_event(7, 5) + DONE

    async def byte_by_byte(call: Call) -> None:
        call.head()
        for byte in body:
            call.chunk(bytes((byte,)))
            await asyncio.sleep(0)  # a write of its own
        call.end()

    worker.answer = byte_by_byte
    before = await field.metric("laneway_tokens_total", kind="output")
    answer = await field.stream()
    assert await answer.read() == body
    assert answer.complete
    await eventually(field.is_idle)
    assert await field.metric("laneway_tokens_total", kind="output") == before + 5


async def test_events_with_other_line_ends_pass_as_they_come(field: Field) -> None:
    """ST05."""
    worker = await field.worker()
    gate = asyncio.Event()
    first = chat_event("one").replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
    last = b"data:[DONE]\r\n\r\n"

    async def crlf(call: Call) -> None:
        call.head()
        call.chunk(first[:-1])
        await asyncio.sleep(0.01)  # so that CR and LF come in two reads
        call.chunk(first[-1:])
        await gate.wait()
        call.chunk(last)
        call.end()

    worker.answer = crlf
    before = await field.metric("laneway_requests_total", outcome="success")
    answer = await field.stream()
    await answer.until(first)
    gate.set()
    assert await answer.read() == first + last
    await eventually(field.is_idle)
    assert await field.metric("laneway_requests_total", outcome="success") == before + 1


async def test_a_worker_that_dies_in_mid_answer_ends_it_in_an_error(field: Field) -> None:
    """ST07."""
    worker, other = await field.worker(priority=10), await field.worker()
    gate = asyncio.Event()

    async def dying(call: Call) -> None:
        call.head()
        for text in ("one", "two", "three"):
            call.event(text)
        await gate.wait()
        call.reset()

    worker.answer = dying
    failed = await field.metric("laneway_requests_total", outcome="failed")
    answer = await field.stream()
    await answer.until(b"three")
    gate.set()
    body = await answer.read()
    assert texts(body) == ["one", "two", "three"]
    told = [event for event in events(body) if isinstance(event, dict) and "error" in event]
    assert len(told) == 1
    assert isinstance(told[0]["error"]["message"], str)
    assert b'"stop"' not in body
    assert events(body).index(told[0]) == 3
    assert other.calls == []
    await eventually(field.is_idle)
    assert (await field.shown(worker))["failures"] == 1
    assert await field.metric("laneway_requests_total", outcome="failed") == failed + 1


@pytest.mark.parametrize(
    ("code", "headers", "expected"),
    [
        (429, [("retry-after", "3")], (429, 503)),
        (503, [], (503,)),
        (400, [], (400,)),
        (500, [], (500, 502)),
    ],
)
async def test_a_stream_refused_before_its_first_byte_is_no_stream(
    field: Field, code: int, headers: list[tuple[str, str]], expected: tuple[int, ...]
) -> None:
    """ST09."""
    worker = await field.worker()
    worker.answer = status(code, headers)
    answer = await field.stream()
    await answer.read()
    assert answer.status in expected, answer.body
    assert (answer.header("content-type") or "").startswith("application/json")
    assert "message" in str(answer.json())
    if answer.status in (429, 503):
        assert int(answer.header("retry-after") or "0") >= 1


async def queue_full(call: Call) -> None:
    """What SGLang answers to a stream when its queue is full: 200 and an error event."""
    error = {"object": "error", "message": "The request queue is full.", "code": 503}
    call.head()
    call.chunk(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    call.chunk(DONE)
    call.end()


async def test_a_full_queue_told_in_the_first_event_is_tried_elsewhere(field: Field) -> None:
    """ST09, in the form that SGLang gives it."""
    full, other = await field.worker(priority=10), await field.worker()
    full.answer = queue_full
    answer = await field.stream()
    body = await answer.read()
    assert answer.status == 200
    assert texts(body) == ["one ", "two ", "three"]
    assert (len(full.calls), len(other.calls)) == (1, 1)
    assert (await field.shown(full))["breaker"] == "closed"


async def test_a_full_queue_told_in_the_first_event_is_no_stream(field: Field) -> None:
    """ST09, with nowhere else to go."""
    worker = await field.worker()
    worker.answer = queue_full
    answer = await field.stream()
    await answer.read()
    assert_error(answer, 429, 503)


async def zipped(call: Call) -> None:
    """Sends three events, gzipped, whatever was asked for; each is flushed, and waited for."""
    packer = zlib.compressobj(wbits=31)
    call.head(headers=[*SSE, ("content-encoding", "gzip")])
    for text in ("one ", "two ", "three"):
        call.chunk(packer.compress(chat_event(text)) + packer.flush(zlib.Z_SYNC_FLUSH))
        await asyncio.sleep(0.02)  # a read of its own for each event
    call.chunk(packer.compress(DONE) + packer.flush())
    call.end()


async def test_a_zipped_stream_keeps_its_label(field: Field) -> None:
    """ST11 (a)."""
    worker = await field.worker()
    worker.answer = zipped
    body = json.dumps({**BODY, "stream": True}).encode()
    answer = await field.post("/v1/chat/completions", body, headers=[("accept-encoding", "gzip")])
    data = await (await answer.head()).read()
    if answer.header("content-encoding") is not None:
        assert answer.header("content-encoding") == "gzip"
        data = zlib.decompress(data, wbits=31)
    assert texts(data) == ["one ", "two ", "three"]


async def test_a_client_that_cannot_unzip_gets_plain_events(field: Field) -> None:
    """ST11 (b)."""
    worker = await field.worker()
    worker.answer = zipped
    answer = await field.stream()
    assert answer.header("content-encoding") is None
    await answer.until(b"one ")
    assert b"[DONE]" not in answer.body
    assert texts(await answer.read()) == ["one ", "two ", "three"]


async def test_a_slow_first_token_is_waited_for(field: Field) -> None:
    """ST13: as OpenAI's own client sees it."""
    worker = await field.worker()

    async def slow(call: Call) -> None:
        await asyncio.sleep(IDLE_S + 0.2)  # longer than any silence allowed later
        await good(call)

    worker.answer = slow
    url = f"http://127.0.0.1:{field.router.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        chunks = [chunk async for chunk in stream]
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert [text for text in said if text] == ["one ", "two ", "three"]


async def test_a_stream_that_moves_has_no_total_limit(field: Field) -> None:
    """ST15 (a)."""
    worker = await field.worker()

    async def steady(call: Call) -> None:
        call.head()
        for n in range(6):
            call.event(f"{n} ")
            await asyncio.sleep(IDLE_S * 0.4)  # more than every limit in all
        call.chunk(DONE)
        call.end()

    worker.answer = steady
    answer = await field.stream()
    assert texts(await answer.read()) == [f"{n} " for n in range(6)]
    assert answer.complete


async def test_a_stream_that_falls_silent_is_ended(field: Field) -> None:
    """ST15 (b)."""
    worker = await field.worker()
    worker.answer = held(asyncio.Event())
    answer = await field.stream()
    await answer.until(b"one ")
    began_at = asyncio.get_running_loop().time()
    body = await answer.read(within_s=IDLE_S + 2)
    took_s = asyncio.get_running_loop().time() - began_at
    assert IDLE_S - 0.1 <= took_s <= IDLE_S + 1
    if answer.complete:
        assert "error" in events(body)[-1]
    async with asyncio.timeout(1):
        await worker.calls[0].gone.wait()


async def test_no_first_byte_is_a_gateway_timeout(field: Field) -> None:
    """ST15 (c)."""
    worker = await field.worker()
    worker.answer = silent(asyncio.Event())
    answer = await field.stream()
    took_s = asyncio.get_running_loop().time() - answer.began_at
    await answer.read()
    assert_error(answer, 504)
    assert FIRST_BYTE_S - 0.1 <= took_s <= FIRST_BYTE_S + 1
    async with asyncio.timeout(1):
        await worker.calls[0].gone.wait()


async def test_an_event_without_end_needs_no_memory(field: Field) -> None:
    """ST17."""
    worker = await field.worker()
    piece, count = b"x" * 2**18, 256  # 64 MiB

    async def endless(call: Call) -> None:
        call.head()
        call.chunk(b"data: ")
        for _ in range(count):
            call.chunk(piece)
            await call.drained()
        call.end()

    before_kb = field.router.status_kb("VmRSS")
    worker.answer = endless
    answer = await field.stream()
    size = await discard(answer)
    assert size == 6 + count * len(piece) or not answer.complete
    assert field.router.status_kb("VmHWM") - before_kb <= 30 * 1024


async def test_an_abort_reaches_only_the_request_that_was_left(field: Field) -> None:
    """ST19."""
    worker = await field.worker()
    gate = asyncio.Event()
    worker.answer = held(gate)
    first, second = await field.stream(rid="job-1"), await field.stream(rid="job-10")
    await first.until(b"one ")
    await second.until(b"one ")
    first.close()
    left = next(call for call in worker.calls if call.json()["rid"] == "job-1")
    async with asyncio.timeout(1):
        await left.gone.wait()
    gate.set()
    assert b"[DONE]" in await second.read()
    live = [call.json()["rid"] for call in worker.calls if call is not left]
    aborted = [abort.get("rid") for abort in worker.aborts]
    assert not [rid for rid in live for gone in aborted if rid.startswith(gone)]


BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def discard(answer: Answer) -> int:
    """Read an answer without keeping it; returns its length."""
    size = 0
    while piece := await answer.more(within_s=30):
        size += len(piece)
        answer.body = b"-"
    answer.close()
    return size


async def test_a_worker_that_answers_before_the_body_ends_is_heard(field: Field) -> None:
    """ST09: an early refusal while the body is still on its way is passed on, not lost."""
    worker = await field.worker()

    async def early(call: Call) -> None:
        plain(call, 413, {"error": {"message": "too long"}}, [("connection", "close")])
        call.close()

    worker.answer = early
    content = [{"role": "user", "content": "x" * 2_000_000}]
    answer = await field.chat(messages=content)
    assert answer.status == 413
