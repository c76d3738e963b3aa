"""Requests that come while the workers that may serve them are still joining."""

from __future__ import annotations

import pytest

from router.contract import WorkerId
from router.core.types import Ticket, TicketState
from router.errors import STATUS, Reason
from tests.core.builders import Bench, bench, plain_config, waits, worker_spec

SAYS_NOTHING = {"models": (), "kv_total_tokens": None}


def joining(*names: str, **fields: object) -> Bench:
    """Workers that were registered and have not answered yet."""
    b = bench()
    b.join(*names, report=None, **fields)
    return b


def describe(b: Bench, name: str, *models: str) -> None:
    b.core.on_worker_described(
        WorkerId(name), models=models, kv_total_tokens=None, concurrency_max=None, now=b.now
    )
    b.take()


def is_refused(b: Bench, made: Ticket, reason: Reason) -> None:
    assert made.state is TicketState.FINISHED
    assert b.refusal(made).reason is reason


def test_a_request_waits_for_a_worker_that_joins_and_goes_to_it_at_its_first_answer() -> None:
    b = joining("w1")
    made = b.ask()
    assert waits(made)
    b.report("w1")
    assert (b.dispatched, made.worker_id) == ([made], "w1")


def test_requests_that_waited_go_in_their_order() -> None:
    b = joining("w1", concurrency_max=1)
    first, second = b.ask(), b.ask()
    b.report("w1")
    assert b.dispatched == [first]
    b.end(first)
    assert b.dispatched == [first, second]


@pytest.mark.parametrize("reported", [True, False])
def test_a_wait_for_a_worker_that_never_answers_ends_at_its_deadline(reported: bool) -> None:
    b = joining("w1")
    made = b.ask()
    if not reported:
        b.core.on_probe_failed(WorkerId("w1"), "connection refused", now=b.now)
    b.pass_to(made.queue_deadline_at - 0.1)
    assert waits(made)
    b.pass_to(made.queue_deadline_at)
    is_refused(b, made, Reason.NO_WORKERS)
    assert STATUS[b.refusal(made).reason] == 503
    assert (b.refusal(made).retry_after_s or 0) >= 1


def test_nobody_waits_for_a_worker_that_is_not_joining_any_more() -> None:
    b = bench(queue={"wait_s_max": 500.0}, probe={"join_timeout_s": 10.0})
    b.join("w1", report=None)
    made = b.ask()
    b.pass_to(10.0)
    is_refused(b, made, Reason.NO_WORKERS)
    is_refused(b, b.ask(), Reason.NO_WORKERS)


def test_nobody_waits_for_a_worker_that_was_removed() -> None:
    b = joining("w1")
    made = b.ask()
    b.core.on_worker_left(WorkerId("w1"), now=b.now)
    b.take()
    is_refused(b, made, Reason.NO_WORKERS)


def test_nobody_waits_for_a_worker_that_comes_back() -> None:
    b = bench("w1", probe={"failures_to_eject": 1})
    b.core.on_probe_failed(WorkerId("w1"), "no answer", now=1.0)
    b.report("w1")  # joining again, but known
    is_refused(b, b.ask(), Reason.NO_WORKERS)


def test_a_worker_of_another_model_is_not_waited_for() -> None:
    b = bench("w1", probe={"failures_to_eject": 1})
    b.core.on_probe_failed(WorkerId("w1"), "no answer", now=1.0)
    b.join("w2", report=None, models=("other",))
    is_refused(b, b.ask(), Reason.NO_WORKERS)


def test_a_worker_of_another_lane_is_not_waited_for_unless_lanes_may_be_left() -> None:
    for spill in (False, True):
        b = bench(lanes={"spill": spill})
        b.join("w1", report=None, lanes=("long",))
        assert waits(b.ask(max_tokens=10)) is spill


