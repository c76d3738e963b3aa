"""What crosses between router and workers: reports and registrations."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.contract import (
    LOAD_FORMAT,
    Lane,
    Links,
    LoadReport,
    MalformedReport,
    WorkerSpec,
    checked_report,
    decode_report,
    encode_report,
    encode_spec,
    normalized_url,
)

COUNT = st.none() | st.integers(0, 2**53)
REAL = st.none() | st.floats(0, 1e12)
RATIO = st.none() | st.floats(0, 1)
IDS = st.text("0123456789abcdef", min_size=1, max_size=16)
LINKS = st.builds(
    Links, IDS, st.floats(0, 1e9), st.integers(0, 9), st.lists(IDS, max_size=3).map(tuple)
)
REPORTS = st.builds(
    LoadReport,
    **{
        name: RATIO
        if name.endswith("_ratio")
        else COUNT
        if name.endswith(("_requests", "_tokens", "_bytes"))
        or name in ("prefill_tokens_total", "workers")
        else st.none() | st.lists(IDS, min_size=1, max_size=4).map(tuple)
        if name == "routers"
        else st.none() | st.lists(LINKS, min_size=1, max_size=3).map(tuple)
        if name == "links"
        else st.none() | st.booleans()
        if name == "ready"
        else st.none() | st.lists(st.floats(0, 1e9), max_size=6).map(tuple)
        if name == "decode_moments"
        else REAL
        for name in LoadReport.__struct_fields__
    },
)


@given(REPORTS)
def test_a_report_survives_the_trip_and_unknown_stays_unknown(report: LoadReport) -> None:
    assert decode_report(encode_report(report)) == report


def test_a_newer_agent_may_say_more() -> None:
    body = orjson.dumps({"format": LOAD_FORMAT, "running_requests": 1, "fan_speed": 9})
    assert decode_report(body) == LoadReport(running_requests=1)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"null", b'{"running_requests": 0}', b'{"format": "laneway.load/9"}'],
    ids=repr,
)
def test_other_documents_are_no_reports(body: bytes) -> None:
    with pytest.raises(MalformedReport):
        decode_report(body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("running_requests", -1),
        ("running_requests", "1"),
        ("workers", -1),
        ("routers", []),
        ("routers", "ab"),
        ("routers", ["x y"]),
        ("routers", [1]),
        ("routers", ["ab"] * 65),
        ("links", []),
        ("links", ["ab"]),
        ("links", [{"router": "ab", "said_at": 1.0, "engines": 1}]),
        ("links", [{"router": "x y", "said_at": 1.0, "engines": 1, "routers": []}]),
        ("links", [{"router": "ab", "said_at": None, "engines": 1, "routers": []}]),
        ("links", [{"router": "ab", "said_at": 1.0, "engines": -1, "routers": []}]),
        ("links", [{"router": "ab", "said_at": 1.0, "engines": 1, "routers": [1]}]),
        ("links", [{"router": "ab", "said_at": 1.0, "engines": 1, "routers": []}] * 65),
        ("running_requests", True),
        ("running_requests", math.nan),
        ("running_requests", 10**400),
        ("kv_used_tokens", math.inf),
        ("cache_hit_ratio", 1.2),
        ("gpu_temperature_c", -5),
        ("ready", 1),
        ("decode_moments", 3),
        ("decode_moments", [1, None]),
        ("decode_moments", [1.0] * 17),
    ],
)
def test_an_impossible_figure_is_named(name: str, value: Any) -> None:
    with pytest.raises(MalformedReport, match=name):
        checked_report({name: value})


FIGURES = st.dictionaries(
    st.sampled_from(LoadReport.__struct_fields__),
    st.none()
    | st.booleans()
    | st.integers(-1, 3)
    | st.just(2**60)
    | st.floats(-0.5, 1.5)
    | st.sampled_from([math.nan, math.inf, -0.0, "1"])
    | st.lists(st.floats(-0.5, 9) | st.sampled_from(["ab", None]), max_size=3),
)


@given(FIGURES)
def test_a_report_read_as_a_whole_is_what_its_figures_are_one_by_one(
    figures: dict[str, Any],
) -> None:
    """A ratio a hair above one is not taken as a whole, and is one."""

    def read(ratio: float) -> LoadReport | None:
        body = orjson.dumps({"format": LOAD_FORMAT, **figures, "cache_hit_ratio": ratio})
        try:
            return decode_report(body)
        except MalformedReport:
            return None

    assert read(1.0) == read(1.01)


def test_a_count_too_large_is_refused_beside_a_ratio_too() -> None:
    with pytest.raises(MalformedReport, match="kv_used_tokens"):
        checked_report({"kv_used_tokens": 2**53 + 1, "cache_hit_ratio": 0.5})


def test_a_ratio_a_hair_above_one_is_one() -> None:
    assert checked_report({"cache_hit_ratio": 1.01}).cache_hit_ratio == 1.0


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://h:30000", "http://h:30000"),
        ("http://H:30000/", "http://h:30000"),
        ("http://h", "http://h:80"),
        ("https://h", "https://h:443"),
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("http://h:1/pool/a/", "http://h:1/pool/a"),
    ],
)
def test_urls_have_one_form(url: str, normal: str) -> None:
    assert normalized_url(url) == normal
    assert normalized_url(normal) == normal


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:30000",
        "ftp://h",
        "http://h/..",
        "http://h/a/%2e%2e/b",
        "http://h/./a",
        "http://" + "h" * 254,
        "http://h/" + "p" * 1024,
        "http://",
        "http://h:0",
        "http://h:99999",
        "http://h:x",
        "http://user@h:1",
        "http://user:pw@h:1",
        "http://@h:1",
        "http://h:1/?a=b",
        "http://h:1/#a",
        "http://h :1",
        "http://h:1\r\nx: y",
        "http://h\u00fc:1",
        "http://[::1",
    ],
)
def test_urls_that_are_no_worker_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        normalized_url(url)


@given(st.text())
def test_any_other_text_is_refused_or_becomes_a_stable_url(text: str) -> None:
    try:
        normal = normalized_url(text)
    except ValueError:
        return
    assert normalized_url(normal) == normal


def test_a_worker_is_named_after_its_address_unless_it_has_an_id() -> None:
    assert WorkerSpec(url="http://[::1]:30000").worker_id == "[::1]:30000"
    assert WorkerSpec(url="http://h:1", id="w1").worker_id == "w1"


@pytest.mark.parametrize(
    "fault",
    [
        {"url": "h"},
        {"id": "a/b"},
        {"id": ""},
        {"lanes": []},
        {"lanes": ["medium"]},
        {"kv_total_tokens": 0},
        {"kv_total_tokens": -1},
        {"concurrency_max": 0},
        {"cost": 0},
        {"worker_type": "spare"},
        {"models": [""]},
        {"labels": {f"k{n}": "v" for n in range(33)}},
        {"health_url": "h:1/health"},
        {"api_key": ""},
        {"api_key": "k\r\nx: y"},
        {"nonsense": 1},
    ],
    ids=repr,
)
def test_a_faulty_registration_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        WorkerSpec.model_validate({"url": "http://h:1", **fault})


def test_a_registration_survives_the_trip_with_its_key() -> None:
    spec = WorkerSpec.model_validate(
        {
            "url": "http://h:1",
            "health_url": "http://h:2",
            "lanes": ["short"],
            "labels": {"zone": "a"},
            "api_key": "w-key",
        }
    )
    body = encode_spec(spec)
    assert WorkerSpec.model_validate_json(body) == spec
    assert "models" not in orjson.loads(body)
    assert spec.lanes == {Lane.SHORT}


def test_a_key_is_never_shown_by_accident() -> None:
    spec = WorkerSpec.model_validate({"url": "http://h:1", "api_key": "w-key"})
    assert "w-key" not in f"{spec!r} {spec} {spec.model_dump()} {spec.model_dump_json()}"


@pytest.mark.parametrize("name", ["..", ".", "", "a b", "a/b", "a" * 129, "\u00e4", "a\n"])
def test_a_name_that_no_path_can_carry_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="a worker's name is"):
        WorkerSpec(url="http://h:1", id=name)
