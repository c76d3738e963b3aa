"""One kept-alive HTTP/1.1 connection to a worker.

It sends a request, finds the end of the answer, and hands on what it reads. Bytes of the body go to
the receiver as read, chunk framing included, so a read costs one callback: httptools follows the
chunks without calling back for each. A receiver that asks for it gets the payload instead.

The head is parsed on its own (`heads`), and decides the framing; httptools then only sees a head
of ours and the chunks. A byte beyond the end of an answer is never handed on.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol, cast

import httptools

from router.errors import Reason
from router.runtime.heads import HEAD_BYTES_MAX, AnswerHead, Framing, MalformedHead

if TYPE_CHECKING:
    from router.runtime.upstream import UpstreamPool

_log = logging.getLogger(__name__)

_NONE: Final = Framing.NONE
_LENGTH: Final = Framing.LENGTH
_CHUNKED: Final = Framing.CHUNKED
_CHUNKED_HEAD: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_LAST_CHUNK_BYTES: Final = len(_LAST_CHUNK)
# A used connection that is closed so soon after a request was sent was closed before that came. One
# that is closed later had the request: the worker gave up on it, and may have begun to work.
_STALE_S: Final = 0.1
# What the system keeps of an answer that is not read on, as its client is slow, and so about the
# most that one read brings. Left alone it grows to megabytes for each.
_UNREAD_BYTES_MAX: Final = 32 * 1024
# Larger requests are written as two pieces rather than copied into one.
_JOIN_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an attempt at a worker broke off."""

    reason: Reason
    why: str


class Receiver(Protocol):
    """Who waits for an answer: the relay's exchange, or a side call."""

    def on_connected(self, connection: Connection) -> None:
        """Send the request on `connection` now. Called again if a stale connection broke."""

    def on_connect_failed(self, fault: Fault) -> None:
        """Learn that no connection could be made; nothing was sent."""

    def on_whole(self, head: AnswerHead, body: bytes, connection: Connection) -> bool:
        """Take a whole plain answer and `release` the connection; False: take it as any other."""

    def on_head(self, head: AnswerHead) -> bool | None:
        """Take the head of the final answer; return True to get the payload without framing.

        None: nothing more is read until the receiver says `go_on`, or abandons the connection.
        """

    def on_data(self, data: bytes) -> None:
        """Take bytes of the body."""

    def on_end(self) -> None:
        """Learn that the answer is complete. The connection is no longer the receiver's."""

    def on_broken(self, fault: Fault) -> None:
        """Learn that the answer ends before its end. The connection is closed."""


