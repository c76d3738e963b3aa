"""The life of a worker, and the polls that watch it."""

from __future__ import annotations

import pytest

from router.contract import WorkerId
from router.core.effects import BreakerMoved, WorkerChanged
from router.core.fleet import TRANSITIONS, Signal
from router.core.types import WorkerState
from tests.core.builders import Bench, bench

W, S = WorkerState, Signal
W1 = WorkerId("w1")


@pytest.mark.parametrize(
    ("state", "signal", "new"),
    [
        (W.JOINING, S.ALIVE, W.ACTIVE),
        (W.JOINING, S.PROBES_FAILED, W.EJECTED),
        (W.JOINING, S.JOIN_TIMEOUT, W.EJECTED),
        (W.JOINING, S.DRAIN, W.DRAINING),
        (W.ACTIVE, S.ALIVE, None),
        (W.ACTIVE, S.PROBES_FAILED, W.EJECTED),
        (W.ACTIVE, S.JOIN_TIMEOUT, None),
        (W.ACTIVE, S.DRAIN, W.DRAINING),
        (W.EJECTED, S.ALIVE, W.JOINING),
        (W.EJECTED, S.PROBES_FAILED, None),
        (W.EJECTED, S.JOIN_TIMEOUT, None),
        (W.EJECTED, S.DRAIN, W.DRAINING),
        (W.DRAINING, S.ALIVE, None),
        (W.DRAINING, S.PROBES_FAILED, None),
        (W.DRAINING, S.JOIN_TIMEOUT, None),
        (W.DRAINING, S.DRAIN, None),
    ],
)
def test_every_pair_of_state_and_signal(
    state: WorkerState, signal: Signal, new: WorkerState | None
) -> None:
    assert TRANSITIONS.get((state, signal)) is new


def fail(b: Bench, times: int = 1) -> None:
    for _ in range(times):
        b.core.on_probe_failed(W1, "no answer", now=b.now)
        b.take()


def changes(b: Bench) -> list[tuple[WorkerState | None, WorkerState | None]]:
    return [(e.old, e.new) for e in b.effects if isinstance(e, WorkerChanged)]


def test_a_worker_is_polled_at_once_and_then_about_each_interval() -> None:
    b = bench(probe={"interval_s": 1.0, "jitter_ratio": 0.1})
    b.join("w1", report=None)
    assert b.probes == ["w1"]
    for second in range(1, 101):
        b.report("w1")
        b.pass_to(second)
    assert 85 <= len(b.probes) <= 115


def test_workers_that_joined_together_are_not_polled_together() -> None:
    b = bench("w1", "w2", "w3")
    moments = []
    for _ in range(20):
        due = b.core.next_deadline()
        assert due is not None
        moments.append(due)
        b.pass_to(due)
        for worker_id in b.core.worker_ids:
            b.report(worker_id)
    assert len(set(moments)) == len(moments)


def test_a_poll_that_is_out_is_not_overtaken_unless_it_was_lost() -> None:
    b = bench(probe={"interval_s": 1.0, "timeout_s": 2.0})
    b.join("w1", report=None)
    b.pass_to(5.0)
    assert len(b.probes) == 1
    b.pass_to(8.0)
    assert len(b.probes) == 2


def test_a_few_failed_polls_change_nothing_and_a_good_one_breaks_the_row() -> None:
    b = bench("w1", probe={"failures_to_eject": 3})
    for _ in range(5):
        fail(b, times=2)
        b.report("w1")
    assert b.view("w1").state is W.ACTIVE


def test_failing_polls_eject_and_good_ones_bring_back_through_joining() -> None:
    b = bench("w1")
    fail(b, times=3)
    b.effects.clear()
    b.report("w1")
    assert b.probes == ["w1"]  # at once, not an interval later
    b.report("w1")
    assert changes(b) == [(W.EJECTED, W.JOINING), (W.JOINING, W.ACTIVE)]


def test_a_worker_that_fails_while_it_rejoins_is_ejected_again() -> None:
    b = bench("w1")
    fail(b, times=3)
    b.report("w1")
    fail(b, times=3)
    assert b.view("w1").state is W.EJECTED


def test_a_worker_that_still_loads_its_model_is_joining_until_the_time_is_over() -> None:
    b = bench(probe={"join_timeout_s": 60.0})
    b.join("w1", report=None)
    fail(b, times=50)
    b.pass_to(59.0)
    assert b.view("w1").state is W.JOINING
    b.pass_to(60.0)
    assert b.view("w1").state is W.EJECTED
    b.report("w1")
    b.report("w1")
    assert b.view("w1").state is W.ACTIVE


def test_missing_figures_never_eject() -> None:
    b = bench("w1")
    for _ in range(50):
        b.core.on_report_missing(W1, "404", now=b.now)
    assert b.view("w1").state is W.ACTIVE


def test_a_draining_worker_is_not_polled_and_leaves_only_by_going_idle() -> None:
    b = bench("w1")
    made = b.ask()
    b.core.on_drain(W1, now=0.0, deadline_s=100.0)
    b.take()
    b.effects.clear()
    b.report("w1")
    fail(b, times=10)
    b.pass_to(10.0)
    assert b.probes == []
    assert b.view("w1").state is W.DRAINING
    b.end(made)
    assert changes(b) == [(W.DRAINING, None)]


def test_a_poll_of_a_worker_that_left_leads_to_nothing() -> None:
    b = bench("w1")
    b.core.on_worker_left(W1, now=0.0)
    b.take()
    b.effects.clear()
    b.pass_to(1_000.0)
    assert b.effects == []
    assert b.core.next_deadline() is None


