"""The waiting room: who waits for a worker, who is next, and how long the refused stay away."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.fading import FadingRate
from router.core.flow import FlowQueue
from router.core.pools import Pool
from router.core.types import Ticket

_MEMORY_S: Final = 10.0  # of the rate of dispatches
AllAway = Callable[[Ticket, float], bool]
_CHOOSY_RATIO: Final = 3  # times the lookahead, of tickets that could go but rather wait


class Round:
    """One round of offers: what was freed is filled, in the order of flow control.

    A ticket that does not fit is passed over for others that may, up to `lookahead_max` of them;
    one that was passed too often closes its pool until it is served, so that it is not starved.
    Neither holds for one that rather waits for a worker: it keeps nobody from the others.
    """

    def __init__(self, flow: FlowQueue, pools: list[Pool]) -> None:
        self._flow = flow
        self._lookahead_max = flow.settings.lookahead_max
        self._skips_max = flow.settings.skips_max
        self._passed: dict[int, Ticket] = {}
        self._choosy: set[int] = set()  # of these, who rather waits, by number
        self.blocked = False  # a pool waits for a ticket that was passed over too often
        self.pools = pools

    @property
    def complete(self) -> bool:
        """Whether the lookahead was no limit."""
        return not self.blocked and not self._spent

    @property
    def _spent(self) -> bool:
        """Whether as many were tried as may be."""
        choosy = min(len(self._choosy), _CHOOSY_RATIO * self._lookahead_max)
        return len(self._passed) - choosy >= self._lookahead_max

    @property
    def pools(self) -> list[Pool]:
        """The pools whose tickets are still offered."""
        return self._pools

    @pools.setter
    def pools(self, pools: list[Pool]) -> None:
        self._pools = pools
        self._heads = self._flow.heads(pools, self._passed) if pools else None

    def next(self, now: float) -> Ticket | None:
        """Who is to be tried next; None when the round is over."""
        if not self._pools or self._spent:
            return None
        if self._heads is None:
            return self._flow.offer(self._pools, self._passed, now=now)
        found = self._heads.choice()
        return None if found is None else found[1]

    def close(self, pool: Pool) -> None:
        """Offer nothing of `pool` any more."""
        self.pools = [other for other in self._pools if other is not pool]

    def keep(self, pools: list[Pool]) -> None:
        """Offer only what waits for `pools`, some of those it has."""
        if len(pools) < len(self._pools):
            self.pools = pools

    def passed(self, ticket: Ticket, *, choosy: bool = False) -> None:
        """`ticket` found no room, or rather waits."""
        if ticket.skips >= self._skips_max and not (ticket.tried or choosy):
            self.blocked = True
            self.close(ticket.pool)
        else:
            if choosy:
                self._choosy.add(ticket.number)
            self._passed[ticket.number] = ticket
            if self._heads is not None:
                self._heads.changed(ticket)

    def served(self, ticket: Ticket) -> None:
        """`ticket` was dispatched, ahead of those that were passed."""
        for number, passed in self._passed.items():
            passed.skips += number not in self._choosy
        if self._heads is not None:
            self._heads.changed(ticket)

    def end(self) -> None:
        """Put back what was moved aside."""
        self._flow.end_round()


class WaitingRoom:
    """Tickets that no worker has room for yet."""

    def __init__(self, config: Config, *, rng: Random) -> None:
        self._rng = rng
        self.flow = FlowQueue(config)
        # Who got a worker, after waiting or at once: the scheduler counts them.
        self.dispatches = {lane: FadingRate(_MEMORY_S) for lane in Lane}
        self.depth_max = config.queue.depth_max

    def __len__(self) -> int:
        return len(self.flow)

    def configure(self, config: Config) -> None:
        """Take over new settings; those who wait already may stay."""
        self.depth_max = config.queue.depth_max
        self.flow.configure(config)

    def full(self, lane: Lane) -> bool:
        """Whether the lane has no place left."""
        return self.flow.depth(lane) >= self.depth_max

    def tickets(self) -> list[Ticket]:
        """Everybody who waits, by pool."""
        return [ticket for pool in self.flow.pools for ticket in self.flow.of_pool(pool)]

    def hold(self, ticket: Ticket, now: float, all_away: AllAway) -> None:
        """Let a ticket wait; for as long as its patience goes while its workers are away."""
        self.flow.push(ticket, now=now)
        if all_away(ticket, now):
            self.flow.spare(ticket, now)

    def expired(self, now: float, all_away: AllAway) -> Ticket | None:
        """The next that has waited too long; what is only late waits on while workers are away."""
        while (ticket := self.flow.expired(now)) is not None:
            if now >= ticket.queue_deadline_at or not all_away(ticket, now):
                self.flow.learn(ticket, now)
                return ticket
            self.flow.spare(ticket, now)
        return None

    def dispatches_per_s(self, lane: Lane, now: float) -> float:
        """Recent dispatches of the lane per second."""
        return self.dispatches[lane].per_s(now)

    def retry_after_s(self, ticket: Ticket, now: float) -> float:
        """Seconds after which the client of a refused ticket should come again."""
        return self.flow.retry_after_s(ticket, now=now, rng=self._rng)
