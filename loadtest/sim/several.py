"""Several routers over one cluster: arrivals go to them in turn.

Baselines decide alone. Ours tell each other what they have where, in a fixed rhythm; what one says
is known to the others a little later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from math import inf
from operator import add
from typing import Generic, TypeVar

from loadtest.sim.cluster import Cluster, Job, Router
from loadtest.sim.laneway import LanewayRouter
from router.contract import WorkerId
from router.core.peers import NO_LOAD, PeerLoad

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


class Acquainted(Several[LanewayRouter]):
    """Routers of ours that exchange their loads every `interval_s`, known `delay_s` later.

    While Redis is away, from the first to the second second of `away_s`, none hears of another and
    each goes on with what it knew. After `ttl_s` without a word what the others said counts as last
    heard of routers that are silent, as in the service.
    """

    def __init__(
        self,
        routers: Sequence[LanewayRouter],
        *,
        interval_s: float,
        delay_s: float,
        ttl_s: float,
        away_s: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(routers)
        self._interval_s = interval_s
        self._delay_s = delay_s
        self._ttl_s = ttl_s
        self._away_from, self._away_until = (inf, inf) if away_s is None else away_s
        self._loads: list[dict[WorkerId, PeerLoad]] = [{} for _ in routers]
        self._heard: list[dict[WorkerId, PeerLoad]] = [{} for _ in routers]
        self._heard_at = [0.0 for _ in routers]

    def start(self, cluster: Cluster) -> None:
        """Each learns of the workers and of the others; their rhythms are spread evenly."""
        super().start(cluster)
        names = [f"router-{number}" for number, _ in enumerate(self.routers)]
        for number, router in enumerate(self.routers):
            router.core.peering.on_replicas(names, own=names[number], now=0.0)
            first = self._interval_s * (number + 1) / len(names)
            cluster.at(first, partial(self._exchange, cluster, number))

    def _exchange(self, cluster: Cluster, number: int, now: float) -> None:
        if not self._away_from <= now < self._away_until:
            said = self.routers[number].core.peering.loads
            cluster.at(now + self._delay_s, lambda later: self._known(number, said, later))
        elif self._heard[number] and now - self._heard_at[number] > self._ttl_s:
            silent, self._heard[number] = self._heard[number], {}
            self.routers[number].heard({}, now, silent=silent)
        cluster.at(now + self._interval_s, partial(self._exchange, cluster, number))

    def _known(self, number: int, said: dict[WorkerId, PeerLoad], now: float) -> None:
        """What a router said is stored; it reads what the others have stored by now."""
        self._loads[number] = said
        others = [loads for other, loads in enumerate(self._loads) if other != number]
        workers = dict.fromkeys(worker for loads in others for worker in loads)
        sums = {w: reduce(add, (loads.get(w, NO_LOAD) for loads in others)) for w in workers}
        self._heard[number], self._heard_at[number] = sums, now
        self.routers[number].heard(sums, now)
