"""The router stops: unready at once, running answers end, new ones are served until it closes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.field.harness import Field, RouterProcess, router_process
from tests.field.mock_worker import held, silent
from tests.field.wire import Answer, eventually

DELAY_S, GRACE_S = 0.6, 1.0
CONFIG = {"server": {"drain_delay_s": DELAY_S, "shutdown_grace_s": GRACE_S}}


@pytest.fixture
async def stopping(tmp_path: Path) -> AsyncIterator[Field]:
    """A router of its own, as the test ends it."""
    with router_process(tmp_path, CONFIG) as router:
        field = Field(router)
        try:
            yield field
        finally:
            await field.stop_workers()


async def ended(router: RouterProcess, *, within_s: float) -> int:
    """The exit status, once it has ended."""
    await eventually(lambda: router.process.poll() is not None, within_s=within_s, what="its end")
    code = router.process.poll()
    assert code is not None
    assert "Traceback" not in router.log(), router.log()
    return code


async def test_running_streams_end_before_it_does(stopping: Field) -> None:
    """SD01."""
    worker, gate = await stopping.worker(), asyncio.Event()
    worker.answer = held(gate)
    streams = [await stopping.stream() for _ in range(3)]
    for stream in streams:
        await stream.until(b"one ")
    stopping.router.process.send_signal(signal.SIGTERM)
    await eventually(lambda: is_unready(stopping), within_s=0.5, what="503 at once")
    await eventually(lambda: refuses(stopping), within_s=DELAY_S + 1)
    assert stopping.router.process.poll() is None
    gate.set()
    for stream in streams:
        assert b"[DONE]" in await stream.read()
        assert stream.complete
    assert await ended(stopping.router, within_s=2) == 0


async def is_unready(field: Field) -> bool:
    return (await field.get("/readyz")).status == 503


async def refuses(field: Field) -> bool:
    try:
        (await Answer.connect(field.router.port)).close()
    except (ConnectionRefusedError, ConnectionResetError):  # or as it stops listening
        return True
    return False


async def test_a_stream_that_never_ends_is_cut_at_the_grace(stopping: Field) -> None:
    """SD01: it does not wait for ever."""
    worker = await stopping.worker()
    worker.answer = held(asyncio.Event())
    stream = await stopping.stream()
    await stream.until(b"one ")
    stopping.router.process.send_signal(signal.SIGTERM)
    await stream.read(within_s=DELAY_S + GRACE_S + 2)
    assert b"[DONE]" not in stream.body
    await ended(stopping.router, within_s=2)
    async with asyncio.timeout(1):
        await worker.calls[0].gone.wait()


async def test_requests_are_served_until_the_listener_closes(stopping: Field) -> None:
    """SD03."""
    await stopping.worker()
    loop = asyncio.get_running_loop()
    stopping.router.process.send_signal(signal.SIGTERM)
    told_at, served, answer = loop.time(), 0, None
    while loop.time() < told_at + DELAY_S + GRACE_S + 2:
        try:
            answer = await stopping.open()
            head = await answer.head()
        except ConnectionRefusedError:
            break
        except ConnectionResetError:
            # The system resets who connects just as the listener closes, and was not accepted.
            assert await refuses(stopping)
            break
        assert head.status == 200
        assert b"[DONE]" in await answer.read()
        assert answer.complete
        served += 1
        await asyncio.sleep(0.03)  # the pace of the clients
    closed_after_s = loop.time() - told_at
    assert served >= 5
    assert DELAY_S - 0.2 <= closed_after_s <= DELAY_S + 1
    assert await ended(stopping.router, within_s=2) == 0


async def test_who_waits_in_the_queue_is_served_too(stopping: Field) -> None:
    """SD03: a request that was accepted is not forgotten because it waits."""
    worker, gate = await stopping.worker(concurrency_max=1), asyncio.Event()
    worker.answer = silent(gate)
    running = [await stopping.open() for _ in range(2)]
    await eventually(lambda: some_wait(stopping))
    stopping.router.process.send_signal(signal.SIGTERM)
    await eventually(lambda: refuses(stopping), within_s=DELAY_S + 1)
    gate.set()
    for answer in running:
        assert (await answer.head()).status == 200
        assert b"[DONE]" in await answer.read()
    assert await ended(stopping.router, within_s=2) == 0


async def some_wait(field: Field) -> bool:
    return await field.queued() > 0
