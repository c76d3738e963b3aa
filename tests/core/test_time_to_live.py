"""Late requests are given up sooner than others, where they wait behind others."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest

from router.core.drain import SHORT_S, DrainEstimator
from router.core.types import Failure, Priority
from router.errors import Reason, retry_after_value
from tests.core.builders import Bench, bench, config, one_at_a_time, runs, waits

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


def test_who_waits_for_a_worker_to_join_waits_on() -> None:
    b = bench()
    b.join("w1", report=None)
    made = b.ask()
    b.pass_to(29.0)
    assert waits(made)
    assert made.ttl_s == inf


def test_who_waits_for_a_worker_to_come_back_waits_on() -> None:
    b = bench("w1")
    pause = Failure(reason=Reason.UPSTREAM_OVERLOADED, blames_worker=False, retry_after_s=12.0)
    b.fail(b.ask(), pause)
    made = b.ask()
    b.pass_to(11.9)
    assert waits(made)
    b.pass_to(12.0)
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


# What they are told.


@pytest.mark.parametrize("priority", [P0, P1])
@pytest.mark.parametrize("seed", range(20))
def test_half_of_a_short_patience_is_told_and_right_whatever_comes(
    priority: Priority, seed: int
) -> None:
    b = bench(seed=seed)
    b.join("w1", concurrency_max=1)
    b.ask()
    made = b.ask(priority=priority)
    b.pass_to(1.0)
    b.ask()  # by now something has left
    b.pass_to(5.0)
    told_s = retry_after_value(b.refusal(made).retry_after_s or 0.0)
    assert told_s <= 2 * 1.0  # served at once, which counts as a second
    assert told_s >= made.ttl_s / 2  # or never


def test_the_jitter_makes_no_three_seconds_of_two() -> None:
    drain, rng = DrainEstimator(config()), Random(1)
    assert {retry_after_value(drain.spread(SHORT_S, rng)) for _ in range(100)} == {2}
    assert {retry_after_value(drain.spread(0.3, rng)) for _ in range(100)} == {2}
    assert {retry_after_value(drain.spread(2.5, rng)) for _ in range(100)} == {3, 4}
