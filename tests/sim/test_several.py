"""Several routers over the same workers, which tell each other their loads."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from loadtest.report import Served, quantile
from loadtest.sim.cluster import Cluster, Ending
from loadtest.sim.laneway import LanewayRouter
from loadtest.sim.run import judged_run, played
from loadtest.sim.trials import TRIALS, Trial
from tests.sim.worlds import SHORT

SEEDS = range(31, 35)
LENGTH_S = 25.0


def short_p99_s(routers: int) -> float:
    trial = replace(TRIALS["R4"], routers=routers, length_s=LENGTH_S, measured_from_s=3.0)
    rows: list[Served] = []
    for seed in SEEDS:
        cluster, found = played(trial, "laneway", seed=seed)
        rows += judged_run(trial, "laneway", seed, cluster, found).rows
    return quantile([row.ttft_s for row in rows if row.short and row.outcome == "served"], 0.99)


def test_four_routers_are_hardly_slower_than_one() -> None:
    assert short_p99_s(4) <= 1.5 * short_p99_s(1)


@pytest.mark.parametrize(("routers", "away_s"), [(2, None), (4, None), (4, (1.0, 5.0))])
def test_several_never_overfill_a_workers_memory_and_lose_nothing(
    routers: int, away_s: tuple[float, float] | None
) -> None:
    trial: Trial = replace(SHORT["KV"], routers=routers, redis_away_s=away_s)
    for seed in range(5):
        cluster, found = played(trial, "laneway", seed=seed)
        assert cluster.retractions == 0, seed
        assert {job.ending for job in cluster.jobs} <= {Ending.SERVED, Ending.REFUSED}
        for router in cast("list[LanewayRouter]", found):
            assert router.core.peering.loads == {}, "something was not given back"


@pytest.mark.patches
def test_while_redis_is_away_what_others_said_lasts_for_a_while_and_then_again() -> None:
    known: dict[float, list[int]] = {}

    class Watching(LanewayRouter):
        def start(self, cluster: Cluster) -> None:
            super().start(cluster)
            for at_s in (1.9, 4.5, 6.0, 7.5):
                cluster.at(at_s, self._look)

        def _look(self, now: float) -> None:
            workers = self.core._fleet.workers.values()
            known.setdefault(now, []).append(sum(w.peers.load.streams for w in workers))

    trial = replace(TRIALS["F4"], length_s=8.0, measured_from_s=0.0, redis_away_s=(2.0, 7.0))
    played(trial, "laneway", seed=1, make=Watching)
    assert all(known[1.9])
    assert known[4.5][0] > 0, "it goes on with what it knew"
    assert not any(known[6.0])
    assert all(known[7.5])
