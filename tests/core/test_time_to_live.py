"""Late requests are given up sooner than others, where they wait behind others."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from router.core.drain import SHORT_S, DrainEstimator
from router.core.types import Failure, Priority, TicketState
from router.errors import Reason, retry_after_value
from tests.core.builders import Bench, bench, config, one_at_a_time, request_spec, runs, waits

P0, P1, P2, P3 = Priority
NEVER = {"queue": {"give_up_after_targets": 0}}


def busy(**sections: Any) -> Bench:
    """One worker with one place, which is taken."""
    made = one_at_a_time(**sections)
    made.ask()
    return made


@pytest.mark.parametrize(("priority", "at"), [(P0, 2.4), (P1, 4.0), (P2, 10.0), (P3, 600.0)])
def test_a_late_request_waits_four_targets_and_two_seconds(priority: Priority, at: float) -> None:
    """Offline ones have set a patience of their own."""
    b = busy(degrade={"enabled": False})
    made = b.ask(priority=priority)
    b.pass_to(at - 0.01)
    assert waits(made)
    b.pass_to(at)
    assert b.refusal(made).reason is Reason.QUEUE_TIMEOUT


@pytest.mark.parametrize(
    ("sections", "at"),
    [
        (NEVER, 30.0),
        ({"queue": {"give_up_after_targets": 10}}, 7.0),
        ({"queue": {"wait_s_max": 3}}, 3.0),
        ({"queue": {"relegate_ratio": 0}}, 30.0),
        ({"queue": {"order": "fifo"}}, 30.0),
        ({"classes": {"p1": {"ttft_target_s": 1, "tpot_target_s": 1, "share_min": 0}}}, 6.0),
        (
            {
                "classes": {
                    "p1": {
                        "ttft_target_s": 1, "tpot_target_s": 1, "share_min": 0, "wait_s_max": 20
                    }
                }
            },
            20.0,
        ),
    ],
)  # fmt: skip
def test_how_long_is_a_setting(sections: dict[str, Any], at: float) -> None:
    b = busy(**sections)
    made = b.ask()
    b.pass_to(at - 0.01)
    assert waits(made)
    b.pass_to(at)
    assert b.refusal(made).reason is Reason.QUEUE_TIMEOUT


def test_what_can_be_in_time_later_waits_for_longer() -> None:
    """A prompt of seconds has the target of a class in which it is possible at all."""
    b = busy()
    made = b.ask(prompt_bytes=60_000)
    assert made.ttft_target_whole_s > 0.5
    b.pass_to(4 * made.ttft_target_whole_s + 1.99)
    assert waits(made)
    b.pass_to(4 * made.ttft_target_whole_s + 2.0)
    assert b.refusal(made).reason is Reason.QUEUE_TIMEOUT


def test_who_waits_for_a_worker_to_join_waits_on_and_has_not_waited_in_vain() -> None:
    b = bench()
    b.join("w1", report=None, concurrency_max=1)
    made = [b.ask() for _ in range(5)]
    b.pass_to(8.0)
    assert all(map(waits, made))
    b.report("w1", running_requests=0)
    b.pass_to(29.9)
    assert runs(made[0])
    assert all(map(waits, made[1:]))


def test_who_waits_for_a_worker_to_come_back_waits_on_and_has_not_waited_in_vain() -> None:
    b = bench()
    b.join("w1", concurrency_max=1)
    pause = Failure(reason=Reason.UPSTREAM_OVERLOADED, blames_worker=False, retry_after_s=12.0)
    b.fail(b.ask(), pause)
    early = b.ask()
    b.pass_to(8.05)
    late = b.ask()
    b.pass_to(11.9)
    assert waits(early)
    b.pass_to(25.0)
    assert runs(early)
    assert waits(late)


def test_who_waits_for_others_before_all_workers_go_waits_on() -> None:
    b = bench()
    b.join("w1", concurrency_max=1)
    first = b.ask()
    made = b.ask()
    b.pass_to(3.0)
    pause = Failure(reason=Reason.UPSTREAM_OVERLOADED, blames_worker=False, retry_after_s=12.0)
    b.fail(first, pause)
    b.pass_to(14.9)
    assert waits(made)
    b.pass_to(15.0)
    assert runs(made)


def test_who_was_sent_once_is_not_given_up_for_being_late() -> None:
    b = bench()
    b.join("w1", "w2", concurrency_max=1)
    first, _ = b.ask(), b.ask()
    assert b.fail(first) is True
    assert first.worker_id is not None
    other = b.ask()  # takes the place that the failure left
    assert runs(other)
    b.pass_to(29.9)
    assert waits(first)


def test_who_moves_to_another_line_has_waited_all_the_same() -> None:
    b = busy()
    made = b.ask()
    b.pass_to(3.0)
    flow = b.core._room.flow
    assert flow.take_out(made, now=b.now)
    flow.put_back(made, now=b.now)
    b.pass_to(3.99)
    assert waits(made)
    b.pass_to(4.0)
    assert b.refusal(made).reason is Reason.QUEUE_TIMEOUT


def test_a_client_with_little_patience_has_no_more_for_that() -> None:
    b = busy()
    made = b.ask(wait_s_max=1.5)
    b.pass_to(1.5)
    assert b.refusal(made).reason is Reason.QUEUE_TIMEOUT


def test_nobody_is_given_up_before_it_is_late() -> None:
    b = busy(queue={"relegate_ratio": 10})
    made = b.ask()
    assert made.late_at == pytest.approx(5.0, abs=0.1)
    b.pass_to(made.late_at - 0.01)
    assert waits(made)
    b.pass_to(made.late_at)
    assert b.refusal(made).reason is Reason.QUEUE_TIMEOUT


def test_a_wait_before_the_queue_makes_no_class_look_worn() -> None:
    """As for limits: its life in the queue begins when it gets there."""
    b = busy(degrade={"rise_s": 0.0})
    held = b.core.new_ticket(request_spec(priority=P2, tenant="a"), owner=None, now=b.now)
    b.pass_to(8.0)
    b.core.admit(held, now=b.now)
    b.pass_to(9.0)
    made = b.ask(priority=P2, tenant="b")
    assert waits(held)
    assert waits(made)
    b.pass_to(17.99)
    assert waits(held)
    b.pass_to(18.0)
    assert b.refusal(held).reason is Reason.QUEUE_TIMEOUT


# What they are told.


@pytest.mark.parametrize("priority", [P0, P1])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("jitter_ratio", [0.0, 0.25])
def test_half_of_a_short_patience_is_told_and_right_whatever_comes(
    priority: Priority, moves: bool, jitter_ratio: float
) -> None:
    b = busy(queue={"depth_max": 40}, drain={"jitter_ratio": jitter_ratio})
    first = b.core.on_request(request_spec(), owner=None, now=b.now) if moves else None
    made = [b.ask(priority=priority) for _ in range(40)]
    if first is not None:
        b.pass_to(0.3)
        b.end(b.dispatched[0])  # so that somebody was sent from the queue
        b.pass_to(0.6)
        assert b.core._room.flow._domain(made[0].pool).drain.prefill_per_s(now=b.now)
    b.pass_to(5.0)
    refused = [ticket for ticket in made if ticket.state is TicketState.FINISHED]
    assert len(refused) >= 39
    for ticket in refused:
        told_s = retry_after_value(b.refusal(ticket).retry_after_s or 0.0)
        assert told_s <= 2 * 1.0  # served at once, which counts as a second
        assert told_s >= ticket.ttl_s / 2  # or never


def test_nobody_is_told_to_stay_away_for_longer_than_it_would_wait() -> None:
    """Where nothing moves, and where nothing was ever sent from the queue."""
    b = busy(queue={"depth_max": 5})
    for _ in range(5):
        b.ask(priority=P2)
    b.pass_to(1.0)
    told = [b.refusal(b.ask(priority=P2)).retry_after_s or 0.0 for _ in range(25)]
    assert all(1.0 <= told_s <= 10.0 * 1.3 for told_s in told)


def test_the_jitter_makes_no_three_seconds_of_two() -> None:
    drain, rng = DrainEstimator(config()), Random(1)
    assert {retry_after_value(drain.spread(SHORT_S, rng)) for _ in range(100)} == {2}
    assert {retry_after_value(drain.spread(0.3, rng)) for _ in range(100)} == {2}
    assert {retry_after_value(drain.spread(2.5, rng)) for _ in range(100)} == {3, 4}
