"""A client that reads answers by the letter of RFC 9112, and shares no code with the router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

# Long beside anything that these tests do; an answer that takes longer has not come.
DEADLINE_S = 6.0
# Between two pieces, so that each is read on its own.
GAP_S = 0.001


class End(StrEnum):
    """How an answer ended."""

    COMPLETE = "complete"  # as its head announced
    CLOSED = "closed"  # with the connection, as its head announced
    CUT = "cut"  # the connection ended before
    NONE = "none"  # no answer at all, not even a head


@dataclass(repr=False)
class Seen:
    """An answer as it came."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    end: End = End.NONE
    keeps: bool = False  # the head announces that the connection stays

    def __repr__(self) -> str:
        body = self.body if len(self.body) < 300 else self.body[:99] + b"..." + self.body[-99:]
        return f"Seen({self.status}, {self.end}, keeps={self.keeps}, {self.headers}, {body!r})"

    def all(self, name: bytes) -> list[bytes]:
        return [value for known, value in self.headers if known == name]


class _Ended(Exception):
    """The connection ended."""


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._held = b""

    @classmethod
    async def connected(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, pieces: Sequence[bytes], *, gap_s: float = GAP_S) -> None:
        """Send piece by piece. A peer that no longer listens is no error: it may have answered.

        Without a gap, some turns of the loop lie between pieces: enough for a peer on it.
        """
        for piece in pieces:
            if self._writer.is_closing():
                return
            self._writer.write(piece)
            for _ in range(1 if gap_s else 3):
                await asyncio.sleep(gap_s)

    async def answer(self, *, head_only: bool = False) -> Seen:
        """Read the next final answer, or what there is of it."""
        seen = Seen()
        async with asyncio.timeout(DEADLINE_S):
            try:
                while True:
                    await self._head(seen)
                    if seen.status >= 200:
                        break
                await self._body(seen, head_only=head_only)
            except _Ended:
                seen.end = End.CUT if seen.status >= 200 else End.NONE
        return seen

    async def silent(self) -> bool:
        """Wait for the end of the connection; True when nothing more came before."""
        async with asyncio.timeout(DEADLINE_S):
            if self._held:
                return False
            try:
                return not await self._reader.read(1)
            except ConnectionError:
                return True

    def close(self) -> None:
        self._writer.transport.abort()

    async def _head(self, seen: Seen) -> None:
        lines = (await self._until(b"\r\n\r\n"))[:-4].split(b"\r\n")
        version, code, *_ = lines[0].split(b" ", 2)
        assert version == b"HTTP/1.1", lines[0]
        seen.status = int(code)
        seen.headers = []
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            assert colon, line
            assert name == name.strip(), line
            seen.headers.append((name.lower(), value.strip(b" \t")))

    async def _body(self, seen: Seen, *, head_only: bool) -> None:
        codings, lengths = seen.all(b"transfer-encoding"), seen.all(b"content-length")
        assert not (codings and lengths), seen.headers
        assert len(codings) <= 1 >= len(lengths), seen.headers
        seen.keeps = b"close" not in [value.lower() for value in seen.all(b"connection")]
        if head_only or seen.status in (204, 304):
            pass
        elif codings:
            assert codings == [b"chunked"]
            await self._chunks(seen)
        elif lengths:
            await self._take(seen, int(lengths[0]))
        else:
            seen.keeps = False
            await self._rest(seen)
            return
        seen.end = End.COMPLETE

    async def _chunks(self, seen: Seen) -> None:
        while True:
            line = (await self._until(b"\r\n"))[:-2]
            size = int(line.partition(b";")[0].strip(), 16)
            if not size:
                break
            await self._take(seen, size)
            assert await self._until(b"\r\n") == b"\r\n"
        while await self._until(b"\r\n") != b"\r\n":
            pass  # trailers

    async def _take(self, seen: Seen, size: int) -> None:
        while size:
            if not self._held:
                self._held = await self._read()
            piece, self._held = self._held[:size], self._held[size:]
            seen.body += piece
            size -= len(piece)

    async def _rest(self, seen: Seen) -> None:
        seen.body, self._held = self._held, b""
        try:
            while data := await self._reader.read(2**16):
                seen.body += data
        except ConnectionError:
            seen.end = End.CUT
        else:
            seen.end = End.CLOSED

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._held:
            self._held += await self._read()
        end = self._held.index(mark) + len(mark)
        data, self._held = self._held[:end], self._held[end:]
        return data

    async def _read(self) -> bytes:
        try:
            data = await self._reader.read(2**16)
        except ConnectionError as exc:
            raise _Ended from exc
        if not data:
            raise _Ended
        return data
