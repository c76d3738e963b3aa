"""The demo's processes: started, waited for, and stopped by their own ids whatever happens."""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Final

STOP_TIMEOUT_S: Final = 5.0
_OUTPUT_BYTES_SHOWN: Final = 2_000


class ChildFailed(Exception):
    """A process of the demo ended by itself; the message has its last words."""


class Child:
    """One process. Its output goes to a file without a name, shown only when it fails."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, output: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._output = output

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise ChildFailed when it is not running any more."""
        status = self._process.returncode
        if status is not None:
            raise ChildFailed(f"{self.name} ended with status {status}:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of what it printed."""
        size = self._output.seek(0, 2)
        self._output.seek(max(0, size - _OUTPUT_BYTES_SHOWN))
        return self._output.read().decode(errors="replace").strip()

    async def stop(self) -> None:
        """End it: politely, and after a while for good."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._output.close()


class Children:
    """All processes of the demo; leaving the context stops every one of them."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    async def start(self, name: str, args: Sequence[str]) -> Child:
        """Start `python ARGS` in a session of its own, so that Ctrl-C reaches the demo alone."""
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by Child.stop
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *args,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        child = Child(name, process, output)
        self._children.append(child)
        return child

    def check(self, name: str | None = None) -> None:
        """Raise ChildFailed when any of them, or the one of this name, has ended."""
        for child in self._children:
            if name in (None, child.name):
                child.check()

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for child in self._children:
                group.create_task(child.stop())


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def is_free(port: int) -> bool:
    """Whether something may listen on this loopback port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
