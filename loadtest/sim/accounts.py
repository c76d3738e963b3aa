"""What a run cost and what it broke: figures that single requests do not show.

Work is counted in tokens that engines computed (prompt tokens without cached ones, and output) and
in the seconds that they spent on them. It is useful when its request was good: whole and within the
targets of its tier. All else is wasted: computed twice after a retraction, for a client that was
cut off, or too late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Final

from loadtest.report import Served, attainment
from loadtest.sim.cluster import Cluster, Ending
from loadtest.sim.ghosts import Told
from loadtest.workload import Tier
from workers.engine_model import EngineFigures

_RECOVERED_AT: Final = 0.95  # feasible premium attainment
_RECOVERY_WINDOW_S: Final = 5.0
_RECOVERY_STEP_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """Figures of one run as a whole; nan where the question does not arise."""

    retractions: int
    lost_elsewhere: int  # lost, but not as a stream that had begun on a worker that died
    wasted_tokens_ratio: float
    useful_busy_ratio: float  # of the engines' busy time
    recovery_s: float  # after the first loss, until feasible premium is at 95 % again
    retry_after_ratio: float  # share of Retry-After within a factor 2 of the real wait
    retry_after_judged: int
    p3_cost_ratio: float  # of the dispatched cost, while P3 waits


def accounts_of(
    cluster: Cluster,
    good: Sequence[bool],
    rows: Sequence[Served],
    *,
    lost_at: float | None,
    told: Sequence[Told],
    p3_cost_ratio: float,
) -> Accounts:
    """Settle the run of `cluster`; `good` says of each job whether it met its targets."""
    wasted, useful_busy = _work(cluster, good)
    return Accounts(
        retractions=cluster.retractions,
        lost_elsewhere=sum(
            job.ending is Ending.LOST
            and (job.first_token_at is None or job.server is None or not job.server.killed)
            for job in cluster.jobs
        ),
        wasted_tokens_ratio=wasted,
        useful_busy_ratio=useful_busy,
        recovery_s=nan if lost_at is None else recovery_s(rows, lost_at=lost_at),
        retry_after_ratio=sum(t.within_factor_2 for t in told) / len(told) if told else nan,
        retry_after_judged=len(told),
        p3_cost_ratio=p3_cost_ratio,
    )


def _work(cluster: Cluster, good: Sequence[bool]) -> tuple[float, float]:
    """The share of computed tokens that was wasted, and of busy time that was useful."""
    engines: Iterable[EngineFigures] = (
        *cluster.retired,
        *(server.engine.figures() for server in cluster.servers if server.alive),
    )
    prefilled = generated = 0
    prefill_us = decode_us = 0.0
    for figures in engines:
        prefilled += figures.prefill_tokens_total
        generated += figures.generated_tokens_total
        prefill_us += figures.prefill_busy_us_total
        decode_us += figures.decode_moments[2]
    useful_prompt = useful_output = 0
    for job, well in zip(cluster.jobs, good, strict=True):
        if well and job.request is not None:
            useful_prompt += job.item.prompt_tokens - job.request.cached_tokens
            useful_output += job.output_tokens
    if not prefilled or not generated:
        return nan, nan
    wasted = 1 - (useful_prompt + useful_output) / (prefilled + generated)
    useful_us = prefill_us * useful_prompt / prefilled + decode_us * useful_output / generated
    return wasted, useful_us / (prefill_us + decode_us)


def recovery_s(rows: Sequence[Served], *, lost_at: float) -> float:
    """Seconds from `lost_at` on after which arrivals of five seconds are at 95 % again.

    nan when no five seconds until the last arrival are.
    """
    premium = [row for row in rows if row.tier is Tier.PREMIUM and row.feasible]
    last_at = max((row.at_s for row in premium), default=0.0)
    after_s = 0.0
    while lost_at + after_s + _RECOVERY_WINDOW_S <= last_at:
        begin = lost_at + after_s
        window = [row for row in premium if begin <= row.at_s < begin + _RECOVERY_WINDOW_S]
        if window and attainment(window) >= _RECOVERED_AT:
            return after_s
        after_s += _RECOVERY_STEP_S
    return nan
