"""Every series of the router, for Prometheus.

Records of finished requests are added to plain integers, some at a time. Everything that Prometheus
sees is made from those, and from one `Snapshot` of the core, when it asks. So a scrape costs in
proportion to the workers that exist, and a worker that is gone has no series.

Labels come from enums and worker ids. Models are named as workers name them, so an alias counts for
its model: at most `MODELS_MAX` get a series of their own, the rest and what no worker is known to
serve share "other". Raw paths are never labels. Layer 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from router.contract import Lane, word_for_lanes
from router.core.breaker import BreakerState
from router.core.shadow import ShadowView
from router.core.snapshot import Snapshot, WorkerView
from router.core.types import Endpoint, Outcome, Priority, RequestRecord, WorkerState
from router.errors import Reason
from router.histogram import Histogram
from router.metrics_qos import qos_families
from router.records import Records
from router.release import BUILD

MODELS_MAX: Final = 100
MODEL_LENGTH_MAX: Final = 200
OTHER_MODEL: Final = "other"
NO_MODEL: Final = "none"
_SUCCESS: Final = Outcome.SUCCESS
_COUNTED: Final = (
    "cached_tokens",
    "output_tokens",
    "prompt_tokens",
    "requests",
    "retries",
    "spilled",
)

# Edges sit on the TTFT targets of the tiers (0.1, 0.5 and 2 s) and on the alerts' thresholds, so
# that attainment is read from a bucket and not interpolated between two.
WAIT_EDGES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOTAL_EDGES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_EDGES = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0)


class _Times:
    """Histograms of one lane and priority."""

    __slots__ = ("itl", "queue_wait", "total", "ttft")

    def __init__(self) -> None:
        self.ttft = Histogram(WAIT_EDGES)
        self.queue_wait = Histogram(WAIT_EDGES)
        self.total = Histogram(TOTAL_EDGES)
        self.itl = Histogram(TOKEN_EDGES)

    def observe_streams(self, records: list[RequestRecord]) -> None:
        """Count when the tokens of streams came."""
        ttft, itl = [], []
        for record in records:
            first_at, further = record.first_token_at, record.further_tokens
            if first_at is not None:
                ttft.append(first_at - record.arrived_at)
                if further:
                    itl.append((record.finished_at - first_at) / further)
        self.ttft.observe(ttft)
        self.itl.observe(itl)


class _Counts:
    """Sums over requests that agree in all labels, or in some of them."""

    __slots__ = _COUNTED

    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0
        self.spilled = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0

    def add(self, more: _Counts) -> None:
        """Count what `more` counts, too."""
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + getattr(more, name))


class _Group(_Counts):
    """What is counted of requests that agree in all labels."""

    __slots__ = ("_times",)

    def __init__(self, times: _Times) -> None:
        super().__init__()
        self._times = times

    def observe(self, records: list[RequestRecord]) -> None:
        """Count finished requests of this group."""
        self.requests += len(records)
        times = self._times
        if records[0].outcome is _SUCCESS:
            times.total.observe([one.finished_at - one.arrived_at for one in records])
        else:
            records = [one for one in records if one.dispatched_at is not None]
        attempts = spilled = prompt = cached = output = 0
        for record in records:
            attempts += record.attempts
            spilled += record.spilled
            prompt += record.prompt_tokens
            cached += record.cached_tokens or 0
            output += record.output_tokens
        self.retries += attempts - len(records)
        self.spilled += spilled
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.output_tokens += output
        times.queue_wait.observe(
            [one.dispatched_at - one.arrived_at for one in records if one.dispatched_at is not None]
        )
        if records and records[0].stream:
            times.observe_streams(records)


_Class = tuple[Lane, Priority]
# The model's name, and whether it is a stream.
_Key = tuple[Lane, Priority, Outcome, Reason | None, Endpoint, str, bool]
_Some = TypeVar("_Some")


class Metrics(Collector):
    """All counts of one router. Written from the event loop only."""

    def __init__(
        self,
        records: Records,
        *,
        version: str,
        snapshot: Callable[[], Snapshot],
        log_lines_dropped: Callable[[], int],
    ) -> None:
        self._version = version
        self.records = records
        self._groups: dict[_Key, _Group] = {}
        self._times: dict[_Class, _Times] = {}
        self._models: set[str] = set()  # that have a series of their own
        self._edge_refusals: Counter[Reason] = Counter()
        self.polls_unanswered = 0
        self.polls_without_report = 0
        records.observers.append(self._count)
        self._snapshot = snapshot
        self._log_lines_dropped = log_lines_dropped
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def _count(self, records: list[RequestRecord]) -> None:
        """Count finished requests, those together that agree in all labels."""
        alike: dict[_Key, list[RequestRecord]] = {}
        models = self._models
        for record in records:
            name = record.served_model
            if name not in models or name is None:
                name = self._name_of(record)
            key = (
                record.lane,
                record.priority,
                record.outcome,
                record.reason,
                record.endpoint,
                name,
                record.stream,
            )
            if key in alike:
                alike[key].append(record)
            else:
                alike[key] = [record]
        for key, same in alike.items():
            group = self._groups.get(key)
            if group is None:
                times = self._times.setdefault(key[:2], _Times())
                group = self._groups[key] = _Group(times)
            group.observe(same)

    def refused_at_edge(self, reason: Reason) -> None:
        """Count a request that was refused before it reached the dispatcher."""
        self._edge_refusals[reason] += 1

    def _name_of(self, record: RequestRecord) -> str:
        """The name under which the series know the record's model, which may be new to them."""
        name = record.served_model
        if name is None:
            # What no worker serves is any text a client likes: it must not use up the cap.
            return NO_MODEL if record.model is None else OTHER_MODEL
        if len(name) > MODEL_LENGTH_MAX or len(self._models) >= MODELS_MAX:
            return OTHER_MODEL
        self._models.add(name)
        return name

    def _summed(self, part: Callable[[_Key], _Some]) -> dict[_Some, _Counts]:
        """The counts by a part of the labels."""
        sums: dict[_Some, _Counts] = {}
        for key, group in self._groups.items():
            sums.setdefault(part(key), _Counts()).add(group)
        return sums

    def collect(self) -> Iterable[Metric]:
        """All series, for one scrape."""
        self.records.hand_on()
        build = {"version": self._version, "build": BUILD}
        yield InfoMetricFamily("laneway_build", "This router.", build)
        yield from self._request_families()
        yield from self._class_families()
        yield from self._model_families()
        dropped = CounterMetricFamily(
            "laneway_access_log_dropped_lines", "Access log lines lost to a stalled reader."
        )
        dropped.add_metric((), self._log_lines_dropped())
        yield dropped
        polls = CounterMetricFamily(
            "laneway_failed_polls",
            "Polls of workers that brought no load report.",
            labels=("kind",),
        )
        polls.add_metric(("unanswered",), self.polls_unanswered)
        polls.add_metric(("no_report",), self.polls_without_report)
        yield polls
        snapshot = self._snapshot()
        yield from lane_families(snapshot)
        yield from qos_families(snapshot)
        yield from worker_families(snapshot)
        if snapshot.shadow is not None:
            yield from shadow_families(snapshot.shadow)

    def _request_families(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "laneway_requests",
            "Requests that ended, by how.",
            labels=("lane", "priority", "outcome", "reason", "endpoint"),
        )
        refusals: Counter[Reason] = Counter(self._edge_refusals)
        gone = 0
        for labels, counts in self._summed(itemgetter(0, 1, 2, 3, 4)).items():
            lane, priority, outcome, reason, endpoint = labels
            count = counts.requests
            why = "" if reason is None else reason.value
            requests.add_metric(
                (lane.value, priority.name, outcome.value, why, endpoint.value), count
            )
            if outcome is Outcome.REFUSED and reason is not None:
                refusals[reason] += count
            gone += count if outcome is Outcome.ABORTED and reason is None else 0
        yield requests
        refused = CounterMetricFamily(
            "laneway_refusals",
            "Requests answered without a worker, those with bad bodies or keys among them.",
            labels=("reason",),
        )
        for refusal_reason, count in refusals.items():
            refused.add_metric((refusal_reason.value,), count)
        yield refused
        disconnects = CounterMetricFamily(
            "laneway_client_disconnects", "Clients that left before their answer ended."
        )
        disconnects.add_metric((), gone)
        yield disconnects

    def _class_families(self) -> Iterable[Metric]:
        labels = ("lane", "priority")
        for attribute, name, text in (
            ("ttft", "ttft", "Arrival to the first token of a streamed answer."),
            ("queue_wait", "queue_wait", "Arrival to dispatch."),
            ("total", "request_duration", "Arrival to the end of a successful answer."),
            ("itl", "inter_token", "Mean time between the tokens of a streamed sequence."),
        ):
            family = HistogramMetricFamily(f"laneway_{name}_seconds", text, labels=labels)
            for (lane, priority), times in self._times.items():
                histogram: Histogram = getattr(times, attribute)
                family.add_metric((lane.value, priority.name), histogram.buckets(), histogram.total)
            yield family
        classes: dict[_Class, _Counts] = self._summed(itemgetter(0, 1))
        for attribute, text in (
            ("retries", "Attempts after the first."),
            ("spilled", "Requests that the other lane's workers served."),
        ):
            counter = CounterMetricFamily(f"laneway_{attribute}", text, labels=labels)
            for (lane, priority), counts in classes.items():
                counter.add_metric((lane.value, priority.name), getattr(counts, attribute))
            yield counter
        tokens = CounterMetricFamily(
            "laneway_tokens",
            "Tokens of dispatched requests; cached ones are part of prompt.",
            labels=(*labels, "kind"),
        )
        for (lane, priority), counts in classes.items():
            for kind in ("prompt", "cached", "output"):
                count = getattr(counts, f"{kind}_tokens")
                tokens.add_metric((lane.value, priority.name, kind), count)
        yield tokens

    def _model_families(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "laneway_model_requests", "Requests that ended, by model.", labels=("model", "outcome")
        )
        tokens = CounterMetricFamily(
            "laneway_model_tokens", "Tokens of dispatched requests.", labels=("model", "kind")
        )
        by_outcome: dict[tuple[str, Outcome], _Counts] = self._summed(itemgetter(5, 2))
        for (name, outcome), counts in by_outcome.items():
            requests.add_metric((name, outcome.value), counts.requests)
        by_model: dict[str, _Counts] = self._summed(itemgetter(5))
        for name, counts in by_model.items():
            for kind in ("prompt", "cached", "output"):
                tokens.add_metric((name, kind), getattr(counts, f"{kind}_tokens"))
        yield requests
        yield tokens


