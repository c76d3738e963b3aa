"""A tenant with a guarantee of 5 cost units/s and no limit of the cluster: the workers decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from loadtest.sim.laneway import LanewayRouter
from loadtest.sim.run import judged_run, played
from loadtest.sim.trials import Trial
from loadtest.workload import Tier
from tests.sim.worlds import flow, trial

BORROWER: Final = "tenant-noisy"
_OF_IT: Final[dict[str, Any]] = {"tier": Tier.STANDARD, "tenant": BORROWER}
IDLE = trial("idle", flow(5), flow(25, **_OF_IT), length_s=25)
BUSY = trial("busy", flow(55), flow(70, **_OF_IT), length_s=25)
CAP: Final = {"cost_per_s": 5}
CEILING: Final = {**CAP, "cost_ceiling_per_s": 500}


def figures(of: Trial, limits: Mapping[str, float], seed: int) -> tuple[float, float]:
    """Cost units per second of the borrower, and the share of the others' requests in time."""
    settings = {"tenants": {BORROWER: {"limits": limits}}}
    cluster, routers = played(of, "laneway", seed=seed, settings=settings)
    (router,) = routers
    assert isinstance(router, LanewayRouter)
    units = router.core.reserving.limits.units
    used = sum(units(record) for record in router.records if record.tenant == BORROWER)
    victims = judged_run(of, "laneway", seed, cluster, routers).figures.victims
    return used / of.length_s, victims


@pytest.mark.parametrize("seed", [1, 2])
def test_of_idle_workers_a_tenant_borrows_all_that_it_asks_for(seed: int) -> None:
    found, _ = figures(IDLE, CEILING, seed)
    assert found == pytest.approx(figures(IDLE, {}, seed)[0])
    assert found > 5 * figures(IDLE, CAP, seed)[0]


@pytest.mark.parametrize("seed", [1, 2])
def test_of_busy_workers_it_borrows_what_the_others_leave(seed: int) -> None:
    (units, in_time), (all_units, felt), (capped, _) = (
        figures(BUSY, limits, seed) for limits in (CEILING, {}, CAP)
    )
    assert 5 <= capped < units < 0.6 * all_units
    assert in_time >= 0.97
    assert in_time > felt + 0.01, "no overload"
