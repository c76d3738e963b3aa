"""A router as a process of its own, for tests of what only a process can show."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx

_START_S: Final = 20.0


class RouterProcess:
    """A running `python -m router`; `log` is what it has said on standard error."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._reading: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._news = asyncio.Condition()
        self.log = ""
        self.url = ""

    async def started(self) -> None:
        """Wait until it listens or has ended, and go on reading its log."""
        self._reading = asyncio.get_running_loop().create_task(self._read())
        async with asyncio.timeout(_START_S):
            await self._listening.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process."""
        self._process.send_signal(number)

    def resident_bytes(self) -> int:
        """Memory of this process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    async def exit_status(self) -> int:
        """Wait until it has ended."""
        return await self._process.wait()

    async def logged(self, text: str) -> None:
        """Wait until its log has `text`."""
        async with self._news, asyncio.timeout(_START_S):
            await self._news.wait_for(lambda: text in self.log)

    async def logged_times(self, text: str, times: int) -> None:
        """Wait until its log has `text` so many times."""
        async with self._news, asyncio.timeout(_START_S):
            await self._news.wait_for(lambda: self.log.count(text) >= times)

    async def log_ended(self) -> None:
        """Wait until nobody can write to its log any more."""
        assert self._reading is not None
        await asyncio.shield(self._reading)

    async def stop(self) -> None:
        """End it, whatever state it is in."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            async with self._news:
                self.log += line.decode()
                self._news.notify_all()
            found = re.search(r"listens on (\S+)", line.decode())
            if found is not None:
                self.url = found[1]
                self._listening.set()
        self._listening.set()


@asynccontextmanager
async def router_process(
    *args: str, files: tuple[int, int] | None = None
) -> AsyncIterator[RouterProcess]:
    """Start a router on a free port with these flags, and end it at the end.

    `files` are its limits on open files when it starts, soft and hard.
    """
    router = await spawned(*args, files=files)
    try:
        await router.started()
        assert router.url, router.log
        yield router
    finally:
        await router.stop()


async def failed_start(*args: str) -> tuple[int, str]:
    """Start a router that cannot serve; return its exit status and log."""
    router = await spawned(*args)
    try:
        await router.started()
        return await router.exit_status(), router.log
    finally:
        await router.stop()


async def spawned(*args: str, files: tuple[int, int] | None = None) -> RouterProcess:
    """Start `python -m router` with these flags; the caller stops it."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, files)

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--port", "0", "--no-access-log", *args,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=limit,
    )  # fmt: skip
    return RouterProcess(process)


async def until_ready(client: httpx.AsyncClient) -> None:
    """Wait until the router has a healthy worker."""
    async with asyncio.timeout(10):
        while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - no event there
            await asyncio.sleep(0.02)


@asynccontextmanager
async def client_of(router: RouterProcess, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of this router."""
    async with httpx.AsyncClient(
        base_url=router.url, timeout=20, trust_env=False, **options
    ) as client:
        yield client
