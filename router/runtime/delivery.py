"""One answer on its way from a worker to the client.

A delivery begins with the worker's head. The client's head waits for the first bytes of the body,
so that until then the request can still go to another worker; of an event stream it waits for the
first event that says more than that an answer begins, which may be an error. From there on each
read is written as it came, and looked at from the side. A worker that breaks off in the middle of a
stream is reported to the client as an error event where one fits, else by an unmistakably broken
answer; never by a made-up good end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from router.core.types import Outcome, Usage
from router.errors import (
    REASON_HEADER,
    RETRY_AFTER_DEFAULT_S,
    Reason,
    Refused,
    error_event,
)
from router.runtime.connection import Connection
from router.runtime.heads import STATUS_LINES, AnswerHead, Framing
from router.runtime.reframing import MalformedBody, Reframer, chunk
from router.runtime.sse import (
    FIRST_EVENT_BYTES_MAX,
    READ_BYTES_MAX,
    READS_MAX,
    TAIL_BYTES,
    EndOfAnswer,
    ReportedError,
    StreamScan,
    between_events,
    dechunked,
    event_error,
    first_chunked_event,
    first_event,
    told_error,
)

_LAST_CHUNK: Final = b"0\r\n\r\n"
# A first event that comes in more reads than this is not waited for.
_FIRST_EVENT_READS_MAX: Final = 256
# A longer body of an error is not looked into.
_REFUSAL_BYTES_MAX: Final = 2048
_OVERLOADED: Final = frozenset((429, 503))
_REASON_NAME: Final = REASON_HEADER.encode()
# Members under names of their own: reading one off its class is a slow look-up.
_CHUNKED: Final = Framing.CHUNKED
_LENGTH: Final = Framing.LENGTH
_SUCCESS: Final = Outcome.SUCCESS


class Client(Protocol):
    """The client's side of an exchange: the server's connection, or a test's."""

    write: Callable[[bytes], None]

    @property
    def write_paused(self) -> bool:
        """Whether the client reads too slowly; nothing more is to be read for it."""

    @property
    def keep_alive(self) -> bool:
        """Whether the connection will serve another request after this one."""

    def answered(self, *, close: bool) -> None:
        """Learn that the answer is complete; `close`: its end is the end of the connection."""

    def served(self) -> None:
        """The same where `keep_alive` was just true and the answer does not end the connection."""

    def answer_refused(self, refused: Refused, request_id: str) -> None:
        """Answer with an error; the answer is complete."""

    def end_early(self) -> None:
        """Close behind a part of an answer that can be known for one by its framing."""

    def break_off(self) -> None:
        """Close so that the client can't take what it has for a whole answer."""


class Owner(Protocol):
    """Who is told about a delivery: the exchange."""

    @property
    def tells_status(self) -> bool:
        """Whether the body of a 400 may tell another status."""

    def on_moved(self) -> None:
        """Bytes came, the first since `moved` was taken back."""

    def on_opened(self) -> None:
        """The client got its first byte."""

    def on_reported(self, error: ReportedError) -> bool:
        """The answer is but an error. True: the exchange deals with it; drop the answer."""

    def on_malformed(self, why: str) -> None:
        """The body can't be decoded."""

    def on_delivered(self) -> None:
        """The client has the whole answer."""


