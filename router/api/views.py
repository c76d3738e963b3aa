"""Makes the JSON of workers, loads and state from a snapshot of the core.

The words `status`, `is_healthy`, `load`, `model_id` are those of sglang-router; the figures beside
them are ours. An unknown figure is null, never zero. Keys of workers are never shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import msgspec

from router.contract import Lane, WorkerSpec
from router.core.breaker import BreakerState
from router.core.refusals import NONE_REGISTERED
from router.core.reserving import ReservingView
from router.core.shadow import ShadowView
from router.core.snapshot import Snapshot, WorkerView
from router.core.types import WorkerState
from router.runtime.loops import LEADS_BACK

_STATUS: Final[Mapping[WorkerState, str]] = {
    WorkerState.JOINING: "Pending",
    WorkerState.ACTIVE: "Ready",
    WorkerState.EJECTED: "NotReady",
    WorkerState.DRAINING: "Draining",
}


def is_healthy(view: WorkerView) -> bool:
    """Whether the worker is given requests now, as far as its health goes."""
    # An open breaker whose time is over waits for its trial: a router that called itself unready
    # would never be sent one.
    out = view.breaker is BreakerState.OPEN and view.out_s > 0
    return view.state is WorkerState.ACTIVE and not out


def can_serve(view: WorkerView) -> bool:
    """Whether requests can be sent there: halves of a prefill/decode pair serve none alone."""
    return is_healthy(view) and view.spec.worker_type == "regular"


def why_none_serves(snapshot: Snapshot) -> str:
    """Why no worker can serve, where that is so."""
    if not snapshot.workers:
        return NONE_REGISTERED
    if any(view.why_unknown == LEADS_BACK for view in snapshot.workers):
        return "no worker is live but routers whose workers all lead back to this one"
    return "no worker is live"


def status_of(view: WorkerView) -> str:
    """The worker's status in sglang-router's words; Failed: out, and never heard of."""
    if view.state is WorkerState.EJECTED and not view.answered:
        return "Failed"
    if view.state is WorkerState.ACTIVE and view.breaker is BreakerState.OPEN:
        return "NotReady"
    return _STATUS[view.state]


def lanes_of(spec: WorkerSpec) -> list[str]:
    """The worker's lanes, always in the same order."""
    return [lane.value for lane in Lane if lane in spec.lanes]


def worker_json(view: WorkerView) -> dict[str, Any]:
    """All that may be shown of a worker."""
    spec, report = view.spec, view.report
    models = list(view.models)
    return {
        "id": view.id,
        "url": spec.url,
        "model_id": models[0] if models else "unknown",
        "models": models,
        "models_known": view.models_known,
        "lanes": lanes_of(spec),
        "priority": spec.priority,
        "cost": spec.cost,
        "worker_type": spec.worker_type,
        "pass_priority": spec.pass_priority,
        "labels": dict(spec.labels),
        "health_url": spec.health_url,
        "ttl_s": spec.ttl_s,
        "status": status_of(view),
        "state": view.state.value,
        "why": view.why,
        "is_healthy": is_healthy(view),
        "load": view.streams,
        "waiting": view.waiting,
        "pending_prefill_tokens": view.pending_tokens,
        "concurrency_max": view.concurrency_max,
        "kv_used_tokens": view.kv_used_tokens,
        "kv_reserved_tokens": view.kv_reserved_tokens,
        "kv_total_tokens": view.kv_total_tokens,
        "kv_usable_tokens": view.kv_usable_tokens,
        "kv_bytes_per_token": view.kv_bytes_per_token,
        "kv_used_ratio": kv_used_ratio(view),
        "running_requests": None if report is None or view.stale else report.running_requests,
        "queued_requests": None if report is None or view.stale else report.queued_requests,
        "report_age_s": rounded(view.report_age_s),
        "why_unknown": view.why_unknown,
        "ttft_mean_s": rounded(view.ttft_mean_s),
        "breaker": view.breaker.value,
        "out_s": rounded(view.out_s),
        "requests": view.requests,
        "failures": view.failures,
        "probe_failures": view.probe_failures,
    }


def kv_used_ratio(view: WorkerView) -> float | None:
    """Share of the worker's KV pool in use, 0 to 1; None when unknown."""
    if view.kv_used_tokens is None or not view.kv_total_tokens:
        return None
    return round(min(1.0, view.kv_used_tokens / view.kv_total_tokens), 4)


