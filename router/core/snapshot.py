"""What the core shows of itself: frozen values for admin answers, gauges, dashboards and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.contract import Lane, LoadReport, WorkerId, WorkerSpec
from router.core.breaker import BreakerState
from router.core.degrading import DegradeView
from router.core.queue_view import QueueView
from router.core.reserving import ReservingView
from router.core.shadow import ShadowView
from router.core.slo_watch import SloView
from router.core.types import (
    Outcome,
    RequestRecord,
    Ticket,
    Usage,
    WorkerState,
)
from router.core.waiting import WaitingRoom
from router.core.worker import Worker
from router.errors import Reason


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
    kv_used_tokens: int | None  # as it reported, evictable cache excluded
    kv_total_tokens: int | None
    kv_usable_tokens: int | None  # of these, what may be in use and reserved
    kv_bytes_per_token: int | None  # over all its GPUs
    concurrency_max: int
    report: LoadReport | None  # the last one, whatever its age
    report_age_s: float | None
    stale: bool  # its reported figures are unknown by now
    why_unknown: str | None  # what was wrong with its last poll; None: it was good
    answered: bool  # a poll, since it was registered
    ttft_mean_s: float | None  # own measurement
    breaker: BreakerState
    out_s: float  # seconds for which it is left out (breaker, its own request, overload)
    probe_failures: int  # in a row
    requests: int  # dispatched to it since it joined
    failures: int  # of these, by its own fault
    prefill_duty: float  # share of its time that pacing leaves for prefill
    prefill_trim: float  # predicted over measured time of what it did lately
    prefill_credit_s: float  # seconds of prefill that it may be sent now; below 0: owes


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
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole core at `at`."""

    at: float
    workers: tuple[WorkerView, ...]
    lanes: Mapping[Lane, LaneView]
    counters: Counters
    retry_budget: float
    queue: QueueView
    slo: SloView
    degrade: DegradeView
    limits: ReservingView
    shadow: ShadowView | None = None  # None: no shadow policy is configured


def lane_views(
    room: WaitingRoom, running: Mapping[Lane, int], queue: QueueView, now: float
) -> dict[Lane, LaneView]:
    """Every lane at `now`."""
    return {
        lane: LaneView(
            lane=lane,
            queued=room.flow.depth(lane),
            depth_max=room.depth_max,
            oldest_age_s=max(line.oldest_age_s for line in queue.lines if line.lane is lane),
            running=running[lane],
            drain_per_s=room.dispatches_per_s(lane, now),
        )
        for lane in Lane
    }


def worker_view(worker: Worker, now: float) -> WorkerView:
    """`worker` at `now`."""
    if worker.valid_until <= now:
        worker.refresh(now)
    return WorkerView(
        id=worker.id,
        spec=worker.spec,
        state=worker.state,
        why=worker.why,
        models=worker.models,
        models_known=bool(worker.models),
        streams=worker.streams,
        waiting=worker.waiting,
        pending_tokens=worker.pend_tokens,
        kv_reserved_tokens=worker.kv_reserved_tokens,
        kv_used_tokens=(
            None if worker.unknown or worker.report is None else worker.report.kv_used_tokens
        ),
        kv_total_tokens=worker.kv_total_tokens,
        kv_usable_tokens=_whole(worker.kv_usable_tokens),
        kv_bytes_per_token=_whole(worker.kv_bytes_per_token),
        concurrency_max=worker.concurrency_max,
        report=worker.report,
        report_age_s=None if worker.report is None else now - worker.reported_at,
        stale=worker.fresh_until <= now,
        why_unknown=worker.why_unknown,
        answered=worker.answered,
        ttft_mean_s=worker.ttft_mean_s,
        breaker=worker.breaker.state,
        out_s=max(0.0, worker.out_until - now),
        probe_failures=worker.probe_failures,
        requests=worker.requests,
        failures=worker.failures,
        prefill_duty=worker.pace.duty,
        prefill_trim=worker.pace.trim,
        prefill_credit_s=worker.pace.credit_s,
    )


def _whole(figure: float | None) -> int | None:
    return None if figure is None else int(figure)


def record_of(
    ticket: Ticket, outcome: Outcome, reason: Reason | None, usage: Usage | None, now: float
) -> RequestRecord:
    """What remains of `ticket`: figures as reported, else as estimated and counted."""
    spec = ticket.spec
    known = usage is not None and usage.output_tokens is not None
    usage = usage or Usage()
    return RequestRecord(
        spec.request_id,
        spec.tenant,
        spec.model,
        ticket.pool.served_model,
        spec.endpoint,
        ticket.lane,
        spec.priority,
        spec.stream,
        ticket.worker_id,
        outcome,
        reason,
        ticket.attempts,
        ticket.spilled,
        ticket.arrived_at,
        ticket.dispatched_at,
        ticket.first_token_at,
        now,
        ticket.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens,
        usage.cached_tokens,
        ticket.output_seen_tokens if usage.output_tokens is None else usage.output_tokens,
        known,
        None if ticket.degraded is None else ticket.degraded.act,
        ticket.preempted,
        spec.samples,
    )
