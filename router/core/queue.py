"""The hold queue of one lane: requests wait here until a worker can really take them.

First in, first out within a pool (the workers of one model); a pool whose workers are full never
blocks another's tickets, as the dispatcher asks for the next ticket among the pools that it can
still serve. A ticket whose client leaves is taken out at once and its place is free.
A QoS queue may replace this one: the dispatcher uses only what is public here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from heapq import heapify, heappop, heappush

from router.core.pools import Pool
from router.core.types import Ticket

_Deadline = tuple[float, int, Ticket]
_EMPTY: OrderedDict[int, Ticket] = OrderedDict()


class HoldQueue:
    """Waiting tickets by pool, at most `depth_max` in all."""

    def __init__(self, depth_max: int) -> None:
        self.depth_max = depth_max
        # Ordered dicts, as a plain dict's first key takes linear time once its front is deleted.
        self._waiting: dict[Pool, OrderedDict[int, Ticket]] = {}
        self._arrivals: OrderedDict[int, Ticket] = OrderedDict()
        self._deadlines: list[_Deadline] = []

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def full(self) -> bool:
        """Whether another ticket would be one too many."""
        return len(self._arrivals) >= self.depth_max

    def holds(self, pool: Pool) -> bool:
        """Whether a ticket of `pool` waits here."""
        return pool in self._waiting

    @property
    def pools(self) -> list[Pool]:
        """The pools for which tickets wait."""
        return list(self._waiting)

    def push(self, ticket: Ticket) -> None:
        """Add a ticket by its arrival: one that was retried goes ahead of those that came later."""
        _insert(self._waiting.setdefault(ticket.pool, OrderedDict()), ticket)
        _insert(self._arrivals, ticket)
        heappush(self._deadlines, (ticket.queue_deadline_at, ticket.number, ticket))

    def remove(self, ticket: Ticket) -> bool:
        """Take `ticket` out, wherever it stands; False when it is not here."""
        if self._arrivals.pop(ticket.number, None) is None:
            return False
        line = self._waiting[ticket.pool]
        del line[ticket.number]
        if not line:
            del self._waiting[ticket.pool]
        if len(self._deadlines) > 2 * len(self._arrivals) + 64:
            self._forget_gone()
        return True

    def offer(self, pools: Iterable[Pool], passed: Container[int]) -> Ticket | None:
        """The next ticket to serve among `pools`, left in place; None when none waits.

        Tickets whose number is in `passed` (few) are passed over.
        """
        best: Ticket | None = None
        for pool in pools:
            for head in self._waiting.get(pool, _EMPTY).values():
                if head.number not in passed:
                    if best is None or head.number < best.number:
                        best = head
                    break
        return best

    def expired(self, now: float) -> Ticket | None:
        """A ticket that has waited too long, left in place; None when there is none."""
        deadline = self.next_deadline()
        return self._deadlines[0][2] if deadline is not None and deadline <= now else None

    def next_deadline(self) -> float | None:
        """When the first waiting ticket's patience ends."""
        heap = self._deadlines
        while heap and heap[0][1] not in self._arrivals:
            heappop(heap)
        return heap[0][0] if heap else None

    def of_pool(self, pool: Pool) -> list[Ticket]:
        """All tickets that wait for `pool`, first in first."""
        return list(self._waiting.get(pool, _EMPTY).values())

    def oldest_arrival_at(self) -> float | None:
        """When the ticket that waits longest came."""
        return next(iter(self._arrivals.values())).arrived_at if self._arrivals else None

    def _forget_gone(self) -> None:
        self._deadlines = [entry for entry in self._deadlines if entry[1] in self._arrivals]
        heapify(self._deadlines)


def _insert(line: OrderedDict[int, Ticket], ticket: Ticket) -> None:
    late = bool(line) and ticket.number < next(reversed(line))
    line[ticket.number] = ticket
    if late:
        # Only retried tickets come late, so few stand before them.
        earlier = []
        for number in line:
            if number >= ticket.number:
                break
            earlier.append(number)
        for number in (ticket.number, *reversed(earlier)):
            line.move_to_end(number, last=False)