def lane_families(snapshot: Snapshot) -> Iterable[Metric]:
    """Limits and running requests of each lane, workers by state."""
    limit = GaugeMetricFamily(
        "laneway_queue_length_max", "Requests that may wait.", labels=("lane",)
    )
    running = GaugeMetricFamily(
        "laneway_in_flight", "Requests that run on a worker.", labels=("lane",)
    )
    for lane, view in snapshot.lanes.items():
        limit.add_metric((lane.value,), view.depth_max)
        running.add_metric((lane.value,), view.running)
    yield from (limit, running)
    states = Counter(view.state for view in snapshot.workers)
    pool = GaugeMetricFamily("laneway_workers", "Workers by state.", labels=("state",))
    for state in WorkerState:
        pool.add_metric((state.value,), states[state])
    yield pool
    budget = GaugeMetricFamily("laneway_retry_budget", "Retries that are saved up.")
    budget.add_metric((), snapshot.retry_budget)
    yield budget


def shadow_families(view: ShadowView) -> Iterable[Metric]:
    """How far the shadow policy agrees; a new pair of policies counts from zero."""
    labels = ("live", "shadow")
    pair = (view.live, view.shadow)
    decisions = CounterMetricFamily(
        "laneway_shadow_decisions",
        "Dispatches on which the shadow policy was asked.",
        labels=(*labels, "verdict"),
    )
    decisions.add_metric((*pair, "agreed"), view.agreed)
    decisions.add_metric((*pair, "sooner"), view.sooner)
    decisions.add_metric((*pair, "not_sooner"), view.differed - view.sooner)
    yield decisions
    difference = GaugeMetricFamily(
        "laneway_shadow_ttft_difference_seconds",
        "Predicted first-token time of the shadow's worker less the live one's, summed.",
        labels=labels,
    )
    difference.add_metric(pair, view.ttft_difference_s_total)
    yield difference


