"""Moments at which the core wants to be called: one heap for probes, pauses and deadlines.

Nothing is ever taken out early. What is called must look whether its subject still wants it, so
each subject keeps at most a few entries here and all of them lapse by themselves. Many subjects
share a moment, so the heap holds each moment once.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Callee = Callable[[float], None]


class Timers:
    """Callables that take `now`, by the moment when they are due; equal ones in their order."""

    def __init__(self) -> None:
        self._moments: list[float] = []  # a heap
        self._callees: dict[float, list[Callee]] = {}

    def call_at(self, at: float, callee: Callee) -> None:
        """Have `callee(now)` called by the first `run_due` at or after `at`."""
        callees = self._callees.get(at)
        if callees is None:
            heappush(self._moments, at)
            self._callees[at] = [callee]
        else:
            callees.append(callee)

    @property
    def next_at(self) -> float | None:
        """The earliest moment, None when there is none."""
        return self._moments[0] if self._moments else None

    def run_due(self, now: float) -> None:
        """Call everything that is due at `now`, earliest first; what that adds runs next time.

        If one raises, those behind it stay due.
        """
        due: list[Callee] = []
        while self._moments and self._moments[0] <= now:
            due += self._callees.pop(heappop(self._moments))
        due.reverse()
        try:
            while due:
                due.pop()(now)
        finally:
            while due:
                self.call_at(now, due.pop())


def earlier(one: float | None, other: float | None) -> float | None:
    """The earlier of two moments; None is never."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
