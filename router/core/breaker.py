"""A circuit breaker per worker: failures in a row take it out, one trial at a time lets it back.

CLOSED: requests pass, failures in a row are counted. OPEN: none passes until `out_until`. Then the
first request that is dispatched is the trial (HALF_OPEN): while it runs no other passes. A good
trial closes the breaker, a failed one opens it anew, and one that says nothing (the client left,
the engine was full, the client's own 4xx) leaves the place to the next, so that no trial can be
lost with the breaker stuck. Only the trial decides in HALF_OPEN: streams from before do not.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf

from router.config import BreakerSettings


class BreakerState(StrEnum):
    """States of a breaker; a metric label."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Members of enums are found slowly; these are read for each request.
_CLOSED, _OPEN, _HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Breaker:
    """The breaker of one worker. `trial` values are compared by identity only."""

    __slots__ = ("_failures", "_good_trials", "_trial", "out_until", "settings", "state")

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.state = _CLOSED
        self.out_until = 0.0  # no request before; inf while a trial runs
        self._failures = 0
        self._good_trials = 0
        self._trial: object = None

    def on_dispatch(self, attempt: object) -> None:
        """A request was sent although `out_until` had to be over: in OPEN it is the trial."""
        if self.state is _OPEN:
            self.state = _HALF_OPEN
            self.out_until = inf
            self._trial = attempt

    def is_trial(self, attempt: object) -> bool:
        """Whether `attempt` is the trial that now decides."""
        return self.state is _HALF_OPEN and self._trial is attempt

    def on_success(self, attempt: object, *, now: float) -> None:
        """An attempt ended well."""
        if self.state is _CLOSED:
            self._failures = 0
        elif self.is_trial(attempt):
            self._trial = None
            self._good_trials += 1
            if self._good_trials >= self.settings.successes:
                self._move(_CLOSED, out_until=0.0)
            else:
                self._move(_OPEN, out_until=now)

    def on_failure(self, attempt: object, *, now: float) -> None:
        """An attempt failed by the worker's fault."""
        if self.state is _CLOSED:
            self._failures += 1
            if self._failures >= self.settings.failures:
                self._open(now)
        elif self.is_trial(attempt):
            self._open(now)

    def on_nothing_learnt(self, attempt: object, *, now: float) -> None:
        """An attempt ended without saying whether the worker is well."""
        if self.is_trial(attempt):
            self._trial = None
            self._move(_OPEN, out_until=now)

    def reset(self) -> None:
        """Forget everything: the worker joins anew."""
        self._move(_CLOSED, out_until=0.0)

    def _open(self, now: float) -> None:
        self._good_trials = 0
        self._move(_OPEN, out_until=now + self.settings.open_s)

    def _move(self, state: BreakerState, *, out_until: float) -> None:
        self.state = state
        self.out_until = out_until
        if state is _CLOSED:
            self._failures = 0
            self._good_trials = 0
            self._trial = None
