"""One request from its submission to the last byte of its answer.

An exchange is the owner of a ticket and the receiver of the worker's answer. It moves between
waiting for the core's decision, an attempt at a worker, and the delivery of that worker's answer;
each step is a plain call from whoever has news. There is exactly one way out, `_over`, which the
driver hears of; whoever takes it has given back the connection.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from router.contract import Lane
from router.core import degrade
from router.core.types import Endpoint, Failure, Outcome, Refusal, Usage
from router.errors import Reason, Refused
from router.runtime.connection import Connection, Fault
from router.runtime.delivery import Client, Delivery, opening_for, reason_of
from router.runtime.edge import Decided, Edge
from router.runtime.heads import AnswerHead, header_text
from router.runtime.limit_lines import limit_headers, limit_lines
from router.runtime.reframing import reframer_for
from router.runtime.sse import TAIL_BYTES, ReportedError, usage_in
from router.runtime.upstream import UpstreamPool
from router.wire import rewritten

if TYPE_CHECKING:
    from router.runtime.front import Taken

# Another worker may do better; one that is merely full, or a router that had this very request
# before, is not ill.
_RETRIED: Final = frozenset((408, 429, 500, 502, 503, 504, 508))
_NOT_ILL: Final = frozenset((429, 503, 508))


class Phase(Enum):
    """Where an exchange is."""

    WAITING = auto()  # for the core: queued, or pausing before another attempt
    CONNECTING = auto()
    SENT = auto()  # the answer's head is awaited
    ANSWERING = auto()
    OVER = auto()


# Members under names of their own: reading one off its class is a slow look-up on every request.
_WAITING: Final = Phase.WAITING
_CONNECTING: Final = Phase.CONNECTING
_SENT: Final = Phase.SENT
_ANSWERING: Final = Phase.ANSWERING
_OVER: Final = Phase.OVER
_SUCCESS: Final = Outcome.SUCCESS
_SHORT: Final = Lane.SHORT
_REQUEST_HEAD: Final = b"POST %b%b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n"


class Exchange:
    """A client's request and what becomes of it."""

    __slots__ = (
        "_answer_lines",
        "_body",
        "_client",
        "_connection",
        "_delivery",
        "_driver",
        "_head",
        "_id",
        "_limits_told",
        "_phase",
        "_pool",
        "_quiet_since",
        "_rewritten",
        "_spare",
        "_ticket_over",
        "ticket",
    )
    ticket: Decided

    def __init__(
        self,
        driver: Edge,
        client: Client,
        taken: Taken,
        request_id: bytes,
        body: bytes,
    ) -> None:
        self._driver = driver
        self._client = client
        self._head = taken.head
        self._id = request_id
        self._body = body
        driver.bodies_bytes += len(body)
        self._answer_lines = taken.answer_lines  # of ours, behind those that say who answered
        self._rewritten = self._limits_told = False
        self._phase = _WAITING
        self._pool: UpstreamPool | None = None
        self._connection: Connection | None = None
        self._delivery: Delivery | None = None
        # What an attempt that failed brought, until it is known whether another one follows.
        self._spare: tuple[AnswerHead, Connection] | Refused | None = None
        self._ticket_over = False
        self._quiet_since = 0.0  # nothing came since then; 0: the next sweep says

    @property
    def submitted(self) -> bool:
        """Whether it has a ticket; without one nobody knows of it but its client."""
        return hasattr(self, "ticket")

    def drop_body(self) -> None:
        """Let go of the body; that it is empty then makes a second time harmless."""
        self._driver.bodies_bytes -= len(self._body)
        self._body = b""

    # The core's decisions.

    def dispatch(self) -> None:
        """Send the request to the ticket's worker."""
        if self._phase is _OVER:
            return
        ticket = self.ticket
        if ticket.reservation is not None and not self._limits_told:
            self._limits_told = True
            self._answer_lines += limit_lines(ticket.reservation)
        if ticket.degraded is not None and not self._rewritten and not self._rewrite():
            return
        worker_id = ticket.worker_id
        self._quiet_since = 0.0
        self._phase = _CONNECTING
        pool = self._pool = None if worker_id is None else self._driver.upstreams.get(worker_id)
        if pool is None:
            self.on_connect_failed(Fault(Reason.UPSTREAM_UNREACHABLE, "the worker was removed"))
        else:
            pool.acquire(self)

    def preempt(self) -> bool:
        """Stop the attempt, to make another one later; False when it is too late for that."""
        if self._phase is _WAITING or self._phase is _OVER or self._ticket_over:
            return False
        if self._delivery is not None and self._delivery.opened:
            return False
        self._give_up_connection()
        self._delivery = None
        self._phase = _WAITING
        return True

    def refuse(self, refusal: Refusal) -> None:
        """Answer with the core's refusal."""
        if self._phase is not _OVER:
            self._ticket_over = True
            self._answer(
                Refused(
                    refusal.reason,
                    refusal.message,
                    retry_after_s=refusal.retry_after_s,
                    param=refusal.param,
                    more_headers=limit_headers(refusal.levels),
                )
            )

    def judged(self, *, again: bool) -> None:
        """Drop what the attempt that failed brought, or answer with it."""
        spare, self._spare = self._spare, None
        if self._phase is _OVER:
            return
        self._ticket_over = not again
        if isinstance(spare, Refused):
            if not again:
                self._answer(spare)
        elif spare is not None:
            head, connection = spare
            if again:
                connection.abandon()
            else:
                self._connection = connection
                connection.resume()
                connection.go_on(payload=self._deliver(head))

    # The worker's answer.

    def on_connected(self, connection: Connection) -> None:
        """Send the request."""
        pool = self._pool
        assert pool is not None
        self._connection = connection
        self._phase = _SENT
        body, asked = self._body, self._head
        lines = asked.lines if pool.has_key else asked.lines + asked.credentials
        if pool.priority_lines is not None:
            lines += pool.priority_lines[self.ticket.spec.priority]
        if pool.is_router:
            lines += self._driver.lines_for_router(self.ticket.spec, self.ticket.arrived_at)
        request = pool.prefix, asked.target, pool.after_target, lines, self._id, len(body)
        connection.send(self, _REQUEST_HEAD % request, body)

    def on_connect_failed(self, fault: Fault) -> None:
        """Try elsewhere, or answer with the error."""
        self._attempt_broke(fault)

    def on_whole(self, head: AnswerHead, body: bytes, connection: Connection) -> bool:
        """Pass on a plain answer that came in one piece: most answers, in one step."""
        client, pool, ticket = self._client, self._pool, self.ticket
        assert pool is not None
        if not client.keep_alive:
            return False
        marks = pool.short_marks if ticket.lane is _SHORT else pool.long_marks
        client.write(
            b"".join(
                (
                    head.opening,
                    marks,
                    self._answer_lines,
                    b"x-request-id: ",
                    self._id,
                    b"\r\n\r\n",
                    body,
                )
            )
        )
        self._connection = None
        connection.release()
        self._over(_SUCCESS, None, usage_in(body[-TAIL_BYTES:]))
        client.served()
        return True

    def on_head(self, head: AnswerHead) -> bool | None:
        """Try elsewhere if the worker refused or failed, else begin to deliver its answer."""
        if head.status in _RETRIED and not self._ticket_over:
            pool = self._pool
            assert pool is not None
            failure = Failure(
                reason=reason_of(head.status),
                blames_worker=head.status not in _NOT_ILL,
                # A router's 429 is for the class or the tenant of this request: others may come.
                retry_after_s=None if pool.is_router and head.status == 429 else head.retry_after_s,
            )
            connection = self._detached()
            self._spare = head, connection
            self._driver.attempt_failed(self.ticket, failure)
            if self._is_unjudged():
                connection.pause()  # until it is judged
            return None
        return self._deliver(head)

    def on_data(self, data: bytes) -> None:
        """Nothing comes here: the delivery takes the reads."""
        raise AssertionError(f"a read of {len(data)} bytes without a delivery")

    def on_end(self) -> None:
        """The worker's part is done and its connection back in the pool."""
        self._connection = None
        assert self._delivery is not None
        self._delivery.end()

    def on_broken(self, fault: Fault) -> None:
        """Try elsewhere while the client has nothing, else end what it has as an error."""
        self._connection = None
        if self._is_unjudged():
            self._spare = _no_answer(self.ticket, fault)
        elif self._delivery is not None and self._delivery.opened:
            self._abandon_answer(fault)
        else:
            self._delivery = None
            self._attempt_broke(fault)

    # The delivery's news.

    @property
    def tells_status(self) -> bool:
        """Whether the worker may tell the status in the body of a 400."""
        return self.ticket.spec.endpoint is Endpoint.RESPONSES

    def on_moved(self) -> None:
        """Have the next sweep report its progress."""
        self._driver.moved.append(self)

    def on_opened(self) -> None:
        """The client has its first byte: the request stays with this worker."""
        self.drop_body()
        delivery = self._delivery
        # Only a stream shows when the first token came: other answers come at their end.
        if delivery is not None and delivery.head.event_stream and not self._ticket_over:
            self._driver.first_token(self.ticket)

    def on_reported(self, error: ReportedError) -> bool:
        """Treat an answer that reports an error as the status that it stands for."""
        if self._ticket_over or (error.status < 500 and error.status != 429):
            return False
        failure = Failure(
            reason=reason_of(error.status), blames_worker=error.status not in _NOT_ILL
        )
        self._detached().abandon()
        self._spare = Refused(failure.reason, error.message or "The worker refused.")
        self._driver.attempt_failed(self.ticket, failure)
        return True

    def on_malformed(self, why: str) -> None:
        """The worker's body can't be decoded."""
        self._abandon_answer(Fault(Reason.UPSTREAM_PROTOCOL, why))

    def on_delivered(self) -> None:
        """Report the end, then let the client go on."""
        delivery = self._delivery
        assert delivery is not None
        outcome, reason, usage = delivery.result()
        self._leave(outcome, reason, usage)
        self._client.answered(close=delivery.closes)

    # The client.

    def client_gone(self) -> None:
        """The client left: stop the worker's work at once, and give the place back."""
        if self._phase is not _OVER:
            self._leave(Outcome.ABORTED)

    def pause(self) -> None:
        """The client reads slower than the worker writes."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The client has read what was waiting for it."""
        self._quiet_since = 0.0
        if self._delivery is not None:
            self._delivery.resume()
        if self._connection is not None and not self._client.write_paused:
            self._connection.resume()

    # Time.

    def sweep(self, now: float) -> None:
        """Look at deadlines and report progress."""
        delivery = self._delivery
        if delivery is not None and delivery.moved:
            delivery.moved = False
            self._quiet_since = now
            if not self._ticket_over:
                self._driver.tokens(self.ticket, delivery.progress())
            if not delivery.waits:
                return  # no deadline is near
        elif not self._quiet_since:
            self._quiet_since = now
        self._check_deadlines(delivery, now - self._quiet_since)

    def _check_deadlines(self, delivery: Delivery | None, quiet_s: float) -> None:
        settings = self._driver.config.upstream
        if delivery is None or (delivery.waits and not delivery.holds):
            # The core has deadlines of its own for what waits for it.
            if self._phase is not _WAITING and quiet_s > settings.first_byte_timeout_s:
                self._timed_out(f"no first byte within {settings.first_byte_timeout_s:g} s")
        elif quiet_s > settings.idle_chunk_timeout_s:
            if not self._client.write_paused:  # else it is the client who is silent
                self._timed_out(f"silent for {settings.idle_chunk_timeout_s:g} s")
        elif delivery.waits:
            if delivery.aged:
                delivery.release()
            delivery.aged = True
            self._driver.moved.append(self)  # to be looked at again by the next sweep

    def cut(self, reason: Reason, message: str) -> None:
        """End it now, for a reason that is neither the client's nor the worker's."""
        try:
            if self._delivery is not None and self._delivery.opened:
                self._abandon_answer(Fault(reason, message), Outcome.ABORTED)
            elif self._phase is not _OVER:
                self._answer(Refused(reason, message), Outcome.ABORTED)
        finally:
            self.drop_body()

    # Inside.

    def _rewrite(self) -> bool:
        """Make the body what overload left of it, and tell the client; False: it was answered."""
        self._rewritten = True
        decision, endpoint = self.ticket.degraded, self.ticket.spec.endpoint
        assert decision is not None
        try:
            body = rewritten(
                self._body, endpoint, max_tokens=decision.max_tokens, model=decision.model
            )
        except Refused as refused:
            self._answer(refused, Outcome.CLIENT_ERROR)
            return False
        self._driver.bodies_bytes += len(body) - len(self._body)
        self._body = body
        said = header_text(decision.header or "")
        self._answer_lines += b"%b: %b\r\n" % (degrade.HEADER.encode(), said)
        return True

    def _deliver(self, head: AnswerHead) -> bool:
        pool, connection, ticket = self._pool, self._connection, self.ticket
        assert pool is not None
        assert connection is not None
        self._phase = _ANSWERING
        reframer = reframer_for(head, self._head)
        closes = reframer is not None and not reframer.chunked
        opening = opening_for(
            head,
            reframer,
            marks=(pool.short_marks if ticket.lane is _SHORT else pool.long_marks)
            + self._answer_lines,
            request_id=self._id,
            close=closes or not self._client.keep_alive,
        )
        self._delivery = Delivery(
            self, self._client, connection, head, reframer=reframer, opening=opening
        )
        if self._delivery.moved:
            self.on_moved()
        if self._client.write_paused:
            connection.pause()  # nobody tells again of a pause that began before the answer
        return reframer is not None

    def _is_unjudged(self) -> bool:
        """Whether an attempt failed, and nobody has said yet whether another one follows."""
        return self._spare is not None

    def _detached(self) -> Connection:
        """Let go of the connection, as the core may begin another attempt right away."""
        connection, self._connection = self._connection, None
        assert connection is not None
        self._delivery = None
        self._phase = _WAITING
        return connection

    def _attempt_broke(self, fault: Fault, *, retryable: bool = True) -> None:
        """Nothing came of an attempt: wait for another one, or answer with the error."""
        self._phase = _WAITING
        ours = fault.reason is Reason.CONNECTIONS_FULL  # with any other worker it would be the same
        failure = Failure(
            reason=fault.reason, blames_worker=not ours, retryable=retryable and not ours
        )
        refused = _no_answer(self.ticket, fault)
        if self._ticket_over:
            self._answer(refused)
        else:
            self._spare = refused
            self._driver.attempt_failed(self.ticket, failure)

    def _timed_out(self, why: str) -> None:
        fault = Fault(Reason.UPSTREAM_TIMEOUT, why)
        if self._delivery is not None and self._delivery.opened:
            self._abandon_answer(fault)
            return
        self._give_up_connection()
        self._delivery = None
        # Another attempt would take as long: its answer would come too late for anyone.
        self._attempt_broke(fault, retryable=False)

    def _abandon_answer(self, fault: Fault, outcome: Outcome = Outcome.FAILED) -> None:
        """End an answer that the client has a part of."""
        delivery = self._delivery
        assert delivery is not None
        self._leave(outcome, fault.reason)
        delivery.break_off(fault.reason, f"The answer broke off: {fault.why}.")

    def _answer(self, refused: Refused, outcome: Outcome = Outcome.FAILED) -> None:
        """Answer with an error, as the client has nothing yet."""
        self._leave(outcome, refused.reason)
        self._client.answer_refused(refused, self.ticket.spec.request_id)

    def _give_up_connection(self) -> None:
        if self._pool is not None and self._phase is not _ANSWERING:
            self._pool.cancel(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()
        spare, self._spare = self._spare, None
        if isinstance(spare, tuple):
            spare[1].abandon()

    def _leave(
        self, outcome: Outcome, reason: Reason | None = None, usage: Usage | None = None
    ) -> None:
        """Give back what was taken, and report the end unless the core knows it."""
        self._give_up_connection()
        delivery = self._delivery
        if delivery is not None and usage is None and not self._ticket_over:
            # Whoever ended it: without the worker's own word, what the client got is what counts.
            self._driver.tokens(self.ticket, delivery.output_tokens())
        self._over(outcome, reason, usage)

    def _over(self, outcome: Outcome, reason: Reason | None, usage: Usage | None) -> None:
        self._phase = _OVER
        self._delivery = None
        driver = self._driver
        driver.bodies_bytes -= len(self._body)
        self._body = b""
        driver.left(self)
        # Ticket and exchange know each other; left so, only the garbage collector would free them.
        self.ticket.owner = None
        if not self._ticket_over:
            self._ticket_over = True
            driver.finished(self.ticket, outcome, reason, usage)


def _no_answer(ticket: Decided, fault: Fault) -> Refused:
    return Refused(fault.reason, f"Worker {ticket.worker_id} gave no answer: {fault.why}.")
