"""The listening side: a uvicorn HTTP protocol that takes inference requests for itself.

POSTs to inference routes never become ASGI: no scope, task or event is made for them. `intake`
reads them; here the fields that policy needs are taken from the body and an exchange is started.

Requests of one connection are answered in their order. uvicorn keeps that order by "cycles", one
per request; a taken request is a cycle, too (`Taken`), so both kinds may follow each other in a
pipeline. All deadlines are looked at in the driver's sweep.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from router.errors import Reason, Refused
from router.runtime.front import Front, Taken, bodies_full, not_allowed
from router.runtime.heads import error_answer
from router.runtime.intake import Intake
from router.runtime.relay import Exchange

_log = logging.getLogger(__name__)

# After an error that leaves a request unread: how long the client may take to read the error.
_LINGER_S: Final = 2.0
# Connections above the limit whose first request is read: whoever asks whether the process lives
# must hear that it does, or it is killed for being busy.
_SURPLUS_MAX: Final = 64
# Above that the answer is a refusal, and above this nobody waits until it is read, either: each
# that waits takes a file, and of those there are too few.
_REFUSED_MAX: Final = 128
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


def protocol_for(front: Front) -> type[InferenceProtocol]:
    """Return the protocol class for `uvicorn.Config(http=...)`."""
    return type("BoundInferenceProtocol", (InferenceProtocol,), {"front": front})


class InferenceProtocol(Intake):
    """One client connection."""

    _advancing = False
    _lingering = False  # all is said; only the client's end of the connection is awaited

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the connection."""
        super().connection_made(transport)
        settings = self.front.config.server
        self._outbox = self.front.driver.upstreams.outbox
        if transport.get_extra_info("sslcontext") is None:
            self.write: Callable[[bytes], None] = partial(self._outbox.write, transport)
            self.transport.set_write_buffer_limits(high=settings.client_buffer_bytes_max)
        else:
            # uvloop says so only of what is above 64 kB, which it holds besides.
            self.write = partial(self._outbox.write_encrypted, transport)
            self.transport.set_write_buffer_limits(high=1, low=0)
        host = self.client[0].encode() if self.client else b"unknown"
        self._peer = host
        self.rules_changed()
        self._forwarded_line = b"x-forwarded-for: %b\r\n" % host
        self.front.driver.clients.add(self)
        surplus = len(self.connections) - self.front.connections_max
        self._surplus = surplus > 0
        if surplus > _SURPLUS_MAX:
            self._deaf = True
            refused = self._connections_full()
            self.front.on_refused(refused.reason, request_id := self.front.ids(), b"")
            self.write(self._error(refused, request_id, keep_alive=False))
            if surplus > _REFUSED_MAX:
                self._outbox.flush()
                self.transport.close()
            else:
                self._linger()

    def rules_changed(self) -> None:
        """Judge the next head, and who sends it, by the rules of now."""
        self._known, self._compared = None, 0
        self._trusted = self.front.trusts(self.client[0] if self.client else None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: end what runs for it."""
        self.front.driver.clients.discard(self)
        super().connection_lost(exc)
        active, self._active = self._active, None
        waiting: list[Any] = [active, *(cycle for cycle, _ in self.pipeline)]
        self.pipeline.clear()
        for cycle in waiting:
            if type(cycle) is Taken:
                self._drop_body(cycle)
        if type(active) is Taken and active.exchange is not None:
            active.exchange.client_gone()

    def pause_writing(self) -> None:
        """The client reads too slowly: stop reading what is meant for it."""
        super().pause_writing()
        self._since = 0.0
        if type(self._active) is Taken and self._active.exchange is not None:
            self._active.exchange.pause()

    def resume_writing(self) -> None:
        """The client caught up: go on with its answer, or with what waited for that."""
        super().resume_writing()
        self._since = 0.0
        active = self._active
        if type(active) is Taken and active.exchange is not None:
            active.exchange.resume()
        elif type(active) is Taken:
            self._start_active()
        elif active is None:
            self._go_on()

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
        if close or not self.keep_alive:
            self._close_behind()
        self.served()

    def served(self) -> None:
        """The same where another request may follow on the connection."""
        active = self._active
        active.response_complete = True
        active.exchange = None
        self.on_response_complete()

    def answer_refused(self, refused: Refused, request_id: str) -> None:
        """Answer the active request with an error."""
        self.write(self._error(refused, request_id, keep_alive=self.keep_alive))
        self.answered(close=False)

    def end_early(self) -> None:
        """End the connection behind a part of an answer whose framing says that more was due."""
        self._close_behind()

    def break_off(self) -> None:
        """Cut the connection, so that no part of an answer can pass for the whole."""
        self._outbox.flush()
        self.transport.abort()

    # uvicorn's order of requests

    @property
    def expects_request(self) -> bool:
        """Whether a request is being read, or the first one is awaited, and none is answered."""
        return self._receiving and self._active is None

    def shutdown(self) -> None:
        """Close once the request that runs has its answer."""
        self._outbox.flush()
        super().shutdown()

    def on_response_complete(self) -> None:
        """Go on to the next request of the pipeline, whoever answered the last one.

        Not while the client has so much to read: the next answer would only be held as well.
        """
        self._active = None
        self._since = 0.0
        if self.pipeline or self.flow.read_paused:
            self._go_on()

    def _go_on(self) -> None:
        if self._may_go_on():
            if self.flow.read_paused:
                self.flow.resume_reading()
            self._advance()

    def _may_go_on(self) -> bool:
        """Whether another request may be answered; none is behind one that ends the connection."""
        return not (self.flow.write_paused or self._lingering or self.transport.is_closing())

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        self._outbox.flush()  # the app writes past it, and answers before its own may lie there
        super()._start_asgi_task(cycle, app)

    def _advance(self) -> None:
        """Start what waits. In a loop, as an answer may be there before its start returns."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self.pipeline and self._active is None and self._may_go_on():
                entry: Any = self.pipeline.pop()
                cycle, app = entry
                if type(cycle) is Taken:
                    self._active = cycle
                    self._start_active()
                else:
                    self._start_asgi_task(cycle, app)
        finally:
            self._advancing = False

    def _cut_asgi(self, refused: Refused) -> None:
        """End the connection inside the body of an ASGI request: with an answer, if none began."""
        active = self._active
        if active is not self.cycle or active.response_started:
            self._outbox.flush()
            self.transport.close()
            return
        request_id = self.front.ids()
        self.front.on_refused(refused.reason, request_id, self.url)
        self.write(self._error(refused, request_id, keep_alive=False))
        active.disconnected = True  # so its handler sees a client that left, and writes no more
        active.message_event.set()
        self._linger()

    # Taken requests

    def _start_active(self) -> None:
        """Start the request whose turn it is, as far as it has come."""
        taken = self._active
        if type(taken) is not Taken or taken.started or self.flow.write_paused:
            return
        if taken.refused is not None and (taken.complete or taken.unread):
            taken.started = True
            self._refuse(taken, taken.refused)
        elif taken.complete:
            self._drop_body(taken)
            self._begin(taken, taken.whole_body())
        elif taken.head.expects_continue:
            taken.head.expects_continue = False
            if taken.refused is not None:
                taken.refuse_unread(taken.refused)
                self._deaf = True
                self._start_active()
            elif not taken.head.http_1_0:
                self.write(_CONTINUE)

    def _begin(self, taken: Taken, body: bytes) -> None:
        """Start a request whose turn it is and whose body is whole."""
        taken.started = True
        front, head, standing = self.front, taken.head, taken.standing
        driver = front.driver
        try:
            request_id = head.request_id or front.ids()
            try:
                if driver.bodies_bytes + len(body) > front.bodies_bytes_max:
                    raise bodies_full()
                spec = head.reader.read(
                    head.content_type,
                    body,
                    request_id=request_id,
                    tenant=taken.tenant,
                    priority=standing.priority,
                )
                models = standing.models
                if models is not None and spec.model not in models:
                    raise not_allowed(taken.tenant, spec.model)
            except Refused as refused:
                self._refuse(taken, refused, request_id)
                return
            if head.via:
                spec.avoid = driver.upstreams.routers_in(head.via)
            spec.wait_s_max = head.wait_s_max
            exchange = Exchange(driver, self, taken, request_id.encode(), body)
            taken.exchange = exchange
            driver.submit(spec, exchange)
        except Exception:
            self._failed(taken)

    def _failed(self, taken: Taken) -> None:
        """Answer a request on which a fault of ours came up."""
        _log.exception("a request failed in the router")
        reason, message = Reason.INTERNAL, "The router failed; its log has more."
        if taken.exchange is not None and taken.exchange.submitted:
            taken.exchange.cut(reason, message)
            return
        if taken.exchange is not None:
            taken.exchange.drop_body()
            taken.exchange = None
        if not taken.response_complete:
            self._refuse(taken, Refused(reason, message))

    def _refuse(self, taken: Taken, refused: Refused, request_id: str | None = None) -> None:
        request_id = request_id or taken.head.request_id or self.front.ids()
        self.front.on_refused(refused.reason, request_id, taken.head.target)
        self.answer_refused(refused, request_id)

    def _error(self, refused: Refused, request_id: str, *, keep_alive: bool) -> bytes:
        active = self._active
        return error_answer(
            refused,
            request_id=request_id,
            keep_alive=keep_alive,
            default_headers=self.server_state.default_headers,
            more_lines=active.answer_lines if type(active) is Taken else b"",
        )

    # Time

    def sweep(self, now: float) -> None:
        """Close or answer what takes too long."""
        if not self._since:
            self._since = now
            return
        age_s = now - self._since
        config = self.front.config
        settings = config.server
        if self.flow.write_paused or (self.transport.is_closing() and not self._lingering):
            # It has stopped to read, in an answer or behind its end.
            if age_s > config.upstream.idle_chunk_timeout_s:
                self.transport.abort()
        elif self._lingering:
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

    def _close_behind(self) -> None:
        """Close behind what was written.

        RFC 9112 9.6: what the client has sent meanwhile would reset a connection that is closed at
        once, and the client may lose the answer.
        """
        if self._deaf or self.transport.can_write_eof():
            self._deaf = True
            self._linger()
        else:
            self._outbox.flush()
            self.transport.close()

    def _linger(self) -> None:
        """Close in a way that lets the client read the answer although it is still sending."""
        self._lingering = True
        self._since = 0.0
        self._outbox.flush()
        if self.transport.can_write_eof():
            self.transport.write_eof()
