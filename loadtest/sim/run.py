"""One simulated run: scenario, router and seed in, figures out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loadtest.report import Figures, Served, judged
from loadtest.sim.baselines import BASELINES, BaselineRouter
from loadtest.sim.cluster import Cluster, Job, Router
from loadtest.sim.laneway import LanewayRouter
from loadtest.sim.trials import Fault, Trial
from loadtest.workload import work
from router.config import Config
from workers.engine_model import EngineSettings
from workers.profiles import load_profiles

OURS: Final = "laneway"
LIMIT: Final = "limit"
POLICIES: Final = (OURS, LIMIT, *BASELINES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The outcome of one run."""

    trial: str
    policy: str
    seed: int
    figures: Figures
    rows: tuple[Served, ...]
    retractions: int
    digest: str


def simulate(trial: Trial, policy: str, *, seed: int, config: Config | None = None) -> Run:
    """Play `trial` against `policy`.

    Raises KeyError when the policy or an engine profile of the trial does not exist.
    """
    profiles = load_profiles()
    cluster = Cluster(
        [(name, profiles[name]) for name in trial.workers],
        settings=EngineSettings(prefix_block_tokens=trial.prefix_block_tokens),
    )
    for fault in trial.faults:
        _schedule(cluster, fault)
    router = _router(policy, seed, config)
    cluster.run(router, work(trial.scenario.flows, seed=seed), length_s=trial.length_s)
    rows = tuple(_served(job) for job in cluster.jobs if job.item.at_s >= trial.measured_from_s)
    return Run(
        trial=trial.name,
        policy=policy,
        seed=seed,
        figures=judged(rows, seconds=trial.length_s - trial.measured_from_s),
        rows=rows,
        retractions=cluster.retractions,
        digest=cluster.digest(),
    )


def default_config() -> Config:
    """The configuration that `laneway` and `limit` are tried with."""
    return Config.model_validate({"prefix": {"blocks_max": 1024}})


def _router(policy: str, seed: int, config: Config | None) -> Router:
    if policy in (OURS, LIMIT):
        return LanewayRouter(config or default_config(), seed=seed, exact=policy == LIMIT)
    return BaselineRouter(BASELINES[policy], seed=seed)


def _schedule(cluster: Cluster, fault: Fault) -> None:
    def strike(now: float) -> None:
        engine = cluster.servers[fault.worker].engine
        match fault.kind:
            case "kill":
                cluster.kill(fault.worker, now=now)
            case "revive":
                cluster.revive(fault.worker)
            case "slow":
                engine.set_speed(slow_ratio=fault.ratio, now=now)
            case "freeze":
                server = cluster.servers[fault.worker]
                server.frozen = server.report()
            case _:
                raise ValueError(f"no such fault: {fault.kind}")

    cluster.at(fault.at_s, strike)


def _served(job: Job) -> Served:
    assert job.ending is not None
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
