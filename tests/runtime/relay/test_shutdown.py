"""The end of the process, for streams that run."""

from __future__ import annotations

import asyncio

from tests.runtime.raw_worker import (
    DONE,
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
    Hang,
    RawWorker,
    Step,
    Wait,
    delta,
)
from tests.runtime.relay.rig import chat, eventually, post, running_router

STREAM = chat(stream=True)


async def test_running_streams_end_well_within_the_grace_period() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), DONE]
    async with RawWorker([steps, [PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await client.until(b'"a"')
        drained = asyncio.create_task(router.driver.drained(grace_s=10))
        await asyncio.sleep(0)
        late = await router.post(chat())  # still served, and told to connect elsewhere
        assert (late.status, late.one(b"connection")) == (200, b"close")
        assert not drained.done()
        gate.set()
        assert b"[DONE]" in await client.until(LAST_CHUNK)
        assert await drained
        assert await client.closed()


async def test_after_the_grace_period_what_runs_is_cut_with_an_error() -> None:
    steps: list[Step] = [SSE_HEAD, delta("a"), Hang()]
    async with RawWorker([steps, [Hang()]]) as worker, running_router(worker) as router:
        streaming, waiting = await router.client(), await router.client()
        streaming.send(post(STREAM))
        await streaming.until(b'"a"')
        waiting.send(post(chat()))
        await eventually(lambda: len(worker.requests) == 2)
        assert not await router.driver.drained(grace_s=0.1)
        assert b'"code":"shutting_down"' in await streaming.until(LAST_CHUNK)
        got = await waiting.answer()
        assert (got.status, got.one(b"x-laneway-reason")) == (503, b"shutting_down")
        await eventually(lambda: len(worker.aborted) == 2)
        assert not router.driver.running
