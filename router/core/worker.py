"""A worker as the router sees it: what it is, what it was given, and what its reports add.

The router's own account leads: a request is charged at dispatch, long before any report could show
it. A ticket points to the worker that it is charged to and is given back through that pointer
exactly once; a worker that left and came back is another object, so late news never reach it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core.breaker import Breaker
from router.core.rates import Rates
from router.core.types import Ticket, WorkerState


@dataclass(slots=True, eq=False)
class Worker:
    """The record of one worker. Only `fleet` and this class write to it."""

    spec: WorkerSpec
    id: WorkerId
    slot: int  # its bit in the prefix index
    breaker: Breaker
    rates: Rates = field(default_factory=Rates)
    state: WorkerState = WorkerState.JOINING
    models: tuple[str, ...] = ()
    models_known: bool = False
    kv_total_tokens: int | None = None
    concurrency_max: int = 1
    # Own account.
    streams: int = 0
    waiting: int = 0  # streams without a first token
    pend_tokens: int = 0  # their uncached prompt tokens
    kv_reserved_tokens: int = 0  # promised to streams, what they already hold included
    # Marks that take it out for a while.
    paused_until: float = 0.0
    # Health.
    report: LoadReport | None = None
    reported_at: float = -inf
    probe_failures: int = 0
    why: str = "registered"

    def takes(self, ticket: Ticket, now: float) -> bool:
        """Whether the worker may be given `ticket` now."""
        if self.streams >= self.concurrency_max or self.id in ticket.tried:
            return False
        if self.breaker.out_until > now or self.paused_until > now:
            return False
        total = self.kv_total_tokens
        return total is None or self.kv_reserved_tokens + ticket.kv_tokens <= 0.92 * total

    def charge(self, ticket: Ticket) -> None:
        """Count `ticket` in, at dispatch."""
        assert ticket.worker is None, "charged twice"
        ticket.worker = self
        ticket.worker_id = self.id
        ticket.pending = True
        self.streams += 1
        self.waiting += 1
        self.pend_tokens += ticket.prompt_tokens - ticket.hit_tokens
        self.kv_reserved_tokens += ticket.kv_tokens

    def prefilled(self, ticket: Ticket) -> None:
        """The prompt of `ticket` no longer waits."""
        if ticket.pending:
            ticket.pending = False
            self.waiting -= 1
            self.pend_tokens -= ticket.prompt_tokens - ticket.hit_tokens

    def grow(self, ticket: Ticket, kv_tokens: int) -> None:
        """The reservation of `ticket` is now `kv_tokens`."""
        self.kv_reserved_tokens += kv_tokens - ticket.kv_tokens
        ticket.kv_tokens = kv_tokens

    def release(self, ticket: Ticket) -> None:
        """Count `ticket` out: the only way back, taken once."""
        assert ticket.worker is self, "given back twice"
        self.prefilled(ticket)
        ticket.worker = None
        self.streams -= 1
        self.kv_reserved_tokens -= ticket.kv_tokens
        assert self.streams >= 0 <= self.kv_reserved_tokens
