"""One end of the socket between a relay and its brain.

What a turn of the loop has to say goes out in one write at its end. What comes in is handed on
message by message. An end that cannot be read any more, or that does not read, ends the link;
both sides go on without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from router.runtime.frames import Message, Unframer, frame, messages_in
from router.runtime.malformed import MalformedFrame

_log = logging.getLogger(__name__)

# Held for a peer that reads too slowly: above the first it is `full`, above the second given up.
_FULL_BYTES: Final = 2**22
_HELD_BYTES_MAX: Final = 2**26
_MESSAGES_MAX: Final = 64  # in one frame

Handlers = Mapping[int, Callable[..., None]]


class Link:
    """Sends and receives messages. `handlers` take the fields of each kind that may come.

    An `asyncio.Protocol` without its class, which can't be compiled.
    """

    def __init__(
        self,
        handlers: Handlers,
        *,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[Link], None],
    ) -> None:
        self._handlers = handlers
        self._loop = loop
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._unframer = Unframer()
        self._unsent: list[Message] = []
        self.lost = False
        self.full = False  # the peer does not keep up

    def send(self, message: Message) -> None:
        """Say `message` at the end of this turn; said to nobody once the link is lost."""
        unsent = self._unsent
        if not unsent:
            self._loop.call_soon(self.flush)
        unsent.append(message)
        if len(unsent) >= _MESSAGES_MAX:
            self.flush()

    def flush(self) -> None:
        """Say now what is unsent."""
        unsent, self._unsent = self._unsent, []
        transport = self._transport
        if not unsent or self.lost or transport is None:
            return
        transport.write(frame(unsent))
        if self.full and transport.get_write_buffer_size() > _HELD_BYTES_MAX:
            self.give_up("it does not read what it is sent")

    def give_up(self, why: str) -> None:
        """End the link at once: the peer is not as it must be."""
        _log.error("ending a link between the router's processes: %s", why)
        if self._transport is not None:
            self._transport.abort()
        self._lose()

    def close(self) -> None:
        """Say what is unsent, then end the link."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_FULL_BYTES)

    def data_received(self, data: bytes) -> None:
        """Hand on the messages of each whole frame."""
        try:
            for body in self._unframer.feed(data):
                for message in messages_in(body):
                    if self.lost:
                        return
                    self._handle(message)
        except MalformedFrame as exc:
            self.give_up(f"malformed: {exc}")

    def pause_writing(self) -> None:
        """The peer reads too slowly."""
        self.full = True

    def resume_writing(self) -> None:
        """It caught up."""
        self.full = False

    def eof_received(self) -> None:
        """The other end closed it; so does the transport now."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        if exc is not None:
            _log.warning("a link between the router's processes broke: %s", exc)
        self._lose()

    def _handle(self, message: list[Any]) -> None:
        kind = message[0]
        handler = self._handlers.get(kind)
        if handler is None:
            raise MalformedFrame(f"a message of kind {kind} is not due from this side")
        try:
            handler(*message[1:])
        except MalformedFrame:
            raise
        except Exception:
            # A fault in one request must not take the others of its relay away.
            _log.exception("a message of kind %d failed", kind)

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            on_lost = self._on_lost
            on_lost(self)
