"""Series of routers that act as one. A part of `router.metrics`. Layer 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.replicas import ClusterView, Standing


class ClusterCollector(Collector):
    """Makes the series when Prometheus asks."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return _families(self._view())


def _families(view: ClusterView) -> Iterable[Metric]:
    """How this router stands to the others, and how many there are."""
    standing = GaugeMetricFamily(
        "laneway_cluster_standing", "1 for how it stands to other routers.", labels=("standing",)
    )
    for each in Standing:
        standing.add_metric((each.value,), view.standing is each)
    yield standing
    if view.age_s is not None:
        age = GaugeMetricFamily(
            "laneway_cluster_age_seconds", "Since it last heard of the other routers."
        )
        age.add_metric((), view.age_s)
        yield age
    configs = {replica.config_version for replica in view.replicas}
    for name, text, value in (
        ("replicas", "Routers that it knows, itself included.", len(view.replicas)),
        ("leads", "1: its slow loop is the one that runs.", view.leader == view.name),
        ("registered_workers", "Workers in the registry.", view.workers),
        ("untold_changes", "Changes of workers that the registry was not told yet.", view.untold),
        ("config_versions", "Configurations that the routers run; above 1 they differ.",
         len(configs)),
    ):  # fmt: skip
        family = GaugeMetricFamily(f"laneway_cluster_{name}", text)
        family.add_metric((), value)
        yield family
