"""`laneway worker --simulated` beside `laneway worker`: the same flags for the same things."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from pydantic import SecretStr

from router.contract import BOTH_LANES, Lane
from tests.workers.conftest import OPTIONS
from tests.workers.recorder import running_router
from workers.sim.server import RouterAddress, run_simulated


@asynccontextmanager
async def command(*flags: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`laneway worker FLAGS` as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from router.cli import main; main()", "worker", *flags),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_command_registers_with_the_flags_that_an_agent_has() -> None:
    simulated = ("--simulated", "3", "--port", "0", "--lanes", "short", "long", "both")
    async with running_router(admin_key="k") as router, asyncio.timeout(30):
        async with command(*simulated, "--register", router.url, "--admin-key", "k") as process:
            await router.until(lambda: len(router.known) == 3)
            lanes = {spec.lanes for spec in router.known.values()}
            assert lanes == {frozenset({Lane.SHORT}), frozenset({Lane.LONG}), BOTH_LANES}
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        assert not router.known
        register = ("--simulated", "1", "--port", "0", "--register", router.url)
        async with command(*register, LANEWAY_ADMIN_KEY="k"):
            await router.until(lambda: len(router.known) == 1)


async def test_workers_register_at_every_router_with_the_key_that_they_want() -> None:
    stop = asyncio.Event()
    async with running_router() as one, running_router(admin_key="k") as other, asyncio.timeout(20):
        routers = ((one, None), (other, SecretStr("k")))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                run_simulated(
                    replace(OPTIONS, api_key="sk-worker"),
                    ports=[0, 0],
                    register=[RouterAddress(url=r.url, admin_key=k) for r, k in routers],
                    stop=stop,
                )
            )
            for router, _ in routers:
                await router.until(lambda router=router: len(router.known) == 2)  # type: ignore[misc]
            assert one.known == other.known
            told = [spec.api_key for spec in one.known.values()]
            stop.set()
        assert told == [SecretStr("sk-worker")] * 2
        assert one.known == other.known == {}
