"""What counts as in SLO, and that windows and totals agree with a plain recount."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import Config
from router.contract import Lane
from router.core.slo import (
    NOTHING_JUDGED,
    ClassView,
    SloMonitor,
    Standing,
    Totals,
)
from router.core.types import Endpoint, Outcome, Priority, RequestRecord
from router.errors import Reason

P0, P1 = Priority.P0, Priority.P1


def record(**changes: Any) -> RequestRecord:
    """A streamed P0 answer of 11 tokens within the default targets (0.1 s, 0.05 s)."""
    figures: dict[str, Any] = {
        "request_id": "r",
        "tenant": "t",
        "model": "m",
        "served_model": "m",
        "endpoint": Endpoint.CHAT,
        "lane": Lane.SHORT,
        "priority": P0,
        "stream": True,
        "worker_id": None,
        "outcome": Outcome.SUCCESS,
        "reason": None,
        "attempts": 1,
        "spilled": False,
        "arrived_at": 100.0,
        "dispatched_at": 100.0,
        "first_token_at": 100.05,
        "finished_at": 100.45,
        "prompt_tokens": 10,
        "cached_tokens": None,
        "output_tokens": 11,
        "usage_known": True,
    }
    return RequestRecord(**(figures | changes))


def unanswered(outcome: Outcome, reason: Reason | None, **changes: Any) -> RequestRecord:
    return record(outcome=outcome, reason=reason, first_token_at=None, **changes)


def small(window: int = 50, **slo: Any) -> Config:
    return Config.model_validate({"slo": {"window_requests": window, **slo}})


@pytest.mark.parametrize(
    ("finished", "met"),
    [
        (record(), True),
        (record(first_token_at=100.11), False),
        (record(first_token_at=100.1 - 1e-9), True),
        (record(finished_at=100.05 + 0.501), False),  # ten tokens at 50.1 ms
        (record(output_tokens=1, finished_at=109.0), True),  # no further token, no pace
        (record(output_tokens=0, finished_at=109.0), True),
        # Of several sequences each has its pace: four of eleven tokens, at 49 and at 51 ms.
        (record(samples=4, output_tokens=44, finished_at=100.05 + 0.49), True),
        (record(samples=4, output_tokens=44, finished_at=100.05 + 0.51), False),
        (record(samples=4, output_tokens=44, stream=False, finished_at=100.59), True),
        (record(samples=4, output_tokens=44, stream=False, finished_at=100.61), False),
        (record(samples=4, output_tokens=4, finished_at=109.0), True),
        # Not streamed: the time of a stream within both targets, 0.1 + 10 * 0.05.
        (record(stream=False, first_token_at=100.59, finished_at=100.59), True),
        (record(stream=False, first_token_at=100.61, finished_at=100.61), False),
        # As the relay reports it: nobody saw the first token of an answer that came whole.
        (record(stream=False, first_token_at=None, finished_at=100.59), True),
        (record(stream=False, first_token_at=None, finished_at=100.61), False),
        # Nothing generated: a score, then a stream without a token.
        (record(stream=False, first_token_at=None, output_tokens=0, finished_at=100.09), True),
        (record(stream=False, first_token_at=None, output_tokens=0, finished_at=100.2), False),
        (unanswered(Outcome.SUCCESS, None, finished_at=100.09), True),
        (unanswered(Outcome.SUCCESS, None, finished_at=100.2), False),
        # The client left.
        (record(outcome=Outcome.ABORTED), True),
        (record(outcome=Outcome.ABORTED, first_token_at=100.2), False),
        (unanswered(Outcome.ABORTED, None, finished_at=100.09), None),
        (unanswered(Outcome.ABORTED, None, finished_at=100.2), False),
        (unanswered(Outcome.ABORTED, None, finished_at=109.0, stream=False), None),
        (
            unanswered(Outcome.ABORTED, None, finished_at=109.0, stream=False, dispatched_at=None),
            False,
        ),
        # Not served.
        (unanswered(Outcome.REFUSED, Reason.QUEUE_FULL), False),
        (unanswered(Outcome.REFUSED, Reason.SHED), False),
        (unanswered(Outcome.REFUSED, Reason.NO_WORKERS), False),
        (unanswered(Outcome.FAILED, Reason.UPSTREAM_ERROR), False),
        (record(outcome=Outcome.FAILED, reason=Reason.UPSTREAM_ERROR), False),
        (unanswered(Outcome.REFUSED, Reason.TOO_LARGE), None),
        (unanswered(Outcome.REFUSED, Reason.BODY_TOO_LARGE), None),
        (unanswered(Outcome.REFUSED, Reason.MODEL_NOT_FOUND), None),
        (record(outcome=Outcome.CLIENT_ERROR), None),
    ],
)
def test_a_request_is_judged_by_what_its_client_saw(
    finished: RequestRecord, met: bool | None
) -> None:
    monitor = SloMonitor(Config())
    assert monitor.count(finished) is met
    view = monitor.view(P0)
    assert (view.requests, view.met) == (met is not None, met is True)


@pytest.mark.parametrize(
    ("finished", "is_engine_miss"),
    [
        (unanswered(Outcome.REFUSED, Reason.NO_WORKERS), True),
        (unanswered(Outcome.REFUSED, Reason.SHUTTING_DOWN), True),
        (unanswered(Outcome.REFUSED, Reason.CONNECTIONS_FULL), True),
        (unanswered(Outcome.FAILED, Reason.UPSTREAM_TIMEOUT), True),
        (unanswered(Outcome.REFUSED, Reason.QUEUE_TIMEOUT), False),
        (unanswered(Outcome.REFUSED, Reason.SHED), False),
        (unanswered(Outcome.FAILED, Reason.UPSTREAM_OVERLOADED), False),
    ],
)
def test_a_miss_that_no_share_would_have_spared_is_counted_apart(
    finished: RequestRecord, *, is_engine_miss: bool
) -> None:
    monitor = SloMonitor(Config())
    assert monitor.count(finished) is False
    assert monitor.view(P0).engine_misses == is_engine_miss
    assert monitor.totals(P0) == Totals(not is_engine_miss, 0, is_engine_miss)


def test_an_empty_class_is_unknown_and_not_perfect() -> None:
    view = SloMonitor(Config()).view(P1)
    assert view.standing is Standing.UNKNOWN
    assert view.attainment is None
    assert view.attainment_feasible is None


def test_only_the_window_counts() -> None:
    monitor = SloMonitor(small(50))
    for _ in range(50):
        monitor.count(record(first_token_at=100.3))
    assert monitor.view(P0).attainment == 0
    for _ in range(50):
        monitor.count(record())
    assert monitor.view(P0).attainment == 1
    assert monitor.view(P0).requests == 50
    assert monitor.totals(P0).judged == 100


def test_what_other_routers_count_is_added_once_and_stays_when_they_go() -> None:
    monitor = SloMonitor(Config())

    def said(judged: int, met: int) -> list[Totals]:
        return [Totals(judged, met, 0), *[NOTHING_JUDGED] * 3]

    monitor.count(record())
    assert not monitor.hear({"a": said(100, 50)})  # of before we knew it
    assert monitor.hear({"a": said(103, 51), "b": said(7, 7)})
    assert not monitor.hear({"a": said(103, 51), "b": said(7, 7)})
    assert monitor.totals(P0) == Totals(4, 2, 0)
    assert monitor.own_totals(P0) == Totals(1, 1, 0)
    assert not monitor.hear({"b": said(7, 7)})
    assert monitor.hear({"b": said(8, 7)})
    assert monitor.totals(P0) == Totals(5, 2, 0)
    assert monitor.totals(P1) == NOTHING_JUDGED


def test_infeasible_requests_are_counted_apart() -> None:
    monitor = SloMonitor(Config())
    for _ in range(9):
        monitor.count(record())
    monitor.count(record(first_token_at=100.2), feasible=False)
    view = monitor.view(P0)
    assert view.attainment == 0.9
    assert view.attainment_feasible == 1
    assert view.standing is Standing.MET
    assert monitor.totals(P0).judged == 9


def test_failures_of_workers_are_misses_that_no_loop_looks_at() -> None:
    monitor = SloMonitor(Config())
    monitor.count(record())
    monitor.count(unanswered(Outcome.FAILED, Reason.UPSTREAM_UNREACHABLE))
    view, totals = monitor.view(P0), monitor.totals(P0)
    assert (view.attainment, view.engine_misses) == (0.5, 1)
    assert (totals.judged, totals.met, totals.engine_misses) == (1, 1, 1)


@pytest.mark.parametrize(
    ("met", "standing"),
    [(99, Standing.MET), (98, Standing.BELOW_TARGET), (94, Standing.BELOW_FLOOR)],
)
def test_target_and_floor_tell_a_shortfall_from_an_alarm(met: int, standing: Standing) -> None:
    monitor = SloMonitor(Config())
    for number in range(100):
        monitor.count(record(first_token_at=100.05 if number < met else 100.2))
    assert monitor.view(P0).standing is standing


def test_new_targets_judge_new_requests_only() -> None:
    monitor = SloMonitor(Config())
    late = record(first_token_at=100.2)
    monitor.count(late)
    p0 = {"ttft_target_s": 0.3, "tpot_target_s": 0.05, "share_min": 0.6, "wait_s_max": 30}
    monitor.configure(Config.model_validate({"classes": {"p0": p0}}))
    assert monitor.count(late) is True
    assert monitor.view(P0).met == 1
    assert monitor.view(P0).requests == 2


def test_a_resized_window_starts_empty_and_totals_go_on() -> None:
    monitor = SloMonitor(small(50))
    monitor.count(record())
    monitor.configure(small(60))
    assert monitor.view(P0).requests == 0
    assert monitor.totals(P0).judged == 1


KINDS = (
    record(),
    record(first_token_at=100.2),
    unanswered(Outcome.FAILED, Reason.UPSTREAM_ERROR),
    record(outcome=Outcome.CLIENT_ERROR),
)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=300))
def test_a_window_equals_a_recount_of_its_last_requests(steps: list[tuple[int, bool]]) -> None:
    monitor = SloMonitor(small(50))
    counted: list[tuple[int, bool]] = []
    for kind, feasible in steps:
        if monitor.count(KINDS[kind], feasible=feasible) is not None:
            counted.append((kind, feasible))
    last = counted[-50:]
    expected = ClassView(
        priority=P0,
        ttft_target_s=0.1,
        tpot_target_s=0.05,
        requests=len(last),
        met=sum(kind == 0 for kind, _ in last),
        feasible_requests=sum(feasible for _, feasible in last),
        feasible_met=sum(kind == 0 and feasible for kind, feasible in last),
        engine_misses=sum(kind == 2 for kind, _ in last),
        standing=monitor.view(P0).standing,
    )
    assert monitor.view(P0) == expected
    totals = monitor.totals(P0)
    assert totals.judged == sum(feasible and kind < 2 for kind, feasible in counted)
    assert monitor.snapshot()[1].requests == 0
