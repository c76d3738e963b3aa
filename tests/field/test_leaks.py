"""Requests that fail, or whose clients leave, take no memory and no files for good."""

from __future__ import annotations

import asyncio
import itertools

from tests.field.harness import Field
from tests.field.mock_worker import Call, good, status
from tests.field.wire import eventually

CONFIG = {
    "server": {"body_timeout_s": 60},
    "breaker": {"failures": 1_000},
    "upstream": {"idle_s": 0.5},
}


async def broken_off(call: Call) -> None:
    """Begins a stream and resets the connection in it."""
    call.head()
    call.event("one")
    await call.drained()
    call.reset()


async def test_requests_that_fail_or_are_left_leave_nothing_behind(field: Field) -> None:
    """LK03, with fewer requests and so less memory."""
    worker = await field.worker()
    kinds, calls = (good, good, good, status(500), broken_off), itertools.count()

    async def mixed(call: Call) -> None:
        await kinds[next(calls) % len(kinds)](call)

    async def client(chats: int) -> None:
        for number in range(chats):
            answer = await field.open()
            if number % 7:
                await (await answer.head()).read()
            else:
                answer.reset()

    async def after(chats: int) -> tuple[int, int]:
        await asyncio.gather(*(client(chats) for _ in range(16)))
        await eventually(field.is_idle)
        await eventually(lambda: not worker.running)
        return field.router.status_kb("VmRSS"), field.router.open_files()

    worker.answer = mixed
    before_kb, files = await after(60)
    now_kb, _ = await after(200)
    assert now_kb - before_kb <= 6 * 1024
    await eventually(lambda: field.router.open_files() <= files + 2)
