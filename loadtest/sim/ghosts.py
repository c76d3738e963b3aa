"""Was Retry-After right? What a refused request would have waited, told by its ghost.

A ghost stands in the queue where its request would have stood, costs nothing and delays nobody.
While it is on time it stands in its tenant's line in its class, for its pool. Once all that stand
before it have left, the first dispatch serves it that fair queueing puts behind it, or one from a
lower class when nobody else on time waits above. When it is late it stands among the late ones.
When nobody waits any more, the next dispatch serves all. A small prompt finds room wherever
anything does; a long one's ghost takes the place of one as long, an elephant's that of any
elephant. A ghost that is served by none of these within its longest wait has waited just that long.
Places in a line and tags of fair queueing are those of `router.core.flow`, followed from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from router.core.drain import LATE
from router.core.flow import WAIT_PER_PREFILL
from router.core.pools import Pool
from router.core.types import Priority, Ticket
from router.errors import retry_after_value

_SMALL: Final = 1 / 3  # of an elephant
_LEAST_S: Final = 1.0  # no Retry-After is below: shorter waits count as this long
_CLASSES: Final = list(Priority)
_P0: Final = Priority.P0
_Line = tuple[Priority, str, Pool]


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

    def corrected(self, tenant: str, difference: float) -> None:
        """The cost of what the tenant was served turned out to be another."""
        if tenant in self.ends:
            self.ends[tenant] += difference


@dataclass(frozen=True, slots=True)
class Told:
    """What a refused client was told, and what would have happened."""

    priority: Priority
    told_s: float
    wait_s: float

    @property
    def within_factor_2(self) -> bool:
        """Whether the real wait was between half and twice of what the header said."""
        return 0.5 <= retry_after_value(self.told_s) / max(_LEAST_S, self.wait_s) <= 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _Ghost:
    line: _Line
    number: int  # higher ones came later
    place_at: float  # those with a lower one stand before it
    at: float
    late_at: float
    told_s: float
    since: float  # V when it came
    prefill_s: float  # what a dispatch must bring to take its place
    wait_s_max: float


class Ghosts:
    """Follows one router's queue from outside and keeps the ghosts of those it refused."""

    def __init__(self, waits_s_max: Sequence[float], *, elephant_s: float) -> None:
        self.told: list[Told] = []
        self._waits_s_max = waits_s_max
        self._elephant_s = elephant_s
        self._fair = {priority: _Fair() for priority in Priority}
        self._charged: dict[int, _Fair] = {}  # where a ticket's cost was counted, until it is known
        self._newest = 0  # the highest number of a ticket so far
        self._since: dict[_Line, float] = {}  # V when its line was begun
        self._waiting: set[int] = set()
        # Heaps of those that wait on time, by class and line; who left or was relegated is
        # dropped when met.
        self._lines: list[dict[_Line, list[tuple[float, int, Ticket]]]] = [{} for _ in Priority]
        self._on_time: dict[_Line, list[_Ghost]] = {}
        self._late: list[tuple[float, int, _Ghost]] = []  # a heap by place
        self._entries = 0

    def queued(self, ticket: Ticket) -> None:
        """A ticket waits."""
        name = _line_of(ticket)
        priority = name[0]
        self._newest = max(self._newest, ticket.number)
        if self._first_on_time(name) is None:
            self._since[name] = self._fair[priority].clock
        line = self._lines[priority].setdefault(name, [])
        heappush(line, (ticket.place_at, ticket.number, ticket))
        self._waiting.add(ticket.number)

    def left(self, ticket: Ticket) -> None:
        """A ticket waits no more, if it did."""
        self._waiting.discard(ticket.number)

    def refused(self, ticket: Ticket, retry_after_s: float, *, now: float) -> None:
        """A client was told to come again: its ghost queues up as if it came now."""
        late_after_s = ticket.late_at - ticket.arrived_at
        self._newest = max(self._newest, ticket.number)
        ghost = _Ghost(
            _line_of(ticket),
            self._newest,
            now + WAIT_PER_PREFILL * ticket.prefill_s,
            now,
            now + late_after_s,
            retry_after_s,
            self._fair[ticket.spec.priority].clock,
            self._room_s(ticket.prefill_s),
            min(self._waits_s_max[ticket.spec.priority], ticket.ttl_s),
        )
        self._on_time.setdefault(ghost.line, []).append(ghost)

    def dispatched(self, ticket: Ticket, *, now: float) -> None:
        """A ticket got a worker: so did the ghosts that stood before it."""
        self._newest = max(self._newest, ticket.number)
        tag = self._tag_of(ticket)
        empty = not self._waiting
        for line, ghosts in list(self._on_time.items()):
            left = [g for g in ghosts if not self._settled(g, ticket, tag, now, empty=empty)]
            self._on_time[line] = left
            if not left:
                del self._on_time[line]
        while self._late:
            place_at, _, ghost = self._late[0]
            passed = ticket.band == LATE and ticket.place_at > place_at
            passed = passed and ticket.prefill_s >= ghost.prefill_s
            if not (empty or passed or self._is_over(ghost, now)):
                break
            heappop(self._late)
            self._tell(ghost, now)

    def ended(self, ticket: Ticket, cost: float) -> None:
        """The real cost of a ticket that was dispatched is known: its tenant's account follows."""
        fair, priority = self._charged.pop(ticket.number, None), ticket.spec.priority
        if fair is not None and fair is self._fair[priority]:
            fair.corrected(ticket.spec.tenant, cost - ticket.cost)

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
        priority, tenant, _ = line = _line_of(ticket)
        fair = self._fair[priority]
        tag = fair.tag(tenant, self._since.get(line, fair.clock))
        if not self._waits_above(priority, priority):
            self._fair[priority] = _Fair()  # nobody waits, so nobody has a claim
        elif ticket.band != LATE:
            fair.served(tenant, tag, ticket.cost)
            self._charged[ticket.number] = fair
        return tag

    def _room_s(self, prefill_s: float) -> float:
        """The prefill of a dispatch that finds room where one of `prefill_s` would, too."""
        small = prefill_s <= _SMALL * self._elephant_s
        return 0.0 if small else min(prefill_s, self._elephant_s)

    def _waits_above(self, first: Priority, last: Priority) -> bool:
        """Whether somebody waits on time in the classes from `first` to `last`."""
        return any(self._waits_in(priority) for priority in _CLASSES[first : last + 1])

    def _waits_in(self, priority: Priority) -> bool:
        """Whether somebody waits on time in a class; lines found empty are dropped."""
        lines = self._lines[priority]
        while lines:
            name = next(iter(lines))
            if self._first_on_time(name) is not None:
                return True
            del lines[name]
        return False

    def _settled(
        self, ghost: _Ghost, ticket: Ticket, tag: float, now: float, *, empty: bool
    ) -> bool:
        """Whether the ghost has left its line: served, timed out or late."""
        if not empty and now >= ghost.late_at and not self._is_over(ghost, now):
            self._entries += 1
            heappush(self._late, (ghost.place_at, self._entries, ghost))
            return True
        if not (empty or self._is_over(ghost, now) or self._has_its_turn(ghost, ticket, tag)):
            return False
        self._tell(ghost, now)
        return True

    def _has_its_turn(self, ghost: _Ghost, ticket: Ticket, tag: float) -> bool:
        """Whether a ghost on time would have been sent instead of `ticket`."""
        priority, tenant, _ = ghost.line
        first = self._first_on_time(ghost.line)
        if ticket.prefill_s < ghost.prefill_s or (first is not None and first <= ghost.place_at):
            return False
        if _line_of(ticket) == ghost.line and ticket.band != LATE:
            return ticket.place_at > ghost.place_at
        if ticket.band == priority:
            own = self._fair[priority].tag(tenant, ghost.since)
            return tag > own or (tag == own and ticket.number > ghost.number)
        return ticket.band > priority and not self._waits_above(_P0, priority)

    def _first_on_time(self, name: _Line) -> float | None:
        """The lowest place of those that wait on time in a line."""
        line = self._lines[name[0]].get(name)
        while line:
            place_at, number, ticket = line[0]
            if number in self._waiting and ticket.band != LATE:
                return place_at
            heappop(line)
        return None

    def _is_over(self, ghost: _Ghost, now: float) -> bool:
        return now - ghost.at >= ghost.wait_s_max

    def _tell(self, ghost: _Ghost, now: float) -> None:
        priority = ghost.line[0]
        wait_s = min(now - ghost.at, ghost.wait_s_max)
        self.told.append(Told(priority, ghost.told_s, wait_s))


def _line_of(ticket: Ticket) -> _Line:
    return ticket.spec.priority, ticket.spec.tenant, ticket.pool
