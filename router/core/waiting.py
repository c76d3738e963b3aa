"""The waiting room: one hold queue per lane, how fast each drains, and who is next over all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from random import Random

from router.contract import Lane
from router.core.drain_rate import DrainRate, retry_after_s
from router.core.pools import Pool
from router.core.queue import HoldQueue
from router.core.types import Ticket


class WaitingRoom:
    """Tickets that no worker has room for yet."""

    def __init__(self, depth_max: int, *, rng: Random) -> None:
        self._rng = rng
        self._queues = {lane: HoldQueue(depth_max) for lane in Lane}
        self._drains = {lane: DrainRate() for lane in Lane}
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def configure(self, depth_max: int) -> None:
        """Change how many may wait per lane; those who wait already may stay."""
        for queue in self._queues.values():
            queue.depth_max = depth_max

    def holds(self, pool: Pool) -> bool:
        """Whether a ticket of `pool` waits, so that a newcomer stands behind it."""
        return self._waiting > 0 and self._queues[pool.lane].holds(pool)

    def full(self, lane: Lane) -> bool:
        """Whether the lane's queue has no place left."""
        return self._queues[lane].full

    def push(self, ticket: Ticket) -> None:
        """Let `ticket` wait in its lane."""
        self._queues[ticket.lane].push(ticket)
        self._waiting += 1

    def remove(self, ticket: Ticket) -> bool:
        """Take `ticket` out; False when it does not wait."""
        if self._waiting and self._queues[ticket.lane].remove(ticket):
            self._waiting -= 1
            return True
        return False

    def pools(self) -> list[Pool]:
        """The pools for which tickets wait."""
        return [pool for queue in self._queues.values() for pool in queue.pools]

    def tickets(self) -> list[Ticket]:
        """Everybody who waits, by lane and pool."""
        return [
            ticket
            for queue in self._queues.values()
            for pool in queue.pools
            for ticket in queue.of_pool(pool)
        ]

    def offer(self, pools: Iterable[Pool], passed: Container[int]) -> Ticket | None:
        """Who is next among `pools`, less those in `passed`: over all lanes, first come first."""
        best: Ticket | None = None
        for queue in self._queues.values():
            ticket = queue.offer(pools, passed)
            if ticket is not None and (best is None or ticket.number < best.number):
                best = ticket
        return best

    def expired(self, now: float) -> Ticket | None:
        """Somebody who has waited too long, left in place."""
        for queue in self._queues.values():
            ticket = queue.expired(now)
            if ticket is not None:
                return ticket
        return None

    def next_deadline(self) -> float | None:
        """When the first one's patience ends."""
        moments = [queue.next_deadline() for queue in self._queues.values()]
        return min((at for at in moments if at is not None), default=None)

    def dispatched(self, lane: Lane, now: float) -> None:
        """One of the lane got a worker, after waiting or at once."""
        self._drains[lane].count(now)

    def drain_per_s(self, lane: Lane, now: float) -> float:
        """Recent dispatches of the lane per second."""
        return self._drains[lane].per_s(now)

    def retry_after_s(self, lane: Lane, now: float) -> float:
        """Seconds after which a refused client of the lane should come again."""
        return retry_after_s(
            queued=len(self._queues[lane]), drain_per_s=self.drain_per_s(lane, now), rng=self._rng
        )

    def queue(self, lane: Lane) -> HoldQueue:
        """The lane's queue, to look at."""
        return self._queues[lane]