def test_who_waited_for_any_worker_goes_only_to_one_that_serves_its_model() -> None:
    b = joining("a", "b", **SAYS_NOTHING)
    for_b, for_a = b.ask(model="of b"), b.ask(model="of a")
    describe(b, "a", "of a")
    b.report("a", kv_total_tokens=100_000)
    assert b.dispatched == [for_a]
    assert waits(for_b)
    describe(b, "b", "of b")
    b.report("b", kv_total_tokens=100_000)
    assert b.dispatched == [for_a, for_b]
    assert (for_a.worker_id, for_b.worker_id) == ("a", "b")
    assert for_b.pool.model == "of b"


def test_a_model_that_turns_out_to_be_served_by_nobody_is_not_found() -> None:
    b = joining("a", **SAYS_NOTHING)
    made = b.ask(model="nobody's")
    describe(b, "a", "of a")
    is_refused(b, made, Reason.MODEL_NOT_FOUND)


def test_a_request_whose_model_was_unknown_is_told_from_others_when_its_worker_says_it() -> None:
    """Not only while it joins: a worker that served before it said its models."""
    b = bench()
    b.join("a", models=(), concurrency_max=1)
    running, made = b.ask(model="x"), b.ask(model="x")
    assert waits(made)
    describe(b, "a", "x")
    assert waits(made)
    b.end(running)
    assert made.worker_id == "a"


def test_a_request_too_large_for_those_here_waits_for_a_larger_one_that_joins() -> None:
    b = bench()
    b.join("small", kv_total_tokens=1_000)
    b.join("large", report=None, kv_total_tokens=None)
    made = b.ask(prompt_bytes=40_000)
    assert waits(made)
    b.report("large", kv_total_tokens=100_000)
    assert made.worker_id == "large"


def test_a_request_too_large_for_all_is_told_so_when_the_last_has_joined() -> None:
    b = bench()
    b.join("small", kv_total_tokens=1_000)
    b.join("other", report=None, kv_total_tokens=None)
    made, in_vain = b.ask(prompt_bytes=40_000), b.ask(prompt_bytes=40_000)
    b.pass_to(made.queue_deadline_at)
    is_refused(b, made, Reason.TOO_LARGE)
    is_refused(b, in_vain, Reason.TOO_LARGE)


def test_a_retry_waits_for_a_worker_that_joins() -> None:
    b = bench("w1", "w2")
    made = b.ask()
    b.join("w3", report=None)
    assert b.fail(made)
    second = "w2" if made.tried == ("w1",) else "w1"
    b.core.on_worker_left(WorkerId(second), now=b.now)
    b.take()
    b.pass_to(2.0)
    assert waits(made)
    b.report("w3")
    assert made.worker_id == "w3"


def test_a_request_does_not_wait_for_a_router_that_it_came_through() -> None:
    b = joining("w1")
    is_refused(b, b.ask(avoid=("w1",)), Reason.NO_WORKERS)


def test_figures_follow_from_the_rates_of_the_worker_that_came() -> None:
    """What waited before any worker was known is an elephant, or late, as if it came now."""
    b = joining("w1", concurrency_max=1)
    first, waiting = b.ask(prompt_bytes=4_000), b.ask(prompt_bytes=4_000)
    assert waiting.prefill_s == 0
    b.report("w1")
    assert first.worker_id == "w1"
    assert waiting.prefill_s > 0
    assert waiting.prefill_s == b.ask(prompt_bytes=4_000).prefill_s


def test_a_worker_that_the_configuration_adds_is_waited_for() -> None:
    b = bench("w1")
    b.core.on_config(plain_config(queue={"depth_max": 9}), now=1.0)
    b.core.on_worker_joined(worker_spec("w2", models=("new",)), now=1.0)
    made = b.ask(model="new")
    assert waits(made)
    b.report("w2")
    assert made.worker_id == "w2"


def test_the_wait_of_one_that_moved_goes_on() -> None:
    b = joining("a", **SAYS_NOTHING)
    made = b.ask(model="x")
    b.pass_to(1.0)
    describe(b, "a", "x")
    assert waits(made)
    assert made.queued_at == 0.0
    b.pass_to(made.queue_deadline_at)
    is_refused(b, made, Reason.NO_WORKERS)
