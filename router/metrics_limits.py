"""Series of the limits: who decided what, how long that took, and how Redis is.

A part of `router.metrics`. Labels come from enums. Layer 2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from router.core.bucket import DecidedBy, Scope, Verdict

# Around the figures that matter: a Redis on the same host, one in the same zone, the time-out.
DECISION_EDGES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)


@dataclass(slots=True)
class LimitsView:
    """What a store of limits counts. It writes here, the series are made from it."""

    granted: Counter[DecidedBy] = field(default_factory=Counter)
    denied: Counter[tuple[DecidedBy, Scope | None]] = field(default_factory=Counter)
    away: int | None = None  # 0: Redis answers, 1: a trial is on its way, 2: away; None: no Redis
    held: int = 0  # reservations in Redis that this router has not ended
    unsettled: int = 0  # settlements that Redis has not been told yet
    settlements_lost: int = 0
    waits: list[int] = field(default_factory=lambda: [0] * (len(DECISION_EDGES) + 1))
    waited_s: float = 0.0

    def count(self, verdict: Verdict) -> None:
        """Count a verdict."""
        if verdict.granted:
            self.granted[verdict.by] += 1
        else:
            self.denied[verdict.by, verdict.scope] += 1

    def waited(self, seconds: float, asks: int) -> None:
        """Count how long `asks` that went together waited for Redis."""
        self.waits[bisect_left(DECISION_EDGES, seconds)] += asks
        self.waited_s += seconds * asks


class LimitsCollector(Collector):
    """Makes the series when Prometheus asks."""

    def __init__(self, view: Callable[[], LimitsView]) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """All of them; those of Redis only where limits are kept in it."""
        return limit_families(self._view())


def limit_families(view: LimitsView) -> Iterable[Metric]:
    """All of them."""
    decisions = CounterMetricFamily(
        "laneway_limit_decisions", "Asks of requests that limits granted or denied.",
        labels=("by", "verdict", "scope"),
    )  # fmt: skip
    for by, count in view.granted.items():
        decisions.add_metric((by.value, "granted", "none"), count)
    for (by, scope), count in view.denied.items():
        decisions.add_metric((by.value, "denied", scope.value if scope else "none"), count)
    yield decisions
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
