"""Reads what workers say of their load and of themselves: our own report and SGLang's answers.

Four sources carry a load, and `parse` turns each into a `LoadReport`. SGLang has renamed and moved
its figures with nearly every release, so every figure is optional: one that is absent (or null) is
None, "unknown". A figure that is present but impossible (negative, NaN, a text) condemns the whole
answer as malformed, and so does an answer without any load figure: no broken answer may look idle.

Data-parallel ranks are summed; one rank's unknown makes the sum unknown. Pure; layer 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Literal, TypeGuard

import msgspec
import orjson
from prometheus_client.parser import text_string_to_metric_families

from router.contract import (
    LoadReport,
    MalformedReport,
    checked_figure,
    checked_report,
    decode_report,
)
from router.sglang_loads import FIGURES, RANKS_MAX, Loads, RankLoad, decode_loads

_MODELS_MAX: Final = 256
_NAME_LENGTH_MAX: Final = 512
_KV_BYTES_MAX: Final = 2**26  # of a token; large models without shared heads have some 2**22
# The two clocks of one host are read in this order, so the difference may be a hair below zero.
_CLOCK_SLACK_S: Final = 1.0


class LoadFormat(StrEnum):
    """The kinds of load answer; `target` is where a worker serves it."""

    LANEWAY = "laneway"  # our JSON, from an agent or a simulated worker
    LOADS = "loads"  # SGLang from 0.5.8
    GET_LOAD = "get_load"  # SGLang up to 0.5.20
    METRICS = "metrics"  # SGLang with --enable-metrics: the stalest of the four

    @property
    def target(self) -> str:
        """Path and query of the GET that answers in this format."""
        return _TARGET[self]


_TARGET: Final[Mapping[LoadFormat, str]] = {
    LoadFormat.LANEWAY: "/health",
    LoadFormat.LOADS: "/v1/loads?include=core",
    LoadFormat.GET_LOAD: "/get_load",
    LoadFormat.METRICS: "/metrics",
}

# What an SGLang server may offer, best first.
SGLANG_FORMATS: Final = (LoadFormat.LOADS, LoadFormat.GET_LOAD, LoadFormat.METRICS)


def parse(source: LoadFormat, body: bytes) -> LoadReport:
    """Read a load answer.

    Raises MalformedReport, and nothing else, when `body` is not such an answer, holds an impossible
    figure, or holds no figure of load at all.
    """
    report = _PARSERS[source](body)
    if (
        report.running_requests is None
        and report.queued_requests is None
        and report.queued_uncached_tokens is None
        and report.kv_used_tokens is None
    ):
        raise MalformedReport(f"{source}: no load figure in it")
    return report


def _loads(body: bytes) -> LoadReport:
    """SGLang's /v1/loads: ranks under "loads".

    Releases 0.5.8 to 0.5.12 also send an "aggregate"; it is left alone, as it says zero when no
    rank answered. Later ones read a snapshot that each rank writes now and then; its age is told by
    the server's two timestamps.
    """
    try:
        told = decode_loads(body)
    except msgspec.MsgspecError:
        told = _by_figure(_json(body))
    answered_at = _moment(told.timestamp)
    return _summed([_loads_rank(rank, answered_at) for rank in told.loads])


def _by_figure(document: Any) -> Loads:
    """What was not taken as a whole: to say what is wrong, or that all will do."""
    if not isinstance(document, dict):
        raise MalformedReport("loads: not a JSON object")
    ranks = [
        RankLoad(
            timestamp=checked_figure("timestamp", _moment(rank.get("timestamp"))),
            **{theirs: checked_figure(ours, rank.get(theirs)) for theirs, ours in FIGURES.items()},
        )
        for rank in _ranks("loads", document.get("loads"))
    ]
    answered_at = checked_figure("timestamp", _moment(document.get("timestamp")))
    return Loads(ranks, answered_at)


def _loads_rank(rank: RankLoad, answered_at: float | None) -> LoadReport:
    written_at = rank.timestamp
    if written_at == 0:
        # The slot as it is created, before its scheduler wrote anything: all zeros.
        raise MalformedReport("loads: a rank has not reported yet")
    busy_us = rank.total_prefill_busy_us
    return LoadReport(
        running_requests=rank.num_running_reqs,
        queued_requests=rank.num_waiting_reqs,
        queued_uncached_tokens=rank.num_waiting_uncached_tokens,
        max_running_requests=_capacity(rank.max_running_requests),
        kv_used_tokens=rank.num_used_tokens,
        kv_total_tokens=_capacity(rank.max_total_num_tokens),
        generation_tokens_per_s=rank.gen_throughput,
        cache_hit_ratio=rank.cache_hit_rate,
        prefill_tokens_total=rank.total_prefill_uncached_tokens,
        prefill_busy_s_total=None if busy_us is None else busy_us / 1e6,
        decode_moments=rank.decode_moments,
        age_s=_age_s(_moment(written_at), answered_at),
    )


def _age_s(written_at: float | None, answered_at: float | None) -> float | None:
    """Seconds between two moments of the worker's clock; None when one is missing or it jumped."""
    if written_at is None or answered_at is None:
        return None
    age_s = answered_at - written_at
    return max(0.0, age_s) if age_s >= -_CLOCK_SLACK_S else None