class Delivery:
    """Copies one answer."""

    __slots__ = (
        "_client",
        "_connection",
        "_dropped",
        "_ended",
        "_held",
        "_opening",
        "_owner",
        "_reads",
        "_reframer",
        "_scan",
        "_tail",
        "_write",
        "aged",
        "error",
        "head",
        "holds",
        "moved",
        "opened",
    )

    def __init__(
        self,
        owner: Owner,
        client: Client,
        connection: Connection,
        head: AnswerHead,
        *,
        reframer: Reframer | None,
        opening: bytes,
    ) -> None:
        self.head = head
        self.opened = False  # the client got bytes
        self.holds = False  # a part of what the head waits for
        self.aged = False  # what is held back was there at the last sweep
        self.error: ReportedError | None = None  # reported by the stream itself
        self._owner = owner
        self._client = client
        self._connection = connection
        self._reframer = reframer
        self._write = client.write
        self._opening = opening
        self._scan = StreamScan() if head.event_stream else None
        self._reads: list[bytes] = [] if self._scan is None else self._scan.reads
        self._tail = b""
        self._ended = False  # the worker's part is
        self._dropped = False
        # Reads of an event stream's beginning; None: nothing is held back. Of a compressed stream
        # nothing could be seen.
        readable = head.encoding is None or (reframer is not None and reframer.decodes)
        held = head.event_stream and head.status == 200 and readable
        self._held: list[bytes] | None = [] if held else None
        # Bytes came since the last sweep. A head counts, but for one that waits for its event:
        # until that begins, the client has to wait no longer than for any first byte.
        self.moved = not held
        if reframer is not None:
            connection.deliver = self._reframe
        elif held:
            connection.deliver = self._inspect
        elif head.status == 400 and owner.tells_status and self._is_small():
            self._held = []
            connection.deliver = self._inspect_refusal
        else:
            connection.deliver = self._open

    def _is_small(self) -> bool:
        head = self.head
        small = head.framing is _LENGTH and head.length <= _REFUSAL_BYTES_MAX
        return small and head.encoding is None

    @property
    def waits(self) -> bool:
        """Whether the client's head is held back, as the worker may have refused."""
        return self._held is not None

    def _moves(self) -> None:
        self.moved = True
        self._owner.on_moved()

    # Reads of the worker, one of these each.

    def _copy(self, data: bytes) -> None:
        """A read of a stream that runs, so that it has a scan: the hot path."""
        write = self._write  # called as an attribute it would be looked up as a method first
        write(data)
        if not self.moved:
            self._moves()
        reads = self._reads
        reads.append(data)
        if len(reads) >= READS_MAX or len(data) > READ_BYTES_MAX:
            self._scan.fold()  # type: ignore[union-attr]

    def _copy_plain(self, data: bytes) -> None:
        """A further read of an answer that is no stream."""
        self._write(data)
        if not self.moved:
            self._moves()
        self._tail = (self._tail + data)[-TAIL_BYTES:] if len(data) < TAIL_BYTES else data

    def _open(self, data: bytes) -> None:
        """The first read that the client gets, behind its head."""
        self._write(self._opening + data)
        self._opening = b""
        self.opened = True
        if not self.moved:
            self._moves()
        if self._scan is None:
            self._tail = data
            self._connection.deliver = self._copy_plain
        else:
            self._scan.reads.append(data)
            self._connection.deliver = self._copy
        self._owner.on_opened()

    def _inspect(self, data: bytes) -> None:
        """A read before the first event is known."""
        held = self._held
        assert held is not None
        held.append(data)
        whole = data if len(held) == 1 else b"".join(held)
        raw = self._reframer is None and self.head.framing is _CHUNKED
        event = first_chunked_event(whole) if raw else first_event(whole)
        if event is None:
            if len(whole) < FIRST_EVENT_BYTES_MAX and len(held) < _FIRST_EVENT_READS_MAX:
                self._hold(dechunked(whole) if raw else whole)
                return
            event = b""
        self._scan.first = event  # type: ignore[union-attr]
        error = self.error = event_error(event)
        if error is not None and self._owner.on_reported(error):
            self._dropped = True
        else:
            self.release()

    def _hold(self, payload: bytes) -> None:
        """Wait on. Events that say nothing yet are no first byte, however many come."""
        self.holds = not between_events(payload)
        if not self.holds:
            self.aged = False
        elif not self.moved:
            self._moves()

    def _inspect_refusal(self, data: bytes) -> None:
        """A read of the body of an error that may tell a status of its own."""
        held = self._held
        assert held is not None
        held.append(data)
        self.holds = True
        if not self.moved:
            self._moves()
        body = b"".join(held)
        if len(body) == self.head.length:
            error = told_error(body)
            if error is None or not self._owner.on_reported(error):
                self.release()

    def release(self) -> None:
        """Give the client what is held back."""
        data = b"".join(self._held or ())
        self._held = None
        if self._reframer is None:
            self._open(data)
        elif data:
            if not self.moved:
                self._moves()
            self._put(data)

    def _reframe(self, payload: bytes) -> None:
        """A read of an answer that is framed anew."""
        assert self._reframer is not None
        if self._held is None and not self.moved:
            self._moves()
        self._reframer.feed(payload)
        self.resume()

    def resume(self) -> None:
        """Pass on what was read, as far as the client takes it."""
        reframer = self._reframer
        if reframer is None:
            return
        try:
            while not self._dropped and not self._client.write_paused:
                if not (piece := reframer.take()):
                    if self._ended:
                        self._finish(reframer.end())
                    return
                if self._held is not None:
                    self._inspect(piece)
                else:
                    self._put(piece)
        except MalformedBody as exc:
            self._dropped = True
            self._owner.on_malformed(str(exc))

    def _put(self, piece: bytes) -> None:
        assert self._reframer is not None
        self._write(self._opening + self._reframer.framed(piece))
        self._opening = b""
        if self._scan is not None:
            self._scan.reads.append(piece)
            self._scan.fold()
        else:
            self._tail = (self._tail + piece)[-TAIL_BYTES:]
        if not self.opened:
            self.opened = True
            self._owner.on_opened()

    # The end.

    def end(self) -> None:
        """The worker's answer is complete; the client has it now or when it took all of it."""
        self._ended = True
        if self._reframer is not None:
            self.resume()
        else:
            self._finish(b"")

    def _finish(self, last: bytes) -> None:
        if self._held is not None:
            self.release()
        if self._opening or last:
            self._write(self._opening + last)
            self._opening = b""
            self.opened = True
        self._owner.on_delivered()

    @property
    def closes(self) -> bool:
        """Whether the client knows the end of the answer by the end of the connection."""
        return self._reframer is not None and not self._reframer.chunked

    def break_off(self, reason: Reason, message: str) -> None:
        """End a begun answer that won't come to its end."""
        if self._scan is None:
            self._end_early()
            return
        event = error_event(reason, message)
        self._scan.fold()
        if self._reframer is not None:
            fits = self._scan.ended().between_events(chunked=False)
            last = self._reframer.framed(event) + (_LAST_CHUNK if self._reframer.chunked else b"")
        else:
            fits = self._scan.ended().between_events(chunked=True)
            fits = fits and self._connection.between_chunks()
            last = chunk(event) + _LAST_CHUNK
        if fits:
            self._write(last)
            self._client.answered(close=self.closes)
        else:
            self._end_early()

    def _end_early(self) -> None:
        if self.closes:
            self._client.break_off()
        else:
            self._client.end_early()

    # Looking.

    def progress(self) -> int:
        """About so many tokens of a stream came so far, a few more or less."""
        return 0 if self._scan is None else self._scan.progress()

    def output_tokens(self) -> int:
        """Tokens of a stream so far: its events with output, as SGLang sends one for each token."""
        return 0 if self._scan is None else self._scan.output_events()

    def result(self) -> tuple[Outcome, Reason | None, Usage | None]:
        """How a complete answer counts, and the usage that it reports."""
        end = EndOfAnswer(self._tail) if self._scan is None else self._scan.ended()
        usage = end.usage()
        status = self.head.status
        if status < 400 and self._scan is not None:
            error = self.error or end.error()
            status = error.status if error is not None else status
        if status < 400:
            return _SUCCESS, None, usage
        if status < 500 and status != 429:
            return Outcome.CLIENT_ERROR, None, usage
        return Outcome.FAILED, reason_of(status), usage


