"""A worker's account, marks, freshness and slow start."""

from __future__ import annotations

from math import inf

import pytest

from router.contract import LoadReport
from router.core.types import Failure, Outcome, Ticket
from router.core.worker import Worker
from router.errors import Reason
from tests.core.builders import config, plain_config, request_spec, ticket, worker


def charged(one: Worker, number: int = 1, *, now: float = 0.0, stream: bool = True) -> Ticket:
    made = ticket(number, spec=request_spec(stream=stream), dispatched_at=now)
    one.charge(made, now=now)
    return made


def test_a_charge_twice_or_a_release_twice_is_a_bug() -> None:
    one, made = worker(), ticket()
    one.charge(made, now=0.0)
    with pytest.raises(AssertionError, match="charged twice"):
        one.charge(made, now=0.0)
    one.release(made)
    with pytest.raises(AssertionError, match="given back twice"):
        one.release(made)


def test_room_is_what_is_left_below_the_ratio() -> None:
    one = worker(settings=plain_config(headroom={"kv_ratio_max": 0.9}))
    charged(one)
    one.refresh(0.0)
    assert one.kv_admitted_tokens == 360_000
    one.foreign.kv_tokens = 10_000
    one.refresh(0.0)
    assert one.kv_admitted_tokens == 350_000


def test_where_others_send_too_each_request_is_counted_before_the_next() -> None:
    """Of four places a router that shares them takes two, however fast its own requests come."""
    one = worker(concurrency_max=4)
    one.peers.sharers = 2
    number = 0
    while one.is_open(0.0):
        number += 1
        charged(one, number)
    assert number == 2


def test_what_shared_its_memory_leaves_no_more_room_than_there_is() -> None:
    one = worker(kv_total_tokens=10_000, kv_usable_tokens=9_000.0)
    made = ticket(prompt_tokens=8_000, kv_tokens=8_100, dispatched_at=0.0)
    one.charge(made, now=0.0)
    one.first_token(made, now=0.0)
    one.foreign.kv_scale = 0.5
    one.refresh(0.0)
    assert one.kv_admitted_tokens == 9_000 + 4_000
    one.release(made)
    assert one.is_open(0.0)
    assert one.kv_admitted_tokens == 9_000


@pytest.mark.parametrize("until", [1.0, inf])
def test_a_mark_means_no_permits(until: float) -> None:
    one = worker(out_until=until)
    one.refresh(0.0)
    assert one.permits == (0, 0, 0)


def test_a_mark_ends_by_itself() -> None:
    one = worker(out_until=5.0)
    one.refresh(4.99)
    assert one.valid_until == 5.0
    one.refresh(5.0)
    assert one.permits == (256, 256, 256)


def test_plain_answers_count_as_prefilled_when_that_is_predicted() -> None:
    one = worker()
    charged(one, stream=False)
    one.refresh(0.0)
    assert (one.waiting, one.pend_tokens) == (1, 100)
    one.refresh(0.1)
    assert (one.waiting, one.pend_tokens, one.streams) == (0, 0, 1)


def test_a_prompt_that_waits_without_progress_makes_the_worker_look_slower() -> None:
    one, made = worker(), ticket()
    charged(one)
    assert one.ttft_s(made, 0, now=9.0) - one.ttft_s(made, 0, now=1.0) == pytest.approx(8.0)


def test_a_report_is_compared_with_the_account_of_its_own_moment() -> None:
    """It was taken before the later requests were sent: they are not missing from it."""
    one = worker()
    for number in range(10):
        one.first_token(charged(one, number, now=number * 0.1), now=number * 0.1)
    one.mark(1.0)
    for number in range(10, 20):
        charged(one, number, now=1.0 + number * 0.01)
    report = LoadReport(running_requests=10, queued_requests=0, kv_used_tokens=1_000, age_s=0.2)
    one.learn(report, now=1.25)
    assert (one.foreign.streams, one.foreign.kv_tokens, one.foreign.kv_scale) == (0, 0, 1)
    assert one.kv_load_tokens == 20 * 200


def test_an_equal_report_counts_again_where_reports_count_for_more() -> None:
    one = worker(settings=plain_config(policy={"report_weight": 0.0}))
    one.learn(LoadReport(running_requests=4), now=1.0)
    idle = LoadReport(running_requests=0)
    one.learn(idle, now=2.0)
    assert one.foreign.streams == 4
    one.configure(plain_config(policy={"report_weight": 0.5}))
    one.learn(idle, now=3.0)
    assert one.foreign.streams == 2


def test_a_report_that_was_old_on_arrival_tells_nothing() -> None:
    one = worker(settings=config())
    one.learn(LoadReport(running_requests=50, kv_used_tokens=390_000, age_s=60.0), now=100.0)
    one.refresh(100.0)
    assert one.unknown
    assert one.foreign.streams == 0


