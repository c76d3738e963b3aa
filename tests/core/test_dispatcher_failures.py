"""What happens when an attempt or a worker fails: retries, pauses, the breaker."""

from __future__ import annotations

import pytest

from router.contract import WorkerId
from router.core.types import (
    Failure,
    Outcome,
    Priority,
    TicketState,
)
from router.errors import Reason
from tests.core.builders import (
    FULL_ENGINE,
    bench,
    one_at_a_time,
    runs,
    waits,
)

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
