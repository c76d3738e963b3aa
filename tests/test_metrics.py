"""The series: right sums, bounded labels, nothing of workers that are gone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.config import Config
from router.config_source import Loaded
from router.contract import Lane, LoadReport, WorkerId, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.replicas import ClusterView, Replica, Standing
from router.core.types import Endpoint, Outcome, Priority, RequestRecord, RequestSpec
from router.errors import Reason
from router.histogram import Histogram
from router.metrics import MODELS_MAX, Metrics
from router.metrics_cluster import ClusterCollector
from router.metrics_config import ConfigCollector, ConfigFigures
from router.metrics_limits import LimitsCollector, LimitsView
from router.metrics_relays import RelayCollector, RelayFigures
from router.metrics_tenants import TenantCollector
from router.records import Records
from router.runtime.live_config import LiveConfig
from router.usage import UsageTable
from tests.test_access_log import RECORD

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scraped:
    """A dispatcher, its metrics, and a scraper."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(Config(), rng=Random(1))
        self.now = 0.0
        self.metrics = Metrics(
            Records(),
            version="1.2.3",
            snapshot=lambda: self.dispatcher.snapshot(now=self.now),
            log_lines_dropped=lambda: 7,
        )

    def series(self) -> Series:
        text = generate_latest(self.metrics.registry).decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.series()[name, tuple(sorted(labels.items()))]

    def names_of_workers(self) -> set[str]:
        return {dict(labels)["worker"] for _, labels in self.series() if "worker" in dict(labels)}


TOGETHER = ClusterView(
    standing=Standing.TOGETHER,
    name="a",
    leader="b",
    term=3,
    age_s=0.1,
    why_away="",
    workers=4,
    untold=0,
    replicas=(
        Replica(name="a", config_version="1", loads={}),
        Replica(name="b", config_version="2", loads={}),
    ),
)


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


def test_a_value_on_an_edge_counts_as_within_it() -> None:
    histogram = Histogram((0.1, 0.5))
    histogram.observe([3.0, 0.5, 0.2, 0.1, 0.05])
    assert histogram.buckets() == [("0.1", 2.0), ("0.5", 4.0), ("+Inf", 5.0)]
    assert histogram.total == pytest.approx(3.85)


@given(st.lists(st.lists(st.floats(0, 2), max_size=100), max_size=8))
def test_buckets_hold_what_is_not_above_their_edges(batches: list[list[float]]) -> None:
    edges = (0.1, 0.5, 1.0)
    histogram = Histogram(edges)
    for batch in batches:
        histogram.observe(list(batch))
    values = [value for batch in batches for value in batch]
    counts = [count for _, count in histogram.buckets()]
    assert counts == [*(sum(value <= edge for value in values) for edge in edges), len(values)]
    assert histogram.total == pytest.approx(sum(values))


def test_a_finished_request_is_counted_once_everywhere(scraped: Scraped) -> None:
    scraped.metrics.records.add(RECORD)
    labels = {"lane": "short", "priority": "P1"}
    assert (
        scraped.value(
            "laneway_requests_total", outcome="success", reason="", endpoint="chat", **labels
        )
        == 1
    )
    assert scraped.value("laneway_ttft_seconds_bucket", le="0.5", **labels) == 1
    assert scraped.value("laneway_ttft_seconds_bucket", le="0.25", **labels) == 0
    assert scraped.value("laneway_queue_wait_seconds_sum", **labels) == 0.25
    assert scraped.value("laneway_request_duration_seconds_sum", **labels) == 2.0
    assert scraped.value("laneway_inter_token_seconds_sum", **labels) == pytest.approx(1.5 / 19)
    assert scraped.value("laneway_tokens_total", kind="output", **labels) == 20
    assert scraped.value("laneway_model_tokens_total", model="m", kind="prompt") == 10


def test_the_time_between_tokens_is_that_within_a_sequence(scraped: Scraped) -> None:
    fields = {name: getattr(RECORD, name) for name in RECORD.__slots__}
    fields["samples"] = 4  # of five tokens each
    scraped.metrics.records.add(RequestRecord(**fields))
    seen = scraped.value("laneway_inter_token_seconds_sum", lane="short", priority="P1")
    assert seen == pytest.approx(1.5 / 4)


