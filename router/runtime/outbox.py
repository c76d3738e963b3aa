"""What connections have to send goes out together, at the end of the loop's turn.

A turn of the loop reads from many sockets. Writing at once in between would wake the process at the
other end for each write; written in one go, it wakes once and finds several requests, as we do when
it answers. Nothing waits for it: the turn ends when everything that was read has been dealt with.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

_log = logging.getLogger(__name__)

# More is not held: a transport has to see it to say that its reader is too slow.
_BYTES_MAX: Final = 256 * 1024


class Outbox:
    """Keeps the order of writes. Whoever closes a connection flushes first."""

    __slots__ = ("_loop", "_size", "_writes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._writes: list[tuple[asyncio.Transport, bytes]] = []
        self._size = 0

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write `data` to `transport` at the end of this turn."""
        if not self._writes:
            self._loop.call_soon(self.flush)
        self._writes.append((transport, data))
        self._size += len(data)
        if self._size > _BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write everything now. A connection that can't be written to is cut, and no other."""
        writes, self._writes = self._writes, []
        self._size = 0
        for transport, data in writes:
            try:
                if not transport.is_closing():
                    transport.write(data)
            except Exception:
                _log.exception("a connection can't be written to")
                transport.abort()
