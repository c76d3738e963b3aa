"""What connections have to send goes out together, at the end of the loop's turn or a little later.

A turn of the loop reads from many sockets. Writing at once in between would wake the process at the
other end for each write; written in one go, it wakes once and finds several requests, as we do when
it answers.

When many write in one turn, as many are likely to in the next, which is then waited for as well:
the larger the batches, the less often each process finds its caches filled by the others. Where a
turn had one write, the next is likely to have one as well, which goes out at once: what is left to
do for its request is done while the other end reads. A connection that is alone never waits.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

_log = logging.getLogger(__name__)

# More is not held: a transport has to see it to say that its reader is too slow. Small writes are
# not worth the sum: their number is bounded.
_BYTES_MAX: Final = 256 * 1024
_SMALL_BYTES_MAX: Final = 4096
# A turn with so many writes is followed by another one before they go out, up to so many turns or
# writes.
_MANY: Final = 4
_TURNS_MAX: Final = 4
_WRITES_MAX: Final = 256


# uvloop encrypts a write as a whole, into a buffer that stays as large, and keeps it as a whole
# until all of it is sent. This is what one record of TLS holds.
_PIECE_BYTES: Final = 16 * 1024


class Outbox:
    """Keeps the order of writes. Who closes a transport or writes to it directly flushes first."""

    __slots__ = ("_alone", "_due", "_loop", "_size", "_writes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._writes: list[tuple[asyncio.Transport, bytes]] = []
        self._size = 0  # of the large writes
        self._due = False  # the end of this turn is waited for
        self._alone = True  # at most one write waited when the last turn with writes was over

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write `data` to `transport` now or at the end of this turn, or of one that follows."""
        self._writes.append((transport, data))
        if not self._due:  # so nothing waits that it could overtake
            self._due = True
            self._loop.call_soon(self._turn_over, 0, 1)
            if self._alone:
                self.flush()
                return
        if len(data) > _SMALL_BYTES_MAX:
            self._size += len(data)
            if self._size > _BYTES_MAX:
                self.flush()

    def write_large(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        """Write both now, in one go and without copying them together."""
        self.flush()
        try:
            if not transport.is_closing():
                transport.writelines((head, body))
        except Exception:
            _cut(transport)

    def write_encrypted(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write to a transport of TLS. What is large goes now, so that the transport can say before
        the next read that its reader is too slow, and in pieces.
        """
        if len(data) <= _SMALL_BYTES_MAX:
            self.write(transport, data)
            return
        self.flush()
        view = memoryview(data)
        try:
            for at in range(0, len(data), _PIECE_BYTES):
                if not transport.is_closing():
                    transport.write(view[at : at + _PIECE_BYTES])
        except Exception:
            _cut(transport)

    def _turn_over(self, before: int, turns: int) -> None:
        """Write, or wait for another turn, which begins with `before` writes."""
        count = len(self._writes)
        if count - before < _MANY or count > _WRITES_MAX or turns == _TURNS_MAX:
            self._due, self._alone = False, count <= 1
            if count:
                self.flush()
        else:
            self._loop.call_soon(self._turn_over, count, turns + 1)

    def flush(self) -> None:
        """Write everything now. A connection that can't be written to is cut, and no other."""
        writes, self._writes = self._writes, []
        self._size = 0
        for transport, data in writes:
            try:
                if not transport.is_closing():
                    transport.write(data)
            except Exception:
                _cut(transport)


def _cut(transport: asyncio.Transport) -> None:
    _log.exception("a connection can't be written to")
    transport.abort()
