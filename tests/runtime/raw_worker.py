"""A worker that does exactly what a script says, byte for byte.

A script is a list of steps for one request; bytes are sent as they are, everything else is one of
the steps below. Scripts are used in order, the last one again and again. What came in is recorded,
and so is every request whose sender closed the connection before its script was over.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.listening import stop_listening


@dataclass(frozen=True)
class Pause:
    """Wait so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Wait:
    """Wait until the test sets the event."""

    event: asyncio.Event


class Reset:
    """Cut the connection by a TCP reset."""


class Close:
    """Close the connection in order."""


class Hang:
    """Do nothing until the other side closes."""


Step = bytes | Pause | Wait | Reset | Close | Hang
Script = Sequence[Step]


@dataclass
class RawRequest:
    """A request as it came."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    connection: int  # which of the worker's connections, from 0

    @property
    def target(self) -> bytes:
        return self.line.split(b" ")[1]

    def all(self, name: bytes) -> list[bytes]:
        return [value for known, value in self.headers if known.lower() == name]


@dataclass(eq=False)
class RawWorker:
    """Listens on loopback. Use as an async context manager."""

    scripts: Sequence[Script]
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    read_body: bool = True  # False: the script starts when the head is there
    port: int = 0
    requests: list[RawRequest] = field(default_factory=list)
    aborted: list[RawRequest] = field(default_factory=list)
    connections: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"

    async def __aenter__(self) -> RawWorker:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; on the same port again after `stop`."""
        self._server = await asyncio.start_server(
            self._serve, self.host, self.port, ssl=self.tls, limit=2**20
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and cut what is connected."""
        assert self._server is not None
        await stop_listening(self._server)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        number = self.connections
        self.connections += 1
        try:
            while (request := await self._request(reader, number)) is not None:
                self.requests.append(request)
                self._notify()
                script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
                if not await self._play(script, request, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side, or the test, ended it
        finally:
            writer.close()

    def _notify(self) -> None:
        self.changed.set()
        self.changed.clear()

    async def _request(self, reader: asyncio.StreamReader, number: int) -> RawRequest | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        line, *lines = head[:-4].split(b"\r\n")
        headers = [(name, value.strip()) for name, _, value in (h.partition(b":") for h in lines)]
        request = RawRequest(line, headers, b"", number)
        length = request.all(b"content-length")
        if self.read_body and length:
            request.body = await reader.readexactly(int(length[0]))
        return request

    async def _play(
        self,
        script: Script,
        request: RawRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Play a script; False when the connection is over."""
        steps = asyncio.create_task(self._steps(script, writer))
        gone = asyncio.create_task(_closed(reader))
        self._tasks |= {steps, gone}
        steps.add_done_callback(self._tasks.discard)
        gone.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait((steps, gone), return_when=asyncio.FIRST_COMPLETED)
            if steps.done():
                return steps.result() and not gone.done()
            self.aborted.append(request)
            self._notify()
            return False
        finally:
            for task in (steps, gone):
                task.cancel()
            await asyncio.wait((steps, gone))

    async def _steps(self, script: Script, writer: asyncio.StreamWriter) -> bool:
        for step in script:
            match step:
                case bytes():
                    writer.write(step)
                    await writer.drain()
                case Pause(seconds):
                    await asyncio.sleep(seconds)
                case Wait(event):
                    await event.wait()
                case Reset():
                    reset(writer)
                    return False
                case Close():
                    return False
                case Hang():
                    await asyncio.Event().wait()
        return True


async def _closed(reader: asyncio.StreamReader) -> None:
    """Return when the other side closed. Nothing is consumed of a request that follows."""
    while not reader.at_eof():
        buffered: bytearray = reader._buffer  # type: ignore[attr-defined]
        if buffered:
            await asyncio.sleep(0.01)
        else:
            with contextlib.suppress(ConnectionError):
                await reader._wait_for_data("closed")  # type: ignore[attr-defined]


def reset(writer: asyncio.StreamWriter) -> None:
    """Close `writer` by a TCP reset instead of an orderly end."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# Answers.


def answer(
    body: bytes,
    *,
    status: bytes = b"200 OK",
    headers: Iterable[bytes] = (b"content-type: application/json",),
) -> bytes:
    """A whole answer with its length."""
    lines = b"".join(line + b"\r\n" for line in headers)
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, lines, len(body), body)


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(data: bytes, end: bytes = b"\n\n") -> bytes:
    """One event as one chunk."""
    return chunk(b"data: " + data + end)


def delta(text: str) -> bytes:
    """A content event of a chat stream, as one chunk."""
    return event(
        b'{"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}' % text.encode()
    )


DONE = event(b"[DONE]") + LAST_CHUNK
USAGE = event(b'{"choices":[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}')
PLAIN = answer(
    b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}'
)