def _moment(value: Any) -> float | None:
    """Seconds since 1970 of a timestamp: a number or ISO 8601, UTC where it names no zone."""
    if value is None or type(value) is float or _is_number(value):
        return value
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError) as exc:
        raise MalformedReport(f"timestamp: {value!r:.80} is none") from exc


def _get_load(body: bytes) -> LoadReport:
    """SGLang's /get_load: a list with one entry per rank.

    `num_reqs` counts waiting requests too. So does `num_tokens` their prompts, which makes it an
    upper bound of the KV memory in use: exact while nothing waits, on the safe side otherwise.
    """
    return _summed([_get_load_rank(rank) for rank in _ranks("get_load", _json(body))])


def _get_load_rank(rank: Mapping[str, Any]) -> LoadReport:
    report = checked_report(
        {
            "running_requests": rank.get("num_reqs"),
            "queued_requests": rank.get("num_waiting_reqs"),
            "queued_uncached_tokens": rank.get("num_pending_tokens"),
            "kv_used_tokens": rank.get("num_tokens"),
        }
    )
    if report.running_requests is None or report.queued_requests is None:
        return msgspec.structs.replace(report, running_requests=None)
    running = report.running_requests - report.queued_requests
    if running < 0:
        raise MalformedReport("get_load: more requests wait than exist")
    return msgspec.structs.replace(report, running_requests=running)


_GAUGES: Final[Mapping[str, str]] = {
    "sglang:num_running_reqs": "running_requests",
    "sglang:num_queue_reqs": "queued_requests",
    "sglang:num_used_tokens": "kv_used_tokens",
    "sglang:max_total_num_tokens": "kv_total_tokens",
    "sglang:gen_throughput": "generation_tokens_per_s",
    "sglang:cache_hit_rate": "cache_hit_ratio",
}
_GAUGE_PREFIXES: Final = tuple(name + end for name in _GAUGES for end in ("{", " "))


def _metrics(body: bytes) -> LoadReport:
    """SGLang's /metrics: gauges per rank.

    The tensor-parallel ranks of one data-parallel rank repeat each other, so the first one counts.
    With priorities on, a gauge is broken down by `priority` beside its total, where that is empty.
    """
    try:
        text = body.decode()
        # Hundreds of histogram lines surround the six that matter; parsing them costs milliseconds.
        lines = [line for line in text.splitlines() if line.startswith(_GAUGE_PREFIXES)]
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        # The library's parser has no error type of its own: bad lines break it in various ways.
        raise MalformedReport(f"metrics: not the Prometheus text format: {exc!r:.120}") from exc
    ranks: dict[str, dict[str, Any]] = {}
    for family in families:
        for sample in family.samples:
            if not sample.labels.get("priority"):
                rank = ranks.setdefault(sample.labels.get("dp_rank", ""), {})
                if (figure := _GAUGES.get(sample.name)) is None:
                    raise MalformedReport(f"metrics: an odd name: {sample.name!r:.120}")
                rank.setdefault(figure, sample.value)
    if not ranks or len(ranks) > RANKS_MAX:
        raise MalformedReport(f"metrics: {len(ranks)} ranks with SGLang's gauges")
    for rank in ranks.values():
        rank["kv_total_tokens"] = _capacity(rank.get("kv_total_tokens"))
    return _summed([checked_report(rank) for rank in ranks.values()])


_PARSERS: Final[Mapping[LoadFormat, Callable[[bytes], LoadReport]]] = {
    LoadFormat.LANEWAY: decode_report,
    LoadFormat.LOADS: _loads,
    LoadFormat.GET_LOAD: _get_load,
    LoadFormat.METRICS: _metrics,
}


def _summed(ranks: Sequence[LoadReport]) -> LoadReport:
    """One report for all ranks: sums, the mean of ratios, the age of the oldest."""
    if len(ranks) == 1:
        return ranks[0]
    return LoadReport(
        **{
            name: _together(name, [getattr(rank, name) for rank in ranks])
            for name in LoadReport.__struct_fields__
        }
    )


