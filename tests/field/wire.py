"""Raw HTTP/1.1 on asyncio streams, for tests that care about every byte. No pools, no decoding.

`Answer` is an answer being read: its head as sent, its body piece by piece, and whether it ended
as its framing promised (`complete`) or was cut.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

Headers = Sequence[tuple[str, str]]
DEADLINE_S = 10.0


async def eventually(
    condition: Callable[[], Any], *, within_s: float = 3.0, what: str = ""
) -> None:
    """Return when `condition` (a function, or one that returns an awaitable) holds, or fail."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {within_s} s: {what or condition}")
        await asyncio.sleep(0.005)


def events(body: bytes) -> list[Any]:
    """The data of the events of an SSE body: objects, or the text that is no JSON."""
    lines = body.replace(b"\r\n", b"\n").split(b"\n")
    data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    return [item.decode() if item == b"[DONE]" else json.loads(item) for item in data]


def texts(body: bytes) -> list[str]:
    """The non-empty content deltas of a chat stream."""
    chunks = [event for event in events(body) if isinstance(event, dict)]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    return [text for choice in choices if (text := choice.get("delta", {}).get("content"))]


class Answer:
    """One request and its answer on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body = b""  # what has been read of it so far
        self.complete = False
        self._left = 0  # bytes of the current chunk, or of the body, still to come
        self.began_at = asyncio.get_running_loop().time()

    @classmethod
    async def request(
        cls,
        port: int,
        method: str,
        target: str,
        *,
        headers: Headers = (),
        body: bytes | None = None,
        host: str = "127.0.0.1",
    ) -> Self:
        """Send a request; the answer's head is not yet read."""
        self = await cls.connect(port, host=host)
        lines = [f"{method} {target} HTTP/1.1", f"host: {host}:{port}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if body is not None:
            lines.append(f"content-length: {len(body)}")
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))
        return self

    @classmethod
    async def connect(cls, port: int, *, host: str = "127.0.0.1") -> Self:
        """Connect and send nothing."""
        return cls(*await asyncio.open_connection(host, port, limit=2**20))

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)

    async def head(self, *, within_s: float = DEADLINE_S) -> Self:
        """Read the head of the answer, skipping interim ones."""
        async with asyncio.timeout(within_s):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ", 2)[1])
        pairs = (line.partition(":") for line in lines[1:] if line)
        self.headers = [(name.lower(), value.strip()) for name, _, value in pairs]
        return await self.head(within_s=within_s) if 100 <= self.status < 200 else self

    def header(self, name: str) -> str | None:
        """The value of the only header of that name; None when there is none."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} appears {len(values)} times"
        return values[0] if values else None

    def all(self, name: str) -> list[str]:
        """Every value of a header, in order."""
        return [value for key, value in self.headers if key == name]

    async def more(self, *, within_s: float = DEADLINE_S) -> bytes:
        """Return the next piece of the body as it arrives; b"" at its end or where it was cut."""
        try:
            async with asyncio.timeout(within_s):
                piece = await self._next()
        except (ConnectionError, asyncio.IncompleteReadError):
            return b""
        self.complete = not piece
        self.body += piece
        return piece

    async def read(self, *, within_s: float = DEADLINE_S) -> bytes:
        """Read what is left of the body; returns all of it."""
        async with asyncio.timeout(within_s):
            while await self.more(within_s=within_s):
                pass
        self._writer.close()
        return self.body

    async def until(self, mark: bytes, *, within_s: float = DEADLINE_S) -> None:
        """Read on until the body so far holds `mark`."""
        async with asyncio.timeout(within_s):
            while mark not in self.body:
                piece = await self.more(within_s=within_s)
                assert piece, f"{mark!r} never came; the body is {self.body[-500:]!r}"

    async def _next(self) -> bytes:
        length = self.header("content-length")
        if "chunked" in (self.header("transfer-encoding") or ""):
            if not self._left and not await self._next_chunk():
                return b""
        elif length is None:
            return await self._reader.read(65_536)
        else:
            self._left = int(length) - len(self.body)
            if not self._left:
                return b""
        piece = await self._reader.read(min(self._left, 65_536))
        if not piece:
            raise asyncio.IncompleteReadError(b"", self._left)
        self._left -= len(piece)
        return piece

    async def _next_chunk(self) -> bool:
        """Read the head of the next chunk; False for the last one, whose trailers are read."""
        if self.body:
            end = await self._reader.readexactly(2)
            assert end == b"\r\n", f"a chunk ends with {end!r}"
        self._left = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
        while not self._left and await self._reader.readuntil(b"\r\n") != b"\r\n":
            pass
        return self._left > 0

    async def closed(self, *, within_s: float = DEADLINE_S) -> bytes:
        """Wait until the other side has closed; returns what it still sent."""
        data = b""
        try:
            async with asyncio.timeout(within_s):
                while piece := await self._reader.read(65_536):
                    data += piece
        except ConnectionError:
            pass
        self._writer.close()
        return data

    def json(self) -> Any:
        """The body, which must be read, as JSON."""
        return json.loads(self.body)

    def close(self) -> None:
        """Leave, as a client that hangs up does."""
        self._writer.close()

    def reset(self) -> None:
        """Leave with a reset."""
        reset(self._writer.transport)


def reset(transport: asyncio.BaseTransport) -> None:
    """Close a connection by RST."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert isinstance(transport, asyncio.Transport)
    transport.abort()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
