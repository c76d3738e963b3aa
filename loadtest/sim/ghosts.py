"""Was Retry-After right? What a refused request would have waited, told by its ghost.

A ghost stands in the queue where its request would have stood, costs nothing and delays nobody.
While it is on time it stands at the end of its tenant's line in its class. Once all that stood
before it have left, the first dispatch serves it that fair queueing puts behind it, or one from a
lower class when nobody else on time waits above. When it is late it stands among the late ones by
age. When nobody waits any more, the next dispatch serves all. An elephant's ghost takes the place
of elephants only. A ghost that is served by none of these within its class's longest wait has
waited just that long. Tags of fair queueing are those of `router.core.flow`, followed from outside.
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


class _Fair:
    """Start-time fair queueing of one class: V, and F by tenant."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.ends: dict[str, float] = {}

    def tag(self, tenant: str, since: float) -> float:
        """The tag of a line that was begun when V was `since`."""
        return max(since, self.ends.get(tenant, 0.0))

    def served(self, tenant: str, tag: float, cost: float) -> None:
        """Count a dispatch with that tag."""
        self.clock = max(self.clock, tag)
        self.ends[tenant] = tag + cost


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
    since: float  # V when it came
    prefill_s: float  # what a dispatch must bring to take its place


class Ghosts:
    """Follows one router's queue from outside and keeps the ghosts of those it refused."""

    def __init__(self, waits_s_max: Sequence[float], *, elephant_s: float) -> None:
        self.told: list[Told] = []
        self._waits_s_max = waits_s_max
        self._elephant_s = elephant_s
        self._fair = {priority: _Fair() for priority in Priority}
        self._since: dict[_Line, float] = {}  # V when its line was begun
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
        if not line:
            self._since[_line_of(ticket)] = self._fair[ticket.spec.priority].clock
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
        ghost = _Ghost(
            _line_of(ticket),
            number,
            now,
            now + late_after_s,
            retry_after_s,
            self._fair[ticket.spec.priority].clock,
            self._elephant_s if ticket.prefill_s > self._elephant_s else 0.0,
        )
        self._on_time.setdefault(ghost.line, deque()).append(ghost)

    def dispatched(self, ticket: Ticket, *, now: float) -> None:
        """A ticket got a worker: so did the ghosts that stood before it."""
        tag = self._tag_of(ticket)
        empty = not self._waiting
        for line, ghosts in list(self._on_time.items()):
            while ghosts and self._settled(ghosts[0], ticket, tag, now, empty=empty):
                ghosts.popleft()
            if not ghosts:
                del self._on_time[line]
        while self._late:
            arrived_at, _, ghost = self._late[0]
            passed = ticket.band == LATE and ticket.arrived_at > arrived_at
            passed = passed and ticket.prefill_s >= ghost.prefill_s
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

    def _tag_of(self, ticket: Ticket) -> float:
        """The tag with which `ticket` was dispatched; its class's account moves on."""
        priority, tenant = line = _line_of(ticket)
        fair = self._fair[priority]
        tag = fair.tag(tenant, self._since.get(line, fair.clock))
        if not self._waits_above(priority, priority):
            self._fair[priority] = _Fair()  # nobody waits, so nobody has a claim
        elif ticket.band != LATE:
            fair.served(tenant, tag, ticket.cost)
        return tag

    def _waits_above(self, first: Priority, last: Priority) -> bool:
        """Whether somebody waits on time in the classes from `first` to `last`."""
        return any(
            first <= line[0] <= last and self._oldest_on_time(line) is not None
            for line in self._lines
        )

    def _settled(
        self, ghost: _Ghost, ticket: Ticket, tag: float, now: float, *, empty: bool
    ) -> bool:
        """Whether the ghost at the head of its line has left it: served, timed out or late."""
        if not empty and now >= ghost.late_at and not self._is_over(ghost, now):
            self._entries += 1
            heappush(self._late, (ghost.at, self._entries, ghost))
            return True
        if not (empty or self._is_over(ghost, now) or self._has_its_turn(ghost, ticket, tag)):
            return False
        self._tell(ghost, now)
        return True

    def _has_its_turn(self, ghost: _Ghost, ticket: Ticket, tag: float) -> bool:
        """Whether a ghost on time would have been sent instead of `ticket`."""
        priority, tenant = ghost.line
        oldest = self._oldest_on_time(ghost.line)
        if ticket.prefill_s < ghost.prefill_s or (oldest is not None and oldest <= ghost.number):
            return False
        if _line_of(ticket) == ghost.line and ticket.band != LATE:
            return ticket.number > ghost.number
        if ticket.band == priority:
            return tag >= self._fair[priority].tag(tenant, ghost.since)
        return ticket.band > priority and not self._waits_above(Priority.P0, priority)

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
