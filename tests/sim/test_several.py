"""Several routers over the same workers, which tell each other their loads."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from loadtest.report import Served, quantile
from loadtest.sim.cluster import Ending
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
    assert short_p99_s(4) <= 1.6 * short_p99_s(1)


@pytest.mark.parametrize("routers", [2, 4])
def test_several_never_overfill_a_workers_memory_and_lose_nothing(routers: int) -> None:
    trial: Trial = replace(SHORT["KV"], routers=routers)
    for seed in range(5):
        cluster, found = played(trial, "laneway", seed=seed)
        assert cluster.retractions == 0, seed
        assert {job.ending for job in cluster.jobs} <= {Ending.SERVED, Ending.REFUSED}
        for router in cast("list[LanewayRouter]", found):
            assert router.core.peering.loads == {}, "something was not given back"
