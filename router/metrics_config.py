"""Series of the configuration: which version is in force, and whether the file is. Layer 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from router.config_versions import ConfigSourceName, ConfigVersion


@dataclass(frozen=True, slots=True)
class ConfigFigures:
    """What there is to say of the configuration; `counts` by source and outcome."""

    version: ConfigVersion
    counts: Mapping[tuple[ConfigSourceName, str], int]
    file_faulty: bool
    waiting: int  # settings


class ConfigCollector(Collector):
    """Makes the series when Prometheus asks."""

    def __init__(self, figures: Callable[[], ConfigFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        figures = self._figures()
        version = figures.version
        yield InfoMetricFamily(
            "laneway_config", "The configuration in force.", {"digest": version.digest}
        )
        for name, text, value in (
            ("version", "Number of the configuration in force.", version.number),
            ("applied_timestamp_seconds", "When it came into force.", version.at),
            ("file_faulty", "1: what the file holds now is refused.", figures.file_faulty),
            ("restart_needed", "Settings that only a restart can change.", figures.waiting),
        ):
            gauge = GaugeMetricFamily(f"laneway_config_{name}", text)
            gauge.add_metric((), value)
            yield gauge
        changes = CounterMetricFamily(
            "laneway_config_changes",
            "Attempts to change the configuration, by who made them and what came of it.",
            labels=("source", "outcome"),
        )
        for (source, outcome), count in figures.counts.items():
            changes.add_metric((source, outcome), count)
        yield changes
