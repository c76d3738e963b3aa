"""The waiting room: who waits for a worker, who is next, and how long the refused stay away."""

from __future__ import annotations

from random import Random
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.fading import FadingRate
from router.core.flow import FlowQueue
from router.core.pools import Pool
from router.core.types import Ticket

_MEMORY_S: Final = 10.0  # of the rate of dispatches


class Round:
    """One round of offers: what was freed is filled, in the order of flow control.

    A ticket that does not fit is passed over for others that may, up to `lookahead_max` of them;
    one that was passed too often closes its pool until it is served, so that it is not starved.
    """

    def __init__(self, flow: FlowQueue, pools: list[Pool]) -> None:
        self._flow = flow
        self.pools = pools
        self._passed: dict[int, Ticket] = {}

    def next(self, now: float) -> Ticket | None:
        """Who is to be tried next; None when the round is over."""
        settings = self._flow.settings
        if not self.pools or len(self._passed) >= settings.lookahead_max:
            return None
        return self._flow.offer(self.pools, self._passed, now=now)

    def passed(self, ticket: Ticket) -> None:
        """`ticket` found no room."""
        if ticket.skips >= self._flow.settings.skips_max and not ticket.tried:
            self.pools.remove(ticket.pool)
        else:
            self._passed[ticket.number] = ticket

    def served(self) -> None:
        """A ticket was dispatched ahead of those that were passed."""
        for ticket in self._passed.values():
            ticket.skips += 1

    def end(self) -> None:
        """Put back what was moved aside."""
        self._flow.end_round()


class WaitingRoom:
    """Tickets that no worker has room for yet."""

    def __init__(self, config: Config, *, rng: Random) -> None:
        self._rng = rng
        self.flow = FlowQueue(config)
        self._dispatches = {lane: FadingRate(_MEMORY_S) for lane in Lane}
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

    def dispatched(self, lane: Lane, now: float) -> None:
        """One of the lane got a worker, after waiting or at once."""
        self._dispatches[lane].add(1, now)

    def dispatches_per_s(self, lane: Lane, now: float) -> float:
        """Recent dispatches of the lane per second."""
        return self._dispatches[lane].per_s(now)

    def retry_after_s(self, ticket: Ticket, now: float) -> float:
        """Seconds after which the client of a refused ticket should come again."""
        return self.flow.retry_after_s(ticket, now=now, rng=self._rng)
