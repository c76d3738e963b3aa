"""The connections of one process: what runs for its clients, and the deadlines of all of it.

An edge takes in requests and hears of their fate; who decides is behind it. `driver.Driver` decides
in the same process. One coarse sweep, four times a second, serves every deadline of every
connection, so no request needs a timer of its own. Where deadlines are long, each sweep looks at a
part of the clients and exchanges only, at all of them within a second, and beside them at the
exchanges whose answers have moved, the longest known first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Protocol

from router.config import Config
from router.contract import Lane, WorkerId
from router.core.degrade import Decision
from router.core.limits import Reservation
from router.core.types import Failure, Outcome, Refusal, RequestSpec, Usage
from router.errors import Reason
from router.runtime.hops import tenant_line, wait_line
from router.runtime.rounds import SWEEP_S, Round, steps_for
from router.runtime.upstream import Upstreams

_log = logging.getLogger(__name__)

# Exchanges that a sweep looks at because they have moved; of more a part, of all within a second.
_MOVED_AT_ONCE: Final = 512
FAILED: Final = "the router failed; its log has more"


class Decided(Protocol):
    """What a request's owner reads of its ticket: what was asked, and what was decided so far."""

    spec: RequestSpec
    arrived_at: float
    lane: Lane
    worker_id: WorkerId | None  # where to send it, from its first dispatch on
    degraded: Decision | None
    reservation: Reservation | None  # what its limits granted, until the end
    owner: object


class Running(Protocol):
    """Who submits a request and waits for what is decided: an exchange, or a test's client."""

    ticket: Any  # a Decided, of the kind that its edge makes

    def dispatch(self) -> None:
        """Send the request to `ticket.worker_id` now."""

    def refuse(self, refusal: Refusal) -> None:
        """Answer with this refusal; the ticket is over."""

    def judged(self, *, again: bool) -> None:
        """Learn what follows the attempt that failed.

        `again`: `dispatch` or `refuse`. Else nothing: the ticket is over, and what the attempt
        brought is the answer.
        """

    def preempt(self) -> bool:
        """Stop the attempt and wait for another one; False if the client has a part of its answer
        or no attempt is under way.
        """

    def sweep(self, now: float) -> None:
        """Look whether a deadline is over, and report progress."""

    def cut(self, reason: Reason, message: str) -> None:
        """End it now, with an error for the client."""


class Watched(Protocol):
    """A client's connection, which has deadlines of its own."""

    def sweep(self, now: float) -> None:
        """Look whether a deadline is over."""

    def rules_changed(self) -> None:
        """Judge the next request by the rules of now."""

    def break_off(self) -> None:
        """Close it at once."""


class Edge(ABC):
    """What runs in one process, on one event loop."""

    def __init__(
        self,
        config: Config,
        upstreams: Upstreams,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.upstreams = upstreams
        self.running: set[Running] = set()
        self.clients: set[Watched] = set()
        self.moved: list[Running] = []  # those that the next sweep has to look at
        self._running_round: Round[Running] = Round()
        self._clients_round: Round[Watched] = Round()
        # Of requests that are being read, or may still be sent to a worker. Who holds a body
        # counts it here, and gives that back when it lets go of it.
        self.bodies_bytes = 0
        self.draining = False  # told to stop: answers announce the end of their connections
        self._loop = loop
        self._clock = clock
        self._sweeper: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event | None = None  # set when the last exchange ends, once awaited

    # Requests.

    def lines_for_router(self, spec: RequestSpec, arrived_at: float) -> bytes:
        """What a worker that is a router is told of a request, beside its class."""
        waited_s = self._clock() - arrived_at
        return tenant_line(self.config, spec.tenant) + wait_line(self.config, spec, waited_s)

    @abstractmethod
    def submit(self, spec: RequestSpec, owner: Running) -> None:
        """Take in a request: its `ticket` is set, then `dispatch` or `refuse` follows, perhaps
        before this returns.
        """

    @abstractmethod
    def first_token(self, ticket: Any) -> None:
        """The first byte of an answer came."""

    @abstractmethod
    def tokens(self, ticket: Any, output_tokens: int) -> None:
        """A stream has put out so many tokens by now: a guess while it runs, then the count."""

    @abstractmethod
    def attempt_failed(self, ticket: Any, failure: Failure) -> None:
        """An attempt failed before the client got a byte: its owner hears by `judged` what
        follows, perhaps before this returns.
        """

    @abstractmethod
    def finished(
        self, ticket: Any, outcome: Outcome, reason: Reason | None, usage: Usage | None
    ) -> None:
        """A request is over, in whatever state: ended in some way, cut, or left by its client."""

    def left(self, exchange: Running) -> None:
        """An exchange is over, its ticket too."""
        self.running.discard(exchange)
        if self._idle is not None and not self.running:
            self._idle.set()

    # The end of the process.

    async def drained(self, grace_s: float) -> bool:
        """Wait until no exchange runs; after `grace_s` cut those that do. True: none was cut."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                while self.running:
                    self._idle = asyncio.Event()
                    await self._idle.wait()
        except TimeoutError:
            _log.warning("shutdown grace is over: cutting %d running answers", len(self.running))
            for exchange in list(self.running):
                self._cut(exchange, Reason.SHUTTING_DOWN, "the router is shutting down")
            return False
        return True

    def stop(self) -> None:
        """Stop watching time and close all connections to workers."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.upstreams.close()

    def _cut(self, exchange: Running, reason: Reason, message: str) -> None:
        """End an exchange. Even if that fails its place is free, and nobody else is touched."""
        try:
            exchange.cut(reason, message)
        except Exception:
            _log.exception("a request can't be ended in order")
            self.left(exchange)
            self.finished(exchange.ticket, Outcome.ABORTED, reason, None)

    # Time.

    def _sweep(self) -> None:
        now = self._clock()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        # One that fails must not take the others' deadlines away.
        try:
            self.upstreams.sweep(now)
        except Exception:
            _log.exception("looking after the connections to workers failed")
        steps = steps_for(_shortest_s(self.config))
        most = max(_MOVED_AT_ONCE, -(-len(self.running) // steps))
        moved = [each for each in dict.fromkeys(self.moved) if each in self.running]
        # Each once: what is there at two sweeps in a row has waited.
        turn = self._running_round.turn(self.running, steps)
        looked_at = dict.fromkeys((*moved[:most], *turn))
        self.moved = [each for each in moved[most:] if each not in looked_at]
        for exchange in looked_at:
            if exchange not in self.running:
                continue  # it is over
            try:
                exchange.sweep(now)
            except Exception:
                _log.exception("looking after a request failed")
                self._cut(exchange, Reason.INTERNAL, FAILED)
        for client in self._clients_round.turn(self.clients, steps):
            if client not in self.clients:
                continue  # it left before its turn
            try:
                client.sweep(now)
            except Exception:
                _log.exception("looking after a client failed")
                client.break_off()
        self._swept(now)

    def _swept(self, now: float) -> None:  # noqa: B027 - most have nothing
        """Do what else is due a few times a second."""


def _shortest_s(config: Config) -> float:
    """The shortest deadline of a sweep."""
    server, upstream = config.server, config.upstream
    return min(
        server.body_timeout_s,
        server.keep_alive_s,
        upstream.first_byte_timeout_s,
        upstream.idle_chunk_timeout_s,
    )
