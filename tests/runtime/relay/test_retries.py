"""Attempts that failed: repeated elsewhere, or passed on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.contract import WorkerId, WorkerSpec
from tests.runtime.raw_worker import (
    DONE,
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
    Pause,
    RawWorker,
    Reset,
    Step,
    Wait,
    answer,
    delta,
)
from tests.runtime.relay.rig import chat, eventually, post, running_router

STREAM = chat(stream=True)
FAST_RETRIES = {"retries_max": 2, "backoff_s": 0.02, "budget_tokens_max": 100}


async def test_an_unreachable_worker_is_replaced_by_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        dead = WorkerSpec(url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        async with (
            RawWorker([[PLAIN]]) as worker,
            running_router(dead, worker, retry=FAST_RETRIES) as router,
        ):
            for _ in range(4):
                assert (await router.post(chat())).status == 200


async def test_an_unreachable_worker_alone_is_502() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = WorkerSpec(url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        async with running_router(dead, retry=FAST_RETRIES) as router:
            got = await router.post(chat())
            assert (got.status, got.one(b"x-laneway-reason")) == (502, b"upstream_unreachable")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_an_attempt_that_failed_is_repeated_elsewhere(status: int) -> None:
    failing = answer(b'{"n":1}', status=b"%d X" % status)
    async with (
        RawWorker([[failing]]) as bad,
        RawWorker([[PLAIN]]) as good,
        running_router(bad, good, retry=FAST_RETRIES) as router,
    ):
        for _ in range(3):
            assert (await router.post(chat())).status == 200
        assert len(good.requests) == 3
        assert bad.requests


async def test_the_last_failure_is_passed_on_after_every_worker_was_tried_once() -> None:
    failing = answer(b'{"said":"no"}', status=b"500 X")
    async with (
        RawWorker([[failing]]) as one,
        RawWorker([[failing]]) as two,
        RawWorker([[failing]]) as three,
        running_router(one, two, three, retry=FAST_RETRIES) as router,
    ):
        got = await router.post(chat())
        assert (got.status, got.json()) == (500, {"said": "no"})
        assert [len(w.requests) for w in (one, two, three)] == [1, 1, 1]
        assert router.records[0].attempts == 3
        assert len(router.records) == 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (408, b"upstream_timeout"),
        (429, b"upstream_overloaded"),
        (500, b"upstream_error"),
        (501, b"upstream_error"),
        (503, b"upstream_overloaded"),
        (504, b"upstream_timeout"),
    ],
)
async def test_a_failure_that_is_passed_on_has_its_reason_beside_it(
    status: int, reason: bytes
) -> None:
    failing = answer(b"oh no", status=b"%d X" % status, headers=[b"content-type: text/plain"])
    async with RawWorker([[failing]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.body) == (status, b"oh no")
        assert got.one(b"content-type") == b"text/plain"
        assert got.one(b"x-laneway-reason") == reason


async def test_the_reason_of_a_router_behind_this_one_stays() -> None:
    theirs = answer(b"{}", status=b"503 X", headers=[b"x-laneway-reason: no_workers"])
    async with RawWorker([[theirs]]) as worker, running_router(worker) as router:
        assert (await router.post(chat())).one(b"x-laneway-reason") == b"no_workers"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 501])
async def test_other_statuses_are_passed_on_and_not_repeated(status: int) -> None:
    refusal = answer(b'{"said":"no"}', status=b"%d X" % status)
    async with (
        RawWorker([[refusal]]) as one,
        RawWorker([[refusal]]) as two,
        running_router(one, two, retry=FAST_RETRIES) as router,
    ):
        got = await router.post(chat())
        assert (got.status, got.json()) == (status, {"said": "no"})
        assert bool(got.all(b"x-laneway-reason")) is (status >= 500)
        assert len(one.requests) + len(two.requests) == 1


async def test_a_worker_that_dies_before_its_body_is_replaced() -> None:
    half: list[Step] = [b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", Pause(0.1), Reset()]
    async with (
        RawWorker([half]) as bad,
        RawWorker([[PLAIN]]) as good,
        running_router(bad, good, retry=FAST_RETRIES) as router,
    ):
        for _ in range(3):
            assert (await router.post(chat())).status == 200
        assert bad.requests


async def test_a_full_worker_without_retry_after_gets_one() -> None:
    async with (
        RawWorker([[answer(b"{}", status=b"503 Busy")]]) as worker,
        running_router(worker, retry=FAST_RETRIES) as router,
    ):
        got = await router.post(chat())
        assert (got.status, got.one(b"retry-after")) == (503, b"1")
        assert router.driver.snapshot().workers[0].breaker == "closed"


async def test_a_worker_that_is_removed_finishes_what_it_runs() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), DONE]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await client.until(b'"a"')
        router.driver.on_worker_left(WorkerId(f"127.0.0.1:{worker.port}"))
        gate.set()
        assert b"[DONE]" in await client.until(LAST_CHUNK)
        assert (await router.post(STREAM)).status == 503
        await eventually(lambda: not router.driver.running)
