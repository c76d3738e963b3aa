"""How fast a router's line for a common limit may ask, so that routers get equal parts by tenant.

Routers tell each other, a few times a second, whose requests wait for a common limit and how much
the line was granted. A tenant that waits at n routers counts with a n-th of its weight at each. A
router's part of the limit is the weight of its tenants over that of all. One that gets more than
its part lets its line ask only so often that it gets its part and a little more; the others, who
then find more, are not held back. So the parts are kept without anybody knowing the limit's rate,
and as the paces add up to more than all that is granted, nothing is left lying.

One that waits and gets nothing holds the others back for some seconds at most, at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf
from typing import Final

from router.core.peers import PeerLine

_MORE: Final = 1.02  # of its part a router that is ahead may have
# Rates are those of about so many grants, but of no shorter and no longer time.
_GRANTS: Final = 30.0
_MEMORY_S_MIN, _MEMORY_S_MAX = 2.0, 60.0
# Who waits and gets nothing for so many grants' time, of these bounds, holds nobody back.
_IDLE_GRANTS: Final = 3.0
_IDLE_S_MIN, _IDLE_S_MAX = 1.0, 5.0
_LATE_S: Final = 0.02  # what timers and the store may be late, which is made up for


@dataclass(slots=True, eq=False)
class _Rate:
    """What one router's line was granted lately. Moments are of that router's clock."""

    line: PeerLine
    units: float = 0.0
    seconds: float = 0.0

    def saw(self, line: PeerLine, memory_s: float) -> float:
        """The line says more: returns the units that it was granted since."""
        passed_s, grew = line.at - self.line.at, line.granted - self.line.granted
        kept = exp(-passed_s / memory_s)
        self.units = self.units * kept + grew
        self.seconds = self.seconds * kept + passed_s
        self.line = line
        return grew

    @property
    def per_s(self) -> float:
        """Units per second; 0 while nothing is known."""
        return max(0.0, self.units / self.seconds) if self.seconds > 0 else 0.0


class LinePace:
    """What one line was granted, and when it may ask again."""

    __slots__ = (
        "_amount", "_due", "_granted_at", "_idle_s", "_moved_at", "_others", "_own", "_pace",
        "began", "granted", "sharers",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.began = now
        self.granted = 0.0  # units, since then
        self.sharers: dict[str, int] = {}  # routers at which a tenant waits, if several
        self._others: dict[str, _Rate] = {}
        self._own: _Rate | None = None
        self._pace = inf  # units per second
        self._due = now
        self._amount = 0.0
        self._idle_s = _IDLE_S_MIN
        self._granted_at = self._moved_at = now

    @property
    def is_held(self) -> bool:
        """Whether it is ahead of others that wait."""
        return self._pace < inf

    @property
    def is_shared(self) -> bool:
        """Whether others wait for the same, as was last heard."""
        return bool(self._others)

    def took(self, amount: float, now: float) -> None:
        """The line was granted so much."""
        self.granted += amount
        self._granted_at, self._amount = now, amount
        if self._pace < inf:
            gap_s = amount / self._pace
            due = max(self._due, now - max(gap_s, _LATE_S)) + gap_s
            self._due = min(due, now + max(gap_s, _IDLE_S_MIN))  # many may have asked at once

    @property
    def due(self) -> float:
        """When the line may ask, if it is held."""
        return min(self._due, max(self._granted_at, self._moved_at) + self._idle_s)

    def hear(self, own: PeerLine, others: Mapping[str, PeerLine], now: float) -> None:
        """This is how the line stands, and what other routers say of theirs, by name."""
        memory_s = self.memory_s
        if self._own is None:
            self._own = _Rate(own)
        else:
            self._own.saw(own, memory_s)
        self._hear_others(others, memory_s, now)
        self._idle_s = self._grants_s(_IDLE_GRANTS, _IDLE_S_MIN, _IDLE_S_MAX)
        before, self._pace = self._pace, self._new_pace(own)
        if before == inf:
            self._due = self._granted_at + self._amount / self._pace

    @property
    def memory_s(self) -> float:
        """Over how long rates are averaged."""
        return self._grants_s(_GRANTS, _MEMORY_S_MIN, _MEMORY_S_MAX)

    def _grants_s(self, grants: float, least_s: float, most_s: float) -> float:
        """The time of so many grants like the last, to all routers; between these bounds."""
        per_s = self._total_per_s()
        return min(most_s, max(least_s, grants * self._amount / per_s)) if per_s > 0 else least_s

    def _total_per_s(self) -> float:
        own = 0.0 if self._own is None else self._own.per_s
        return own + sum([other.per_s for other in self._others.values()])

    def _hear_others(self, told: Mapping[str, PeerLine], memory_s: float, now: float) -> None:
        before, self._others = self._others, {}
        for name, line in told.items():
            known = before.get(name)
            if known is None or known.line.began != line.began:
                known = _Rate(line)
                self._moved_at = now
            elif line.at > known.line.at and known.saw(line, memory_s):
                self._moved_at = now
            self._others[name] = known

    def _new_pace(self, own: PeerLine) -> float:
        """Units per second that the line may have; inf: it is not held back."""
        lines = [own, *[other.line for other in self._others.values()]]
        counts: dict[str, int] = {}
        for line in lines:
            for tenant in line.tenants:
                counts[tenant] = counts.get(tenant, 0) + 1
        self.sharers = {tenant: counts[tenant] for tenant in own.tenants if counts[tenant] > 1}
        if len(lines) == 1 or not own.tenants or self._own is None:
            return inf
        weights = [
            line.more + sum([weight / counts[tenant] for tenant, weight in line.tenants.items()])
            for line in lines
        ]
        part, total_per_s = weights[0] / sum(weights), self._total_per_s()
        if self._own.per_s <= part * total_per_s:
            return inf
        return _MORE * part * total_per_s
