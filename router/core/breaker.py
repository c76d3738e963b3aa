"""A circuit breaker per worker: failures in a row take it out, trials let it back.

CLOSED: requests pass, failures in a row are counted. OPEN: none passes until `out_until`. Then the
first request that is dispatched is the trial (HALF_OPEN): while it runs no other passes. A good
trial closes the breaker, a failed one opens it anew, and one that says nothing (the client left,
the engine was full, the client's own 4xx) leaves the place to the next, so that no trial can be
lost with the breaker stuck. Only trials decide in HALF_OPEN: streams from before do not.

A trial may run for minutes and only then say that all is well, as a plain answer does. So when it
has run for as long as the breaker was open, one more request is let through beside it, and so on up
to a bound: whichever ends first decides.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import Final

from router.config import BreakerSettings


class BreakerState(StrEnum):
    """States of a breaker; a metric label."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Members of enums are found slowly; these are read for each request.
_CLOSED, _OPEN, _HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
# Trials at once: a worker that takes requests and never answers gets no more than these.
_TRIALS_MAX: Final = 8


class Breaker:
    """The breaker of one worker. Attempts are compared by identity only."""

    __slots__ = ("_failures", "_good_trials", "_trials", "out_until", "settings", "state")

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.state = _CLOSED
        self.out_until = 0.0  # no request before; inf while all trials run that may
        self._failures = 0
        self._good_trials = 0
        self._trials: list[object] = []  # running

    def on_dispatch(self, attempt: object, *, now: float) -> None:
        """A request was sent, so `out_until` is over: unless CLOSED, it is a trial."""
        if self.state is not _CLOSED:
            self.state = _HALF_OPEN
            self._trials.append(attempt)
            full = len(self._trials) >= _TRIALS_MAX
            self.out_until = inf if full else now + self.settings.open_s

    def is_trial(self, attempt: object) -> bool:
        """Whether `attempt` is one of the trials that now decide."""
        return bool(self._trials) and any(trial is attempt for trial in self._trials)

    def has_passed(self, attempt: object, began_at: float, now: float) -> bool:
        """Whether a trial has streamed, since `began_at`, for as long as the breaker was open.

        An answer of ten minutes must not keep a healthy worker closed to all others.
        """
        return now >= began_at + self.settings.open_s and self.is_trial(attempt)

    def on_success(self, attempt: object, *, now: float) -> None:
        """An attempt ended well."""
        if self.state is _CLOSED:
            self._failures = 0
        elif self.is_trial(attempt):
            self._good_trials += 1
            if self._good_trials >= self.settings.successes:
                self._close()
            else:
                self._next_trial(attempt, now)

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
            self._next_trial(attempt, now)

    def reset(self) -> None:
        """Forget everything: the worker joins anew."""
        self._close()

    def _next_trial(self, ended: object, now: float) -> None:
        """The place of `ended` is free at once."""
        self._trials = [trial for trial in self._trials if trial is not ended]
        self.state = _HALF_OPEN if self._trials else _OPEN
        self.out_until = now

    def _open(self, now: float) -> None:
        self.state = _OPEN
        self.out_until = now + self.settings.open_s
        self._good_trials = 0
        self._trials = []

    def _close(self) -> None:
        self.state = _CLOSED
        self.out_until = 0.0
        self._failures = self._good_trials = 0
        self._trials = []
