"""The X-RateLimit-* headers: the tightest limit, OpenAI's names, nothing of the cluster."""

from __future__ import annotations

import pytest

from router.core.bucket import Charge, Kind, Level, Rule, Scope
from router.core.limits import Reservation
from router.runtime.limit_lines import limit_headers, limit_lines

REQUESTS = Rule("tenant:a:requests", Scope.TENANT_REQUESTS, 1.0, 60)
COST = Rule("tenant:a:cost", Scope.TENANT_COST, 2.0, 6)
PERMITS = Rule("tenant:a:concurrency", Scope.TENANT_CONCURRENCY, 0.0, 4, Kind.PERMITS)
CLUSTER = Rule("cluster:cost", Scope.CLUSTER, 10.0, 5)


def test_no_limit_says_nothing() -> None:
    assert limit_headers([]) == {}
    assert limit_lines(Reservation("r", (), ())) == b""


def test_the_tightest_is_told_in_general_and_each_under_its_name() -> None:
    told = [(REQUESTS, Level(60, 59.5, 0.5)), (COST, Level(6, 0.12345, 2.94))]
    assert limit_headers(told) == {
        "x-ratelimit-limit": "6",
        "x-ratelimit-remaining": "0.123",
        "x-ratelimit-reset": "3",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-cost": "6",
        "x-ratelimit-remaining-cost": "0.123",
        "x-ratelimit-reset-cost": "3s",
    }


def test_when_permits_come_back_nobody_knows() -> None:
    assert limit_headers([(PERMITS, Level(4, 1, None))]) == {
        "x-ratelimit-limit": "4",
        "x-ratelimit-remaining": "1",
    }


def test_a_granted_answer_says_nothing_of_the_cluster() -> None:
    charges = (Charge(CLUSTER, 1), Charge(REQUESTS, 1))
    levels = (Level(5, 0, 1), Level(60, 30, 30))
    lines = limit_lines(Reservation("r", charges, levels))
    assert b"x-ratelimit-remaining: 30\r\n" in lines
    assert limit_lines(Reservation("r", charges[:1], levels[:1])) == b""
    assert limit_lines(Reservation("r", charges, ())) == b"", "the store could not look"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0101, "11ms"), (1, "1s"), (59.2, "1m0s"), (90, "1m30s"), (3661, "1h1m1s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    told = [(REQUESTS, Level(60, 1, seconds))]
    assert limit_headers(told)["x-ratelimit-reset-requests"] == text