def test_refusals_are_summed_by_reason_wherever_they_happened(scraped: Scraped) -> None:
    refused = replace(
        RECORD,
        outcome=Outcome.REFUSED,
        reason=Reason.QUEUE_FULL,
        dispatched_at=None,
        first_token_at=None,
    )
    scraped.metrics.records.add(refused)
    scraped.metrics.records.add(replace(refused, lane=Lane.LONG))
    scraped.metrics.refused_at_edge(Reason.UNAUTHORIZED)
    assert scraped.value("laneway_refusals_total", reason="queue_full") == 2
    assert scraped.value("laneway_refusals_total", reason="unauthorized") == 1
    assert ("laneway_queue_wait_seconds_count", ()) not in scraped.series()


def test_a_client_that_left_is_a_disconnect_and_no_success(scraped: Scraped) -> None:
    scraped.metrics.records.add(replace(RECORD, outcome=Outcome.ABORTED))
    cut = replace(RECORD, outcome=Outcome.ABORTED, reason=Reason.SHUTTING_DOWN)
    scraped.metrics.records.add(cut)  # by the router: no disconnect
    assert scraped.value("laneway_client_disconnects_total") == 1
    labels = {"lane": "short", "priority": "P1"}
    assert scraped.value("laneway_request_duration_seconds_count", **labels) == 0


def test_a_plain_answer_has_no_first_token_time(scraped: Scraped) -> None:
    scraped.metrics.records.add(replace(RECORD, stream=False))
    labels = {"lane": "short", "priority": "P1"}
    assert scraped.value("laneway_ttft_seconds_count", **labels) == 0


def test_clients_cannot_make_series_without_bound(scraped: Scraped) -> None:
    for number in range(3 * MODELS_MAX):
        scraped.metrics.records.add(replace(RECORD, served_model=f"m-{number}"))
    scraped.metrics.records.add(replace(RECORD, served_model="x" * 10_000))
    scraped.metrics.records.add(replace(RECORD, model=None, served_model=None))
    models = {dict(labels).get("model") for _, labels in scraped.series()} - {None}
    assert len(models) == MODELS_MAX + 2  # with "other" and "none"
    assert scraped.value("laneway_model_requests_total", model="other", outcome="success") > 200


def test_a_model_that_nobody_serves_never_gets_a_series(scraped: Scraped) -> None:
    unknown = replace(
        RECORD, outcome=Outcome.REFUSED, reason=Reason.NO_WORKERS, model="x", served_model=None
    )
    scraped.metrics.records.add(unknown)
    assert scraped.value("laneway_model_requests_total", model="other", outcome="refused") == 1


def test_odd_model_names_do_not_break_the_page(scraped: Scraped) -> None:
    for model in ('a"b', "a\nb", "a\\b", "\u4e2d\u6587-\U0001f600", "", "a b"):
        scraped.metrics.records.add(replace(RECORD, model=model, served_model=model))
    scraped.series()


def test_a_worker_that_left_has_no_series(scraped: Scraped) -> None:
    for name in ("a", "b"):
        spec = WorkerSpec(url=f"http://{name}:1", id=name)
        scraped.dispatcher.on_worker_joined(spec, now=0.0)
    scraped.dispatcher.on_report(WorkerId("a"), LoadReport(queued_requests=3), now=1.0)
    scraped.now = 1.5
    assert scraped.names_of_workers() == {"a", "b"}
    labels = {"worker": "a", "lanes": "both"}
    assert scraped.value("laneway_worker_report_age_seconds", **labels) == 0.5
    assert scraped.value("laneway_worker_state", state="active", **labels) == 1
    assert scraped.value("laneway_workers", state="joining") == 1
    scraped.dispatcher.on_worker_left(WorkerId("a"), now=2.0)
    scraped.dispatcher.on_drain(WorkerId("b"), now=2.0, deadline_s=1.0)
    assert scraped.names_of_workers() == set()
    assert scraped.value("laneway_workers", state="joining") == 0


def test_an_unknown_figure_makes_no_sample(scraped: Scraped) -> None:
    scraped.dispatcher.on_worker_joined(WorkerSpec(url="http://a:1"), now=0.0)
    names = {name for name, _ in scraped.series()}
    assert "laneway_worker_streams" in names
    assert "laneway_worker_kv_used_ratio" not in names


def test_both_lanes_have_a_queue_from_the_start(scraped: Scraped) -> None:
    for lane in Lane:
        for band in ("P0", "P1", "P2", "P3", "late"):
            assert scraped.value("laneway_queue_length", lane=lane.value, band=band) == 0


