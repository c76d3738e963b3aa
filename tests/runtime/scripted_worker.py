"""A worker whose answers are a script: path -> answer, changed by the test while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from tests.listening import stop_listening

HANG = None
"""As an answer: take the request and say nothing."""


@dataclass
class Scripted:
    """An answer as (status, body); anything but bytes is sent as JSON."""

    status: int
    body: Any = b""

    def encode(self) -> bytes:
        body = self.body if isinstance(self.body, bytes) else orjson.dumps(self.body)
        head = f"HTTP/1.1 {self.status} Scripted\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body


Script = dict[str, Scripted | None]
NOT_FOUND = Scripted(404, {"detail": "Not Found"})


Handler = Callable[[str, str, dict[str, str], bytes], Scripted | None]


@dataclass
class ScriptedWorker:
    """Serves HTTP/1.1 on loopback; unknown paths get 404. `asked` holds what came in.

    A `handler` answers instead of the script, given method, target, headers and body.
    """

    script: Script
    handler: Handler | None = None
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    port: int = 0
    connections: set[_Connection] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> ScriptedWorker:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", self.port, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Refuse connections and cut those there are."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await stop_listening(server)
        for connection in self.connections:
            if connection.transport is not None:
                connection.transport.abort()
        while self.connections:
            self._closed.clear()
            await self._closed.wait()

    @property
    def running(self) -> bool:
        return self._server is not None

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)

    def answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Scripted | None:
        path = target.partition("?")[0]
        self.asked.append((path, headers))
        if self.handler is not None:
            return self.handler(method, target, headers, body)
        return self.script.get(path, NOT_FOUND)

    def on_closed(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        self._closed.set()


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport | None = None

    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker
        self._buffer = b""
        worker.connections.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if not self._worker.running:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.on_closed(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            request, *lines = head.decode("latin-1").split("\r\n")
            pairs = (line.split(":", 1) for line in lines)
            headers = {name.lower(): value.strip() for name, value in pairs}
            length = int(headers.get("content-length", 0))
            if len(rest) < length:
                return
            body, self._buffer = rest[:length], rest[length:]
            method, target, _ = request.split(" ")
            answer = self._worker.answer(method, target, headers, body)
            if answer is not HANG and self.transport is not None:
                self.transport.write(answer.encode())