def test_figures_are_unknown_when_their_report_is_stale() -> None:
    one = worker(settings=config())
    one.learn(LoadReport(running_requests=50, kv_used_tokens=390_000), now=100.0)
    one.refresh(102.99)
    assert one.valid_until == 103.0
    assert not one.unknown
    assert one.kv_admitted_tokens < 0
    one.refresh(103.0)
    assert one.unknown
    assert one.foreign.streams == 0
    assert one.kv_admitted_tokens > 0


def test_slow_start_grows_to_the_full_share() -> None:
    one = worker(settings=config(policy={"slow_start_s": 10.0}))
    one.rejoin(now=100.0)
    shares = [one.share(100.0 + step) for step in range(12)]
    assert shares == sorted(shares)
    assert (shares[0], shares[5], shares[10]) == (0.1, 0.5, 1.0)
    one.refresh(100.0)
    assert one.factor == pytest.approx(10.0)


def test_slow_start_ends_when_it_is_switched_off() -> None:
    one = worker(settings=config(policy={"slow_start_s": 10.0}))
    one.rejoin(now=100.0)
    one.config = config(policy={"slow_start_s": 0.0})
    assert one.share(101.0) == 1.0


def test_joining_again_forgets_old_marks() -> None:
    one = worker()
    for _ in range(5):
        one.attempt_failed(
            ticket(), Failure(reason=Reason.UPSTREAM_ERROR, retry_after_s=99.0), now=0.0
        )
    assert one.out_until == 99.0
    one.rejoin(now=1.0)
    assert one.out_until == 0.0


def test_an_absurd_pause_is_cut() -> None:
    one = worker()
    failure = Failure(reason=Reason.UPSTREAM_OVERLOADED, blames_worker=False, retry_after_s=1e9)
    one.attempt_failed(ticket(), failure, now=0.0)
    assert one.out_until == 600.0


def test_only_streams_measure_the_time_to_the_first_token() -> None:
    one = worker()
    plain = ticket(spec=request_spec(stream=False), dispatched_at=0.0)
    one.charge(plain, now=0.0)
    one.first_token(plain, now=9.0)
    assert one.ttft_mean_s is None
    stream = ticket(2, dispatched_at=10.0)
    one.charge(stream, now=10.0)
    one.first_token(stream, now=10.2)
    assert one.ttft_mean_s == pytest.approx(0.2)


def test_failures_are_counted_once_each_and_only_the_workers_own() -> None:
    one = worker()
    one.finished(ticket(), Outcome.FAILED, now=0.0)
    one.finished(ticket(), Outcome.CLIENT_ERROR, now=0.0)
    one.finished(ticket(), Outcome.ABORTED, now=0.0)
    one.attempt_failed(ticket(), Failure(reason=Reason.UPSTREAM_ERROR), now=0.0)
    assert one.failures == 2


def plain(one: Worker, number: int, *, prompt_tokens: int, now: float) -> Ticket:
    made = ticket(
        number,
        spec=request_spec(stream=False),
        prompt_tokens=prompt_tokens,
        kv_tokens=prompt_tokens + 100,
        dispatched_at=now,
    )
    one.charge(made, now=now)
    return made


def test_a_huge_plain_prompt_holds_no_smaller_one_behind_it() -> None:
    one = worker()
    huge = plain(one, 1, prompt_tokens=50_000_000, now=0.0)
    one.release(huge)
    small = plain(one, 2, prompt_tokens=1_000, now=0.0)
    one.refresh(600.0)
    assert not small.pending
    assert one.waiting == one.pend_tokens == 0
    assert one.silent == []


def test_plain_prompts_are_taken_for_prefilled_in_order_of_their_moments() -> None:
    one = worker(progress_at=0.0)
    huge = plain(one, 1, prompt_tokens=2_000_000, now=0.0)
    one.pend_tokens -= huge.prompt_tokens  # as if the engine had it behind the next
    small = plain(one, 2, prompt_tokens=1_000, now=0.0)
    one.pend_tokens += huge.prompt_tokens
    first_at = min(one.silent)[0]
    one.refresh(first_at)
    assert (small.pending, huge.pending) == (False, True)


def test_plain_requests_that_ended_are_not_remembered_for_long() -> None:
    one = worker()
    running = [plain(one, n, prompt_tokens=40_000_000, now=0.0) for n in range(5)]
    for number in range(5, 1_000):
        one.release(plain(one, number, prompt_tokens=50_000_000, now=0.0))
        assert len(one.silent) <= 2 * len(running) + 17
    assert all(entry[2].worker is one for entry in one.silent[:5])
