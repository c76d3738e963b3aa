"""A small HTTP/1.1 server for many simulated workers in one process.

One `Connection` per socket on httptools, one `Exchange` per request; the handler is called once
the body is complete and may answer at once or later. No tasks and no queues: a chunk of a stream
is one write to the socket, so that it costs microseconds. Connections that stay idle for five
seconds are closed, as SGLang does.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, cast
from urllib.parse import parse_qsl, unquote

import httptools

KEEP_ALIVE_S: Final = 5.0
BODY_BYTES_MAX: Final = 256 * 2**20
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
EVENTS: Final = "text/event-stream; charset=utf-8"
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}

Handler = Callable[["Exchange"], None]


class Exchange:
    """One request and its answer.

    `on_gone` is called when the client leaves before the answer is complete, `on_writable` when a
    slow client has taken what was written and `writable` is true again.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_keep",
        "body",
        "ended",
        "headers",
        "method",
        "on_gone",
        "on_writable",
        "path",
        "query",
    )

    def __init__(self, connection: Connection, method: str, target: bytes, *, keep: bool) -> None:
        url = httptools.parse_url(target)
        self.method = method
        self.path = unquote((url.path or b"/").decode("latin-1"))
        self.query = dict(parse_qsl((url.query or b"").decode("latin-1"), keep_blank_values=True))
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._connection = connection
        self._keep = keep
        self._chunked = True

    @property
    def writable(self) -> bool:
        """False while the client is slow to take what was written."""
        return self._connection.writable

    def respond(
        self, status: int, body: bytes = b"", content_type: str | None = JSON, extra: str = ""
    ) -> None:
        """Send a whole answer; nothing if the client has left."""
        if self.ended:
            return
        self.ended = True
        head = _head(status, content_type, f"content-length: {len(body)}\r\n{extra}", self._keep)
        self._connection.write(head if self.method == "HEAD" else head + body)
        self._connection.done(keep=self._keep)

    def start(self, content_type: str = EVENTS) -> None:
        """Send the head of a stream."""
        self._chunked = self._connection.http_1_1
        self._keep = self._keep and self._chunked
        framing = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        self._connection.write(_head(200, content_type, framing, self._keep))

    def write(self, data: bytes) -> None:
        """Send one piece of a stream."""
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self) -> None:
        """End a stream."""
        self.ended = True
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        self._connection.done(keep=self._keep)

    def reset(self) -> None:
        """Break the connection: the client sees a reset."""
        self._connection.reset()


def _head(status: int, content_type: str | None, more: str, keep: bool) -> bytes:
    kind = f"content-type: {content_type}\r\n" if content_type else ""
    close = "" if keep else "connection: close\r\n"
    date = formatdate(usegmt=True)
    reason = _REASONS.get(status, "")
    return (
        f"HTTP/1.1 {status} {reason}\r\ndate: {date}\r\nserver: uvicorn\r\n{kind}{more}{close}\r\n"
    ).encode("latin-1")


class Connection(asyncio.Protocol):
    """One client socket. Pipelined requests are answered one after the other, in order."""

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._queue: deque[Exchange] = deque()  # the first one is being answered
        self._handling = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self.http_1_1 = True
        self.writable = True

    # -- socket -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of its class
        self._connections.add(self)
        self._wait_idle()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The client is gone, or we closed."""
        self._connections.discard(self)
        self._transport = None
        self._stop_idle()
        for exchange in self._queue:
            if not exchange.ended:
                exchange.ended = True
                if exchange.on_gone is not None:
                    exchange.on_gone()
        self._queue.clear()

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self._stop_idle()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, b"Unsupported upgrade request.")
        except httptools.HttpParserError:
            self._refuse(400, b"Invalid HTTP request received.")
        # Outside the parser's callbacks: it would turn an error of ours into the client's.
        self._handle_first()

    def pause_writing(self) -> None:
        """The client is slow."""
        self.writable = False

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.writable = True
        if self._queue and (on_writable := self._queue[0].on_writable) is not None:
            on_writable()

    def write(self, data: bytes) -> None:
        """Write, unless the client is gone."""
        if self._transport is not None:
            self._transport.write(data)

    def done(self, *, keep: bool) -> None:
        """The first exchange has its answer: close, wait, or go on with the next."""
        if self._transport is None:
            return
        self._queue.popleft()
        self._handling = False
        if not keep:
            self._transport.close()
        elif self._queue:
            self._loop.call_soon(self._handle_first)  # not from within the handler of this one
        else:
            self._wait_idle()

    def close(self) -> None:
        """Close in order."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Close with RST, as a process that was killed."""
        if self._transport is None:
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _refuse(self, status: int, message: bytes) -> None:
        head = _head(status, TEXT, f"content-length: {len(message)}\r\n", keep=False)
        self.write(head + message)
        self.close()

    def _wait_idle(self) -> None:
        self._idle_timer = self._loop.call_later(KEEP_ALIVE_S, self.close)

    def _stop_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _handle_first(self) -> None:
        if self._queue and not self._handling:
            self._handling = True
            self._handler(self._queue[0])

    # -- httptools --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._target = b""
        self._headers = {}
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Collect the request target, which may come in pieces."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note one header; the last of a repeated one counts."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Ask for the body where the client waits to be asked."""
        self.http_1_1 = self._parser.get_http_version() == "1.1"
        if self._headers.get("expect", "").lower() == "100-continue" and not self._queue:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Collect the body."""
        self._body_bytes += len(body)
        if self._body_bytes > BODY_BYTES_MAX:
            self._refuse(413, b"Request body too large.")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Hand the request to the handler, or behind the one that is being answered."""
        if self._body_bytes > BODY_BYTES_MAX:
            return
        method = self._parser.get_method().decode("latin-1")
        keep = bool(self._parser.should_keep_alive())
        exchange = Exchange(self, method, self._target, keep=keep)
        exchange.headers = self._headers
        exchange.body = b"".join(self._body)
        self._queue.append(exchange)
