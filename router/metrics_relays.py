"""Series of a router with several processes: what its relays hold and use. Layer 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LABELS: Final = ("relay",)


@dataclass(frozen=True, slots=True)
class RelayFigures:
    """What there is to say of one relay that is connected, as it last said it."""

    number: int  # of its place: who replaces a relay has the same
    requests: int  # that the brain knows of and that are not over
    connections: int  # of clients
    cpu_s: float
    resident_bytes: int


class RelayCollector(Collector):
    """Makes the series when Prometheus asks. There are none in a router of one process."""

    def __init__(self, figures: Callable[[], list[RelayFigures]]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        figures = self._figures()
        count = GaugeMetricFamily("laneway_relays", "Relays that are connected.")
        count.add_metric((), len(figures))
        yield count
        gauges: tuple[tuple[str, str, Callable[[RelayFigures], float]], ...] = (
            ("requests", "Requests of a relay that are not over.", lambda f: f.requests),
            ("connections", "Connections of clients to it.", lambda f: f.connections),
            ("resident_memory_bytes", "Memory of its process.", lambda f: f.resident_bytes),
        )
        for name, text, value_of in gauges:
            gauge = GaugeMetricFamily(f"laneway_relay_{name}", text, labels=_LABELS)
            for each in figures:
                gauge.add_metric((str(each.number),), value_of(each))
            yield gauge
        cpu = CounterMetricFamily(
            "laneway_relay_cpu_seconds", "CPU of its process.", labels=_LABELS
        )
        for each in figures:
            cpu.add_metric((str(each.number),), each.cpu_s)
        yield cpu
