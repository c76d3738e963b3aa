"""Requests to workers beside the hot path: probes, model lists, whatever ASGI handlers pass on.

A side call uses the same connections as the relay, but as a coroutine would like to: it awaits
the head, then reads the payload. What it has not read is bounded by pausing the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from router.errors import Reason
from router.runtime.connection import Connection, Fault
from router.runtime.heads import AnswerHead, Headers
from router.runtime.patience import Patience

if TYPE_CHECKING:
    from router.runtime.upstream import UpstreamPool

_UNREAD_BYTES_MAX: Final = 256 * 1024


class UpstreamFailed(Exception):
    """No answer, or only a part of one, came from a worker."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's whole answer; hop-by-hop headers are left out, names are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class SideCall:
    """One request and its answer, as a Receiver that a single task waits on."""

    def __init__(
        self,
        pool: UpstreamPool,
        method: str,
        target: bytes | str,
        *,
        headers: Headers,
        body: bytes,
    ) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        raw = target.encode() if isinstance(target, str) else target
        lines = [method.encode(), b" ", pool.prefix, raw, pool.after_target]
        lines += (b"%b: %b\r\n" % header for header in headers)
        if body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d\r\n" % len(body))
        self._request = b"".join((*lines, b"\r\n"))
        self._body = body
        self._bodiless = method == "HEAD"
        self._connection: Connection | None = None
        self._head: AnswerHead | None = None
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._fault: Fault | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    async def whole(self, *, deadline_s: float, body_bytes_max: int) -> Answer:
        """Return the whole answer, see UpstreamPool.request."""
        try:
            async with Patience(deadline_s):
                self._pool.acquire(self)
                head = await self._headed()
                pieces, size = [], 0
                while piece := await self._read():
                    pieces.append(piece)
                    size += len(piece)
                    if size > body_bytes_max:
                        raise UpstreamFailed(
                            Reason.UPSTREAM_PROTOCOL, f"longer than {body_bytes_max} bytes"
                        )
                return Answer(head.status, head.headers, b"".join(pieces))
        except TimeoutError as exc:
            message = f"no whole answer within {deadline_s} s"
            raise UpstreamFailed(Reason.UPSTREAM_TIMEOUT, message) from exc
        finally:
            self.close()

    def close(self) -> None:
        """Give up what is not finished."""
        self._pool.cancel(self)
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None

    async def _read(self) -> bytes:
        """Return the next bytes of the payload, empty at its end."""
        while not self._unread:
            if self._fault is not None:
                raise UpstreamFailed(self._fault.reason, self._fault.why)
            if self._ended:
                return b""
            await self._wait()
        piece = self._unread.popleft()
        self._unread_bytes -= len(piece)
        if self._connection is not None and self._unread_bytes < _UNREAD_BYTES_MAX:
            self._connection.resume()
        return piece

    async def _headed(self) -> AnswerHead:
        while self._head is None:
            if self._fault is not None:
                raise UpstreamFailed(self._fault.reason, self._fault.why)
            await self._wait()
        return self._head

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Receiver

    def on_connected(self, connection: Connection) -> None:
        """Send the request."""
        self._connection = connection
        connection.send(self, self._request, self._body, bodiless=self._bodiless)

    def on_connect_failed(self, fault: Fault) -> None:
        """Wake the caller with the fault."""
        self._fault = fault
        self._wake()

    def on_whole(self, head: AnswerHead, body: bytes, connection: Connection) -> bool:  # noqa: ARG002
        """Take it piece by piece like any other."""
        return False

    def on_head(self, head: AnswerHead) -> bool:
        """Wake the caller with the head; the payload is wanted."""
        self._head = head
        self._wake()
        return True

    def on_data(self, data: bytes) -> None:
        """Keep a piece until it is read."""
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes >= _UNREAD_BYTES_MAX and self._connection is not None:
            self._connection.pause()
        self._wake()

    def on_end(self) -> None:
        """Wake the caller with the end."""
        self._connection = None
        self._ended = True
        self._wake()

    def on_broken(self, fault: Fault) -> None:
        """Wake the caller with the fault."""
        self._connection = None
        self._fault = fault
        self._wake()
