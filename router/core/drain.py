"""How long a client that is refused should stay away, learnt from those that waited.

Waiting work stands in lines: one per band, and the late line of requests that missed their target.
What leaves each line (served, timed out, abandoned) is measured, as cost per second in which
something waited there; so is what comes in. Of two views of a band's wait the shorter one holds:

    its own line      cost in the line / speed of the line
    the whole queue   cost in it and above / (speed of all - cost that keeps coming in above)

The first knows what strict order and guarantees leave to the band while things stay as they are,
the second sees at once that a burst above it is over. No wait is longer than the longest one of the
class: after that everything that waits now has gone. A request that would stand in its band for
longer than it can be in time ends in the late line, so it waits for that one. Where requests are
relegated, what a refused one is told depends on its own place (`flow`); from here it has the speed
at which prompts are sent.

Errors that stay (costs that are estimated too high, tenants of unequal weight) are learnt: each
line has a factor actual / predicted, averaged over the logarithms of the last minutes of real
waits. Averages are over time and not over requests, so a burst that leaves the queue at once counts
once. Source: 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import exp, inf, log
from random import Random
from typing import Final

from router.config import Config
from router.core.types import Priority

LATE: Final = len(Priority)  # the line behind all bands, as in flow
_LINES: Final = LATE + 1
_ALL: Final = _LINES  # the speed of all lines together
_ABOVE: Final = tuple(slice(band) for band in range(LATE))  # the bands above a band
_TICK_S: Final = 0.05  # averages fade no more often than this
_KNOWN_AT_S: Final = 0.2  # a speed measured for less is unknown
_RETRY_AFTER_S_MIN: Final = 1.0
SHORT_S: Final = 2.0  # is within a factor of two of all waits up to 4 s: none counts as below 1 s
_FACTOR_LOG_MAX: Final = log(3.0)  # a factor beyond it would be a fault, not a correction
_ERROR_LOG_MAX: Final = 1.0  # of one wait, so that a freak does not rule
_EQUAL_S: Final = 0.1  # waits below this do not differ
_LEAST_S: Final = 0.05  # what a shorter wait counts as in a ratio
_WEIGHT_MAX: Final = 0.05  # of a single wait


class Left(Enum):
    """How a ticket left its line, by what that tells of speeds."""

    WAITED = auto()  # served, timed out or abandoned after a wait
    PASSED = auto()  # served when it came: nothing of how fast those move that wait in its line
    MOVED = auto()  # goes on to wait elsewhere: nothing
    EVICTED = auto()  # gave way at the end of its line; in the late line nobody gets ahead by that


# Members of enums are found slowly; these are asked for whenever somebody leaves.
WAITED: Final = Left.WAITED
PASSED: Final = Left.PASSED
_MOVED: Final = Left.MOVED
_EVICTED: Final = Left.EVICTED


@dataclass(slots=True, init=False)
class Forecast:
    """What a request was predicted to wait, uncorrected: in its band, and if it falls behind."""

    on_time_s: float
    late_s: float

    def __init__(self, on_time_s: float, late_s: float) -> None:
        self.on_time_s = on_time_s
        self.late_s = late_s


class DrainEstimator:
    """Waiting cost and its speed, by line. One per set of requests that compete for workers.

    Tell it of every ticket that enters, changes or leaves a line, with its cost at that time; that
    is a few additions. Averages fade at ticks, so what is told of a tick shows when it is over.
    """

    def __init__(self, config: Config) -> None:
        self._cost = [0.0] * _LINES  # waiting now
        self._waiting = [0] * (_LINES + 1)
        self._busy_since = [0.0] * (_LINES + 1)  # while something waits
        self._new_left = [0.0] * (_LINES + 1)  # since the last tick
        self._new_busy_s = [0.0] * (_LINES + 1)
        self._left = [0.0] * (_LINES + 1)  # cost that left lately, fading
        self._busy_s = [0.0] * (_LINES + 1)  # time in which it did, fading alike
        self._new_prefill_s = 0.0  # since the last tick
        self._prefill_s = 0.0  # that was sent lately, fading as what left all lines
        self._came = [0.0] * _LINES  # cost that came lately, fading
        self._came_s = 0.0  # time in which it did, fading alike
        self._speeds: list[tuple[float, float]] = []  # by band: of its line, of the whole queue
        self._late_speed = 0.0
        self._factor_log = [0.0] * _LINES
        self._learnt_at = [-inf] * _LINES
        self._at = -inf  # the last tick
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings; what was measured stays."""
        self._settings = config.drain
        classes = config.classes.by_priority
        # Only the fair order relegates.
        ratio = config.queue.relegate_ratio if config.queue.order == "fair" else 0.0
        self._late_after_s = [ratio * c.ttft_target_s if ratio else inf for c in classes]
        self._wait_s_max = [min(s, config.drain.retry_after_s_max) for s in config.waits_s_max]
        self._shares: Sequence[float] = [c.share_min for c in classes]
        self._weigh()

    def set_shares(self, shares: Sequence[float]) -> None:
        """Take over minimum shares of the dispatched cost, by band."""
        self._shares = shares

    # What happens to tickets.

    def enter(self, line: int, cost: float, *, now: float) -> None:
        """A ticket waits in `line`, a band or LATE."""
        if now - self._at >= _TICK_S:
            self._tick(now)
        self._put(line, cost, now)
        self._count(_ALL, 1, now)

    def move(self, old: int, new: int, cost: float, *, now: float) -> None:
        """A ticket changed its line: relegated, or promoted. It has not left."""
        if now - self._at >= _TICK_S:
            self._tick(now)
        self._take(old, cost, now)
        self._put(new, cost, now)

    def leave(self, line: int, cost: float, *, now: float, left: Left = Left.WAITED) -> None:
        """A ticket waits no more, in the way of `left`."""
        if now - self._at >= _TICK_S:
            self._tick(now)
        self._take(line, cost, now)
        self._count(_ALL, -1, now)
        if left is _MOVED or (left is _EVICTED and line == LATE):
            return
        if left is not PASSED:
            self._new_left[line] += cost
        self._new_left[_ALL] += cost

    def learn(
        self, band: Priority, forecast: Forecast | None, *, waited_s: float, line: int, now: float
    ) -> None:
        """A ticket that got `forecast` when it came was served from `line`, or timed out there.

        Falling behind says of its band only that the wait there was too long, not how long.
        """
        if forecast is None:
            return
        if line != LATE:
            self._correct(band, forecast.on_time_s, waited_s, now)
            return
        late_after_s = self._late_after_s[band]
        if forecast.on_time_s * exp(self._factor_log[band]) < late_after_s < inf:
            self._correct(band, forecast.on_time_s, late_after_s, now)
        self._correct(LATE, forecast.late_s, waited_s, now)

    def sent(self, prefill_s: float, *, now: float) -> None:
        """A prompt is sent to a worker; it counts while something waits here."""
        if now - self._at >= _TICK_S:
            self._tick(now)
        if self._waiting[_ALL]:
            self._new_prefill_s += prefill_s

    # Asking.

    def waiting(self, line: int) -> int:
        """How many wait in a line."""
        return self._waiting[line]

    def cost(self, line: int) -> float:
        """The cost that waits in a line."""
        return self._cost[line]

    def cost_per_s(self, line: int | None = None, *, now: float) -> float | None:
        """The measured speed of a line, or of all together; None while unknown."""
        if now - self._at >= _TICK_S:
            self._tick(now)
        index = _ALL if line is None else line
        return self._speed(index) if self._busy_s[index] >= _KNOWN_AT_S else None

    def prefill_per_s(self, *, now: float) -> float | None:
        """Seconds of prefill that are sent a second while something waits; None while unknown."""
        if now - self._at >= _TICK_S:
            self._tick(now)
        return self._prefill_s / self._busy_s[_ALL] if self._busy_s[_ALL] >= _KNOWN_AT_S else None

    def longest_s(self, band: Priority) -> float:
        """The longest wait that a refused request of `band` is told, without the jitter."""
        return self._wait_s_max[band]

    def forecast(self, band: Priority, *, now: float, ahead: float = inf) -> Forecast | None:
        """What a request of `band` that came now would wait; None while no speed is known.

        Behind so much cost of its band, `ahead`, if that is less than all that waits there.
        """
        if now - self._at >= _TICK_S:
            self._tick(now)
        if not self._speeds:
            return None
        longest_s, cost = self._wait_s_max[band], self._cost
        own, all_above = self._speeds[band]
        ahead = min(ahead, cost[band])
        on_time_s = _wait_s(ahead, own, longest_s)
        if band and on_time_s:
            before = sum(cost[_ABOVE[band]]) + ahead
            on_time_s = min(on_time_s, _wait_s(before, all_above, longest_s))
        return Forecast(on_time_s, _wait_s(cost[LATE], self._late_speed, longest_s))

    def late_s(self, band: Priority, *, now: float) -> float:
        """What one of `band` that falls behind waits: its band's wait, or the late line's."""
        forecast = self.forecast(band, now=now)
        if forecast is None:
            return 0.0
        on_time_s = forecast.on_time_s * exp(self._factor_log[band])
        late_s = forecast.late_s * exp(self._factor_log[LATE])
        return min(max(on_time_s, late_s), self._wait_s_max[band])

    def expected_s(self, band: Priority, forecast: Forecast) -> float:
        """`forecast` with what was learnt, as one figure."""
        wait_s = forecast.on_time_s * exp(self._factor_log[band])
        if wait_s > self._late_after_s[band]:
            wait_s = max(wait_s, forecast.late_s * exp(self._factor_log[LATE]))
        return min(wait_s, self._wait_s_max[band])

    def retry_after_s(
        self, band: Priority, *, now: float, rng: Random, longest_s: float = inf
    ) -> float:
        """Seconds for a refused request of `band`, whatever its place: at least 1.

        At most `longest_s`, and as long as its class waits (or `drain.retry_after_s_max`); beside
        the jitter.
        """
        forecast = self.forecast(band, now=now)
        wait_s = 0.0 if forecast is None else self.expected_s(band, forecast)
        return self.spread(min(wait_s, longest_s), rng)

    def spread(self, wait_s: float, rng: Random) -> float:
        """What a refused client is told for a wait: at least 1 s, stretched by the jitter.

        From up to 2 s no further than to 2 s: the header tells whole seconds.
        """
        told_s = max(_RETRY_AFTER_S_MIN, wait_s)
        spread_s = told_s * rng.uniform(1.0, 1.0 + self._settings.jitter_ratio)
        return min(SHORT_S, spread_s) if told_s <= SHORT_S else spread_s

    # Inside.

    def _put(self, line: int, cost: float, now: float) -> None:
        self._cost[line] += cost
        self._came[line] += cost
        self._count(line, 1, now)

    def _take(self, line: int, cost: float, now: float) -> None:
        self._count(line, -1, now)
        # An empty line costs nothing, whatever rounding says.
        self._cost[line] = max(0.0, self._cost[line] - cost) if self._waiting[line] else 0.0

    def _count(self, line: int, change: int, now: float) -> None:
        """One ticket more or less waits in a line; time runs for it only while one does."""
        waiting = self._waiting[line]
        assert waiting + change >= 0, "left a line twice"
        self._waiting[line] = waiting + change
        if not waiting:
            self._busy_since[line] = now
        elif waiting + change == 0:
            self._new_busy_s[line] += now - self._busy_since[line]

    def _tick(self, now: float) -> None:
        """Let the old fade and add what is new; lines in which nothing waited stand still."""
        passed_s, self._at = now - self._at, now
        if passed_s == inf:
            return
        memory_s = self._settings.memory_s
        for line, waiting in enumerate(self._waiting):
            busy_s = self._new_busy_s[line]
            if waiting:
                busy_s += now - self._busy_since[line]
                self._busy_since[line] = now
            kept = exp(-busy_s / memory_s)
            self._left[line] = self._left[line] * kept + self._new_left[line]
            self._busy_s[line] = self._busy_s[line] * kept + busy_s
            self._new_left[line] = self._new_busy_s[line] = 0.0
            if line == _ALL:
                self._prefill_s = self._prefill_s * kept + self._new_prefill_s
                self._new_prefill_s = 0.0
        # What comes in is counted over all time: after a quiet while less has come.
        kept = exp(-passed_s / memory_s)
        self._came = [cost * kept for cost in self._came]
        self._came_s = self._came_s * kept + memory_s * (1 - kept)
        self._weigh()

    def _weigh(self) -> None:
        """Work out the speeds that forecasts use until the next tick."""
        self._late_speed = self._speed(LATE)
        if self._busy_s[_ALL] < _KNOWN_AT_S:
            self._speeds = []
            return
        total, above, speeds = self._speed(_ALL), 0.0, []
        for band in range(LATE):
            own = max(self._speed(band), self._shares[band] * total)
            speeds.append((own, total - above))
            above += self._came[band] / self._came_s
        self._speeds = speeds

    def _speed(self, line: int) -> float:
        """Cost per second, 0 while unknown."""
        busy_s = self._busy_s[line]
        return self._left[line] / busy_s if busy_s >= _KNOWN_AT_S else 0.0

    def _correct(self, line: int, predicted_s: float, actual_s: float, now: float) -> None:
        """Move a line's factor toward actual / predicted, by the time since it last was."""
        since_s = now - self._learnt_at[line]
        if since_s < _TICK_S or (predicted_s < _EQUAL_S and actual_s < _EQUAL_S):
            return
        self._learnt_at[line] = now
        ratio_log = log(max(actual_s, _LEAST_S) / max(predicted_s, _LEAST_S))
        error = ratio_log - self._factor_log[line]
        error = max(-_ERROR_LOG_MAX, min(_ERROR_LOG_MAX, error))
        weight = min(_WEIGHT_MAX, since_s / self._settings.learn_s)
        factor_log = self._factor_log[line] + weight * error
        self._factor_log[line] = max(-_FACTOR_LOG_MAX, min(_FACTOR_LOG_MAX, factor_log))


def _wait_s(cost: float, speed: float, longest_s: float) -> float:
    """Seconds until `cost` is gone; `longest_s` when that takes longer, or nothing moves."""
    if cost <= 0:
        return 0.0
    return longest_s if cost >= longest_s * speed else cost / speed