def stats_json(snapshot: Snapshot) -> dict[str, Any]:
    """Counts over all workers."""
    views = snapshot.workers
    return {
        "healthy": sum(map(is_healthy, views)),
        "by_state": {state.value: sum(v.state is state for v in views) for state in WorkerState},
        "by_lane": {lane.value: sum(lane in v.spec.lanes for v in views) for lane in Lane},
        **{
            f"{kind}_count": sum(v.spec.worker_type == kind for v in views)
            for kind in ("regular", "prefill", "decode")
        },
    }


def state_json(snapshot: Snapshot) -> dict[str, Any]:
    """Everything that the policy knows, for GET /admin/state."""
    workers = []
    for view in snapshot.workers:
        entry = worker_json(view)
        entry["stale"] = view.stale
        entry["report"] = None if view.report is None else msgspec.to_builtins(view.report)
        workers.append(entry)
    return {
        "workers": workers,
        "lanes": [{**asdict(view), "lane": lane.value} for lane, view in snapshot.lanes.items()],
        "counters": asdict(snapshot.counters),
        "retry_budget": rounded(snapshot.retry_budget),
        "limits": _limits_json(snapshot.limits),
        "stats": stats_json(snapshot),
    }


def _limits_json(view: ReservingView) -> dict[str, Any]:
    refused = Counter[str]()
    for (_, scope), count in view.refused.items():
        refused["unknown" if scope is None else scope.value] += count
    return {
        **asdict(view),
        "granted": sum(view.granted.values()),
        "refused": refused,
        "borrowed": {priority.name: rounded(units) for priority, units in view.borrowed.items()},
    }


def shadow_json(view: ShadowView | None) -> dict[str, Any]:
    """The pair of policies and how far they agree, for GET /shadow."""
    if view is None:
        return {"enabled": False}
    mean_s = view.ttft_difference_s_total / view.differed if view.differed else 0.0
    return {
        "enabled": True,
        "live": view.live,
        "shadow": view.shadow,
        "agreed": view.agreed,
        "differed": view.differed,
        "sooner": view.sooner,
        "ttft_difference_mean_s": round(mean_s, 6),
        "recent": [asdict(difference) for difference in view.recent],
    }


def load_json(view: WorkerView) -> dict[str, Any]:
    """One worker in the words of SGLang's /v1/loads."""
    report = view.report if not view.stale else None
    return {
        "worker": view.id,
        "url": view.spec.url,
        "num_running_reqs": None if report is None else report.running_requests,
        "num_waiting_reqs": None if report is None else report.queued_requests,
        "num_waiting_uncached_tokens": None if report is None else report.queued_uncached_tokens,
        "num_used_tokens": view.kv_used_tokens,
        "max_total_num_tokens": view.kv_total_tokens,
        "max_running_requests": view.concurrency_max,
        "token_usage": kv_used_ratio(view),
        "gen_throughput": None if report is None else report.generation_tokens_per_s,
        "cache_hit_rate": None if report is None else report.cache_hit_ratio,
        "router_streams": view.streams,
        "router_pending_prefill_tokens": view.pending_tokens,
        "report_age_s": rounded(view.report_age_s),
    }


def aggregate_json(snapshot: Snapshot) -> dict[str, Any]:
    """Sums over workers, in SGLang's words; null where no worker says."""
    loads = [load_json(view) for view in snapshot.workers]
    ratios = [load["token_usage"] for load in loads if load["token_usage"] is not None]
    return {
        "total_running_reqs": _sum(loads, "num_running_reqs"),
        "total_waiting_reqs": _sum(loads, "num_waiting_reqs"),
        "total_queued_in_router": sum(lane.queued for lane in snapshot.lanes.values()),
        "total_streams_of_router": sum(view.streams for view in snapshot.workers),
        "avg_token_usage": round(sum(ratios) / len(ratios), 4) if ratios else None,
        "avg_throughput": _sum(loads, "gen_throughput"),
    }


def _sum(loads: list[dict[str, Any]], name: str) -> float | None:
    known = [load[name] for load in loads if load[name] is not None]
    return sum(known) if known else None


def rounded(value: float | None) -> float | None:
    """A duration for people: milliseconds are enough, and JSON knows no infinity."""
    if value is None or value in (float("inf"), float("-inf")):
        return None
    return round(value, 3)
