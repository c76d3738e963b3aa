"""A small queue in virtual time to try estimates of waiting times on.

Lines by band with strict order and guaranteed shares, a late line by age, several servers whose
speed wanders, Poisson arrivals with bursts, costs with a long tail, a bounded queue. A request that
is refused leaves a ghost behind that costs nothing: when the ghost is served tells how long the
refused request would have waited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from router.config import Config
from router.core.drain import LATE, DrainEstimator, Forecast
from router.core.types import Priority

MIX = (0.2, 0.45, 0.3, 0.05)
PER_S = 40.0  # requests per second at load 1; the servers do one unit of cost per second
SERVERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What the queue is put through."""

    load: float
    burst: float = 1.0  # times the load, for 20 of each 60 s
    wander: bool = True  # the servers' speed changes every 10 to 25 s, 0.5 to 1.3
    tail: float = 1.0  # sigma of the log of costs
    depth: int = 200
    relegate: bool = True


@dataclass(slots=True, eq=False)
class Visit:
    """One request, or the ghost of a refused one."""

    band: Priority
    cost: float
    at: float
    late_at: float
    line: int
    ghost: bool = False
    forecast: Forecast | None = None
    told_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Told:
    """What a refused client was told, and what would have happened."""

    band: Priority
    told_s: float
    wait_s: float


class QueueWorld:
    """Plays conditions against an estimator."""

    def __init__(self, conditions: Conditions, *, seed: int) -> None:
        ratio = 0.95 if conditions.relegate else 0
        self.config = Config.model_validate({"queue": {"relegate_ratio": ratio}})
        self.estimator = DrainEstimator(self.config)
        self.told: list[Told] = []
        self._c = conditions
        self._classes = self.config.classes.by_priority
        self._rng = Random(seed)
        self._jitter = Random(f"{seed}/jitter")
        self._lines: list[deque[Visit]] = [deque() for _ in range(LATE + 1)]
        self._owed = [0.0] * LATE
        self._cost_max = [0.0] * LATE
        self._waiting = 0
        self._free = SERVERS
        self._speed = 1.0
        self._now = self._told_until = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def play(self, *, measured_s: float = 120.0) -> list[Told]:
        """Refusals of the first `measured_s` seconds; the queue lives on for a minute."""
        self._at(0.0, self._arrive)
        if self._c.wander:
            self._at(self._rng.uniform(5, 15), self._wander)
        end, self._told_until = measured_s + 60, measured_s
        while self._heap[0][0] < end:
            self._now, _, action = heappop(self._heap)
            action()
        return self.told

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        self._order += 1
        heappush(self._heap, (moment, self._order, action))

    def _wander(self) -> None:
        self._speed = self._rng.uniform(0.5, 1.3)
        self._at(self._now + self._rng.uniform(10, 25), self._wander)

    def _arrive(self) -> None:
        c, now, rng = self._c, self._now, self._rng
        load = c.load * (c.burst if 20 <= now % 60 < 40 else 1)
        self._at(now + rng.expovariate(load * PER_S), self._arrive)
        band = Priority(rng.choices(range(LATE), MIX)[0])
        cost = rng.lognormvariate(-(c.tail**2) / 2, c.tail) / PER_S
        late_at = now + 0.95 * self._classes[band].ttft_target_s
        visit = Visit(band, cost, now, late_at, band)
        if self._free and not self._waiting:
            self._start(visit)
            return
        visit.forecast = self.estimator.forecast(band, now=now)
        if self._waiting >= c.depth:
            visit.ghost, visit.cost = True, 0.0
            visit.told_s = self.estimator.retry_after_s(band, now=now, rng=self._jitter)
        else:
            self._waiting += 1
            self.estimator.enter(band, cost, now=now)
        self._lines[band].append(visit)
        self._cost_max[band] = max(self._cost_max[band], visit.cost)

    def _start(self, visit: Visit) -> None:
        self._free -= 1
        self._at(self._now + visit.cost * SERVERS / self._speed, self._done)

    def _done(self) -> None:
        self._free += 1
        while self._free:
            self._age()
            line = self._next_line()
            if line is None:
                return
            visit = self._lines[line].popleft()
            self._leave(visit, self._now - visit.at)
            if not visit.ghost:
                self._charge(visit)
                self._start(visit)

    def _age(self) -> None:
        if self._c.relegate:
            late = []
            for band in range(LATE):
                while self._lines[band] and self._lines[band][0].late_at <= self._now:
                    late.append(self._lines[band].popleft())
            for visit in late:
                if not visit.ghost:
                    self.estimator.move(visit.line, LATE, visit.cost, now=self._now)
                visit.line = LATE
            if late:
                both = sorted([*self._lines[LATE], *late], key=lambda visit: visit.at)
                self._lines[LATE] = deque(both)
        for line in self._lines:
            while line and self._now - line[0].at > self.config.waits_s_max[line[0].band]:
                visit = line.popleft()
                self._leave(visit, self.config.waits_s_max[visit.band])

    def _leave(self, visit: Visit, waited_s: float) -> None:
        if visit.ghost:
            if visit.at < self._told_until:
                self.told.append(Told(visit.band, visit.told_s, waited_s))
            return
        self._waiting -= 1
        self.estimator.leave(visit.line, visit.cost, now=self._now)
        self.estimator.learn(
            visit.band, visit.forecast, waited_s=waited_s, line=visit.line, now=self._now
        )

    def _charge(self, visit: Visit) -> None:
        if visit.line == LATE:
            return
        for band in range(LATE):
            share = self._classes[band].share_min
            most = 4 * self._cost_max[band]
            owed = min(most, self._owed[band] + share * visit.cost)
            self._owed[band] = owed if self._lines[band] else 0.0
        self._owed[visit.line] = max(0.0, self._owed[visit.line] - visit.cost)

    def _next_line(self) -> int | None:
        best, most = None, -1.0
        for band in range(LATE):
            line, owed = self._lines[band], self._owed[band]
            if line and owed and owed >= line[0].cost:
                surplus = (owed - line[0].cost) / self._classes[band].share_min
                if surplus > most:
                    best, most = band, surplus
        if best is not None:
            return best
        return next((n for n, line in enumerate(self._lines) if line), None)
