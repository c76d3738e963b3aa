"""A flow queue with default arguments and a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.contract import Lane
from router.core.flow import FlowQueue
from router.core.pools import Pool
from router.core.types import Priority, Ticket
from tests.core.builders import config, request_spec, ticket

P0, P1, P2, P3 = Priority
NO_SHARES = {f"p{n}": {"share_min": 0.0} for n in range(4)}
PATIENT: dict[str, Any] = {"relegate_ratio": 0, "promote_after_targets": 0}


class Queue:
    """A flow queue with default arguments and a clock."""

    def __init__(self, *, shares: Sequence[float] | None = (0, 0, 0, 0), **sections: Any) -> None:
        sections = {"queue": PATIENT, **sections}
        self.flow = FlowQueue(config(**sections))
        if shares is not None:
            self.flow.set_shares(shares)
        self.now = 0.0
        self.pool = Pool("m", Lane.SHORT)
        self.count = 0

    def make(
        self,
        priority: Priority = P1,
        *,
        tenant: str = "t",
        cost: float = 1.0,
        pool: Pool | None = None,
        **fields: Any,
    ) -> Ticket:
        """A ticket that comes now, patient and never late unless said otherwise."""
        self.count += 1
        pool = pool or self.pool
        given_fields: dict[str, Any] = {
            "spec": request_spec(priority=priority, tenant=tenant),
            "pool": pool,
            "lane": pool.lane,
            "cost": cost,
            "arrived_at": self.now,
            "queue_deadline_at": 1e12,
        }
        return ticket(self.count, **(given_fields | fields))

    def push(self, priority: Priority = P1, **fields: Any) -> Ticket:
        made = self.make(priority, **fields)
        self.flow.push(made, now=self.now)
        return made

    def offer(self, *skipped: Ticket, pools: list[Pool] | None = None) -> Ticket | None:
        passed = {made.number for made in skipped}
        try:
            return self.flow.offer(pools or self.flow.pools, passed, now=self.now)
        finally:
            self.flow.end_round()

    def serve(self, *, pools: list[Pool] | None = None) -> Ticket:
        made = self.offer(pools=pools)
        assert made is not None, "nothing waits"
        self.flow.serve(made, now=self.now)
        return made

    def drain(self) -> list[Ticket]:
        return [self.serve() for _ in range(len(self.flow))]

    def pass_to(self, now: float) -> list[Ticket]:
        """Let time pass; returns those that waited too long, and takes them out."""
        over = []
        while (due := self.flow.next_deadline()) is not None and due <= now:
            self.now = max(self.now, due)
            while (made := self.flow.expired(self.now)) is not None:
                over.append(made)
                self.flow.remove(made, now=self.now)
        self.now = now
        return over
