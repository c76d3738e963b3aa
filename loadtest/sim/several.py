"""Several routers over one cluster: arrivals go to them in turn, each decides alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from loadtest.sim.cluster import Cluster, Job, Router

Kind = TypeVar("Kind", bound=Router)


class Several(Generic[Kind]):
    """Routers of one kind that share the load and nothing else."""

    def __init__(self, routers: Sequence[Kind]) -> None:
        self.routers = routers

    def start(self, cluster: Cluster) -> None:
        """Each learns of the workers."""
        for router in self.routers:
            router.start(cluster)

    def arrive(self, job: Job) -> None:
        """Each in turn."""
        self._of(job).arrive(job)

    def first_token(self, job: Job) -> None:
        """Tell the one that sent it."""
        self._of(job).first_token(job)

    def ended(self, job: Job) -> None:
        """Tell the one that sent it."""
        self._of(job).ended(job)

    def failed(self, job: Job, *, began: bool) -> None:
        """Tell the one that sent it."""
        self._of(job).failed(job, began=began)

    def progress(self) -> None:
        """Each looks at its own streams."""
        for router in self.routers:
            router.progress()

    def _of(self, job: Job) -> Kind:
        return self.routers[job.item.number % len(self.routers)]
