"""A histogram as Prometheus wants it. Layer 2."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

# Values that are counted together.
_VALUES_MAX: Final = 256


class Histogram:
    """Counts of values by bucket: plain integers, no lock. A value on an edge is below it.

    Values are gathered and sorted, which costs less than a search for each.
    """

    __slots__ = ("_counts", "_edges", "_total", "_values")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._total = 0.0
        self._values: list[float] = []  # not counted yet

    def observe(self, values: list[float]) -> None:
        """Count `values`."""
        self._values += values
        if len(self._values) >= _VALUES_MAX:
            self._count()

    def _count(self) -> None:
        values, counts = self._values, self._counts
        values.sort()
        self._total += sum(values)
        below = 0
        for place, edge in enumerate(self._edges):
            up_to = bisect_right(values, edge, below)
            counts[place] += up_to - below
            below = up_to
        counts[-1] += len(values) - below
        values.clear()

    @property
    def total(self) -> float:
        """The sum of all values."""
        self._count()
        return self._total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as Prometheus wants them, up to +Inf."""
        self._count()
        running, out = 0, []
        for edge, count in zip((*self._edges, float("inf")), self._counts, strict=True):
            running += count
            out.append(("+Inf" if edge == float("inf") else repr(edge), float(running)))
        return out
