"""How requests end: by silence, by their client, by the router; and what remains of them.

Where deadlines matter, time is what the test says it is: it sweeps by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from router.core.types import Outcome
from router.errors import Reason
from router.runtime.relay import Exchange
from tests.runtime.raw_worker import (
    LAST_CHUNK,
    SSE_HEAD,
    Close,
    Hang,
    RawWorker,
    Reset,
    Step,
    Wait,
    chunk,
    delta,
)
from tests.runtime.relay.rig import (
    CHAT,
    RawClient,
    Router,
    chat,
    eventually,
    post,
    running_router,
)

STREAM = chat(stream=True)
LIMITS = {"first_byte_timeout_s": 600, "idle_chunk_timeout_s": 120}
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n"


async def sent(
    router: Router, worker: RawWorker, body: Any, *, path: bytes = CHAT
) -> tuple[RawClient, Exchange]:
    """Send a request from a new client, and stop the driver's own watch."""
    before = len(worker.requests)
    client = await router.client()
    client.send(post(body, path=path))
    await eventually(lambda: len(worker.requests) > before)
    assert router.driver._sweeper is not None
    router.driver._sweeper.cancel()
    (exchange,) = (e for e in router.driver.running if isinstance(e, Exchange))
    return client, exchange


def has_delivery(exchange: Exchange) -> Callable[[], bool]:
    return lambda: exchange._delivery is not None


async def test_silence_is_measured_from_the_head_once_it_came() -> None:
    head, body = asyncio.Event(), asyncio.Event()
    async with (
        RawWorker([[Wait(head), PLAIN_HEAD, Wait(body), b"{}"]]) as worker,
        running_router(worker, upstream=LIMITS) as router,
    ):
        client, exchange = await sent(router, worker, chat())
        for now in (1000.0, 1590.0):
            exchange.sweep(now)
        head.set()
        await eventually(has_delivery(exchange))
        for now in (1595.0, 1714.0):
            exchange.sweep(now)
        body.set()
        assert (await client.answer()).body == b"{}"


async def test_a_head_and_nothing_more_is_a_timeout() -> None:
    async with (
        RawWorker([[PLAIN_HEAD, Hang()]]) as worker,
        running_router(worker, upstream=LIMITS) as router,
    ):
        client, exchange = await sent(router, worker, chat())
        await eventually(has_delivery(exchange))
        for now in (1000.0, 1119.0, 1121.0):
            exchange.sweep(now)
        assert (await client.answer()).status == 504


async def test_silence_is_measured_from_the_last_part_of_a_first_event() -> None:
    first, rest = asyncio.Event(), asyncio.Event()
    steps: list[Step] = [Wait(first), SSE_HEAD, chunk(b"data:"), Wait(rest), chunk(b" {}\n\n")]
    async with (
        RawWorker([[*steps, chunk(b"data: [DONE]\n\n"), LAST_CHUNK]]) as worker,
        running_router(worker, upstream=LIMITS) as router,
    ):
        client, exchange = await sent(router, worker, STREAM)
        for now in (1000.0, 1590.0):
            exchange.sweep(now)
        first.set()
        await eventually(lambda: exchange._delivery is not None and exchange._delivery.holds)
        for now in (1599.0, 1599.25):
            exchange.sweep(now)
        await client.until(b"data:")  # a part of an event is held back for a moment only
        rest.set()
        await client.until(LAST_CHUNK)


async def test_a_head_of_a_stream_does_not_extend_the_wait_for_its_first_event() -> None:
    async with (
        RawWorker([[SSE_HEAD, Hang()]]) as worker,
        running_router(worker, upstream=LIMITS) as router,
    ):
        client, exchange = await sent(router, worker, STREAM)
        exchange.sweep(1000.0)
        await eventually(has_delivery(exchange))
        for now in (1500.0, 1601.0):
            exchange.sweep(now)
        assert (await client.answer()).status == 504


async def test_waiting_for_a_connection_has_a_deadline() -> None:
    limits = {**LIMITS, "connections_max": 1}
    async with RawWorker([[Hang()]]) as worker, running_router(worker, upstream=limits) as router:
        (pool,) = router.driver.upstreams._workers.values()
        side_call = asyncio.create_task(pool.request("GET", "/", deadline_s=60))
        await eventually(lambda: worker.requests)
        client = await router.client()
        client.send(post(chat()))
        await eventually(lambda: "waiting=1" in repr(pool))
        (exchange,) = router.driver.running
        for now in (1e6, 1e6 + 599, 1e6 + 601):
            exchange.sweep(now)
        got = await client.answer()
        assert (got.status, got.one(b"x-laneway-reason")) == (504, b"upstream_timeout")
        assert "waiting=0" in repr(pool)
        side_call.cancel()


@pytest.mark.parametrize("reason", [Reason.INTERNAL, Reason.SHUTTING_DOWN, Reason.ABORTED])
@pytest.mark.parametrize("steps", [[Hang()], [SSE_HEAD, delta("a"), delta("b"), Hang()]])
async def test_what_the_router_ends_is_on_record_with_its_reason(
    reason: Reason, steps: list[Step]
) -> None:
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client, exchange = await sent(router, worker, STREAM)
        if len(steps) > 1:
            await client.until(b'"b"')
        exchange.cut(reason, "for this test")
        await client.until(b'"code":"%b"' % reason.encode())
        record = router.records[0]
        assert (record.outcome, record.reason) == (Outcome.ABORTED, reason)
        assert record.output_tokens == (2 if len(steps) > 1 else 0)
        assert router.driver.snapshot().workers[0].failures == 0


