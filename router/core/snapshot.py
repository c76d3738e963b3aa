"""What the core shows of itself: frozen values for admin answers, gauges, dashboards and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.contract import Lane, LoadReport, WorkerId, WorkerSpec
from router.core.breaker import BreakerState
from router.core.types import WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker at one moment. None: unknown."""

    id: WorkerId
    spec: WorkerSpec  # as registered or patched; its api_key stays hidden in any repr
    state: WorkerState
    why: str  # of the last change of state
    models: tuple[str, ...]  # empty and not models_known: not learnt yet
    models_known: bool
    streams: int  # requests that this router runs on it
    waiting: int  # those of them without a first token
    pending_tokens: int  # their uncached prompt tokens
    kv_reserved_tokens: int  # promised to them, what they hold included
    kv_used_tokens: int | None  # estimate of all use, others' included
    kv_total_tokens: int | None
    concurrency_max: int
    report: LoadReport | None  # the last one, whatever its age
    report_age_s: float | None
    stale: bool  # its reported figures are unknown by now
    ttft_mean_s: float | None  # own measurement
    breaker: BreakerState
    out_s: float  # seconds for which it is left out (breaker, its own request, overload)
    probe_failures: int  # in a row
    requests: int  # dispatched to it since it joined
    failures: int  # of these, by its own fault


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """One lane's queue at one moment."""

    lane: Lane
    queued: int
    depth_max: int
    oldest_age_s: float
    running: int
    drain_per_s: float  # recent dispatches per second


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What happened since the start; only ever grows."""

    requests: int
    dispatches: int
    retries: int
    spills: int
    finished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole core at `at`."""

    at: float
    workers: tuple[WorkerView, ...]
    lanes: Mapping[Lane, LaneView]
    counters: Counters
    retry_budget: float
