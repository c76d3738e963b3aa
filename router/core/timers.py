"""Moments at which the core wants to be called: one heap for probes, pauses and deadlines.

Nothing is ever taken out early. What is called must look whether its subject still wants it, so
each subject keeps at most a few entries here and all of them lapse by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Timers:
    """A heap of (moment, order of entry, callable that takes `now`)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._entries = 0

    def call_at(self, at: float, callee: Callable[[float], None]) -> None:
        """Have `callee(now)` called by the first `run_due` at or after `at`."""
        self._entries += 1
        heappush(self._heap, (at, self._entries, callee))

    @property
    def next_at(self) -> float | None:
        """The earliest moment, None when there is none."""
        return self._heap[0][0] if self._heap else None

    def run_due(self, now: float) -> None:
        """Call everything that is due at `now`, earliest first; what that adds runs next time."""
        last = self._entries
        while self._heap and self._heap[0][0] <= now and self._heap[0][1] <= last:
            heappop(self._heap)[2](now)