async def test_a_client_that_leaves_is_on_record_with_all_that_it_got() -> None:
    steps: list[Step] = [SSE_HEAD, *(delta(str(n)) for n in range(12)), Hang()]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client, _ = await sent(router, worker, STREAM)
        await client.until(b'"11"')
        await client.close()
        await eventually(lambda: router.records)
        record = router.records[0]
        assert (record.outcome, record.reason) == (Outcome.ABORTED, None)
        assert record.output_tokens == 12


async def test_a_stream_that_breaks_off_is_on_record_with_all_that_came() -> None:
    steps: list[Step] = [SSE_HEAD, delta("a"), delta("b"), Close()]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        await router.post(STREAM)
        record = router.records[0]
        assert (record.outcome, record.reason) == (Outcome.FAILED, Reason.UPSTREAM_ERROR)
        assert record.output_tokens == 2


class Broken(Exception):
    """A fault of ours."""


def broken(*_: object) -> None:
    raise Broken


@pytest.mark.parametrize("also", [(), ("_answer",)])
async def test_a_request_that_cannot_be_looked_after_takes_nobody_with_it(
    also: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"first_byte_timeout_s": 0.3}
    async with RawWorker([[Hang()]]) as worker, running_router(worker, upstream=limits) as router:
        client, bad = await sent(router, worker, chat())
        kept = {name: getattr(Exchange, name) for name in ("sweep", *also)}
        for name, whole in kept.items():

            def either(exchange: Exchange, *args: object, whole: Any = whole) -> None:
                (broken if exchange is bad else whole)(exchange, *args)

            monkeypatch.setattr(Exchange, name, either)
        others = [await router.client() for _ in range(5)]
        for other in others:
            other.send(post(chat()))
        await eventually(lambda: len(worker.requests) == 6)
        for _ in range(4):  # which look at a quarter each
            assert router.driver._sweeper is not None
            router.driver._sweeper.cancel()
            router.driver._sweep()
        assert bad not in router.driver.running
        assert router.records[0].reason is Reason.INTERNAL
        if not also:
            assert (await client.answer()).status == 500
        for other in others:
            assert (await other.answer()).status == 504
        assert "Broken" in caplog.text
        assert router.driver.snapshot().workers[0].streams == 0
        monkeypatch.undo()
        await client.close()


async def test_a_client_that_cannot_be_looked_after_takes_nobody_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        RawWorker([[Hang()]]) as worker,
        running_router(worker, server={"keep_alive_s": 0.3, "body_timeout_s": 0.3}) as router,
    ):
        first, second = await router.client(), await router.client()
        await eventually(lambda: len(router.driver.clients) == 2)
        bad = next(iter(router.driver.clients))
        monkeypatch.setattr(bad, "sweep", broken, raising=False)
        assert await first.closed()
        assert await second.closed()
        assert not worker.requests


async def test_an_effect_whose_request_cannot_be_ended_leaves_the_driver_running(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with RawWorker([[PLAIN_HEAD + b"{}"]]) as worker, running_router(worker) as router:
        with monkeypatch.context() as patched:
            patched.setattr(Exchange, "dispatch", broken)
            patched.setattr(Exchange, "_answer", broken)
            client = await router.client()
            client.send(post(chat()))
            await eventually(lambda: router.records)
        assert router.records[0].reason is Reason.INTERNAL
        assert not router.driver.running
        assert "Broken" in caplog.text
        assert (await router.post(chat())).status == 200


AUDIO_HEAD = b"HTTP/1.1 404 x\r\ncontent-type: audio/wav\r\n"
CHUNKED = AUDIO_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"hello")
COUNTED = AUDIO_HEAD + b"content-length: 9\r\n\r\nhello"


@pytest.mark.parametrize("begun", [CHUNKED, COUNTED])
async def test_a_client_that_is_still_sending_can_read_what_there_is_of_a_broken_answer(
    begun: bytes,
) -> None:
    async with RawWorker([[begun, Reset()]]) as worker, running_router(worker) as router:
        client = await router.client()
        second = post(chat())
        client.send(post(chat()) + second[:20])
        answer = await client.answer()
        assert (answer.status, answer.body, answer.complete) == (404, b"hello", False)
        assert await client.closed()
        # A closed socket would say so with a reset, at which clients forget what they have unread.
        for byte in second[20:]:
            client.send(bytes((byte,)))
            await client.writer.drain()
        assert not client.writer.transport.is_closing()
        assert len(worker.requests) == 1
        await client.close()
        await eventually(lambda: not router.state.connections)


async def test_a_broken_answer_that_only_the_close_would_end_is_cut() -> None:
    async with RawWorker([[CHUNKED, Reset()]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat(), version=b"1.0"))
        await client.until(b"hello")
        await eventually(lambda: not router.state.connections)  # it waits for nobody
