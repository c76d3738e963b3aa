"""Load answers of every SGLang release become reports, and broken ones never look idle."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.contract import LoadReport, MalformedReport, encode_report
from router.load_formats import (
    LoadFormat,
    parse,
)

EVERY_FORMAT = list(LoadFormat)


def rank(**changes: Any) -> dict[str, Any]:
    """One entry of /v1/loads as release 0.5.23 sends it with include=core."""
    return {
        "timestamp": 1_764_430_000.25,
        "dp_rank": 0,
        "num_running_reqs": 7,
        "num_waiting_reqs": 3,
        "num_waiting_uncached_tokens": 900,
        "num_used_tokens": 40_000,
        "num_total_tokens": 41_000,
        "num_active_tokens": 41_000,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": 200_000,
        "max_running_requests": 64,
        "token_usage": 0.2,
        "gen_throughput": 512.5,
        "cache_hit_rate": 0.25,
        "utilization": -1.0,
        "total_prefill_uncached_tokens": 1_000_000,
        "total_prefill_busy_us": 2_500_000,
        "decode_moments": [10.0, 20.0, 0.5, 40.0, 1.0, 0.1],
        **changes,
    }


def loads(*ranks: dict[str, Any], **changes: Any) -> bytes:
    document = {
        "timestamp": "2025-11-29T15:26:41.250000+00:00",  # one second after rank()'s own
        "version": "0.5.23",
        "accelerator": None,
        "num_accelerators": 1,
        "loads": list(ranks),
        **changes,
    }
    return orjson.dumps(document)


def test_loads_of_0_5_23_are_read_whole() -> None:
    assert parse(LoadFormat.LOADS, loads(rank())) == LoadReport(
        running_requests=7,
        queued_requests=3,
        queued_uncached_tokens=900,
        max_running_requests=64,
        kv_used_tokens=40_000,
        kv_total_tokens=200_000,
        generation_tokens_per_s=512.5,
        cache_hit_ratio=0.25,
        prefill_tokens_total=1_000_000,
        prefill_busy_s_total=2.5,
        decode_moments=(10.0, 20.0, 0.5, 40.0, 1.0, 0.1),
        age_s=1.0,
    )


def test_loads_of_0_5_9_lack_figures_which_stay_unknown() -> None:
    old = {
        "dp_rank": 0,
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_used_tokens": 500,
        "max_total_num_tokens": 4_000,
        "token_usage": 0.125,
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "max_running_requests": 16,
        "num_total_reqs": 3,
    }
    aggregate = {"total_running_reqs": 2, "total_waiting_reqs": 1, "total_reqs": 3}
    report = parse(LoadFormat.LOADS, loads(old, dp_rank_count=1, aggregate=aggregate))
    assert (report.running_requests, report.queued_requests) == (2, 1)
    assert (report.kv_used_tokens, report.kv_total_tokens) == (500, 4_000)
    assert report.queued_uncached_tokens is None
    assert report.age_s is None


def test_an_aggregate_of_zeros_without_ranks_is_not_an_idle_worker() -> None:
    aggregate = {"total_running_reqs": 0, "total_waiting_reqs": 0, "avg_token_usage": 0.0}
    with pytest.raises(MalformedReport):
        parse(LoadFormat.LOADS, loads(dp_rank_count=0, aggregate=aggregate))


def test_ranks_are_summed_and_the_oldest_tells_the_age() -> None:
    second = rank(dp_rank=1, num_running_reqs=1, cache_hit_rate=0.75, timestamp=1_764_429_990.25)
    report = parse(LoadFormat.LOADS, loads(rank(), second))
    assert report.running_requests == 8
    assert report.kv_total_tokens == 400_000
    assert report.cache_hit_ratio == 0.5
    assert report.decode_moments == (20.0, 40.0, 1.0, 80.0, 2.0, 0.2)
    assert report.age_s == 11.0


def test_one_rank_without_a_figure_makes_the_sum_unknown() -> None:
    second = rank(dp_rank=1)
    del second["num_used_tokens"]
    report = parse(LoadFormat.LOADS, loads(rank(), second))
    assert report.kv_used_tokens is None
    assert report.running_requests == 14


def test_a_negative_rank_is_not_hidden_by_a_busy_one() -> None:
    with pytest.raises(MalformedReport):
        parse(LoadFormat.LOADS, loads(rank(), rank(num_running_reqs=-1)))


def test_a_slot_that_no_scheduler_has_written_yet_is_not_an_idle_worker() -> None:
    fresh = {name: 0 for name in rank() if name != "decode_moments"}
    with pytest.raises(MalformedReport):
        parse(LoadFormat.LOADS, loads(fresh))


def test_a_pool_or_limit_of_zero_is_unknown() -> None:
    report = parse(LoadFormat.LOADS, loads(rank(max_total_num_tokens=0, max_running_requests=0)))
    assert report.kv_total_tokens is None
    assert report.max_running_requests is None


@pytest.mark.parametrize(
    ("answered", "age_s"),
    [
        ("2025-11-29T15:26:40.250000+00:00", 0.0),
        ("2025-11-29T15:26:40.000000+00:00", 0.0),  # within the slack of two readings
        ("2025-11-29T15:26:50.250000", 10.0),  # no zone: UTC
        ("2025-11-29T16:26:50.250000+01:00", 10.0),
        ("2025-11-29T14:26:40.250000+00:00", None),  # the clock was set back
        (None, None),
    ],
)
def test_age_compares_the_workers_own_two_moments(
    answered: str | None, age_s: float | None
) -> None:
    assert parse(LoadFormat.LOADS, loads(rank(), timestamp=answered)).age_s == age_s


@pytest.mark.parametrize(
    "changes",
    [
        {"num_running_reqs": -1},
        {"num_waiting_reqs": "3"},
        {"num_waiting_reqs": "NaN"},
        {"num_used_tokens": 1e300},
        {"num_used_tokens": True},
        {"cache_hit_rate": 40},
        {"gen_throughput": [1]},
        {"timestamp": "yesterday"},
        {"timestamp": True},
        {"decode_moments": [1.0, "x"]},
    ],
    ids=repr,
)
def test_an_impossible_figure_condemns_the_answer(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedReport):
        parse(LoadFormat.LOADS, loads(rank(**changes)))


def test_get_load_tells_running_from_waiting() -> None:
    body = orjson.dumps(
        [
            {"dp_rank": 0, "num_reqs": 9, "num_waiting_reqs": 4, "num_tokens": 5_000},
            {"dp_rank": 1, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 10},
        ]
    )
    assert parse(LoadFormat.GET_LOAD, body) == LoadReport(
        running_requests=6, queued_requests=4, kv_used_tokens=5_010
    )


def test_get_load_of_0_5_20_adds_pending_tokens() -> None:
    entry = {
        "dp_rank": 0,
        "num_reqs": 2,
        "num_waiting_reqs": 1,
        "num_tokens": 700,
        "num_pending_tokens": 200,
        "ts_tic": 123.4,
    }
    assert parse(LoadFormat.GET_LOAD, orjson.dumps([entry])).queued_uncached_tokens == 200


@pytest.mark.parametrize(
    "entry",
    [
        {"num_reqs": 1, "num_waiting_reqs": 2},
        {"num_reqs": -1, "num_waiting_reqs": -1},
        {"load": 0},
    ],
    ids=repr,
)
def test_get_load_that_cannot_be_is_malformed(entry: dict[str, Any]) -> None:
    with pytest.raises(MalformedReport):
        parse(LoadFormat.GET_LOAD, orjson.dumps([entry]))


def test_get_load_without_the_queue_does_not_guess_what_runs() -> None:
    report = parse(LoadFormat.GET_LOAD, b'[{"num_reqs": 5, "num_tokens": 100}]')
    assert report.running_requests is None
    assert report.kv_used_tokens == 100


LABELS = 'engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0"'
METRICS = f"""\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{{LABELS},priority="1",tp_rank="0",dp_rank="0"}} 4.0
sglang:num_running_reqs{{{LABELS},priority="",tp_rank="0",dp_rank="0"}} 5.0
sglang:num_running_reqs{{{LABELS},priority="",tp_rank="1",dp_rank="0"}} 5.0
sglang:num_running_reqs{{{LABELS},priority="",tp_rank="0",dp_rank="1"}} 2.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{{LABELS},tp_rank="0",dp_rank="0"}} 1.0
sglang:num_queue_reqs{{{LABELS},tp_rank="0",dp_rank="1"}} 0.0
# TYPE sglang:num_used_tokens gauge
sglang:num_used_tokens{{{LABELS},tp_rank="0",dp_rank="0"}} 100.0
sglang:num_used_tokens{{{LABELS},tp_rank="0",dp_rank="1"}} 20.0
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{{{LABELS},tp_rank="0",dp_rank="0"}} 1000.0
sglang:max_total_num_tokens{{{LABELS},tp_rank="0",dp_rank="1"}} 1000.0
sglang:gen_throughput{{{LABELS},tp_rank="0",dp_rank="0"}} 12.5
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{{le="0.1",model_name="m"}} 3.0
sglang:time_to_first_token_seconds_sum{{model_name="m"}} 0.3
"""


def test_metrics_count_each_dp_rank_once_and_no_priority_twice() -> None:
    assert parse(LoadFormat.METRICS, METRICS.encode()) == LoadReport(
        running_requests=7,
        queued_requests=1,
        kv_used_tokens=120,
        kv_total_tokens=2_000,
    )


def test_metrics_of_a_single_rank_name_no_rank() -> None:
    body = b'sglang:num_running_reqs{model_name="m"} 3.0\nsglang:num_used_tokens 8\n'
    assert parse(LoadFormat.METRICS, body) == LoadReport(running_requests=3, kv_used_tokens=8)


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf", "1e300", "none"])
def test_metrics_with_an_impossible_gauge_are_malformed(value: str) -> None:
    with pytest.raises(MalformedReport):
        parse(LoadFormat.METRICS, f"sglang:num_running_reqs {value}\n".encode())


def test_metrics_of_another_program_are_malformed() -> None:
    with pytest.raises(MalformedReport):
        parse(LoadFormat.METRICS, b"vllm:num_requests_running 0.0\npython_gc_objects 1\n")


def test_our_own_report_survives_the_trip() -> None:
    report = LoadReport(running_requests=1, queued_requests=0, age_s=0.5, ready=True)
    assert parse(LoadFormat.LANEWAY, encode_report(report)) == report


def test_our_own_report_without_a_load_figure_is_malformed() -> None:
    with pytest.raises(MalformedReport):
        parse(LoadFormat.LANEWAY, encode_report(LoadReport(ready=True, gpu_temperature_c=40.0)))


BROKEN_BODIES = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"-1",
    b'"NaN"',
    b"NaN",
    b"[{}]",
    b'{"loads": [{}]}',
    b'{"loads": [null]}',
    b'{"loads": {}}',
    b'{"detail":"Not Found"}',
    b"<!doctype html><title>502 Bad Gateway</title>",
    b"Internal Server Error",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"loads": [{"num_running_reqs": ' + b"9" * 400 + b"}]}",
]


@pytest.mark.parametrize("source", EVERY_FORMAT)
@pytest.mark.parametrize("body", BROKEN_BODIES, ids=lambda body: repr(body[:24]))
def test_a_broken_answer_is_malformed_in_every_format(source: LoadFormat, body: bytes) -> None:
    with pytest.raises(MalformedReport):
        parse(source, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*rank(), "loads", "format", "num_reqs", "x"]), inner)
    ),
    max_leaves=12,
)
METRIC_LINES = st.lists(
    st.builds(
        "sglang:num_running_reqs{}{} {}".format,
        st.text(max_size=3),
        st.sampled_from(["", "{}", '{dp_rank="1"}', '{dp_rank="', "{a=b}", '{a="\\']),
        st.text(max_size=6) | st.floats().map(str),
    )
    | st.text(max_size=20),
    max_size=4,
).map("\n".join)


@pytest.mark.parametrize("source", EVERY_FORMAT)
@given(
    body=st.binary()
    | JSON.map(lambda v: orjson.dumps(v, option=orjson.OPT_NON_STR_KEYS) if fits(v) else b"")
    | METRIC_LINES.map(lambda text: text.encode(errors="replace"))
)
def test_garbage_raises_malformed_report_or_gives_sane_figures(
    source: LoadFormat, body: bytes
) -> None:
    try:
        report = parse(source, body)
    except MalformedReport:
        return
    for name in report.__struct_fields__:
        value = getattr(report, name)
        if value is not None and name not in ("ready", "decode_moments"):
            assert 0 <= value <= 2**53


def fits(value: Any) -> bool:
    """Whether orjson can write `value`: its integers end at 64 bits."""
    match value:
        case bool():
            return True
        case int():
            return -(2**63) <= value < 2**64
        case list():
            return all(map(fits, value))
        case dict():
            return all(map(fits, value.values()))
        case _:
            return True


FIGURES = {
    "num_running_reqs": "running_requests",
    "num_waiting_reqs": "queued_requests",
    "num_waiting_uncached_tokens": "queued_uncached_tokens",
    "num_used_tokens": "kv_used_tokens",
    "max_total_num_tokens": "kv_total_tokens",
    "max_running_requests": "max_running_requests",
    "gen_throughput": "generation_tokens_per_s",
    "cache_hit_rate": "cache_hit_ratio",
    "total_prefill_uncached_tokens": "prefill_tokens_total",
    "total_prefill_busy_us": "prefill_busy_s_total",
    "decode_moments": "decode_moments",
    "timestamp": "age_s",
}


@given(
    missing=st.lists(st.sets(st.sampled_from(sorted(FIGURES))), min_size=1, max_size=3),
    null=st.booleans(),
)
def test_a_figure_is_known_exactly_when_every_rank_gives_it(
    missing: list[set[str]], null: bool
) -> None:
    ranks = []
    for names in missing:
        entry = rank()
        for name in names:
            if null:
                entry[name] = None
            else:
                del entry[name]
        ranks.append(entry)
    try:
        report = parse(LoadFormat.LOADS, loads(*ranks))
    except MalformedReport:
        return
    unknown = {FIGURES[name] for names in missing for name in names}
    for name in FIGURES.values():
        assert (getattr(report, name) is None) == (name in unknown), name


ODD = (
    st.none()
    | st.booleans()
    | st.integers(-1, 3)
    | st.sampled_from([2**53, 2**53 + 1, 2**63, -0.0, 1e300, "1", "2025-11-29T15:26:41Z", {}])
    | st.floats(-0.5, 1.5)
    | st.lists(st.floats(-0.5, 9) | st.none(), max_size=17)
)


@example(changes={}, answered=2**53 + 1)  # as a float it is 2**53
@given(
    changes=st.dictionaries(st.sampled_from(sorted(FIGURES)), ODD, max_size=3),
    answered=ODD | st.just("2025-11-29T15:26:41"),
)
def test_loads_read_as_a_whole_are_what_their_figures_are_one_by_one(
    changes: dict[str, Any], answered: Any
) -> None:
    """A ratio a hair above one is not taken as a whole, and is one."""

    def read(ratio: float) -> LoadReport | None:
        entry = rank(**changes | {"cache_hit_rate": ratio})
        try:
            return parse(LoadFormat.LOADS, loads(entry, timestamp=answered))
        except MalformedReport:
            return None

    assert read(1.0) == read(1.01)


def test_a_gauge_with_an_odd_name_is_a_malformed_report() -> None:
    with pytest.raises(MalformedReport, match="odd name"):
        parse(LoadFormat.METRICS, b"\nsglang:num_running_reqs 0{}0")