def test_attainment_shares_and_looks_are_told_by_class(scraped: Scraped) -> None:
    assert ("laneway_slo_attainment_ratio", (("kind", "all"), ("priority", "P1"))) not in (
        scraped.series()
    ), "nothing was counted, so nothing is known"
    spec = RequestSpec(request_id="r", endpoint=Endpoint.CHAT, priority=Priority.P1)
    scraped.dispatcher.on_request(spec, owner=None, now=0.0)  # no workers: refused, a miss
    labels = {"priority": "P1"}
    assert scraped.value("laneway_slo_attainment_ratio", kind="all", **labels) == 0
    assert scraped.value("laneway_slo_window_requests", kind="feasible", **labels) == 1
    assert scraped.value("laneway_slo_target_ratio") == 0.99
    assert scraped.value("laneway_class_share_ratio", kind="now", **labels) == pytest.approx(0.3)
    scraped.dispatcher.on_timer(now=0.0)
    looks = {labels: v for (name, labels), v in scraped.series().items() if "loop_looks" in name}
    assert sum(looks.values()) == 1
    assert scraped.value("laneway_slo_overloaded") == 0


def test_what_waits_is_told_by_lane_and_band_and_pacing_by_worker(scraped: Scraped) -> None:
    spec = WorkerSpec(url="http://a:1", id="a", concurrency_max=1, kv_total_tokens=10_000)
    scraped.dispatcher.on_worker_joined(spec, now=0.0)
    scraped.dispatcher.on_report(WorkerId("a"), LoadReport(kv_used_tokens=0), now=0.0)
    for _ in range(3):
        request = RequestSpec(request_id="r", endpoint=Endpoint.CHAT, max_tokens=9)
        scraped.dispatcher.on_request(request, owner=None, now=1.0)
    scraped.now = 1.25
    where = {"lane": "short", "band": "P1"}
    assert scraped.value("laneway_queue_length", **where) == 2
    assert scraped.value("laneway_queue_oldest_seconds", **where) == 0.25
    scraped.dispatcher.on_timer(now=2.0)
    assert scraped.value("laneway_queue_length", **where) == 0
    assert scraped.value("laneway_queue_length", lane="short", band="late") == 2
    assert scraped.value("laneway_queue_relegated_total") == 2
    worker = {"worker": "a", "lanes": "both"}
    assert 0 < scraped.value("laneway_worker_prefill_duty_ratio", **worker) <= 1
    assert scraped.value("laneway_worker_prefill_trim_ratio", **worker) == 1
    assert ("laneway_worker_prefill_credit_seconds", tuple(sorted(worker.items()))) in (
        scraped.series()
    )


def test_every_priority_is_a_class_of_its_own(scraped: Scraped) -> None:
    for priority in Priority:
        scraped.metrics.records.add(replace(RECORD, priority=priority))
    found = {dict(labels).get("priority") for _, labels in scraped.series()} - {None}
    assert found == {"P0", "P1", "P2", "P3"}


def test_a_router_shows_how_it_stands_to_the_others(scraped: Scraped) -> None:
    scraped.metrics.registry.register(ClusterCollector(lambda: TOGETHER))
    assert scraped.value("laneway_cluster_standing", standing="together") == 1
    assert scraped.value("laneway_cluster_standing", standing="away") == 0
    assert scraped.value("laneway_cluster_replicas") == 2
    assert scraped.value("laneway_cluster_leads") == 0
    assert scraped.value("laneway_cluster_config_versions") == 2


def test_every_series_is_documented_and_nothing_else_is(scraped: Scraped) -> None:
    config = Config.model_validate({"policy": {"shadow": "round_robin"}})
    scraped.dispatcher = Dispatcher(config, rng=Random(1))
    scraped.metrics.registry.register(ClusterCollector(lambda: TOGETHER))
    live = LiveConfig(Loaded.of(config))
    figures = ConfigFigures(live.version, live.counts, file_faulty=False, waiting=0)
    scraped.metrics.registry.register(ConfigCollector(lambda: figures))
    limits = scraped.dispatcher.reserving.limits
    usage = UsageTable(Records(), known=frozenset, limits=lambda: limits)
    scraped.metrics.registry.register(TenantCollector(usage))
    scraped.metrics.registry.register(LimitsCollector(lambda: LimitsView(away=0)))
    relays = [RelayFigures(1, 0, 0, 0.0, 0)]
    scraped.metrics.registry.register(RelayCollector(lambda: relays))
    text = generate_latest(scraped.metrics.registry).decode()
    there = set(re.findall(r"^# TYPE (laneway_\w+)", text, flags=re.MULTILINE))
    document = Path("docs/metrics.md").read_text()
    documented = set(re.findall(r"^\| `(laneway_\w+)`", document, flags=re.MULTILINE))
    assert documented == there