def test_the_workers_own_figures_are_used_where_the_spec_says_nothing() -> None:
    b = bench()
    b.join("w1", models=(), kv_total_tokens=None, report=None)
    b.core.on_worker_described(W1, models=("x",), kv_total_tokens=5_000, concurrency_max=7, now=0.0)
    view = b.view("w1")
    assert (view.models, view.kv_total_tokens, view.concurrency_max) == (("x",), 5_000, 7)
    b.join("w2", models=("y",), kv_total_tokens=9_000, concurrency_max=3, report=None)
    b.core.on_worker_described(
        WorkerId("w2"), models=("x",), kv_total_tokens=1, concurrency_max=1, now=0.0
    )
    view = b.view("w2")
    assert (view.models, view.kv_total_tokens, view.concurrency_max) == (("y",), 9_000, 3)


def test_what_a_worker_does_not_say_this_time_stays_known() -> None:
    b = bench()
    b.join("w1", models=(), kv_total_tokens=None, report=None)
    b.core.on_worker_described(W1, models=("x",), kv_total_tokens=5_000, concurrency_max=7, now=0.0)
    b.core.on_worker_described(W1, models=(), kv_total_tokens=None, concurrency_max=None, now=0.0)
    view = b.view("w1")
    assert (view.models, view.kv_total_tokens, view.concurrency_max) == (("x",), 5_000, 7)
    b.core.on_worker_described(
        W1, models=("x", "y"), kv_total_tokens=None, concurrency_max=None, now=0.0
    )
    assert b.view("w1").models == ("x", "y")


def test_a_report_tells_sizes_that_nothing_else_told() -> None:
    b = bench()
    b.join("w1", kv_total_tokens=None, report=None)
    b.report("w1", kv_total_tokens=7_000, max_running_requests=9)
    view = b.view("w1")
    assert (view.kv_total_tokens, view.concurrency_max) == (7_000, 9)


def test_the_first_report_is_measured_by_the_sizes_that_it_tells() -> None:
    b = bench()
    b.join("w1", kv_total_tokens=None, report=None)
    b.report("w1", kv_used_tokens=700, kv_total_tokens=7_000)
    assert b.view("w1").kv_used_tokens == 700


def test_no_worker_is_sent_more_than_there_are_connections() -> None:
    b = bench(upstream={"connections_max": 5})
    b.join("w1", concurrency_max=100)
    assert b.view("w1").concurrency_max == 5


def test_a_leased_worker_is_forgotten_when_it_shows_no_life_for_its_time() -> None:
    b = bench()
    b.join("w1", ttl_s=60.0)
    b.join("w2")
    b.pass_to(30.0)
    b.report("w1")
    b.pass_to(89.0)
    assert b.core.worker_ids == ["w1", "w2"]
    b.pass_to(92.0)
    assert b.core.worker_ids == ["w2"], "the one that an operator registered stays"
    b.report("w1")
    assert b.core.worker_ids == ["w2"], "late news bring nobody back"


def test_a_leased_worker_without_figures_lives() -> None:
    b = bench()
    b.join("w1", ttl_s=60.0)
    for at in range(10, 200, 10):
        b.pass_to(at)
        b.core.on_report_missing(W1, "404", now=b.now)
    assert b.core.worker_ids == ["w1"]


def test_a_leased_worker_that_never_came_is_forgotten_too() -> None:
    b = bench()
    b.join("w1", ttl_s=60.0, report=None)
    b.pass_to(62.0)
    assert b.core.worker_ids == []


def test_a_joining_id_twice_is_a_bug_of_the_caller() -> None:
    b = bench("w1")
    with pytest.raises(AssertionError, match="joined twice"):
        b.join("w1")


def test_an_ejected_worker_has_lost_its_cache() -> None:
    b = bench("w1")
    b.ask(prefix=(1, 2, 3))
    assert len(b.core._prefixes) == 3
    fail(b, times=3)
    assert len(b.core._prefixes) == 0


def test_bits_of_workers_are_used_again() -> None:
    b = bench()
    for _ in range(100):
        b.join("w1", "w2")
        b.core.on_worker_left(W1, now=0.0)
        b.core.on_worker_left(WorkerId("w2"), now=0.0)
    b.join("w1", "w2", "w3")
    bits = [worker.bit for worker in b.core._fleet.workers.values()]
    assert sorted(bits) == [1, 2, 4]


def test_an_opened_breaker_is_told_once_until_it_closes() -> None:
    b = bench("w1", breaker={"failures": 2, "open_s": 5.0}, retry={"retries_max": 0})

    def told() -> list[bool]:
        return [e.opened for e in b.effects if isinstance(e, BreakerMoved)]

    b.fail(b.ask())
    assert told() == []
    b.fail(b.ask())
    assert told() == [True]
    b.pass_to(6.0)
    b.fail(b.ask())  # the trial
    assert told() == [True]
    b.pass_to(12.0)
    b.end(b.ask())
    assert told() == [True, False]


def test_why_a_worker_does_not_get_ready_is_shown() -> None:
    b = bench()
    b.join("w1", report=None)
    b.core.on_probe_failed(WorkerId("w1"), "connection refused", now=b.now)
    assert (b.view("w1").why_unknown, b.view("w1").answered) == ("connection refused", False)
    b.report("w1", running_requests=0)
    assert (b.view("w1").why_unknown, b.view("w1").answered) == (None, True)