class Connection:
    """A connection of a pool: idle, or serving exactly one receiver.

    An `asyncio.Protocol` without its class, which can't be compiled.
    """

    __slots__ = (
        "_bodiless",
        "_chunks",
        "_feed",
        "_framing",
        "_head",
        "_held",
        "_left",
        "_made",
        "_paused",
        "_payload",
        "_pool",
        "_receiver",
        "_sent_at",
        "_used",
        "counted",
        "deliver",
        "idle_since",
        "transport",
    )

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._used = False  # it has served a receiver
        self._receiver: Receiver | None = None
        self.transport: asyncio.Transport
        self._made = False
        self._paused = False
        self._held = b""  # of a head that is not complete
        self._head: AnswerHead | None = None
        self._framing: Framing | None = None  # None: the head is awaited
        self._left = 0
        self._payload = False
        self._chunks: _Chunks | None = None
        self._bodiless = False
        self._sent_at = 0.0  # of the request that has no answer yet; 0: an answer has begun
        self.deliver: Callable[[bytes], None] = _nobody  # takes a read; the relay changes it
        self.idle_since = 0.0
        self.counted = True  # by the pool, as one of its open connections

    def send(self, receiver: Receiver, head: bytes, body: bytes, *, bodiless: bool = False) -> None:
        """Send a request for `receiver`. `bodiless`: its answer has no body (HEAD)."""
        self._receiver = receiver
        self._bodiless = bodiless
        self._sent_at = monotonic()
        outbox = self._pool.outbox
        if len(body) <= _JOIN_BYTES_MAX:
            outbox.write(self.transport, head + body)
        else:
            outbox.write_large(self.transport, head, body)

    def pause(self) -> None:
        """Stop reading until `resume`: the client is slower than the worker."""
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def abandon(self) -> None:
        """Close at once. A worker takes that as the wish to stop working on the request."""
        self._receiver = None
        self.transport.abort()

    def discard(self) -> None:
        """Close a connection that may not even be made."""
        if self._made:
            self.transport.abort()

    def between_chunks(self) -> bool:
        """Whether what was handed on so far ends with a whole chunk. Only after on_broken."""
        chunks = self._chunks
        if self._framing is not _CHUNKED or self._payload or chunks is None or chunks.ended:
            return False  # one that has ended was broken in a read of which nothing was handed on
        try:
            self._feed(_LAST_CHUNK)
        except httptools.HttpParserError:
            return False
        return chunks.ended

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)
        self._made = True
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNREAD_BYTES_MAX)
        if not self.counted:
            self.transport.abort()  # nobody waits for it any more

    def data_received(self, data: bytes) -> None:
        """Hand on what was read."""
        if self._framing is _CHUNKED:
            try:
                if len(data) > _LAST_CHUNK_BYTES:
                    feed = self._feed  # not called as an attribute: it is no method
                    feed(data)
                else:
                    self._feed_slowly(data)
            except httptools.HttpParserError as exc:
                self._break(Reason.UPSTREAM_PROTOCOL, f"bad chunk: {exc}")
                return
            if self._chunks.noted:  # type: ignore[union-attr]
                self._take_noted(data)
            else:
                deliver = self.deliver
                deliver(data)
        elif self._receiver is None:
            self.transport.abort()  # bytes that nobody asked for
        elif self._framing is None:
            self._take_head(data)
        elif self._framing is _LENGTH:
            self._take_length(data)
        else:
            self.deliver(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the receiver, unless the end of the connection is the end of the answer."""
        receiver, self._receiver = self._receiver, None
        self._pool.forget(self)
        if receiver is None:
            return
        if self._framing is Framing.UNTIL_CLOSE and exc is None:
            receiver.on_end()
        elif self._used and self._sent_at and monotonic() - self._sent_at < _STALE_S:
            # The worker closed an idle connection just as it was used again: not a failure.
            _log.info("a connection to %s was closed just as it was used again", self._pool.name)
            self._pool.connect(receiver)
        else:
            why = "it closed the connection" if self._sent_at else "it broke off its answer"
            receiver.on_broken(Fault(Reason.UPSTREAM_ERROR, f"{why} ({exc or 'end of file'})"))

    def eof_received(self) -> None:
        """The worker closed it; so does the transport now."""

    def pause_writing(self) -> None:
        """The worker reads a request slowly; it has all of that, and no more is written."""

    def resume_writing(self) -> None:
        """It reads again."""

    # reading an answer

    def _take_head(self, data: bytes) -> None:
        receiver, pool = self._receiver, self._pool
        assert receiver is not None
        self._sent_at = 0.0
        if self._held:
            data, self._held = self._held + data, b""
        while (end := data.find(b"\r\n\r\n") + 4) > 3:
            try:
                head = pool.heads[data[:end]]
            except MalformedHead as exc:
                self._break(Reason.UPSTREAM_PROTOCOL, f"bad head: {exc}")
                return
            data = data[end:]
            self._head = head
            if head.plain and head.length == len(data) and receiver.on_whole(head, data, self):
                return
            if head.status >= 200:
                self._begin(head, data)
                return
        if len(data) > HEAD_BYTES_MAX:
            self._break(Reason.UPSTREAM_PROTOCOL, "its head is too long")
        else:
            self._held = data

    def _begin(self, head: AnswerHead, rest: bytes) -> None:
        receiver = self._receiver
        assert receiver is not None
        self.deliver = receiver.on_data
        self._held = rest
        if (payload := receiver.on_head(head)) is not None:
            self.go_on(payload=payload)

    def go_on(self, *, payload: bool) -> None:
        """Hand on what follows the head, see Receiver.on_head."""
        head = self._head
        assert head is not None
        rest, self._held = self._held, b""
        framing = _NONE if self._bodiless else head.framing
        self._framing, self._left = framing, head.length
        self._payload = payload
        if framing is _NONE:
            self._finish(clean=not rest)
            return
        if framing is _CHUNKED:
            self._begin_chunks()
        if rest:
            self.data_received(rest)

    def _begin_chunks(self) -> None:
        chunks = self._chunks
        if chunks is None or self._payload or type(chunks) is not _Chunks:
            self._chunks = chunks = _Payload() if self._payload else _Chunks()
            self._feed = httptools.HttpResponseParser(chunks).feed_data
        chunks.begin()
        self._feed(_CHUNKED_HEAD)

    def _take_length(self, data: bytes) -> None:
        left = self._left - len(data)
        if left > 0:
            self._left = left
            self.deliver(data)
            return
        self.deliver(data[:left] if left else data)
        if self._receiver is not None:
            self._finish(clean=left == 0)

    def _take_noted(self, data: bytes) -> None:
        """Hand on the last read of a chunked answer, or any read of one as payload."""
        chunks = self._chunks
        assert chunks is not None
        if chunks.ended and (chunks.extra or not _ends_cleanly(data)):
            self._break(Reason.UPSTREAM_PROTOCOL, "bytes follow the end of its answer")
            return
        if self._payload:
            data = chunks.taken()
        if data:
            self.deliver(data)
        if chunks.ended and self._receiver is not None:
            self._finish(clean=True)

    def _feed_slowly(self, data: bytes) -> None:
        """Feed a read so short that its own bytes don't show where the answer ends."""
        chunks = self._chunks
        assert chunks is not None
        for index in range(len(data)):
            if chunks.ended:
                chunks.extra = True
            self._feed(data[index : index + 1])

    def _finish(self, *, clean: bool) -> None:
        receiver = self._receiver
        assert receiver is not None
        self.deliver = _nobody
        self.release(clean=clean)
        receiver.on_end()

    def release(self, *, clean: bool = True) -> None:
        """Go back to the pool at the end of an answer, or close if it can't be used again."""
        assert self._head is not None
        self._receiver = self._framing = None
        transport = self.transport
        # Still sending: the worker answered before it read the whole request.
        if (
            clean
            and self._head.keep_alive
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        ):
            self._used = True
            if self._paused:
                self.resume()
            self._pool.give_back(self)
        else:
            transport.abort()

    def _break(self, reason: Reason, why: str) -> None:
        receiver, self._receiver = self._receiver, None
        self.transport.abort()
        if receiver is not None:
            receiver.on_broken(Fault(reason, why))


def _nobody(data: bytes) -> None:
    """Take what comes while no answer is due, and so never comes."""


def _ends_cleanly(data: bytes) -> bool:
    """Whether a read in which an answer ended holds nothing after it.

    httptools tells when anything follows but line ends, which it skips; an answer ends with
    exactly one empty line. Reads too short to show that were fed byte by byte.
    """
    if len(data) <= len(_LAST_CHUNK):
        return True
    return data.endswith(b"\r\n\r\n") and data[-5] not in b"\r\n"


class _Chunks:
    """httptools' callbacks for a chunked body: only its end is of interest."""

    __slots__ = ("ended", "extra", "noted")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Await another answer."""
        self.ended = self.extra = False
        self.noted = False  # a read is more than bytes to hand on

    def on_message_begin(self) -> None:
        self.extra = self.ended

    def on_message_complete(self) -> None:
        self.ended = self.noted = True

    def taken(self) -> bytes:
        """Return the payload since the last call; nothing here, as the raw bytes are used."""
        return b""


class _Payload(_Chunks):
    """The same, gathering the payload."""

    __slots__ = ("_pieces",)

    def begin(self) -> None:
        super().begin()
        self.noted = True
        self._pieces: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        if not self.ended:
            self._pieces.append(data)

    def taken(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)
