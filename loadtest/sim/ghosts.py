"""Was Retry-After right? What a refused request would have waited, told by its ghost.

A ghost stands in the queue where its request would have stood, costs nothing and delays nobody.
While it is on time it stands at the end of its tenant's line in its class, and is served by the
first dispatch from there or from below once all that stood before it have left. When it is late it
stands among the late ones by age. When nobody waits any more, the next dispatch serves all. A ghost
that is served by none of these within its class's longest wait has waited just that long.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from router.core.drain import LATE
from router.core.types import Priority, Ticket

_LEAST_S: Final = 1.0  # no Retry-After is below: shorter waits count as this long
_Line = tuple[Priority, str]


@dataclass(frozen=True, slots=True)
class Told:
    """What a refused client was told, and what would have happened."""

    priority: Priority
    told_s: float
    wait_s: float

    @property
    def within_factor_2(self) -> bool:
        """Whether the real wait was between half and twice of what was said."""
        return 0.5 <= self.told_s / max(_LEAST_S, self.wait_s) <= 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _Ghost:
    line: _Line
    number: int  # of the request: those with a lower one stood before it
    at: float
    late_at: float
    told_s: float


class Ghosts:
    """Follows one router's queue from outside and keeps the ghosts of those it refused."""

    def __init__(self, waits_s_max: Sequence[float]) -> None:
        self.told: list[Told] = []
        self._waits_s_max = waits_s_max
        self._waiting: set[int] = set()
        # Those that wait on time, by line; relegated ones are dropped when met.
        self._lines: dict[_Line, OrderedDict[int, Ticket]] = {}
        self._last = 0  # the highest number seen
        self._on_time: dict[_Line, deque[_Ghost]] = {}
        self._late: list[tuple[float, int, _Ghost]] = []  # by age
        self._entries = 0

    def queued(self, ticket: Ticket) -> None:
        """A ticket waits."""
        self._last = max(self._last, ticket.number)
        line = self._lines.setdefault(_line_of(ticket), OrderedDict())
        line[ticket.number] = ticket
        self._waiting.add(ticket.number)

    def left(self, ticket: Ticket) -> None:
        """A ticket waits no more, if it did."""
        if ticket.number in self._waiting:
            self._waiting.remove(ticket.number)
            self._lines[_line_of(ticket)].pop(ticket.number, None)

    def refused(self, ticket: Ticket, retry_after_s: float, *, now: float) -> None:
        """A client was told to come again: its ghost queues up as if it came now."""
        late_after_s = ticket.late_at - ticket.arrived_at
        self._last = number = max(self._last, ticket.number)
        ghost = _Ghost(_line_of(ticket), number, now, now + late_after_s, retry_after_s)
        self._on_time.setdefault(ghost.line, deque()).append(ghost)

    def dispatched(self, ticket: Ticket, *, now: float) -> None:
        """A ticket got a worker: so did the ghosts that stood before it."""
        if not self._on_time and not self._late:
            return
        empty = not self._waiting
        for line, ghosts in list(self._on_time.items()):
            while ghosts and self._settled(ghosts[0], ticket, now, empty=empty):
                ghosts.popleft()
            if not ghosts:
                del self._on_time[line]
        while self._late:
            arrived_at, _, ghost = self._late[0]
            passed = ticket.band == LATE and ticket.arrived_at > arrived_at
            if not (empty or passed or self._is_over(ghost, now)):
                break
            heappop(self._late)
            self._tell(ghost, now)

    def end(self, now: float) -> list[Told]:
        """The run is over: of those that still stand there, tell the ones that timed out."""
        for ghost in (*(g for line in self._on_time.values() for g in line), *self._late_ghosts()):
            if self._is_over(ghost, now):
                self._tell(ghost, now)
        return self.told

    def _late_ghosts(self) -> list[_Ghost]:
        return [ghost for _, _, ghost in self._late]

    def _settled(self, ghost: _Ghost, ticket: Ticket, now: float, *, empty: bool) -> bool:
        """Whether the ghost at the head of its line has left it: served, timed out or late."""
        if not empty and now >= ghost.late_at and not self._is_over(ghost, now):
            self._entries += 1
            heappush(self._late, (ghost.at, self._entries, ghost))
            return True
        oldest = self._oldest_on_time(ghost.line)
        free = oldest is None or oldest > ghost.number
        if not (empty or self._is_over(ghost, now) or (free and ticket.band >= ghost.line[0])):
            return False
        self._tell(ghost, now)
        return True

    def _oldest_on_time(self, name: _Line) -> int | None:
        line = self._lines.get(name, OrderedDict[int, Ticket]())
        while line:
            number, ticket = next(iter(line.items()))
            if ticket.band != LATE:
                return number
            del line[number]
        return None

    def _is_over(self, ghost: _Ghost, now: float) -> bool:
        return now - ghost.at >= self._waits_s_max[ghost.line[0]]

    def _tell(self, ghost: _Ghost, now: float) -> None:
        priority = ghost.line[0]
        wait_s = min(now - ghost.at, self._waits_s_max[priority])
        self.told.append(Told(priority, ghost.told_s, wait_s))


def _line_of(ticket: Ticket) -> _Line:
    return ticket.spec.priority, ticket.spec.tenant