def reason_of(status: int) -> Reason:
    """Return what an error status of a worker means to us."""
    if status in _OVERLOADED:
        return Reason.UPSTREAM_OVERLOADED
    return Reason.UPSTREAM_TIMEOUT if status in (408, 504) else Reason.UPSTREAM_ERROR


def is_failure(status: int) -> bool:
    """Whether an error status of a worker is a failure of its own, not the client's mistake."""
    return status >= 500 or status in (408, 429)


def opening_for(
    head: AnswerHead, reframer: Reframer | None, *, marks: bytes, request_id: bytes, close: bool
) -> bytes:
    """Return the client's head. `marks` are the lines that say who answered."""
    opening, more = head.opening, b""
    if reframer is not None:
        lines = head.lines
        if reframer.decodes:
            kept = (item for item in head.headers if item[0] != b"content-encoding")
            lines = b"".join(b"%b: %b\r\n" % item for item in kept)
        opening = STATUS_LINES[head.status] + lines + reframer.framing_line
    if head.status in _OVERLOADED and head.line(b"retry-after") is None:
        more = b"retry-after: %d\r\n" % RETRY_AFTER_DEFAULT_S
    if is_failure(head.status) and head.line(_REASON_NAME) is None:
        more += b"%b: %b\r\n" % (_REASON_NAME, reason_of(head.status).encode())
    if close:
        more += b"connection: close\r\n"
    return b"".join((opening, more, marks, b"x-request-id: ", request_id, b"\r\n\r\n"))
