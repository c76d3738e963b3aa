"""Framing of answers: bodies, ends, and bytes that do not belong."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.core.types import Outcome
from router.errors import Reason
from tests.runtime.raw_worker import (
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
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
)
from tests.runtime.relay.rig import chat, eventually, pool_of, post, running_router

STREAM = chat(stream=True)


@pytest.mark.parametrize("head", [b"204 No Content", b"304 Not Modified"])
async def test_answers_without_a_body_end_with_their_head(head: bytes) -> None:
    bare = b"HTTP/1.1 " + head + b"\r\nx-a: 1\r\n\r\n"
    async with RawWorker([[bare], [PLAIN]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.body) == (int(head[:3]), b"")
        assert (await router.post(chat())).status == 200
        assert worker.connections == 1


async def test_an_empty_body_is_an_answer() -> None:
    async with RawWorker([[answer(b"")], [PLAIN]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.one(b"content-length")) == (200, b"0")


async def test_interim_answers_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with RawWorker([[interim + PLAIN]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.raw.count(b"HTTP/1.1")) == (200, 1)


async def test_an_answer_that_ends_with_its_connection_is_framed_for_the_client() -> None:
    bare = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\ndata: [DONE]\n\n"
    async with RawWorker([[bare, Close()]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        got = await client.answer()
        assert got.one(b"transfer-encoding") == b"chunked"
        assert got.body == b"data: 1\n\ndata: [DONE]\n\n"
        client.send(post(STREAM))
        assert (await client.answer()).status == 200


async def test_an_answer_that_should_end_with_its_connection_but_is_reset_is_no_success() -> None:
    bare = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhalf"
    steps: list[Step] = [bare, Pause(0.1), Reset()]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        assert not (await router.post(chat())).complete
        assert router.records[0].outcome is Outcome.FAILED


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 600 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 099 Odd\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_an_answer_is_502(raw: bytes) -> None:
    async with RawWorker([[raw, Hang()]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.one(b"x-laneway-reason")) == (502, b"upstream_protocol")


async def test_bytes_behind_an_answer_are_not_passed_and_its_connection_not_used_again() -> None:
    extra = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    async with RawWorker([[PLAIN + extra], [PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat()))
        assert (await client.answer()).raw_body == PLAIN.partition(b"\r\n\r\n")[2]
        client.send(post(chat()))
        got = await client.answer()
        assert b"evil" not in got.raw
        assert worker.connections == 2


SECOND = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize("extra", [b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"x", SECOND])
async def test_bytes_behind_a_chunked_answer_are_a_fault_and_never_passed(extra: bytes) -> None:
    scripts: list[list[Step]] = [
        [SSE_HEAD, delta("a"), Pause(0.05), LAST_CHUNK + extra],
        [SSE_HEAD, delta("a") + b"0\r\n", Pause(0.05), b"\r\n" + extra],
        [SSE_HEAD, delta("a") + b"0\r\n\r", Pause(0.05), b"\n" + extra],
    ]
    for script in scripts:
        async with RawWorker([script]) as worker, running_router(worker) as router:
            got = await router.post(STREAM)
            assert SECOND not in got.raw_body
            assert router.records[0].reason is Reason.UPSTREAM_PROTOCOL


@pytest.mark.parametrize("extra", [b"x", SECOND, b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_no_error_event_is_put_inside_a_chunk(extra: bytes) -> None:
    half = b"data: 1\n\n"
    last = half + b"\r\n" + LAST_CHUNK + extra  # a fault, and nothing of this read is passed on
    first = SSE_HEAD + b"%x\r\n" % (2 * len(half)) + half
    script: list[Step] = [first, Pause(0.05), last]
    async with RawWorker([script]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert not got.complete
        assert got.raw_body == b"%x\r\n" % (2 * len(half)) + half


async def test_bytes_on_an_idle_connection_close_it() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [PLAIN, Wait(gate), b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"]
    async with RawWorker([steps, [PLAIN]]) as worker, running_router(worker) as router:
        assert (await router.post(chat())).status == 200
        gate.set()
        await eventually(lambda: "idle=0" in repr(pool_of(router, worker)))
        got = await router.post(chat())
        assert b"evil" not in got.raw
        assert worker.connections == 2


async def test_an_answer_may_begin_while_the_request_is_still_being_sent() -> None:
    big = chat(messages=[{"role": "user", "content": "x" * 8_000_000}])
    early = answer(b"{}", status=b"422 No", headers=[b"content-type: application/json"])
    async with (
        RawWorker([[early, Hang()]], read_body=False) as worker,
        running_router(worker) as router,
    ):
        got = await router.post(big)
        assert (got.status, got.body) == (422, b"{}")
        assert "idle=0" in repr(pool_of(router, worker)), "what it was sent is half a request"
        assert router.records[0].outcome is Outcome.CLIENT_ERROR
        await eventually(lambda: "open=0" in repr(pool_of(router, worker)))


TRICKY = [b"data: 1\n\n", b"\r\n0\r\n\r\n", LAST_CHUNK, b"\r\n", b"data:\r\n\r\n"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_the_cuts_the_client_gets_the_workers_bytes(data: st.DataObject) -> None:
    payloads = data.draw(
        st.lists(
            st.binary(min_size=1, max_size=60) | st.sampled_from(TRICKY),
            min_size=1,
            max_size=12,
        )
    )
    whole = SSE_HEAD + b"".join(map(chunk, payloads)) + LAST_CHUNK
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    asyncio.run(_relayed_equals_sent(whole, cuts))


async def _relayed_equals_sent(whole: bytes, cuts: list[int]) -> None:
    steps: list[Step] = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        steps += [whole[start:end], Pause(0.001)]
    limits = {"first_byte_timeout_s": 60}
    async with RawWorker([steps]) as worker, running_router(worker, upstream=limits) as router:
        got = await router.post(STREAM)
        assert got.raw_body == whole.partition(b"\r\n\r\n")[2]
        await eventually(lambda: router.records)
        assert router.records[0].outcome is Outcome.SUCCESS
