"""Streams: bytes as sent, first events, ends good and bad, deadlines, leaving clients."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest

from router.contract import WorkerId
from router.core.types import Outcome
from router.errors import Reason
from tests.runtime.raw_worker import (
    DONE,
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
    USAGE,
    Close,
    Hang,
    Pause,
    RawWorker,
    Reset,
    Step,
    Wait,
    answer,
    chunk,
    delta,
    event,
)
from tests.runtime.relay.rig import chat, eventually, post, running_router

STREAM = chat(stream=True)
QUEUE_FULL = b'{"error":{"object":"error","message":"The request queue is full.","code":503}}'


async def test_a_stream_reaches_the_client_byte_for_byte() -> None:
    body = delta("a") + delta("b") + USAGE + DONE
    async with RawWorker([[SSE_HEAD, body]]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert (got.status, got.raw_body) == (200, body)
        assert got.one(b"x-laneway-worker") == f"127.0.0.1:{worker.port}".encode()
        assert got.one(b"x-laneway-lane") in (b"short", b"long")
        record = router.records[0]
        assert record.outcome is Outcome.SUCCESS
        assert (record.prompt_tokens, record.output_tokens, record.usage_known) == (7, 3, True)
        assert record.first_token_at is not None


async def test_characters_cut_anywhere_arrive_whole_and_usage_is_counted() -> None:
    payload = (
        'data: {"choices":[{"index":0,"delta":{"content":"你好 🙂"}}]}\n\n'
        'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
        "data: [DONE]\n\n"
    ).encode()
    steps: list[Step] = [SSE_HEAD]
    for index in range(len(payload)):
        steps += [chunk(payload[index : index + 1]), Pause(0)]
    async with RawWorker([[*steps, LAST_CHUNK]]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert got.body == payload
        assert got.complete
        assert router.records[0].output_tokens == 2


async def test_crlf_events_split_anywhere_stream_on_as_they_come() -> None:
    gate = asyncio.Event()
    first = [b'data:{"choices":[{"delta":{"content":"x"}}]}\r', b"\n\r\n"]
    second = [b"data:[DONE]\r\n\r", b"\n"]
    steps: list[Step] = [SSE_HEAD, *map(chunk, first), Wait(gate), *map(chunk, second), LAST_CHUNK]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await client.until(b"\n\r\n\r\n")  # the whole first event, before the last is sent
        gate.set()
        await client.until(LAST_CHUNK)
        await client.close()
        await eventually(lambda: router.records)
        assert router.records[0].outcome is Outcome.SUCCESS


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
async def test_heads_and_chunks_may_be_split_at_every_byte(size: int) -> None:
    whole = SSE_HEAD + delta("a") + b"5;x=y\r\n: hi\n\r\n" + USAGE + DONE
    steps: list[Step] = []
    for index in range(0, len(whole), size):
        steps += [whole[index : index + size], Pause(0)]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert got.raw_body == whole.partition(b"\r\n\r\n")[2]
        assert router.records[0].outcome is Outcome.SUCCESS


async def test_trailers_pass_with_the_chunks() -> None:
    body = delta("a") + b"0\r\nx-sum: 1\r\n\r\n"
    async with RawWorker([[SSE_HEAD, body], [PLAIN]]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert got.raw_body == body
        assert (await router.post(chat())).status == 200
        assert worker.connections == 1


async def test_a_reset_in_mid_stream_ends_as_an_error_event_and_counts_against_the_worker() -> None:
    gate = asyncio.Event()
    cut: list[Step] = [SSE_HEAD, delta("a"), delta("b"), delta("c"), Wait(gate), Reset()]
    async with (
        RawWorker([cut]) as worker,
        RawWorker([[PLAIN]]) as other,
        running_router(worker, other) as router,
    ):
        router.driver.on_drain(other_id(other), deadline_s=0)
        client = await router.client()
        client.send(post(STREAM))
        seen = await client.until(b'"c"')
        gate.set()
        seen += await client.until(LAST_CHUNK)
        await client.close()
        assert seen.count(b'"content"') == 3
        assert b'data: {"error":{' in seen
        assert b"[DONE]" not in seen
        assert b'"stop"' not in seen
        assert not other.requests
        record = router.records[0]
        assert (record.outcome, record.reason) == (Outcome.FAILED, Reason.UPSTREAM_ERROR)


def other_id(worker: RawWorker) -> WorkerId:
    return WorkerId(f"127.0.0.1:{worker.port}")


async def test_a_stream_cut_inside_a_chunk_ends_abnormally() -> None:
    cut: list[Step] = [SSE_HEAD, delta("a"), b"ff\r\ndata: {", Close()]
    async with RawWorker([cut]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert not got.complete
        assert got.body.startswith(b'data: {"choices"')
        assert router.records[0].outcome is Outcome.FAILED


async def test_a_stream_cut_inside_an_event_ends_abnormally() -> None:
    cut: list[Step] = [SSE_HEAD, delta("a"), chunk(b'data: {"cho'), Close()]
    async with RawWorker([cut]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert not got.complete


async def test_a_plain_answer_that_breaks_off_is_not_passed_as_whole() -> None:
    cut: list[Step] = [PLAIN[:-10], Close()]
    async with RawWorker([cut]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.complete) == (200, False)
        assert router.records[0].outcome is Outcome.FAILED


async def test_streams_that_always_break_open_the_breaker() -> None:
    cut: list[Step] = [SSE_HEAD, delta("a"), Reset()]
    async with (
        RawWorker([cut]) as bad,
        RawWorker([[SSE_HEAD, delta("a"), DONE]]) as good,
        running_router(bad, good, breaker={"failures": 3, "open_s": 60}) as router,
    ):
        for _ in range(20):
            await router.post(STREAM)
        assert len(bad.requests) == 3
        assert len(good.requests) == 17


@pytest.mark.parametrize("status", [b"429 Too Many", b"400 Bad Request", b"500 Oops"])
async def test_a_refused_stream_is_answered_with_the_workers_own_status(status: bytes) -> None:
    refusal = answer(
        b'{"object":"error","message":"no"}',
        status=status,
        headers=[b"content-type: application/json", b"retry-after: 3"],
    )
    async with RawWorker([[refusal]]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert got.status == int(status[:3])
        assert got.one(b"content-type") == b"application/json"
        assert got.one(b"retry-after") == b"3"
        assert got.json()["message"] == "no"


async def test_a_full_queue_in_the_first_event_is_answered_503_with_retry_after() -> None:
    full: list[Step] = [SSE_HEAD, event(QUEUE_FULL), DONE]
    async with RawWorker([full]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert got.status == 503
        assert got.one(b"content-type") == b"application/json"
        assert int(got.one(b"retry-after")) >= 1
        assert got.json()["error"]["message"] == "The request queue is full."
        assert got.one(b"x-laneway-reason") == b"upstream_overloaded"


ABORT_503 = (
    b'{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":503,"message":"full"}}}'
)


@pytest.mark.parametrize("first", [QUEUE_FULL, ABORT_503])
async def test_a_full_queue_in_the_first_event_is_tried_elsewhere(first: bytes) -> None:
    full: list[Step] = [SSE_HEAD, event(first), DONE]
    async with (
        RawWorker([full]) as busy,
        RawWorker([[SSE_HEAD, delta("a"), DONE]]) as free,
        running_router(busy, free) as router,
    ):
        for _ in range(4):
            got = await router.post(STREAM)
            assert (got.status, got.body.count(b"data:")) == (200, 2)
        assert len(free.requests) == 4
        assert busy.requests


async def test_a_bad_request_in_the_first_event_passes_as_sglang_sends_it() -> None:
    bad = event(b'{"error":{"message":"no","type":"invalid_request_error","code":400}}')
    async with RawWorker([[SSE_HEAD, bad, DONE]]) as worker, running_router(worker) as router:
        got = await router.post(STREAM, path=b"/generate")
        assert (got.status, got.raw_body) == (200, bad + DONE)
        assert router.records[0].outcome is Outcome.CLIENT_ERROR


async def test_a_comment_releases_the_head_at_once() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, chunk(b": ping\n\n"), Wait(gate), delta("a"), DONE]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await client.until(b": ping")
        gate.set()
        await client.until(LAST_CHUNK)
        await client.close()


async def test_a_first_event_without_end_is_held_back_for_a_moment_only() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, chunk(b"data: {"), Wait(gate), chunk(b"}\n\n"), DONE]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await client.until(b"data: {")
        gate.set()
        await client.until(LAST_CHUNK)
        await client.close()


async def test_a_worker_that_always_compresses_is_decoded_for_clients_that_did_not_ask() -> None:
    gate = asyncio.Event()
    packer = zlib.compressobj(wbits=31)
    first = packer.compress(b"data: 1\n\n") + packer.flush(zlib.Z_SYNC_FLUSH)
    second = packer.compress(b"data: [DONE]\n\n") + packer.flush()
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    steps: list[Step] = [head, chunk(first), Wait(gate), chunk(second), LAST_CHUNK]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        seen = await client.until(b"data: 1\n\n")  # before the rest is sent
        gate.set()
        seen += await client.until(LAST_CHUNK)
        assert b"content-encoding" not in seen
        assert b"data: [DONE]\n\n" in seen
        await client.close()


async def test_compressed_answers_pass_as_they_are_to_clients_that_asked() -> None:
    packed = gzip.compress(b"data: 1\n\ndata: [DONE]\n\n")
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    steps: list[Step] = [head, chunk(packed), LAST_CHUNK]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        got = await router.post(STREAM, headers=b"accept-encoding: br, gzip;q=0.8\r\n")
        assert got.one(b"content-encoding") == b"gzip"
        assert got.body == packed
        refusing = await router.post(STREAM, headers=b"accept-encoding: gzip;q=0\r\n")
        assert refusing.body == gzip.decompress(packed)


async def test_a_body_that_is_not_what_its_coding_says_ends_abnormally() -> None:
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    packed = gzip.compress(b"data: 1\n\n" * 50, mtime=0)
    broken: list[Step] = [head, chunk(packed[:-9]), LAST_CHUNK]
    async with RawWorker([broken]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert not got.complete or b'"error"' in got.body
        assert router.records[0].outcome is Outcome.FAILED


LIMITS = {"connect_timeout_s": 2, "first_byte_timeout_s": 1, "idle_chunk_timeout_s": 1}


async def test_a_stream_that_moves_has_no_total_limit() -> None:
    steps: list[Step] = [SSE_HEAD]
    for _ in range(8):
        steps += [delta("a"), Pause(0.3)]
    async with (
        RawWorker([[*steps, DONE]]) as worker,
        running_router(worker, upstream=LIMITS) as router,
    ):
        got = await router.post(STREAM)
        assert got.complete
        assert got.body.count(b"data:") == 9


async def test_a_stream_that_falls_silent_is_ended_and_the_worker_told() -> None:
    silent: list[Step] = [SSE_HEAD, delta("a"), Hang()]
    async with (
        RawWorker([silent]) as worker,
        running_router(worker, upstream=LIMITS) as router,
    ):
        got = await router.post(STREAM)
        assert b'"code":"upstream_timeout"' in got.body
        assert got.complete
        await eventually(lambda: worker.aborted)
        assert router.records[0].reason is Reason.UPSTREAM_TIMEOUT


@pytest.mark.parametrize("steps", [[Hang()], [SSE_HEAD, Hang()]])
async def test_no_first_byte_in_time_is_504_and_not_tried_again(steps: list[Step]) -> None:
    async with (
        RawWorker([steps]) as worker,
        RawWorker([steps]) as other,
        running_router(worker, other, upstream=LIMITS) as router,
    ):
        got = await router.post(STREAM)
        assert (got.status, got.one(b"x-laneway-reason")) == (504, b"upstream_timeout")
        assert len(worker.requests) + len(other.requests) == 1
        await eventually(lambda: worker.aborted or other.aborted)


async def test_an_event_without_end_costs_no_memory() -> None:
    block = chunk(b"x" * 65_536)
    steps: list[Step] = [SSE_HEAD, chunk(b"data: "), *([block] * 1024), LAST_CHUNK]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        peak, seen = 0, 0
        while seen < 1024 * len(block):
            seen += len(await client.read(2**20))
            peak = max(peak, held_bytes(router.driver.running))
        assert peak < 10_000
        await client.close()


def held_bytes(running: object) -> int:
    """Bytes that the side scanners of the running exchanges hold."""
    assert isinstance(running, set)
    scans = [e._delivery._scan for e in running if e._delivery is not None]
    return sum(len(s._tail) + sum(map(len, s.reads)) for s in scans if s is not None)


@pytest.mark.parametrize(
    "steps",
    [
        [Hang()],
        [SSE_HEAD, Hang()],
        [SSE_HEAD, chunk(b"data: {"), Hang()],
        [SSE_HEAD, delta("a"), Hang()],
    ],
    ids=["before the head", "before an event", "inside the first event", "in mid stream"],
)
async def test_a_client_that_leaves_stops_the_worker_at_once(steps: list[Step]) -> None:
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await eventually(lambda: worker.requests)
        await client.close()
        await eventually(lambda: worker.aborted, 1.0)
        await eventually(lambda: router.records)
        assert router.records[0].outcome is Outcome.ABORTED
        view = router.driver.snapshot().workers[0]
        assert (view.streams, view.failures) == (0, 0)
        assert not router.driver.running


async def test_leaving_one_stream_leaves_others_of_a_like_rid_alone() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), DONE]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        one, ten = await router.client(), await router.client()
        one.send(post(chat(stream=True, rid="job-1")))
        ten.send(post(chat(stream=True, rid="job-10")))
        await one.until(b'"a"')
        await ten.until(b'"a"')
        await one.close()
        await eventually(lambda: len(worker.aborted) == 1)
        gate.set()
        assert b"[DONE]" in await ten.until(LAST_CHUNK)
        assert all(r.target == b"/v1/chat/completions" for r in worker.requests)
        await ten.close()


async def test_a_slow_client_stops_the_reading_of_its_worker() -> None:
    block = chunk(b"data: " + b"x" * 65_000 + b"\n\n")
    steps: list[Step] = [SSE_HEAD, *([block] * 800), LAST_CHUNK]
    async with (
        RawWorker([steps]) as worker,
        running_router(worker, server={"client_buffer_bytes_max": 65_536}) as router,
    ):
        client = await router.client()
        client.send(post(STREAM))
        head = await client.until(b"\r\n\r\n")
        await eventually(lambda: paused(router.state))
        (connection,) = router.state.connections
        held = []
        for _ in range(40):
            held.append(connection.transport.get_write_buffer_size())
            await asyncio.sleep(0.01)
        assert max(held) < 2**20 < 800 * len(block)
        size = 0
        while size < 800 * len(block) + len(LAST_CHUNK):
            size += len(await client.read(2**22))
        assert head.startswith(b"HTTP/1.1 200")
        await client.close()


def paused(state: object) -> bool:
    return any(c.write_paused for c in state.connections)  # type: ignore[attr-defined]


async def test_eight_tokens_without_usage_are_logged_as_eight() -> None:
    role = event(b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}')
    finish = event(b'{"choices":[{"delta":{},"finish_reason":"length"}]}')
    tokens = [delta(f"data: {number}") for number in range(8)]
    steps = [SSE_HEAD, role, *tokens, finish, DONE]
    for whole in (False, True):
        script: list[Step] = [b"".join(steps)] if whole else [*steps]
        async with RawWorker([script]) as worker, running_router(worker) as router:
            assert (await router.post(STREAM)).complete
            assert router.records[0].output_tokens == 8
