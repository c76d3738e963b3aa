"""Requests beside the hot path: whole answers, deadlines, bounds, the pool's cap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.config import UpstreamSettings
from router.errors import Reason
from router.runtime.upstream import UpstreamFailed, UpstreamPool, Upstreams
from tests.runtime.raw_worker import (
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
    Close,
    Hang,
    RawWorker,
    Step,
    Wait,
    answer,
    chunk,
)
from tests.runtime.relay.rig import eventually


@pytest.fixture
async def upstreams() -> AsyncIterator[Upstreams]:
    settings = UpstreamSettings(connections_max=2)
    made = Upstreams(settings, loop=asyncio.get_running_loop())
    yield made
    made.close()
    await asyncio.sleep(0)


async def closed(pool: UpstreamPool) -> None:
    pool.close()
    await eventually(lambda: pool.unused)


async def test_a_whole_answer_comes_back_with_its_headers(upstreams: Upstreams) -> None:
    reply = answer(b"hello", headers=[b"X-A: 1", b"connection: keep-alive"])
    async with RawWorker([[reply]]) as worker:
        pool = upstreams.origin(worker.url)
        for target in ("/health", b"/health"):
            got = await pool.request("GET", target, headers=[(b"accept", b"*/*")], deadline_s=5)
            assert (got.status, got.body, got.headers) == (200, b"hello", [(b"x-a", b"1")])
        assert worker.requests[0].line == b"GET /health HTTP/1.1"
        assert not worker.requests[0].all(b"content-length")
        assert worker.connections == 1
        await closed(pool)


async def test_chunks_are_taken_apart_and_head_answers_have_no_body(upstreams: Upstreams) -> None:
    chunked: list[Step] = [SSE_HEAD, chunk(b"ab"), chunk(b"cd"), LAST_CHUNK]
    head_only = b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"
    async with RawWorker([chunked, [head_only], chunked]) as worker:
        pool = upstreams.origin(worker.url)
        assert (await pool.request("GET", "/", deadline_s=5)).body == b"abcd"
        assert (await pool.request("HEAD", "/", deadline_s=5)).body == b""
        got = await pool.request("POST", "/", body=b"{}", deadline_s=5)
        assert got.body == b"abcd"
        assert worker.requests[2].body == b"{}"
        assert worker.connections == 1
        await closed(pool)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([Hang()], Reason.UPSTREAM_TIMEOUT),
        ([SSE_HEAD, chunk(b"a"), Hang()], Reason.UPSTREAM_TIMEOUT),
        ([Close()], Reason.UPSTREAM_ERROR),
        ([b"nonsense\r\n\r\n", Hang()], Reason.UPSTREAM_PROTOCOL),
        ([answer(b"x" * 5000), Hang()], Reason.UPSTREAM_PROTOCOL),
    ],
)
async def test_no_whole_answer_within_its_bounds_is_a_failure(
    upstreams: Upstreams, steps: list[Step], reason: Reason
) -> None:
    async with RawWorker([steps]) as worker:
        pool = upstreams.origin(worker.url)
        with pytest.raises(UpstreamFailed) as failed:
            await pool.request("GET", "/", deadline_s=0.3, body_bytes_max=1000)
        assert failed.value.reason is reason
        await closed(pool)


async def test_nobody_listening_is_unreachable(upstreams: Upstreams) -> None:
    async with RawWorker([[PLAIN]]) as worker:
        url = worker.url
    pool = upstreams.origin(url)
    with pytest.raises(UpstreamFailed) as failed:
        await pool.request("GET", "/", deadline_s=5)
    assert failed.value.reason is Reason.UPSTREAM_UNREACHABLE
    assert pool.unused


async def test_an_answer_that_comes_faster_than_it_is_read_is_whole(upstreams: Upstreams) -> None:
    body = b"x" * 30_000_000
    async with RawWorker([[answer(body)]]) as worker:
        pool = upstreams.origin(worker.url)
        got = await pool.request("GET", "/", deadline_s=5, body_bytes_max=len(body))
        assert got.body == body
        await closed(pool)


async def test_calls_above_the_cap_wait_and_a_cancelled_one_leaves_its_place(
    upstreams: Upstreams,
) -> None:
    gate = asyncio.Event()
    async with RawWorker([[Wait(gate), PLAIN]]) as worker:
        pool = upstreams.origin(worker.url)
        calls = [asyncio.create_task(pool.request("GET", "/", deadline_s=5)) for _ in range(5)]
        await eventually(lambda: "waiting=3" in repr(pool))
        calls[4].cancel()
        await eventually(lambda: "waiting=2" in repr(pool))
        gate.set()
        assert [(await call).status for call in calls[:4]] == [200] * 4
        assert worker.connections == 2
        await closed(pool)


async def test_closing_a_pool_fails_what_waits_and_lets_finish_what_runs(
    upstreams: Upstreams,
) -> None:
    gate = asyncio.Event()
    async with RawWorker([[Wait(gate), PLAIN]]) as worker:
        pool = upstreams.origin(worker.url)
        calls = [asyncio.create_task(pool.request("GET", "/", deadline_s=5)) for _ in range(3)]
        await eventually(lambda: "waiting=1" in repr(pool))
        await eventually(lambda: len(worker.requests) == 2)
        pool.close()
        with pytest.raises(UpstreamFailed):
            await calls[2]
        gate.set()
        assert [(await call).status for call in calls[:2]] == [200] * 2
        await eventually(lambda: pool.unused)


async def test_a_call_that_is_cancelled_while_connecting_leaves_nothing_open(
    upstreams: Upstreams,
) -> None:
    async with RawWorker([[PLAIN]]) as worker:
        pool = upstreams.origin(worker.url)
        for steps in range(12):
            call = asyncio.create_task(pool.request("GET", "/", deadline_s=5))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        await eventually(lambda: "connecting=0" in repr(pool))
        await closed(pool)


async def test_the_pool_of_an_address_that_nobody_asks_any_more_is_dropped(
    upstreams: Upstreams,
) -> None:
    async with RawWorker([[PLAIN]]) as worker:
        pool = upstreams.origin(worker.url)
        await pool.request("GET", "/", deadline_s=5)
        upstreams.sweep(1000.0)
        assert upstreams.origin(worker.url) is pool
        upstreams.sweep(1010.0)
        await eventually(lambda: pool.unused)
        upstreams.sweep(1100.0)
        assert upstreams.origin(worker.url) is not pool
