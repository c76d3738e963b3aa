"""The listening side: a uvicorn HTTP protocol that takes inference requests for itself.

POSTs to inference routes never become ASGI: no scope, task or event is made for them. The protocol
collects the bounded body, asks who calls, reads the fields that policy needs and starts an
exchange. Everything else is uvicorn's: the request is handed on as if nothing had been in between.

Requests of one connection are answered in their order. uvicorn keeps that order by "cycles", one
per request; a taken request is a cycle, too (`Taken`), so both kinds may follow each other in a
pipeline. All deadlines are looked at in the driver's sweep.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, ClassVar, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import Reason, Refused
from router.runtime.front import Front, Taken
from router.runtime.heads import HEAD_BYTES_MAX, error_answer
from router.runtime.relay import Exchange

_log = logging.getLogger(__name__)

# Further requests that a client may send before its first one is answered.
_PIPELINE_MAX: Final = 16
# After an error that leaves a request unread: how long the client may take to read the error.
_LINGER_S: Final = 2.0
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


def protocol_for(front: Front) -> type[InferenceProtocol]:
    """Return the protocol class for `uvicorn.Config(http=...)`."""
    return type("BoundInferenceProtocol", (InferenceProtocol,), {"front": front})


class InferenceProtocol(HttpToolsProtocol):
    """One client connection."""

    front: ClassVar[Front]

    # Defaults stand in the class: most connections never change most of them.
    _active: Any = None  # the cycle whose answer is due: a Taken, or uvicorn's own
    _receiving = True  # a request has begun, or the first one is awaited
    _in_head = True
    _unproductive = 0  # bytes read since the last that was of a body or ended a request
    _counted = 0  # bytes of a body that httptools won't read
    _ready = False  # the active request may be able to start
    _advancing = False
    _deaf = False  # what still comes is dropped
    _lingering = False  # all is said; only the client's end of the connection is awaited
    _since = 0.0  # nothing changed since then; 0: the next sweep says

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the connection."""
        super().connection_made(transport)
        settings = self.front.config.server
        self.write: Callable[[bytes], None] = transport.write
        self.transport.set_write_buffer_limits(high=settings.client_buffer_bytes_max)
        host = self.client[0].encode() if self.client else b"unknown"
        self._peer = host
        self._forwarded_line = b"x-forwarded-for: %b\r\n" % host
        self.front.driver.clients.add(self)
        if len(self.connections) > settings.connections_max:
            self._deaf = True
            refused = Refused(Reason.CONNECTIONS_FULL, "Too many connections; try again later.")
            self.front.on_refused(refused.reason)
            self.write(self._error(refused, self.front.ids(), keep_alive=False))
            self._linger()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: end what runs for it."""
        self.front.driver.clients.discard(self)
        super().connection_lost(exc)
        self.pipeline.clear()
        active, self._active = self._active, None
        if type(active) is Taken and active.exchange is not None:
            active.exchange.client_gone()

    def data_received(self, data: bytes) -> None:
        """Read requests, and start the one whose turn it is."""
        if self._deaf:
            return
        if self._counted:
            data = self._take_counted(data)
        self._unproductive += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._refuse_unread(Refused(Reason.BAD_REQUEST, f"Not a valid HTTP request: {exc}."))
        except httptools.HttpParserUpgrade as exc:
            self._upgraded(data[exc.args[0] :])
        else:
            if self._unproductive > HEAD_BYTES_MAX:
                self._refuse_unread(Refused(Reason.BAD_REQUEST, "The request's head is too long."))
        if self._ready:
            self._ready = False
            self._start_active()

    def pause_writing(self) -> None:
        """The client reads too slowly: stop reading what is meant for it."""
        super().pause_writing()
        if type(self._active) is Taken and self._active.exchange is not None:
            self._active.exchange.pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        super().resume_writing()
        if type(self._active) is Taken and self._active.exchange is not None:
            self._active.exchange.resume()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """A request begins. uvicorn's scope is made later, and only if it is needed."""
        self.url = b""
        self.headers = []
        self._in_head = self._receiving = True
        self._since = 0.0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are dropped: nothing may be added after the head was judged."""
        if self._in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the request, or leave it to ASGI."""
        self._in_head = False
        target = self.url
        if target[:1] != b"/":
            target = _origin_form(target)
        reader = self.front.readers.get(target.partition(b"?")[0])
        if reader is None or self.parser.get_method() != b"POST":
            self._leave_to_asgi()
            return
        http_1_0 = self.parser.get_http_version() != "1.1"
        head = self.front.rules.read(self.headers)
        taken = Taken(reader, target, head, http_1_0=http_1_0)
        taken.keep_alive = not http_1_0 and self.parser.should_keep_alive()
        # "Upgrade: h2c", as Java's client offers it, is not accepted: the request stands for
        # itself. httptools takes all that follows for the other protocol, so we count the body.
        if self.parser.should_upgrade():
            self._counted = head.content_length or 0
        previous, self.cycle = self.cycle, taken  # type: ignore[assignment]
        if previous is None or previous.response_complete:
            self._active = taken
        else:
            self.pipeline.appendleft((taken, None))  # type: ignore[arg-type]
            if len(self.pipeline) >= _PIPELINE_MAX:
                self.flow.pause_reading()
        self._judge(taken)

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body, up to the limit."""
        self._unproductive = 0
        taken: Any = self.cycle
        if type(taken) is not Taken:
            super().on_body(body)
        elif taken.refused is None:
            taken.size += len(body)
            taken.body.append(body)
            if taken.size > self.front.config.server.body_bytes_max:
                self._refuse_large(taken)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._unproductive = 0
        if self._counted:
            return  # its body is still to be counted
        self._receiving = False
        self._since = 0.0
        newest: Any = self.cycle
        if type(newest) is Taken:
            newest.complete = True
            self._ready = True
        else:
            super().on_message_complete()

    # The exchange's client

    @property
    def write_paused(self) -> bool:
        """Whether the client reads slower than its answer comes."""
        return self.flow.write_paused

    @property
    def keep_alive(self) -> bool:
        """Whether the connection will serve another request after the active one."""
        return self._active.keep_alive and not self.front.driver.draining

    def answered(self, *, close: bool) -> None:
        """The active request has its whole answer: go on to the next."""
        active = self._active
        if close or not self.keep_alive:
            if self._deaf:
                self._linger()
            else:
                self.transport.close()
        active.response_complete = True
        active.exchange = None
        self.on_response_complete()

    def answer_refused(self, refused: Refused, request_id: str) -> None:
        """Answer the active request with an error."""
        self.write(self._error(refused, request_id, keep_alive=self.keep_alive))
        self.answered(close=False)

    def break_off(self) -> None:
        """Cut the connection, so that no part of an answer can pass for the whole."""
        self.transport.abort()

    # uvicorn's order of requests

    def on_response_complete(self) -> None:
        """Start the next request of the pipeline, whoever answered the last one."""
        self.server_state.total_requests += 1
        self._active = None
        self._since = 0.0
        if not self.transport.is_closing() and not self._lingering:
            self.flow.resume_reading()
            self._advance()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def _advance(self) -> None:
        """Start what waits. In a loop, as an answer may be there before its start returns."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self.pipeline and self._active is None:
                entry: Any = self.pipeline.pop()
                cycle, app = entry
                if type(cycle) is Taken:
                    self._active = cycle
                    self._start_active()
                else:
                    self._start_asgi_task(cycle, app)
        finally:
            self._advancing = False

    def _leave_to_asgi(self) -> None:
        """Do what uvicorn would have done with the head."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers.extend(headers)
        self.expect_100_continue = (b"expect", b"100-continue") in headers
        super().on_headers_complete()

    # Taken requests

    def _judge(self, taken: Taken) -> None:
        """Decide by the head alone what can be; the body of a refused request is not kept."""
        length = taken.head.content_length
        if length is not None and length > self.front.config.server.body_bytes_max:
            self._refuse_large(taken)
            return
        try:
            taken.tenant = self.front.authenticate(self.headers)
        except Refused as refused:
            taken.refused = refused
        if taken.head.expects_continue:
            self._ready = True

    def _refuse_large(self, taken: Taken) -> None:
        limit = self.front.config.server.body_bytes_max
        refused = Refused(Reason.BODY_TOO_LARGE, f"The body is larger than {limit} bytes.")
        taken.refuse_unread(refused)
        self._deaf = self._ready = True

    def _start_active(self) -> None:
        """Start the request whose turn it is, as far as it has come."""
        taken = self._active
        if type(taken) is not Taken or taken.started:
            return
        if taken.refused is not None and (taken.complete or taken.unread):
            taken.started = True
            self._refuse(taken, taken.refused)
        elif taken.complete:
            taken.started = True
            self._begin(taken)
        elif taken.head.expects_continue:
            taken.head.expects_continue = False
            if taken.refused is not None:
                taken.refuse_unread(taken.refused)
                self._deaf = True
                self._start_active()
            elif not taken.http_1_0:
                self.write(_CONTINUE)

    def _begin(self, taken: Taken) -> None:
        """Read the body's fields and start the exchange."""
        front, head = self.front, taken.head
        request_id = head.request_id or front.ids()
        body = taken.whole_body()
        try:
            spec = taken.reader.read(
                head.content_type, body, request_id=request_id, tenant=taken.tenant
            )
        except Refused as refused:
            self._refuse(taken, refused, request_id)
            return
        forwarded = self._forwarded_line
        if head.forwarded_for is not None:
            forwarded = b"x-forwarded-for: %b, %b\r\n" % (head.forwarded_for, self._peer)
        taken.exchange = exchange = Exchange(
            front.driver,
            self,
            head=head,
            lines=b"%bx-request-id: %b\r\n%b" % (head.lines, request_id.encode(), forwarded),
            target=taken.target,
            body=body,
            http_1_0=taken.http_1_0,
        )
        exchange.start(spec)

    def _refuse(self, taken: Taken, refused: Refused, request_id: str | None = None) -> None:
        self.front.on_refused(refused.reason)
        self.answer_refused(refused, request_id or taken.head.request_id or self.front.ids())

    def _refuse_unread(self, refused: Refused) -> None:
        """Refuse the request that is being read, in its turn, and read nothing more."""
        self._deaf = True
        current: Any = self.cycle
        if type(current) is Taken and not current.complete:
            current.refuse_unread(refused)
            self._ready = True
        elif current is not None and type(current) is not Taken and current.more_body:
            self.transport.close()  # its handler sees a client that left in the middle of its body
        else:
            taken = Taken.unreadable(refused)
            previous, self.cycle = self.cycle, taken  # type: ignore[assignment]
            if previous is None or previous.response_complete:
                self._active = taken
            else:
                self.pipeline.appendleft((taken, None))  # type: ignore[arg-type]
            self._ready = True

    def _upgraded(self, rest: bytes) -> None:
        """httptools saw the end of a head that asks for another protocol; `rest` follows it."""
        newest: Any = self.cycle
        if type(newest) is Taken:
            if rest:
                self.data_received(rest)
        elif self._should_upgrade():
            self.handle_websocket_upgrade()
        else:
            self._unsupported_upgrade_warning()

    def _take_counted(self, data: bytes) -> bytes:
        """Take what is the body's; return what follows it."""
        body, rest = data[: self._counted], data[self._counted :]
        self._counted -= len(body)
        self.on_body(body)
        if not self._counted:
            self.on_message_complete()
        return rest

    def _error(self, refused: Refused, request_id: str, *, keep_alive: bool) -> bytes:
        defaults = self.server_state.default_headers
        return error_answer(
            refused, request_id=request_id, keep_alive=keep_alive, default_headers=defaults
        )

    # Time

    def sweep(self, now: float) -> None:
        """Close or answer what takes too long."""
        if not self._since:
            self._since = now
            return
        age_s = now - self._since
        settings = self.front.config.server
        if self._lingering:
            if age_s > _LINGER_S:
                self.transport.abort()
        elif self._active is None and not self._receiving:
            if age_s > settings.keep_alive_s:
                self.transport.close()
        elif age_s > settings.body_timeout_s and self._awaits_client():
            if self._active is None and not self._unproductive:
                self.transport.close()  # it never sent anything
            else:
                message = f"No whole request came within {settings.body_timeout_s:g} s."
                self._refuse_unread(Refused(Reason.BODY_TIMEOUT, message))
                self._ready = False
                self._start_active()

    def _awaits_client(self) -> bool:
        """Whether the client's own request is what everything waits for."""
        active = self._active
        if active is None:
            return True
        if type(active) is Taken:
            return not active.complete
        return bool(active.more_body) and self._receiving

    def _linger(self) -> None:
        """Close in a way that lets the client read the answer although it is still sending."""
        self._lingering = True
        self._since = 0.0
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _origin_form(target: bytes) -> bytes:
    """Return the path and query of a request target in absolute form."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    path: bytes = url.path or b"/"
    return path + b"?" + url.query if url.query else path