_BREAKER: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


def _kv_ratio(view: WorkerView) -> float | None:
    if view.kv_used_tokens is None or not view.kv_total_tokens:
        return None
    return view.kv_used_tokens / view.kv_total_tokens


# Gauges of one worker: name, help, value. A value of None, unknown, makes no sample.
_WORKER_GAUGES: Final[tuple[tuple[str, str, Callable[[WorkerView], float | None]], ...]] = (
    ("streams", "Requests that this router runs on it.", lambda w: w.streams),
    ("waiting", "Those of them without a first token.", lambda w: w.waiting),
    ("pending_prefill_tokens", "Their prompt tokens left to prefill.", lambda w: w.pending_tokens),
    ("concurrency_max", "Requests that it may run at once.", lambda w: w.concurrency_max),
    ("kv_reserved_tokens", "KV memory promised to requests.", lambda w: w.kv_reserved_tokens),
    ("kv_total_tokens", "Its KV pool.", lambda w: w.kv_total_tokens),
    ("kv_usable_tokens", "What of it may be used and reserved.", lambda w: w.kv_usable_tokens),
    ("kv_used_ratio", "Share of the KV pool in use.", _kv_ratio),
    ("report_age_seconds", "Age of its last load report.", lambda w: w.report_age_s),
    ("stale", "1: its reported figures are too old to use.", lambda w: w.stale),
    ("breaker_state", "0 closed, 1 half open, 2 open.", lambda w: _BREAKER[w.breaker]),
    ("probe_failures", "Polls that failed in a row.", lambda w: w.probe_failures),
    (
        "prefill_duty_ratio",
        "Share of its time that pacing leaves for prefill.",
        lambda w: w.prefill_duty,
    ),
    (
        "prefill_trim_ratio",
        "Predicted over measured time of what it did, 0.3 to 1: so much slower it gets prompts.",
        lambda w: w.prefill_trim,
    ),
    (
        "prefill_credit_seconds",
        "Prefill that it may be sent now; below 0 it owes.",
        lambda w: w.prefill_credit_s,
    ),
    ("ttft_mean_seconds", "Mean first-token time seen by the router.", lambda w: w.ttft_mean_s),
)
# Figures of its last report, by attribute.
_REPORT_GAUGES: Final = (
    ("running_requests", "running_requests", "Requests running in the engine, as reported."),
    ("queued_requests", "queued_requests", "Requests waiting in the engine, as reported."),
    ("generation_tokens_per_second", "generation_tokens_per_s", "Output, as reported."),
    ("cache_hit_ratio", "cache_hit_ratio", "Prefix cache hits, as reported."),
    ("gpu_utilization_ratio", "gpu_utilization_ratio", "GPU utilization."),
    ("gpu_memory_used_bytes", "gpu_memory_used_bytes", "GPU memory in use."),
    ("gpu_memory_total_bytes", "gpu_memory_total_bytes", "GPU memory."),
    ("gpu_temperature_celsius", "gpu_temperature_c", "GPU temperature."),
)


