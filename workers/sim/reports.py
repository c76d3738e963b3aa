"""What a simulated worker tells of its load, in the forms that routers read. Pure.

`/v1/loads` has the shape of SGLang 0.5.23 and of 0.5.9, `/get_load` that of releases up to 0.5.20,
`/metrics` SGLang's names; `/health` answers with the router's own load report, as an agent would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from router.contract import LoadReport
from workers.engine_model import EngineFigures, EngineSettings

SECTIONS: Final = ("core", "memory", "spec", "lora", "disagg", "queues")
# Releases by what they changed for a reader of the load.
LOADS_SINCE: Final = (0, 5, 8)  # before: only /get_load
LOADS_FROM_SNAPSHOT_SINCE: Final = (0, 5, 13)  # before: an aggregate, fewer figures
GET_LOAD_UNTIL: Final = (0, 5, 20)
READY_SINCE: Final = (0, 5, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Figures of one worker at one moment."""

    figures: EngineFigures
    settings: EngineSettings
    taken_at: float  # wall clock, for timestamps
    taken_monotonic: float  # for ages
    tokens_per_s: float
    ttft_mean_s: float | None
    requests_total: int
    aborted_total: int
    prompt_tokens_total: int
    ready: bool

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that came from the prefix cache, since the start."""
        cached = self.figures.cached_tokens_total
        seen = cached + self.figures.prefill_tokens_total
        return cached / seen if seen else 0.0

    @property
    def kv_used_ratio(self) -> float:
        """Share of the KV pool in use, evictable cache excluded."""
        return self.figures.kv_used_tokens / self.figures.kv_total_tokens


def load_report(snapshot: Snapshot, *, now: float) -> LoadReport:
    """Return the report by the router's contract; `now` is the worker's monotonic clock."""
    figures = snapshot.figures
    return LoadReport(
        running_requests=figures.running_requests,
        queued_requests=figures.waiting_requests,
        queued_uncached_tokens=figures.waiting_uncached_tokens,
        max_running_requests=snapshot.settings.max_running_requests,
        kv_used_tokens=figures.kv_used_tokens,
        kv_total_tokens=figures.kv_total_tokens,
        generation_tokens_per_s=snapshot.tokens_per_s,
        cache_hit_ratio=snapshot.hit_ratio,
        ttft_mean_s=snapshot.ttft_mean_s,
        prefill_tokens_total=figures.prefill_tokens_total,
        prefill_busy_s_total=figures.prefill_busy_us_total / 1e6,
        decode_moments=figures.decode_moments,
        age_s=max(0.0, now - snapshot.taken_monotonic),
        ready=snapshot.ready,
    )


def loads(
    snapshot: Snapshot,
    *,
    version: str,
    release: tuple[int, ...],
    include: Iterable[str],
    dp_rank: int | None,
    answered_at: float,
) -> dict[str, Any]:
    """Return the body of /v1/loads."""
    ranks = [_rank(snapshot, set(include), release)] if dp_rank in (None, 0) else []
    stamp = datetime.fromtimestamp(answered_at, UTC).isoformat()
    if release >= LOADS_FROM_SNAPSHOT_SINCE:
        head = {"timestamp": stamp, "version": version, "accelerator": None, "num_accelerators": 1}
        return {**head, "loads": ranks}
    figures = snapshot.figures
    aggregate = {
        "total_running_reqs": figures.running_requests,
        "total_waiting_reqs": figures.waiting_requests,
        "total_reqs": figures.running_requests + figures.waiting_requests,
        "avg_token_usage": round(snapshot.kv_used_ratio, 4),
        "avg_throughput": round(snapshot.tokens_per_s, 2),
        "avg_utilization": _utilization(snapshot),
    }
    return {
        "timestamp": stamp,
        "version": version,
        "dp_rank_count": len(ranks),
        "loads": ranks,
        "aggregate": aggregate,
    }


def _rank(snapshot: Snapshot, include: set[str], release: tuple[int, ...]) -> dict[str, Any]:
    figures = snapshot.figures
    rank: dict[str, Any] = {
        "timestamp": snapshot.taken_at,
        "dp_rank": 0,
        "num_running_reqs": figures.running_requests,
        "num_waiting_reqs": figures.waiting_requests,
        "num_used_tokens": figures.kv_used_tokens,
        "max_total_num_tokens": figures.kv_total_tokens,
        "max_running_requests": snapshot.settings.max_running_requests,
        "token_usage": round(snapshot.kv_used_ratio, 4),
        "gen_throughput": round(snapshot.tokens_per_s, 2),
        "cache_hit_rate": round(snapshot.hit_ratio, 4),
        "utilization": _utilization(snapshot),
    }
    if release >= LOADS_FROM_SNAPSHOT_SINCE:
        total = figures.kv_used_tokens + figures.waiting_tokens
        moments = figures.decode_moments
        rank.update(
            num_waiting_uncached_tokens=figures.waiting_uncached_tokens,
            num_total_tokens=total,
            num_active_tokens=total,
            num_prealloc_ready_tokens=0,
            total_prefill_uncached_tokens=figures.prefill_tokens_total,
            total_prefill_busy_us=int(figures.prefill_busy_us_total),
            decode_moments=list(moments) if moments[0] else None,
        )
    else:
        rank["num_total_reqs"] = figures.running_requests + figures.waiting_requests
    everything = "all" in include
    for name, section in _sections(figures).items():
        if everything or name in include:
            rank["disaggregation" if name == "disagg" else name] = section
    return rank


def _sections(figures: EngineFigures) -> dict[str, dict[str, Any]]:
    return {
        "memory": {
            "weight_gb": 15.0,
            "kv_cache_gb": round(figures.kv_total_tokens * 131072 / 2**30, 3),
            "graph_gb": 0.0,
            "token_capacity": figures.kv_total_tokens,
        },
        "disagg": {
            "mode": "null",
            "prefill_bootstrap_queue_reqs": 0,
            "prefill_inflight_queue_reqs": 0,
            "decode_prealloc_queue_reqs": 0,
            "decode_transfer_queue_reqs": 0,
            "decode_retracted_queue_reqs": 0,
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        },
        "queues": {
            "waiting": figures.waiting_requests,
            "grammar": 0,
            "paused": 0,
            "retracted": figures.retracted_waiting,
            "prealloc_ready": 0,
        },
    }


def _utilization(snapshot: Snapshot) -> float:
    running, most = snapshot.figures.running_requests, snapshot.settings.max_running_requests
    return round(max(running / most, snapshot.kv_used_ratio), 4)


def get_load(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the body of the old /get_load."""
    figures = snapshot.figures
    return [
        {
            "dp_rank": 0,
            "num_reqs": figures.running_requests + figures.waiting_requests,
            "num_waiting_reqs": figures.waiting_requests,
            "num_tokens": figures.kv_used_tokens + figures.waiting_tokens,
            "num_pending_tokens": figures.waiting_uncached_tokens,
            "ts_tic": snapshot.taken_monotonic,
        }
    ]


