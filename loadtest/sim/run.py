"""One simulated run: trial, policy and seed in, figures out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from loadtest.arrivals import work
from loadtest.report import Figures, Served, judged
from loadtest.sim.accounts import Accounts, accounts_of
from loadtest.sim.baselines import BASELINES, BaselineRouter
from loadtest.sim.cluster import Cluster, Job, Router
from loadtest.sim.laneway import LanewayRouter
from loadtest.sim.several import Acquainted, Several
from loadtest.sim.trials import Fault, Trial
from router.config import Config
from workers.engine_model import EngineProfile, EngineSettings
from workers.profiles import load_profiles

LANEWAY: Final = "laneway"
LIMIT: Final = "limit"
WEIGHTED_LANES: Final = "weighted_lanes"
OURS: Final[Mapping[str, str]] = {
    LANEWAY: "the router as it is by default",
    LIMIT: "the same with exact lengths and fresh state: what knowing more is worth",
    WEIGHTED_LANES: "the same, lanes apart and workers by weighted score",
}
POLICIES: Final = (*OURS, *BASELINES)

Settings = Mapping[str, Any]
_SYNC_DELAY_S: Final = 0.005  # from a router's question to Redis until it has its answer
_OWN: Final[Mapping[str, Settings]] = {
    LANEWAY: {},
    LIMIT: {"probe": {"interval_s": 0.05}},
    WEIGHTED_LANES: {"policy": {"name": "weighted"}, "lanes": {"spill": False}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The outcome of one run. Equal trials, policies, settings and seeds have equal digests."""

    trial: str
    policy: str
    seed: int
    figures: Figures
    accounts: Accounts
    rows: tuple[Served, ...]
    digest: str
    seconds: float  # of virtual time
    cpu_s: float = 0.0  # that it took: the one figure that differs from run to run


def simulate(trial: Trial, policy: str, *, seed: int, settings: Settings | None = None) -> Run:
    """Play `trial` against `policy`; `settings` change the configuration of ours.

    Raises KeyError when the policy or an engine profile of the trial does not exist, and pydantic's
    ValidationError for settings that cannot be.
    """
    began = time.process_time()
    cluster, routers = played(trial, policy, seed=seed, settings=settings)
    run = judged_run(trial, policy, seed, cluster, routers)
    return replace(run, cpu_s=time.process_time() - began)


def judged_run(
    trial: Trial, policy: str, seed: int, cluster: Cluster, routers: Sequence[Router]
) -> Run:
    """The figures of what was played."""
    served = [_served(job) for job in cluster.jobs]
    rows = tuple(row for row in served if row.at_s >= trial.measured_from_s)
    return Run(
        trial=trial.name,
        policy=policy,
        seed=seed,
        figures=judged(rows, seconds=trial.length_s - trial.measured_from_s),
        accounts=_accounts(trial, cluster, routers, served),
        rows=rows,
        digest=cluster.digest(),
        seconds=cluster.now,
    )


def played(
    trial: Trial,
    policy: str,
    *,
    seed: int,
    settings: Settings | None = None,
    make: type[LanewayRouter] = LanewayRouter,
) -> tuple[Cluster, Sequence[Router]]:
    """The cluster and its routers after `trial`, for a closer look than figures give.

    `make` is what becomes our router, for trials in which an operator does something too.
    """
    profiles = load_profiles()
    cluster = Cluster(
        [(name, _profile(profiles[name], trial)) for name in trial.workers],
        settings=EngineSettings(prefix_block_tokens=trial.prefix_block_tokens),
        poll_delay_s=trial.poll_delay_s,
    )
    for fault in trial.faults:
        _schedule(cluster, fault)
    routers = _routers(policy, trial, seed, settings or {}, make)
    router = routers[0] if len(routers) == 1 else _together(routers, trial)
    cluster.run(router, work(trial.scenario.flows, seed=seed), length_s=trial.length_s)
    return cluster, routers


def config_of(policy: str, settings: Settings) -> Config:
    """The configuration of one of OURS. Raises ValidationError."""
    return Config.model_validate(_merged(_OWN[policy], settings))


def _profile(profile: EngineProfile, trial: Trial) -> EngineProfile:
    tokens = trial.kv_total_tokens
    return profile if tokens is None else replace(profile, kv_total_tokens=tokens)


def _merged(below: Settings, above: Settings) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)  # noqa: PLW2901 - one level deeper
        merged[name] = value
    return merged


def _routers(
    policy: str, trial: Trial, seed: int, settings: Settings, make: type[LanewayRouter]
) -> Sequence[Router]:
    names = [str(seed), *(f"{seed}/{number}" for number in range(1, trial.routers))]
    if policy not in OURS:
        choose = BASELINES[policy]
        return [BaselineRouter(choose, seed=name) for name in names]
    config = config_of(policy, settings)
    exact, dedicated = policy == LIMIT, policy == WEIGHTED_LANES
    return [make(config, seed=s, exact=exact, dedicated=dedicated) for s in names]


def _together(routers: Sequence[Router], trial: Trial) -> Router:
    ours = [router for router in routers if isinstance(router, LanewayRouter)]
    if not ours or trial.sync_interval_s is None:
        return Several(routers)
    return Acquainted(
        ours,
        interval_s=trial.sync_interval_s,
        delay_s=_SYNC_DELAY_S,
        ttl_s=ours[0].ttl_s,
        away_s=trial.redis_away_s,
    )


def _accounts(
    trial: Trial, cluster: Cluster, routers: Sequence[Router], served: Sequence[Served]
) -> Accounts:
    ours = [router for router in routers if isinstance(router, LanewayRouter)]
    return accounts_of(
        cluster,
        [row.good for row in served],
        served,
        lost_at=min((f.at_s for f in trial.faults if f.kind == "kill"), default=None),
        told=[told for router in ours for told in router.ghosts.end(cluster.now)],
        p3_cost_ratio=ours[0].p3_cost_ratio if ours else float("nan"),
    )


def _schedule(cluster: Cluster, fault: Fault) -> None:
    server = cluster.servers[fault.worker]

    def strike(now: float) -> None:
        match fault.kind:
            case "kill":
                cluster.kill(fault.worker)
            case "revive":
                cluster.revive(fault.worker)
            case "slow":
                server.engine.set_speed(slow_ratio=fault.value, now=now)
            case "freeze":
                server.frozen = server.report(now) if fault.value else None
            case "mute":
                server.mute = bool(fault.value)
            case "lag":
                server.lag_s = fault.value
            case "skew":
                server.skew_s = fault.value

    # A digest is made of what is written, where 60 is not 60.0.
    cluster.at(float(fault.at_s), strike)


def _served(job: Job) -> Served:
    assert job.ending is not None, f"job {job.item.number} never ended"
    item = job.item
    return Served(
        at_s=item.at_s,
        tier=item.tier,
        tenant=item.tenant,
        prompt_tokens=item.prompt_tokens,
        output_tokens=item.output_tokens,
        ttft_s=job.ttft_s,
        tpot_s=job.tpot_s,
        outcome=job.ending.value,
        retry_after_s=job.retry_after_s,
        cached_tokens=job.request.cached_tokens if job.request is not None else 0,
    )