def worker_families(snapshot: Snapshot) -> Iterable[Metric]:
    """Gauges of each worker that exists."""
    labels = ("worker", "lanes")
    rows = [((view.id, word_for_lanes(view.spec.lanes)), view) for view in snapshot.workers]
    for name, text, value_of in _WORKER_GAUGES:
        family = GaugeMetricFamily(f"laneway_worker_{name}", text, labels=labels)
        for row, view in rows:
            value = value_of(view)
            if value is not None:
                family.add_metric(row, value)
        yield family
    for name, attribute, text in _REPORT_GAUGES:
        family = GaugeMetricFamily(f"laneway_worker_{name}", text, labels=labels)
        for row, view in rows:
            value = None if view.report is None else getattr(view.report, attribute)
            if value is not None and not view.stale:
                family.add_metric(row, value)
        yield family
    state = GaugeMetricFamily(
        "laneway_worker_state", "1 for the state it is in.", labels=(*labels, "state")
    )
    requests = CounterMetricFamily(
        "laneway_worker_requests", "Requests sent to it since it joined.", labels=labels
    )
    failures = CounterMetricFamily(
        "laneway_worker_failures", "Those that it failed.", labels=labels
    )
    for row, view in rows:
        for candidate in WorkerState:
            state.add_metric((*row, candidate.value), view.state is candidate)
        requests.add_metric(row, view.requests)
        failures.add_metric(row, view.failures)
    yield from (state, requests, failures)