def prometheus_loads(body: dict[str, Any]) -> str:
    """Return /v1/loads as gauges, the form that `format=prometheus` asks for."""
    lines: list[str] = []
    for rank in body["loads"]:
        label = f'{{dp_rank="{rank["dp_rank"]}"}}'
        for name, value in rank.items():
            if isinstance(value, dict):
                section = "disagg" if name == "disaggregation" else name
                pairs = {f"sglang_{section}_{key}": one for key, one in value.items()}
            else:
                pairs = {f"sglang_{name}": value}
            for full, one in pairs.items():
                if isinstance(one, int | float) and full != "sglang_dp_rank":
                    lines += [f"# TYPE {full} gauge", f"{full}{label} {one}"]
    return "\n".join(lines) + "\n"


def metrics(snapshot: Snapshot, model: str) -> str:
    """Return /metrics by SGLang's names."""
    figures = snapshot.figures
    free = figures.kv_total_tokens - figures.kv_used_tokens - figures.kv_evictable_tokens
    gauges = {
        "num_running_reqs": figures.running_requests,
        "num_queue_reqs": figures.waiting_requests,
        "num_used_tokens": figures.kv_used_tokens,
        "token_usage": round(snapshot.kv_used_ratio, 4),
        "max_total_num_tokens": figures.kv_total_tokens,
        "kv_available_tokens": free,
        "kv_evictable_tokens": figures.kv_evictable_tokens,
        "kv_used_tokens": figures.kv_used_tokens,
        "gen_throughput": round(snapshot.tokens_per_s, 2),
        "cache_hit_rate": round(snapshot.hit_ratio, 4),
        "utilization": _utilization(snapshot),
        "decode_sum_seq_lens": figures.context_tokens,
        "new_token_ratio": round(figures.new_token_ratio, 4),
        "num_retracted_reqs": figures.retracted_waiting,
    }
    counters = {
        "num_requests_total": snapshot.requests_total,
        "num_aborted_requests_total": snapshot.aborted_total,
        "prompt_tokens_total": snapshot.prompt_tokens_total,
        "generation_tokens_total": figures.generated_tokens_total,
        "cached_tokens_total": figures.cached_tokens_total,
    }
    quoted = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    label = f'engine_type="unified",model_name="{quoted}"'
    lines: list[str] = []
    for kind, ranks, pairs in (
        ("gauge", ',tp_rank="0",pp_rank="0",moe_ep_rank="0"', gauges),
        ("counter", "", counters),
    ):
        for name, value in pairs.items():
            lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{label}{ranks}}} {value}"]
    return "\n".join(lines) + "\n"
