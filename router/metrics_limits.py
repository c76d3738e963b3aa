"""Series of the store of the limits: how long Redis takes, and how it is.

A part of `router.metrics`. Layer 2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

# Around the figures that matter: a Redis on the same host, one in the same zone, the time-out.
DECISION_EDGES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)


@dataclass(slots=True)
class LimitsView:
    """What a store of limits counts. It writes here, the series are made from it."""

    away: int | None = None  # 0: Redis answers, 1: a trial is on its way, 2: away; None: no Redis
    held: int = 0  # reservations in Redis that this router has not ended
    unsettled: int = 0  # settlements that Redis has not been told yet
    settlements_lost: int = 0
    waits: list[int] = field(default_factory=lambda: [0] * (len(DECISION_EDGES) + 1))
    waited_s: float = 0.0

    def waited(self, seconds: float, asks: int) -> None:
        """Count how long `asks` that went together waited for Redis."""
        self.waits[bisect_left(DECISION_EDGES, seconds)] += asks
        self.waited_s += seconds * asks


class LimitsCollector(Collector):
    """Makes the series when Prometheus asks."""

    def __init__(self, view: Callable[[], LimitsView]) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """All of them; none where limits are not kept in Redis."""
        return limit_families(self._view())


def limit_families(view: LimitsView) -> Iterable[Metric]:
    """All of them."""
    if view.away is None:
        return
    for name, text, value in (
        ("laneway_redis_away", "0: Redis answers, 1: it is being tried, 2: it is away.", view.away),
        ("laneway_limit_reservations", "Those in Redis that have not ended.", view.held),
        (
            "laneway_limit_unsettled",
            "Settlements that Redis has not been told yet.",
            view.unsettled,
        ),
    ):
        gauge = GaugeMetricFamily(name, text)
        gauge.add_metric((), value)
        yield gauge
    lost = CounterMetricFamily(
        "laneway_limit_settlements_lost",
        "Settlements given up: Redis was away for long, or the script failed on them.",
    )
    lost.add_metric((), view.settlements_lost)
    yield lost
    waits = HistogramMetricFamily("laneway_limit_wait_seconds", "Wait for Redis to decide.")
    running, buckets = 0, []
    for edge, count in zip((*map(repr, DECISION_EDGES), "+Inf"), view.waits, strict=True):
        running += count
        buckets.append((edge, float(running)))
    waits.add_metric((), buckets, view.waited_s)
    yield waits