def _together(name: str, values: Sequence[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if name == "decode_moments":
        same_length = len({len(value) for value in values}) == 1
        return tuple(map(sum, zip(*values, strict=True))) if same_length else None
    if name == "age_s":
        return max(values)
    return sum(values) / len(values) if name == "cache_hit_ratio" else sum(values)


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError as exc:
        raise MalformedReport(f"not JSON: {exc}") from exc


def _ranks(source: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= RANKS_MAX:
        raise MalformedReport(f"{source}: no list of ranks")
    if not set(map(type, value)) == {dict}:
        raise MalformedReport(f"{source}: a rank is no JSON object")
    return value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _capacity(value: Any) -> Any:
    """A limit as reported; zero is how an engine writes that it does not know yet."""
    return None if value == 0 else value


PriorityOrder = Literal["low_first", "high_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What a worker says of itself; None (or no model) is unknown.

    Only these fields are taken from SGLang's /server_info, which also holds the server's API keys.
    """

    models: tuple[str, ...] = ()
    context_tokens: int | None = None
    kv_total_tokens: int | None = None
    kv_bytes_per_token: float | None = None  # over all GPUs that have a part of the token
    max_running_requests: int | None = None
    priority_scheduling: bool | None = None
    low_priority_values_first: bool | None = None
    version: str | None = None

    @property
    def priority_order(self) -> PriorityOrder | None:
        """Which priorities its scheduler serves first; None: it has none, or does not say."""
        if not self.priority_scheduling or self.low_priority_values_first is None:
            return None
        return "low_first" if self.low_priority_values_first else "high_first"


def describe_models(body: bytes) -> WorkerDescription:
    """Read /v1/models: names (LoRA adapters included) and the longest context.

    Like all `describe_*`: what cannot be read is unknown; nothing is raised.
    """
    entries = _object(body).get("data")
    entries = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    names = dict.fromkeys(name for e in entries[:_MODELS_MAX] if (name := _name(e.get("id"))))
    contexts = [n for e in entries if (n := _count(e.get("max_model_len"))) is not None]
    return WorkerDescription(models=tuple(names), context_tokens=max(contexts, default=None))


def describe_model_info(body: bytes) -> WorkerDescription:
    """Read /model_info: the served name, else the path the model was loaded from."""
    info = _object(body)
    name = _name(info.get("served_model_name")) or _name(info.get("model_path"))
    return WorkerDescription(models=(name,) if name else ())


def describe_server_info(body: bytes) -> WorkerDescription:
    """Read /server_info.

    Its KV pool is that of one rank; its max_running_requests is for all ranks, but the engines may
    have settled for less.
    """
    info = _object(body)
    ranks = _count(info.get("dp_size")) or 1
    kv_tokens = _count(info.get("max_total_num_tokens"))
    version = _name(info.get("version"))
    return WorkerDescription(
        context_tokens=_count(info.get("context_length")),
        kv_total_tokens=None if kv_tokens is None else kv_tokens * ranks,
        kv_bytes_per_token=_kv_bytes_per_token(info),
        max_running_requests=_effective_running(info) or _count(info.get("max_running_requests")),
        priority_scheduling=_flag(info.get("enable_priority_scheduling")),
        low_priority_values_first=_flag(info.get("schedule_low_priority_values_first")),
        version=None if version is None else version[:64],
    )


def _effective_running(info: Mapping[str, Any]) -> int | None:
    """The limit that the ranks' engines run with, in all."""
    states = _states(info)
    limits = [_count(state.get("effective_max_running_requests_per_dp")) for state in states]
    known = [limit for limit in limits if limit is not None]
    return sum(known) if known and len(known) == len(limits) else None


def _kv_bytes_per_token(info: Mapping[str, Any]) -> float | None:
    """Bytes that a token takes in all GPUs that have a part of it.

    Each rank tells the pool of its first GPU, in GiB: by tensor and pipeline parallelism the others
    have as much each. Data-parallel ranks hold other tokens; with DP attention they share the
    `tp_size` GPUs, else each has as many. One that is smaller than a rounded figure can say has 0,
    which is unknown. The largest counts.
    """
    gpus = (_count(info.get("tp_size")) or 1) * (_count(info.get("pp_size")) or 1)
    if info.get("enable_dp_attention") is True:
        gpus = max(1, gpus // (_count(info.get("dp_size")) or 1))
    sizes = []
    for state in _states(info):
        usage = state.get("memory_usage")
        if isinstance(usage, dict):
            gib, tokens = usage.get("kvcache"), _count(usage.get("token_capacity"))
            if _is_number(gib) and tokens is not None:
                sizes.append(gib * 2.0**30 / tokens * gpus)
    sane = [size for size in sizes if 1 <= size <= _KV_BYTES_MAX]
    return max(sane, default=None)


def _states(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the data-parallel ranks' engines say; one that says nothing sensible says nothing."""
    states = info.get("internal_states")
    if not isinstance(states, list):
        return []
    return [state if isinstance(state, dict) else {} for state in states]


def merged(first: WorkerDescription, *others: WorkerDescription) -> WorkerDescription:
    """One description from several; the earlier one wins where two know a thing."""
    for other in others:
        known = {f.name: getattr(first, f.name) for f in fields(first)}
        first = replace(other, **{k: v for k, v in known.items() if v is not None and v != ()})
    return first


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        document = orjson.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and 1 <= len(value) <= _NAME_LENGTH_MAX else None


def _count(value: Any) -> int | None:
    """A positive count; anything else is unknown."""
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53
    return value if usable else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
