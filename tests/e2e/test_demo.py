"""The demo as a newcomer runs it: real processes, and none of them left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

CHILDREN = 7  # a router and six workers
START_S = 60.0


class Demo:
    """A running demo and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""

    async def printed(self, text: str) -> None:
        """Read until `text` was printed."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            while text not in self.output:
                line = await self.process.stdout.readline()
                assert line, self.output
                self.output += line.decode()

    async def ended(self) -> int:
        """Read to the end; return the exit status."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            self.output += (await self.process.stdout.read()).decode()
            return await self.process.wait()

    def children(self) -> set[int]:
        """Its child processes, by the kernel's own list."""
        pid = self.process.pid
        return {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@asynccontextmanager
async def demo(*args: str) -> AsyncIterator[Demo]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from router.cli import main; main()", "demo", *args,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    running = Demo(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
            await running.ended()


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


async def test_it_shows_a_cluster_serve_and_leaves_nothing_behind() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with demo("--seconds", "4", "--port", str(port)) as running:
            await running.printed("workers 6/6")
            children = running.children()
            assert len(children) == CHILDREN
            assert await running.ended() == 0
    assert alive(children) == set()
    output = running.output
    assert f"Port {port} is taken, perhaps by another router or demo" in output
    outcomes = {name: int(n) for n, name in re.findall(r"\n +(\d+)  ([^\n]+)(?=\n)", output)}
    assert outcomes.keys() <= {"answered", "still running at the end"}
    assert outcomes["answered"] >= 5
    sent = re.search(r"\n(\d+) requests sent in 4 s, ", output)
    assert sent is not None
    assert sum(outcomes.values()) == int(sent[1])
    assert re.search(r"short  p50 +\d+ ms", output)
    assert re.search(r"  short-\d +\d+\n", output)
    assert re.search(r"  long-\d +\d+\n", output)
    assert "curl -N http://127.0.0.1:" in output
    assert "Traceback" not in output


async def test_ctrl_c_stops_every_process_and_still_sums_up() -> None:
    async with demo("--port", "0") as running:
        await running.printed("workers 6/6")
        children = running.children()
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 0
        assert alive(children) == set()
        assert "answers that began, by worker:" in running.output


async def test_a_router_that_dies_ends_the_demo_with_its_last_words() -> None:
    async with demo("--port", "0") as running:
        await running.printed("workers 6/6")
        children = running.children()
        (router,) = (pid for pid in children if "router" in command_of(pid))
        os.kill(router, signal.SIGKILL)
        assert await running.ended() == 1
        assert alive(children) == set()
        assert "the router ended with status -9" in running.output
        assert "Traceback" not in running.output
