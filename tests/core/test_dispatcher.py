"""What happens to one request: arrival, holding, its end."""

from __future__ import annotations

import pytest

from router.contract import WorkerId
from router.core.refusals import NONE_REGISTERED
from router.core.types import (
    Outcome,
    TicketState,
    Usage,
    WorkerState,
)
from router.errors import STATUS, Reason
from tests.core.builders import (
    bench,
    config,
    one_at_a_time,
    runs,
    waits,
    worker_spec,
)

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
    assert refusal.message == NONE_REGISTERED
    assert STATUS[refusal.reason] == 503
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1
    assert b.records[0].outcome is Outcome.REFUSED


def test_a_model_that_nobody_serves_is_not_found() -> None:
    b = bench("w1")
    assert b.refusal(b.ask(model="other")).reason is Reason.MODEL_NOT_FOUND


def test_a_model_whose_workers_are_all_ejected_is_unavailable_not_unknown() -> None:
    b = bench("w1")
    for _ in range(3):
        b.core.on_probe_failed(WorkerId("w1"), "no answer", now=1.0)
    refusal = b.refusal(b.ask())
    assert refusal.reason is Reason.NO_WORKERS
    assert refusal.message == "no live worker serves this model"


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


def test_a_client_may_be_less_patient_than_its_class_and_not_more() -> None:
    b = one_at_a_time(queue={"wait_s_max": 3.0})
    b.ask()
    hasty, patient = b.ask(wait_s_max=1.0), b.ask(wait_s_max=60.0)
    b.pass_to(1.0)
    assert b.refusal(hasty).reason is Reason.QUEUE_TIMEOUT
    assert waits(patient)
    b.pass_to(3.0)
    assert b.refusal(patient).reason is Reason.QUEUE_TIMEOUT


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
    small = [b.ask(tenant="another") for _ in range(4)]
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
    b = one_at_a_time(queue={"depth_max": 20, "give_up_after_targets": 0})
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
    b.core.on_tokens(made, 36, now=0.5)
    b.core.on_tokens(made, 33, now=0.6)  # the count, where there was a guess before
    b.end(made, Outcome.ABORTED)
    assert (b.records[0].output_tokens, b.records[0].usage_known) == (33, False)
    assert b.core.snapshot(now=1.0).workers[0].kv_reserved_tokens == 0


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
