"""What happens to one request, and to those around it."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from router.contract import Lane, LoadReport, WorkerId
from router.core.dispatcher import Dispatcher
from router.core.types import (
    Endpoint,
    Failure,
    Outcome,
    Priority,
    Ticket,
    TicketState,
    Usage,
    WorkerState,
)
from router.errors import STATUS, Reason
from tests.core.builders import Bench, bench, config, worker_spec

FULL_ENGINE = Failure(reason=Reason.UPSTREAM_OVERLOADED, blames_worker=False)


def one_at_a_time(**sections: Any) -> Bench:
    made = bench(**sections)
    made.join("w1", concurrency_max=1)
    return made


def waits(ticket: Ticket) -> bool:
    return ticket.state is TicketState.QUEUED


def runs(ticket: Ticket) -> bool:
    return ticket.state is TicketState.DISPATCHED


# Arrival.


def test_a_request_with_room_is_dispatched_at_once() -> None:
    b = bench("w1")
    made = b.ask()
    assert b.dispatched == [made]
    assert runs(made)
    assert made.worker_id == "w1"


@pytest.mark.parametrize("stream", [True, False])
def test_no_worker_is_said_at_once_and_is_not_called_overload(stream: bool) -> None:
    b = bench()
    made = b.ask(stream=stream)
    refusal = b.refusal(made)
    assert refusal.reason is Reason.NO_WORKERS
    assert STATUS[refusal.reason] == 503
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1
    assert b.records[0].outcome is Outcome.REFUSED


def test_a_worker_that_has_not_answered_yet_gets_nothing() -> None:
    b = bench()
    b.join("w1", report=None)
    assert b.refusal(b.ask()).reason is Reason.NO_WORKERS
    b.report("w1")
    assert b.ask().worker_id == "w1"


def test_a_model_that_nobody_serves_is_not_found() -> None:
    b = bench("w1")
    assert b.refusal(b.ask(model="other")).reason is Reason.MODEL_NOT_FOUND


def test_a_model_whose_workers_are_all_ejected_is_unavailable_not_unknown() -> None:
    b = bench("w1")
    for _ in range(3):
        b.core.on_probe_failed(WorkerId("w1"), "no answer", now=1.0)
    assert b.refusal(b.ask()).reason is Reason.NO_WORKERS


def test_a_worker_with_unknown_models_may_serve_any_name() -> None:
    b = bench("w1")
    b.join("w2", models=())
    assert b.ask(model="other").worker_id == "w2"
    b.core.on_worker_described(
        WorkerId("w2"), models=("x",), kv_total_tokens=None, concurrency_max=None, now=0.0
    )
    assert b.refusal(b.ask(model="other")).reason is Reason.MODEL_NOT_FOUND
    assert b.ask(model="x").worker_id == "w2"


def test_unknown_models_go_anywhere_when_the_catalog_says_so() -> None:
    b = bench("w1", catalog={"unknown": "any"})
    assert b.ask(model="other").worker_id == "w1"


def test_an_alias_reaches_the_workers_of_its_model() -> None:
    b = bench("w1", models={"m": {"aliases": ("gpt",)}})
    assert b.ask(model="gpt").worker_id == "w1"


def test_a_request_without_a_model_goes_anywhere() -> None:
    b = bench("w1")
    assert b.ask(model=None).worker_id == "w1"


def test_a_request_larger_than_every_pool_is_refused_for_good() -> None:
    b = bench()
    b.join("w1", kv_total_tokens=1_000)
    refusal = b.refusal(b.ask(prompt_bytes=40_000))
    assert refusal.reason is Reason.TOO_LARGE
    assert refusal.retry_after_s is None


def test_an_unknown_pool_is_never_too_small() -> None:
    b = bench()
    b.join("w1", kv_total_tokens=None)
    assert b.ask(prompt_bytes=40_000_000).worker_id == "w1"


# Holding.


def test_full_workers_make_a_request_wait_and_the_next_end_dispatches_it() -> None:
    b = one_at_a_time()
    first, second = b.ask(), b.ask()
    assert waits(second)
    b.end(first)
    assert b.dispatched == [first, second]


def test_the_queue_is_first_in_first_out() -> None:
    b = one_at_a_time()
    made = [b.ask() for _ in range(5)]
    for ended in made:
        b.end(ended)
    assert b.dispatched == made


def test_a_permit_is_held_to_the_end_of_the_stream() -> None:
    b = bench()
    b.join("w1", concurrency_max=2)
    first, second, third = b.ask(), b.ask(), b.ask()
    for made in (first, second):
        b.core.on_first_token(made, now=0.1)
    assert waits(third)
    b.end(first)
    assert runs(third)


def test_a_full_queue_refuses_at_once() -> None:
    b = one_at_a_time(queue={"depth_max": 3})
    made = [b.ask() for _ in range(20)]
    states = [ticket.state for ticket in made]
    assert states.count(TicketState.DISPATCHED) == 1
    assert states.count(TicketState.QUEUED) == 3
    assert {b.refusal(t).reason for t in made[4:]} == {Reason.QUEUE_FULL}
    assert all((b.refusal(t).retry_after_s or 0) >= 1 for t in made[4:])


def test_a_client_that_leaves_the_queue_frees_its_place_and_is_never_run() -> None:
    b = one_at_a_time(queue={"depth_max": 2})
    running, left, stays = b.ask(), b.ask(), b.ask()
    b.core.on_finished(left, Outcome.ABORTED, now=0.5)
    newcomer = b.ask()
    assert waits(newcomer)
    b.end(running)
    b.end(stays)
    assert b.dispatched == [running, stays, newcomer]


def test_a_wait_that_is_too_long_ends_with_an_error() -> None:
    b = one_at_a_time(queue={"wait_s_max": 3.0})
    b.ask()
    late = b.ask()
    b.pass_to(2.9)
    assert waits(late)
    b.pass_to(3.0)
    assert b.refusal(late).reason is Reason.QUEUE_TIMEOUT
    assert (b.refusal(late).retry_after_s or 0) >= 1


def test_full_workers_of_one_model_block_nobody_else() -> None:
    b = bench()
    b.join("w1", models=("a",), concurrency_max=1)
    b.join("w2", models=("b",), concurrency_max=1)
    b.ask(model="a")
    blocked = [b.ask(model="a") for _ in range(50)]
    running = b.ask(model="b")
    waiting = b.ask(model="b")
    b.end(running)
    assert runs(waiting)
    assert all(waits(ticket) for ticket in blocked)


def test_a_large_request_is_passed_by_some_smaller_ones_but_not_for_ever() -> None:
    b = bench(queue={"skips_max": 2})
    b.join("w1", kv_total_tokens=10_000)
    running = b.ask(prompt_bytes=20_000)
    large = b.ask(prompt_bytes=32_000)
    small = [b.ask() for _ in range(4)]
    assert [runs(ticket) for ticket in (large, *small)] == [False, True, True, False, False]
    b.end(running)
    assert b.dispatched == [running, *small[:2], large, *small[2:]]


def test_those_behind_a_large_request_move_up_when_its_client_leaves() -> None:
    b = bench(queue={"skips_max": 0})
    b.join("w1", kv_total_tokens=10_000)
    b.ask(prompt_bytes=20_000)
    large = b.ask(prompt_bytes=32_000)
    small = b.ask()
    b.core.on_finished(large, Outcome.ABORTED, now=0.0)
    assert runs(small)


def test_a_worker_that_joins_takes_what_waits() -> None:
    b = one_at_a_time()
    b.ask()
    waiting = b.ask()
    b.join("w2")
    assert waiting.worker_id == "w2"


def test_nobody_waits_for_workers_that_are_gone() -> None:
    b = one_at_a_time()
    running = b.ask()
    waiting = b.ask()
    b.core.on_worker_left(WorkerId("w1"), now=1.0)
    b.take()
    assert b.refusal(waiting).reason is Reason.NO_WORKERS
    b.end(running)
    assert [record.outcome for record in b.records] == [Outcome.REFUSED, Outcome.SUCCESS]


def test_a_waiter_that_fitted_only_a_worker_that_left_is_refused_as_too_large() -> None:
    b = bench()
    b.join("big", kv_total_tokens=100_000, concurrency_max=1)
    b.join("small", kv_total_tokens=1_000)
    b.ask(prompt_bytes=40_000)
    waiting = b.ask(prompt_bytes=40_000)
    b.core.on_worker_left(WorkerId("big"), now=1.0)
    b.take()
    assert b.refusal(waiting).reason is Reason.TOO_LARGE


def test_retry_after_follows_the_recent_drain_rate() -> None:
    b = one_at_a_time(queue={"depth_max": 20})
    running = [b.ask() for _ in range(21)]
    for step in range(200):
        b.now = step * 0.5  # two requests end each second
        b.end(running.pop(0))
        running.append(b.ask())
    wait = b.refusal(b.ask()).retry_after_s
    assert wait is not None
    assert 21 / 2 * 0.8 <= wait <= 21 / 2 * 1.3 * 1.2


# Ends.


def test_one_finish_whatever_is_said_afterwards() -> None:
    b = bench("w1")
    made = b.ask()
    b.end(made)
    b.end(made, Outcome.FAILED)
    b.core.on_finished(made, Outcome.ABORTED, now=1.0)
    b.core.on_first_token(made, now=1.0)
    b.core.on_tokens(made, 500, now=1.0)
    assert b.fail(made) is False
    assert [record.outcome for record in b.records] == [Outcome.SUCCESS]
    assert b.streams() == {"w1": 0}


def test_the_record_prefers_reported_figures_over_estimates() -> None:
    b = bench("w1")
    made = b.ask()
    b.core.on_first_token(made, now=0.2)
    b.core.on_tokens(made, 33, now=0.5)
    usage = Usage(prompt_tokens=77, cached_tokens=11, output_tokens=44)
    b.core.on_finished(made, Outcome.SUCCESS, now=1.0, usage=usage)
    b.take()
    record = b.records[0]
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (77, 11, 44)
    assert (record.first_token_at, record.finished_at, record.usage_known) == (0.2, 1.0, True)


def test_without_usage_the_record_counts_what_was_seen() -> None:
    b = bench("w1")
    made = b.ask()
    b.core.on_tokens(made, 33, now=0.5)
    b.end(made, Outcome.ABORTED)
    assert (b.records[0].output_tokens, b.records[0].usage_known) == (33, False)


def test_the_reservation_grows_with_the_stream_and_is_given_back_whole() -> None:
    b = bench("w1")
    made = b.ask(max_tokens=1_000)
    assert b.view("w1").kv_reserved_tokens == 100 + 256
    b.core.on_first_token(made, now=0.1)
    b.core.on_tokens(made, 200, now=0.2)
    assert b.view("w1").kv_reserved_tokens == 100 + 256
    b.core.on_tokens(made, 900, now=0.3)
    assert b.view("w1").kv_reserved_tokens == 100 + 900
    b.end(made)
    assert b.view("w1").kv_reserved_tokens == 0


def test_samples_are_reserved_each() -> None:
    b = bench("w1")
    b.ask(max_tokens=100, samples=4)
    assert b.view("w1").kv_reserved_tokens == 100 + 4 * 100


# Workers that come and go under running requests.


def test_late_ends_never_touch_the_counters_of_a_worker_that_came_back() -> None:
    b = bench("w1")
    old = [b.ask() for _ in range(10)]
    b.core.on_worker_left(WorkerId("w1"), now=1.0)
    b.join("w1", "w2", "w3")
    assert b.streams()["w1"] == 0
    for made in old:
        b.end(made)
    assert b.streams()["w1"] == 0
    for _ in range(30):
        b.ask()
    assert b.streams() == {"w1": 10, "w2": 10, "w3": 10}


def test_a_worker_whose_health_flaps_keeps_counting_its_streams_down() -> None:
    b = bench("w1", "w2")
    made = [b.ask() for _ in range(20)]
    for _ in range(3):
        b.core.on_probe_failed(WorkerId("w1"), "no answer", now=1.0)
    assert b.view("w1").state is WorkerState.EJECTED
    b.report("w1")
    assert b.view("w1").state is WorkerState.JOINING
    b.report("w1")
    assert b.view("w1").state is WorkerState.ACTIVE
    assert b.streams()["w1"] == 10
    for done in made:
        b.end(done)
    assert b.streams() == {"w1": 0, "w2": 0}


def test_draining_lets_streams_end_and_sends_nothing_new() -> None:
    b = bench("w1", "w2")
    running = [b.ask() for _ in range(4)]
    b.core.on_drain(WorkerId("w1"), now=1.0, deadline_s=60.0)
    assert all(b.ask().worker_id == "w2" for _ in range(5))
    on_w1 = [made for made in running if made.worker_id == "w1"]
    for made in on_w1:
        assert "w1" in b.core.worker_ids
        b.end(made)
    assert b.core.worker_ids == ["w2"]


def test_draining_ends_at_its_deadline() -> None:
    b = bench("w1")
    made = b.ask()
    b.core.on_drain(WorkerId("w1"), now=1.0, deadline_s=5.0)
    b.pass_to(5.9)
    assert b.core.worker_ids == ["w1"]
    b.pass_to(6.0)
    assert b.core.worker_ids == []
    b.end(made, Outcome.FAILED)
    assert len(b.records) == 1


def test_the_drain_of_a_worker_that_left_is_not_that_of_its_successor() -> None:
    b = bench("w1")
    b.ask()
    b.core.on_drain(WorkerId("w1"), now=0.0, deadline_s=5.0)
    b.core.on_worker_left(WorkerId("w1"), now=1.0)
    b.join("w1")
    b.pass_to(10.0)
    assert b.core.worker_ids == ["w1"]


def test_an_idle_worker_drains_at_once() -> None:
    b = bench("w1")
    b.core.on_drain(WorkerId("w1"), now=1.0, deadline_s=5.0)
    assert b.core.worker_ids == []


def test_a_worker_that_moves_to_another_url_is_a_bug_of_the_caller() -> None:
    b = bench("w1")
    with pytest.raises(AssertionError, match="another URL"):
        b.core.on_worker_updated(worker_spec("w1", url="http://elsewhere:1"), now=1.0)


def test_a_patched_limit_holds_for_the_next_request() -> None:
    b = bench("w1")
    b.core.on_worker_updated(worker_spec("w1", concurrency_max=1), now=1.0)
    b.ask()
    assert b.ask().state is TicketState.QUEUED


def test_a_new_configuration_holds_for_the_next_request() -> None:
    b = one_at_a_time()
    b.ask()
    waiting = b.ask()
    b.core.on_config(config(queue={"depth_max": 1}), now=1.0)
    assert b.refusal(b.ask()).reason is Reason.QUEUE_FULL
    assert waits(waiting)


# Retries.


def test_three_failing_workers_make_exactly_three_attempts_with_growing_pauses() -> None:
    b = bench("w1", "w2", "w3")
    made = b.ask()
    failed_at = []
    while b.fail(made):
        failed_at.append((b.now, made.not_before_at))
        b.pass_to(made.not_before_at)
    assert made.attempts == 3
    assert len({ticket.worker_id for ticket in b.dispatched}) == 1  # the same ticket, as it is now
    assert sorted(made.tried) == ["w1", "w2", "w3"]
    first, second = (until - since for since, until in failed_at)
    assert 0 < first < second
    record = b.records[0]
    assert (record.outcome, record.reason) == (Outcome.FAILED, Reason.UPSTREAM_ERROR)
    assert record.attempts == 3


def test_pauses_differ_between_requests() -> None:
    b = bench("w1", "w2")
    pauses = set()
    for _ in range(5):
        made = b.ask()
        assert b.fail(made)
        pauses.add(made.not_before_at - b.now)
        b.core.on_finished(made, Outcome.ABORTED, now=b.now)
    assert len(pauses) == 5


def test_a_retry_that_succeeds_is_one_success() -> None:
    b = bench("w1", "w2")
    made = b.ask()
    assert b.fail(made)
    b.pass_to(1.0)
    assert len(set(made.tried) | {made.worker_id}) == 2
    b.end(made)
    assert [record.outcome for record in b.records] == [Outcome.SUCCESS]


def test_nothing_is_retried_on_the_worker_that_failed() -> None:
    b = bench("w1")
    assert b.fail(b.ask()) is False


def test_what_would_fail_anywhere_is_not_retried() -> None:
    b = bench("w1", "w2")
    failure = Failure(reason=Reason.UPSTREAM_ERROR, retryable=False)
    assert b.fail(b.ask(), failure) is False


def test_offline_requests_are_not_retried() -> None:
    b = bench("w1", "w2")
    assert b.fail(b.ask(priority=Priority.P3)) is False


def test_the_budget_bounds_retries_and_successes_refill_it() -> None:
    b = bench("w1", "w2", retry={"budget_tokens_max": 2.0}, breaker={"failures": 1000})
    answers = [b.fail(b.ask()) for _ in range(4)]
    assert answers == [True, True, False, False]
    for _ in range(10):
        b.end(b.ask())
    assert b.fail(b.ask()) is True
    assert b.fail(b.ask()) is False


def test_a_client_that_leaves_during_the_pause_is_not_retried() -> None:
    b = bench("w1", "w2")
    made = b.ask()
    assert b.fail(made)
    b.core.on_finished(made, Outcome.ABORTED, now=b.now)
    b.pass_to(10.0)
    assert len(b.dispatched) == 1
    assert [record.outcome for record in b.records] == [Outcome.ABORTED]


def test_a_promised_retry_without_a_worker_left_ends_in_a_refusal() -> None:
    b = bench("w1", "w2")
    made = b.ask()
    assert b.fail(made)
    other = next(name for name in ("w1", "w2") if name not in made.tried)
    b.core.on_worker_left(WorkerId(other), now=b.now)
    b.pass_to(1.0)
    assert b.refusal(made).reason is Reason.UPSTREAM_ERROR
    assert [record.outcome for record in b.records] == [Outcome.FAILED]


def test_a_retry_that_waits_is_told_when_its_last_worker_leaves() -> None:
    b = bench()
    b.join("w1", "w2", concurrency_max=1)
    first, second = b.ask(), b.ask()
    assert b.fail(first)
    b.pass_to(1.0)
    assert waits(first)
    assert second.worker_id is not None
    b.core.on_worker_left(second.worker_id, now=b.now)
    b.take()
    assert b.refusal(first).reason is Reason.UPSTREAM_ERROR


def test_a_retry_that_waits_for_a_worker_blocks_nobody_who_has_one() -> None:
    b = bench()
    b.join("w1", "w2", concurrency_max=1)
    first, second = b.ask(), b.ask()
    behind = b.ask()
    assert b.fail(first)
    assert behind.worker_id == first.tried[0]
    b.pass_to(1.0)
    assert waits(first)
    newcomer = b.ask()
    b.end(behind)
    assert newcomer.worker_id == behind.worker_id
    b.end(second)
    assert runs(first)


def test_a_worker_that_asked_for_a_pause_is_left_out_and_a_longer_one_replaces_it() -> None:
    b = bench("w1")
    pause = Failure(reason=Reason.UPSTREAM_OVERLOADED, blames_worker=False, retry_after_s=4.0)
    assert b.fail(b.ask(), pause) is False
    waiting = b.ask()
    b.pass_to(3.9)
    assert waits(waiting)
    b.pass_to(4.0)
    assert runs(waiting)
    longer = Failure(reason=Reason.UPSTREAM_OVERLOADED, blames_worker=False, retry_after_s=10.0)
    assert b.fail(waiting, longer) is False
    shorter = b.ask()
    b.pass_to(13.9)
    assert waits(shorter)
    b.pass_to(14.0)
    assert runs(shorter)


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    b = bench()
    b.join("w1", concurrency_max=2)
    first, second = b.ask(), b.ask()
    reason = Reason.UPSTREAM_OVERLOADED
    b.fail(first, Failure(reason=reason, blames_worker=False, retry_after_s=10.0))
    b.fail(second, Failure(reason=reason, blames_worker=False, retry_after_s=1.0))
    assert b.view("w1").out_s == 10.0


def test_a_pause_longer_than_the_patience_is_told_at_once() -> None:
    b = bench("w1", queue={"wait_s_max": 5.0})
    b.fail(b.ask(), Failure(reason=Reason.UPSTREAM_OVERLOADED, retry_after_s=60.0))
    refusal = b.refusal(b.ask())
    assert refusal.reason is Reason.UPSTREAM_OVERLOADED
    assert refusal.retry_after_s == 60.0


# Breaker.


def test_clients_bad_requests_and_full_engines_never_open_the_breaker() -> None:
    b = bench("w1")
    for _ in range(20):
        b.end(b.ask(), Outcome.CLIENT_ERROR)
        b.end(b.ask(), Outcome.ABORTED)
        b.fail(b.ask(), FULL_ENGINE)
    assert b.ask().worker_id == "w1"
    assert b.view("w1").failures == 0


def test_failures_in_mid_stream_open_the_breaker_although_streams_began() -> None:
    b = bench("w1", "w2")
    for _ in range(40):
        made = b.ask()
        b.core.on_first_token(made, now=b.now)
        b.end(made, Outcome.FAILED if made.worker_id == "w1" else Outcome.SUCCESS)
    assert b.view("w1").failures == 5
    assert all(b.ask().worker_id == "w2" for _ in range(10))


def test_exactly_one_trial_then_traffic_is_back() -> None:
    b = bench("w1", breaker={"open_s": 10.0})
    for _ in range(5):
        b.fail(b.ask())
    assert b.refusal(b.ask()).reason is Reason.NO_WORKERS
    b.pass_to(11.0)
    made = [b.ask() for _ in range(5)]
    assert [ticket.state for ticket in made] == [TicketState.DISPATCHED] + [TicketState.QUEUED] * 4
    b.end(made[0])
    assert all(ticket.worker_id == "w1" for ticket in made)


@pytest.mark.parametrize("lost", ["client gone", "client error", "full engine"])
def test_a_lost_trial_leaves_the_place_to_the_next(lost: str) -> None:
    b = bench("w1")
    for _ in range(5):
        b.fail(b.ask())
    b.pass_to(11.0)
    trial, waiting = b.ask(), b.ask()
    if lost == "client gone":
        b.core.on_finished(trial, Outcome.ABORTED, now=b.now)
    elif lost == "client error":
        b.end(trial, Outcome.CLIENT_ERROR)
    else:
        b.fail(trial, FULL_ENGINE)
    assert runs(waiting)


def test_a_trial_that_streams_long_enough_lets_others_in() -> None:
    b = bench("w1", breaker={"open_s": 10.0})
    for _ in range(5):
        b.fail(b.ask())
    b.pass_to(10.0)
    trial, waiting = b.ask(), b.ask()
    b.core.on_first_token(trial, now=10.5)
    b.core.on_tokens(trial, 10, now=12.0)
    assert waits(waiting)
    b.core.on_tokens(trial, 20, now=20.5)
    assert runs(waiting)


def test_a_plain_trial_of_minutes_does_not_keep_a_healthy_worker_closed() -> None:
    b = bench("w1", breaker={"failures": 1, "open_s": 10.0}, retry={"retries_max": 0})
    b.fail(b.ask())
    b.pass_to(10.0)
    trial, waiting = b.ask(stream=False), b.ask(stream=False)
    b.pass_to(19.0)
    b.report("w1")
    assert waiting.state is TicketState.QUEUED
    b.pass_to(20.0)
    b.report("w1")
    assert waiting.state is TicketState.DISPATCHED
    b.end(waiting)
    assert b.ask().state is TicketState.DISPATCHED
    assert trial.state is TicketState.DISPATCHED


def test_a_lost_trial_beside_another_leaves_its_place_at_once() -> None:
    b = bench("w1", breaker={"failures": 1, "open_s": 10.0}, retry={"retries_max": 0})
    b.fail(b.ask())
    b.pass_to(10.0)
    b.ask(stream=False)
    b.pass_to(20.0)
    lost, waiting = b.ask(), b.ask()
    assert (lost.state, waiting.state) == (TicketState.DISPATCHED, TicketState.QUEUED)
    b.end(lost, Outcome.CLIENT_ERROR)
    assert waiting.state is TicketState.DISPATCHED


def test_a_waiter_becomes_the_trial_when_the_breaker_may_be_tried() -> None:
    b = one_at_a_time(breaker={"failures": 1, "open_s": 5.0})
    running, waiting = b.ask(), b.ask()
    b.fail(running)
    assert waits(waiting)
    b.pass_to(5.0)
    assert runs(waiting)


# Balance.


@pytest.mark.parametrize("policy", ["least_work", "weighted", "round_robin", "least_in_flight"])
@pytest.mark.parametrize("seed", range(5))
def test_a_burst_between_two_polls_is_spread_evenly(policy: str, seed: int) -> None:
    b = bench("w1", "w2", "w3", seed=seed, policy={"name": policy})
    for step in range(60):
        b.now = 0.1 * step / 60
        b.ask()
    assert all(15 <= count <= 25 for count in b.streams().values()), b.streams()


def test_full_workers_are_skipped_while_one_has_room_then_requests_wait() -> None:
    b = bench()
    b.join("w1", "w2", "w3", report=LoadReport(kv_used_tokens=400_000))
    b.join("w4", report=LoadReport(kv_used_tokens=200_000))
    made = [b.ask(prompt_bytes=40_000) for _ in range(20)]
    assert [ticket.worker_id for ticket in made] == ["w4"] * 16 + [None] * 4
    assert waits(made[-1])


def test_a_report_of_a_full_pool_is_believed_although_we_sent_nothing() -> None:
    b = bench()
    b.join("w1", report=LoadReport(kv_used_tokens=396_000))
    b.join("w2", report=LoadReport(kv_used_tokens=120_000))
    assert all(b.ask(max_tokens=1000).worker_id == "w2" for _ in range(20))
    b.report("w2", kv_used_tokens=399_000)
    assert b.ask(max_tokens=1000).state is TicketState.QUEUED


def test_without_a_kv_figure_a_worker_gets_no_more_than_its_share_of_requests() -> None:
    b = bench()
    b.join("w1", kv_total_tokens=None, report=LoadReport(queued_requests=0))
    b.join("w2", report=LoadReport(queued_requests=0, kv_used_tokens=160_000))
    for _ in range(50):
        b.ask(max_tokens=1000)
    assert b.streams()["w1"] <= 25


def test_a_worker_whose_load_answers_fail_is_not_preferred() -> None:
    b = bench()
    b.join("w1", report=None)
    b.core.on_report_missing(WorkerId("w1"), "HTML", now=0.0)
    b.join("w2", report=LoadReport(kv_used_tokens=120_000))
    assert b.view("w1").state is WorkerState.ACTIVE
    for _ in range(100):
        b.ask()
    assert b.streams()["w1"] <= 55
    assert b.view("w1").why_unknown == "HTML"


def test_a_closed_gate_opens_when_the_reports_that_closed_it_go_stale() -> None:
    b = bench(probe={"stale_after_s": 3.0})
    b.join("w1", report=LoadReport(kv_used_tokens=400_000, queued_requests=1_000))
    waiting = b.ask()
    assert waits(waiting)
    b.pass_to(5.0)
    assert runs(waiting)


def test_a_worker_with_many_waiting_is_left_out() -> None:
    b = bench("w1")
    b.report("w1", queued_requests=64)
    assert runs(b.ask())
    b.report("w1", queued_requests=65)
    held = b.ask()
    assert waits(held)
    b.report("w1", queued_requests=0)
    assert runs(held)


def test_a_worker_that_others_filled_and_queue_at_is_left_out() -> None:
    b = bench()
    b.join("w1", "w2", concurrency_max=16)
    b.report("w1", running_requests=16, queued_requests=4)
    assert all(b.ask().worker_id == "w2" for _ in range(8))
    b.report("w1", running_requests=0, queued_requests=0)
    b.core.on_worker_left(WorkerId("w2"), now=0.0)
    assert b.ask().worker_id == "w1"


def test_a_worker_is_shown_with_the_kv_tokens_that_it_reported() -> None:
    b = bench("w1")
    b.ask(prompt_bytes=4_000)
    b.report("w1", kv_used_tokens=73)
    (view,) = b.core.snapshot(now=0.0).workers
    assert (view.kv_used_tokens, view.kv_reserved_tokens > 1_000) == (73, True)


def test_higher_priority_is_filled_first() -> None:
    b = bench()
    b.join("w1", priority=1, concurrency_max=3)
    b.join("w2")
    assert [b.ask().worker_id for _ in range(5)] == ["w1"] * 3 + ["w2"] * 2


def test_twice_the_cost_gets_about_half_the_work() -> None:
    b = bench("w1", policy={"name": "least_in_flight"})
    b.join("w2", cost=2.0)
    for _ in range(90):
        b.ask()
    assert b.streams() == {"w1": 60, "w2": 30}


def test_a_repeated_prompt_goes_where_its_prefix_is() -> None:
    b = bench("w1", "w2", "w3", "w4")
    prefix = tuple(range(100, 108))
    first = b.ask(prompt_bytes=4_096, prefix=prefix)
    b.end(first)
    for _ in range(10):
        made = b.ask(prompt_bytes=4_096, prefix=prefix)
        assert made.worker_id == first.worker_id
        assert made.hit_tokens > 900
        b.end(made)


def test_a_prefix_does_not_draw_all_the_load_to_one_worker() -> None:
    b = bench("w1", "w2", "w3", "w4")
    prefix = tuple(range(100, 108))
    for _ in range(200):
        b.ask(prompt_bytes=8_192, prefix=prefix)
    assert max(b.streams().values()) <= 120


# Lanes.


def two_lanes(**sections: Any) -> Bench:
    made = bench(**sections)
    made.join("s", lanes=["short"])
    made.join("l", lanes=["long"])
    return made


def test_each_lane_has_its_workers() -> None:
    b = two_lanes()
    assert b.ask(max_tokens=256).worker_id == "s"
    assert b.ask(max_tokens=257).worker_id == "l"


def test_short_requests_spill_when_their_own_workers_make_them_wait() -> None:
    b = two_lanes()
    made = [b.ask(prompt_bytes=16_000) for _ in range(12)]
    spilled = [ticket for ticket in made if ticket.spilled]
    assert spilled
    assert {ticket.worker_id for ticket in spilled} == {"l"}
    assert made[0].worker_id == "s"
    assert all(ticket.lane is Lane.SHORT for ticket in made)


def test_nothing_spills_when_that_is_switched_off() -> None:
    b = two_lanes(lanes={"spill": False})
    assert {b.ask(prompt_bytes=16_000).worker_id for _ in range(12)} == {"s"}


def test_long_requests_spill_only_into_an_idle_short_lane() -> None:
    b = two_lanes()
    for _ in range(4):
        b.ask(prompt_bytes=16_000, max_tokens=1000)
    assert b.streams()["l"] < 4
    busy = two_lanes()
    for _ in range(2):
        busy.ask(prompt_bytes=16_000)
    for _ in range(4):
        busy.ask(prompt_bytes=16_000, max_tokens=1000)
    assert busy.streams() == {"s": 2, "l": 4}


@pytest.mark.parametrize(("tokens", "left"), [(100, "l"), (1000, "s")])
def test_a_lane_without_a_live_worker_uses_the_other(tokens: int, left: str) -> None:
    b = two_lanes()
    b.core.on_worker_left(WorkerId("s" if left == "l" else "l"), now=0.0)
    made = b.ask(max_tokens=tokens)
    assert (made.worker_id, made.spilled) == (left, True)


def test_a_lane_without_a_live_worker_is_unavailable_when_spill_is_off() -> None:
    b = two_lanes(lanes={"spill": False})
    b.core.on_worker_left(WorkerId("s"), now=0.0)
    assert b.refusal(b.ask(max_tokens=100)).reason is Reason.NO_WORKERS


def test_halves_of_a_disaggregated_pair_are_not_sent_whole_requests() -> None:
    b = bench()
    b.join("p", worker_type="prefill")
    b.join("d", worker_type="decode")
    assert b.refusal(b.ask()).reason is Reason.NO_WORKERS


# Learning.


def test_settled_usage_corrects_the_prompt_estimate() -> None:
    b = bench("w1")
    for _ in range(200):
        made = b.ask(prompt_bytes=4_000)
        usage = Usage(prompt_tokens=2_000, output_tokens=10)
        b.core.on_finished(made, Outcome.SUCCESS, now=b.now, usage=usage)
    assert 1_950 <= b.ask(prompt_bytes=4_000).prompt_tokens <= 2_050


def test_without_max_tokens_history_decides_the_lane() -> None:
    b = bench("w1")
    assert b.ask(max_tokens=None).lane is Lane.LONG
    for _ in range(50):
        made = b.ask(max_tokens=None)
        usage = Usage(prompt_tokens=100, output_tokens=40)
        b.core.on_finished(made, Outcome.SUCCESS, now=b.now, usage=usage)
    assert b.ask(max_tokens=None).lane is Lane.SHORT


def test_names_in_requests_leave_no_trace() -> None:
    b = bench("w1", catalog={"unknown": "any"})
    for number in range(100):
        b.end(b.ask(model=f"made-up-{number}"))
    assert len(b.core._costs) == 1
    assert len(b.core._pools._pools) <= 2


def test_embeddings_are_short_and_reserve_only_their_prompt() -> None:
    b = bench("w1")
    made = b.ask(endpoint=Endpoint.EMBEDDINGS, max_tokens=None, stream=False)
    assert (made.lane, made.output_tokens, made.kv_tokens) == (Lane.SHORT, 0, 100)


# Determinism.


def trace_of(seed: int) -> list[str]:
    core = Dispatcher(config(), rng=Random(seed))
    b = Bench(core)
    b.join("w1", "w2", "w3", "w4")
    rng = Random(7)
    running = []
    for step in range(300):
        b.pass_to(step * 0.05)
        running.append(b.ask(prompt_bytes=rng.randrange(100, 9_000)))
        if rng.random() < 0.9:
            b.end(running.pop(rng.randrange(len(running))))
    return [str(ticket.worker_id) for ticket in b.dispatched] + [str(e) for e in b.probes]


def test_the_same_seed_decides_the_same() -> None:
    assert trace_of(3) == trace_of(3)
    assert trace_of(3) != trace_of(4)


def test_what_snapshot_shows_is_frozen() -> None:
    b = bench("w1")
    before = b.core.snapshot(now=0.0)
    b.ask()
    assert before.workers[0].streams == 0
    assert b.core.snapshot(now=0.0).workers[0].streams == 1
    assert b.core.snapshot(now=0.0).lanes[Lane.SHORT].running == 1


def test_models_lists_every_worker_that_is_not_ejected() -> None:
    b = bench("w1", "w2")
    assert b.core.models() == {"m": ["w1", "w2"]}
    for _ in range(3):
        b.core.on_probe_failed(WorkerId("w1"), "no answer", now=1.0)
    assert b.core.models() == {"m": ["w2"]}


def test_news_of_strangers_is_dropped() -> None:
    b = bench()
    b.report("nobody")
    b.core.on_probe_failed(WorkerId("nobody"), "no answer", now=0.0)
    b.core.on_drain(WorkerId("nobody"), now=0.0, deadline_s=1.0)
    b.core.on_worker_left(WorkerId("nobody"), now=0.0)
    b.core.on_worker_updated(worker_spec("nobody"), now=0.0)
    assert b.core.worker_ids == []


def test_a_record_names_the_model_as_workers_do_and_no_text_of_a_client() -> None:
    b = bench(models={"m": {"aliases": ["alias"]}}, catalog={"unknown": "any"})
    b.join("w1", models=())
    b.end(b.ask(model="junk"))
    b.join("w2")
    for name in ("m", "alias", "junk", None):
        b.end(b.ask(model=name))
    assert [(r.model, r.served_model) for r in b.records] == [
        ("junk", None), ("m", "m"), ("alias", "m"), ("junk", None), (None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(("lane", "max_tokens"), [("long", 5_000), ("short", 10)])
def test_what_its_own_lane_can_never_hold_goes_to_the_other(lane: str, max_tokens: int) -> None:
    other = {"long": "short", "short": "long"}[lane]
    b = bench()
    b.join("small", lanes=[lane], kv_total_tokens=10_000)
    b.join("large", lanes=[other], kv_total_tokens=400_000)
    b.ask()  # so that the other lane is not idle
    made = b.ask(prompt_bytes=80_000, max_tokens=max_tokens)
    assert (made.worker_id, made.spilled) == ("large", True)
    b.join("unknown", lanes=[lane], kv_total_tokens=None)
    assert b.ask(prompt_bytes=80_000, max_tokens=max_tokens).worker_id == "unknown"


def test_what_no_lane_can_hold_is_too_large_also_where_lanes_do_not_spill() -> None:
    b = bench(lanes={"spill": False})
    b.join("small", lanes=["long"], kv_total_tokens=10_000)
    b.join("large", lanes=["short"], kv_total_tokens=400_000)
    made = b.ask(prompt_bytes=80_000, max_tokens=5_000)
    assert b.refusal(made).reason is Reason.TOO_LARGE


def test_a_prompt_waits_for_the_worker_that_has_it_cached_when_that_is_sooner() -> None:
    b = bench("w1", "w2", pacing={"enabled": True}, policy={"slow_start_s": 0.0})
    prefix = tuple(range(1, 157))  # 80 kB, 20,000 tokens: half a second of prefill
    first = b.ask(prompt_bytes=80_000, prefix=prefix)
    home = first.worker_id
    b.core.on_first_token(first, now=0.6)
    b.now = 0.6
    busy = [b.ask(prompt_bytes=20_000) for _ in range(2)]  # each has as much waiting as it may
    assert {ticket.worker_id for ticket in busy} == {"w1", "w2"}
    later = b.ask(prompt_bytes=80_400, prefix=prefix)
    assert waits(later)
    for ticket in busy:
        if ticket.worker_id == home:
            b.core.on_first_token(ticket, now=0.7)
    b.take()
    assert runs(later)
    assert later.worker_id == home
