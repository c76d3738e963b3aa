"""Prefill credit and its trim, and what requests aim at."""

from __future__ import annotations

from math import exp, inf, nextafter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.core.adoption import catch_up
from router.core.aims import Aims
from router.core.cost import ModelCost
from router.core.pacing import TRIM_MAX, TRIM_MIN, Pace, PaceSettings
from router.core.rates import Rates
from router.core.types import Priority, RequestSpec, Ticket, TicketState
from router.core.worker import Worker
from router.model_settings import ModelSettings
from tests.core.builders import bench, config, plain_config, request_spec, ticket, worker

P0, P1, P2, P3 = Priority
SETTINGS = PaceSettings(config())
BATCH_S = SETTINGS.credit_resume_s - SETTINGS.credit_kept_s
TPOT_S = 0.05
PLAIN = plain_config()


def earned(pace: Pace, now: float, *, step_s: float = 0.02) -> float:
    pace.earn(SETTINGS, step_s=step_s, tpot_s=TPOT_S, now=now)
    return pace.credit_s


# Credit.


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 0.5), st.floats(0.001, 0.2)), max_size=50))
def test_no_window_gets_more_prefill_than_its_duty_and_what_was_saved(
    steps: list[tuple[float, float, float]],
) -> None:
    pace, now, spent = Pace(), 0.0, []
    earned(pace, now)
    for gap_s, prefill_s, step_s in steps:
        now += gap_s
        if earned(pace, now, step_s=step_s) > 0:
            pace.charge(prefill_s, debt_s_max=SETTINGS.debt_s_max)
            spent.append((now, prefill_s))
        assert SETTINGS.duty_min <= pace.duty <= SETTINGS.duty_max
        assert -SETTINGS.debt_s_max <= pace.credit_s <= SETTINGS.credit_s_max
    for first, (start, _) in enumerate(spent):
        for last, (end, largest) in enumerate(spent[first:], first):
            sent = sum(prefill_s for _, prefill_s in spent[first : last + 1])
            most = SETTINGS.credit_s_max + SETTINGS.duty_max * (end - start)
            assert sent <= most + largest + 1e-9


def test_the_duty_is_what_decoding_leaves() -> None:
    pace = Pace()
    for step_s, duty in ((0.02, 0.5), (0.0, 0.9), (0.032, 0.25), (0.2, 0.25)):
        earned(pace, 0.0, step_s=step_s)
        # Aims at 0.8 * 50 ms.
        assert pace.duty == pytest.approx(duty if step_s else 0.9, abs=0.06)


@given(st.floats(0, 1), st.floats(-0.2, 0.14), st.floats(0, 1e5))
def test_credit_is_above_a_level_when_it_was_foretold(
    spent_s: float, level_s: float, now: float
) -> None:
    pace = Pace()
    earned(pace, now)
    pace.charge(spent_s, debt_s_max=1.0)
    at = pace.above_at(level_s, now)
    assert at >= now
    assert earned(pace, nextafter(at, inf)) > level_s - 1e-9
    assert pace.above_at(level_s, at) <= at + 1e-5


def spend(pace: Pace, credit_s: float) -> None:
    """Leave so much credit."""
    pace.charge(pace.credit_s - credit_s, debt_s_max=SETTINGS.debt_s_max)


def test_a_long_prompt_owes_no_more_than_the_most_that_may_be_owed() -> None:
    pace = Pace()
    earned(pace, 0.0)
    assert pace.charge(60.0, debt_s_max=0.5) == pace.credit_s == -0.5
    assert pace.charge(60.0, debt_s_max=2.0) == pace.credit_s == -2.0
    w = worker(settings=config(pacing={"debt_s_max": 0.25}))
    w.refresh(0.0)
    w.charge(ticket(prompt_tokens=100_000), now=0.0)
    assert w.pace.credit_s == -0.25


def test_used_up_credit_is_saved_before_it_is_spent_again() -> None:
    pace = Pace()
    earned(pace, 0.0)
    assert not pace.saving, "nothing was used up yet"
    spend(pace, SETTINGS.credit_kept_s + 0.001)
    earned(pace, 0.0)
    assert not pace.saving
    spend(pace, SETTINGS.credit_kept_s)
    earned(pace, 0.0)
    assert pace.saving
    back_at = pace.above_at(SETTINGS.credit_resume_s, 0.0)
    earned(pace, back_at - 0.001)
    assert pace.saving
    earned(pace, back_at)
    assert not pace.saving


def open_ranks(w: Worker, now: float) -> tuple[bool, bool, bool]:
    urgent, others, late = (w.is_open(now, rank) for rank in range(3))
    return urgent, others, late


def test_a_worker_that_used_up_its_credit_takes_only_p0_until_a_batch_is_saved() -> None:
    w = worker(settings=config())
    for number in range(SETTINGS.streams_free + 1):
        one = ticket(number, dispatched_at=0.0)
        w.charge(one, now=0.0)
        w.first_token(one, now=0.0)
    w.refresh(1.0)
    assert open_ranks(w, 1.0) == (True, True, True)
    spend(w.pace, SETTINGS.credit_kept_s + 0.02)
    w.refresh(1.0)
    assert open_ranks(w, 1.0) == (True, True, False), "a started batch goes on"
    spend(w.pace, SETTINGS.credit_kept_s)
    w.refresh(1.0)
    assert open_ranks(w, 1.0) == (True, False, False)
    resumes_at = w.paced_until[1]
    saved_s = w.pace.duty * (resumes_at - 1.0)
    assert saved_s == pytest.approx(BATCH_S, abs=1e-4)
    assert open_ranks(w, resumes_at - 0.01) == (True, False, False)
    assert open_ranks(w, resumes_at + 1e-6) == (True, True, True)


def test_what_came_while_a_batch_was_saved_goes_together() -> None:
    b = bench("w1", pacing={"enabled": True, "streams_free": 0, "duty_max": 0.5})
    running = b.ask()
    b.core.on_first_token(running, now=b.now)
    w = running.worker
    assert w is not None
    w.refresh(b.now)
    spend(w.pace, 0.0)
    w.refresh(b.now)
    b.take()
    waiting = [b.ask() for _ in range(5)]
    assert b.dispatched == [running]
    urgent = b.ask(priority=P0)
    assert b.dispatched == [running, urgent], "P0 does not wait for a batch"
    b.core.on_first_token(urgent, now=b.now)
    sent_at: list[float] = []
    while len(b.dispatched) < 7 and b.now < 1.0:
        b.pass_to(b.now + 0.01)
        sent_at += [b.now] * (len(b.dispatched) - 2 - len(sent_at))
    assert b.dispatched[2:] == waiting
    assert min(sent_at) >= BATCH_S / 0.5
    assert len(set(sent_at)) == 1


@pytest.mark.parametrize(
    ("kept_s", "batch_s", "late_s"),
    [(0.05, 0.1, 0.1), (0.0, 0.15, 0.1), (0.2, 0.0, 0.1), (0.03, 0.1, 0.15)],
)
def test_credit_that_can_never_be_saved_is_refused(
    kept_s: float, batch_s: float, late_s: float
) -> None:
    with pytest.raises(ValidationError, match=r"credit_s_max = 0\.15 never exceeds"):
        config(
            pacing={
                "credit_kept_s": kept_s,
                "credit_batch_s": batch_s,
                "credit_kept_late_s": late_s,
            }
        )


def test_what_is_kept_for_p0_is_kept_at_once_also_where_late_ones_leave_less() -> None:
    pacing = {"enabled": True, "streams_free": 0, "credit_s_max": 0.5}
    w = worker(settings=config(pacing=pacing | {"credit_kept_s": 0.3, "credit_kept_late_s": 0.05}))
    running = ticket(0, dispatched_at=0.0)
    w.charge(running, now=0.0)
    w.first_token(running, now=0.0)
    w.refresh(1.0)
    assert open_ranks(w, 1.0) == (True, True, True)
    spend(w.pace, 0.3)
    w.charge(ticket(1), now=1.0)
    assert open_ranks(w, 1.0) == (True, False, False)


# Trim.


class Streams:
    """A worker with streams, seen four times a second."""

    def __init__(self, count: int, *, plain: int = 0, samples: int = 1) -> None:
        self.worker = worker(settings=config())
        self.now = 0.0
        self.samples = samples
        self.tickets = self.begin(count)
        self.begin(plain, stream=False)

    def spec(self, stream: bool) -> RequestSpec:
        return request_spec(stream=stream, samples=self.samples)

    def begin(self, count: int, *, stream: bool = True) -> list[Ticket]:
        made = []
        for number in range(count):
            one = ticket(number, spec=self.spec(stream), dispatched_at=self.now)
            self.worker.charge(one, now=self.now)
            self.worker.first_token(one, now=self.now)
            made.append(one)
        return made

    def run(self, seconds: float, *, slower: float = 1.0, prefill: float = 0.0) -> float:
        """Let time pass, of which so much goes to prefill, on a worker slower than predicted."""
        w, owed = self.worker, 0.0
        for _ in range(int(seconds / 0.25)):
            self.now += 0.25
            w.pace.prefilled(0.25 * prefill / slower)
            w.refresh(self.now)
            step_s = slower * w.rates.step_time_s(w.streams, w.kv_held_tokens)
            owed += 0.25 * (1 - prefill) / step_s
            more, owed = int(owed), owed % 1
            for one in self.tickets:
                seen = one.output_seen_tokens + self.samples * more
                kv_tokens = max(one.kv_tokens, 100 + seen)
                w.grow(one, output_seen_tokens=seen, kv_tokens=kv_tokens, now=self.now)
        return w.pace.trim


@given(st.floats(0.0, 0.8))
def test_prefill_that_was_foreseen_is_no_slowness(prefill: float) -> None:
    assert Streams(10).run(20, prefill=prefill) > 0.95


@given(st.floats(1, 3), st.floats(0.0, 0.8))
def test_trim_is_by_how_much_too_fast_it_was_foretold(slower: float, prefill: float) -> None:
    assert Streams(10).run(20, slower=slower, prefill=prefill) == pytest.approx(1 / slower, rel=0.1)


@given(st.floats(0.5, 2), st.floats(0.6, 2))
def test_the_streams_get_their_pace_however_wrong_the_predictions_are(
    prefill_error: float, step_error: float
) -> None:
    """An engine that is `..._error` times as slow as foretold, and always has prompts."""
    pace, tpot_s, step_s = Pace(), SETTINGS.tpot_ratio * TPOT_S, 0.01
    now = tokens = steps = 0.0
    for _ in range(400):
        now += 0.25
        earned(pace, now, step_s=step_s)
        busy = min(0.95, pace.duty * prefill_error)
        steps = 0.25 * (1 - busy) / (step_s * step_error)
        pace.prefilled(0.25 * pace.duty)
        tokens += 10 * steps
        pace.saw(int(tokens), 10, now=now)
        tokens %= 1
    measured_s = 0.25 / steps
    assert measured_s <= 1.1 * tpot_s
    # Where it was foretold too slow, the streams may be faster than they need be.
    if pace.trim < TRIM_MAX:
        assert measured_s == pytest.approx(tpot_s, rel=0.1)


def test_a_worker_that_is_not_paced_has_no_trim() -> None:
    pace = Pace()
    for moment in range(1, 20):
        pace.saw(20, 10, now=float(moment))
    assert pace.trim == TRIM_MAX
    earned(pace, 20.0)
    pace.saw(20, 10, now=21.0)
    assert pace.trim < TRIM_MAX


def test_plain_answers_do_not_make_streams_look_slow() -> None:
    assert Streams(5, plain=20).run(5) > 0.95


def test_several_samples_of_a_stream_are_no_more_steps() -> None:
    assert Streams(10, samples=4).run(10, slower=2.0) < 0.6


def test_a_stall_counts_for_no_more_than_what_is_remembered() -> None:
    streams = Streams(10)
    streams.run(5)
    streams.now += 60
    assert streams.run(0.25) == TRIM_MIN
    assert streams.run(6) > 0.9


def test_what_was_slow_is_forgotten_while_no_stream_tells() -> None:
    streams = Streams(10, plain=20)
    streams.run(5)
    streams.now += 60
    assert streams.run(0.25) == TRIM_MIN
    for one in streams.tickets:
        streams.worker.release(one)
    streams.tickets = []
    assert streams.run(6) > 0.9


def test_what_adopted_streams_put_out_before_says_nothing_of_their_pace() -> None:
    streams = Streams(0)
    w = streams.worker
    for number in range(10):
        one = ticket(number, dispatched_at=0.0)
        one.state = TicketState.STREAMING
        w.charge(one, now=0.0)
        catch_up(one, w, 3_000, now=0.0)
        streams.tickets.append(one)
    assert streams.run(6, slower=2.0) < 0.6


def test_a_time_without_streams_is_no_slowness() -> None:
    streams = Streams(1)
    streams.run(1)
    streams.worker.release(streams.tickets[0])
    streams.now += 600
    streams.tickets = streams.begin(2)
    assert streams.run(1) > 0.95


@given(st.integers(0, 99))
def test_trim_stays_in_its_range(seed: int) -> None:
    pace, rng, now = Pace(), Random(seed), 0.0
    for _ in range(300):
        now += rng.uniform(0, 0.3)
        earned(pace, now, step_s=rng.uniform(0, 0.1))
        pace.prefilled(rng.choice((0.0, rng.uniform(0, 2))))
        pace.saw(rng.randint(0, 60), rng.randint(0, 30), now=now)
        assert TRIM_MIN <= pace.trim <= TRIM_MAX


# The pace of a worker.


def test_a_worker_keeps_the_pace_of_the_tightest_class_that_runs_there() -> None:
    w = worker(settings=config())
    strict, *_ = targets_s = config().tpot_targets_s

    def aims_at(now: float) -> float:
        w.refresh(now)
        return w.tpot_target_s

    assert aims_at(0.0) == strict, "nobody yet: whoever comes first may be the tightest"
    batch, urgent = (
        ticket(n, spec=request_spec(priority=priority)) for n, priority in enumerate((P2, P0))
    )
    w.charge(batch, now=0.0)
    assert aims_at(0.0) == targets_s[P2]
    w.charge(ticket(3, spec=request_spec(priority=P3)), now=0.0)
    assert w.valid_until > 0.0
    w.charge(urgent, now=0.0)
    assert w.valid_until < 0.0, "a tighter pace counts at once"
    assert aims_at(0.0) == strict
    w.release(urgent)
    assert aims_at(1.5) == strict, "another of its class is likely to come"
    assert aims_at(60.0) == targets_s[P2]
    w.foreign.streams = 3.0
    assert aims_at(60.0) == strict, "others' streams may be of any class"


@pytest.mark.parametrize(
    ("before", "after", "tokens", "steps"),
    [(4, 12, 80.0, 10.0), (12, 4, 80.0, 10.0), (1, 0, 20.0, 20.0)],
)
def test_streams_that_came_or_ended_meanwhile_made_half_of_the_steps(
    before: int, after: int, tokens: float, steps: float
) -> None:
    pace = Pace()
    pace.earn(PaceSettings(config()), step_s=0.02, tpot_s=0.05, now=0.0)
    pace.began(before, 0.0)
    pace.saw(tokens, after, now=1.0)
    known_s = 2.0 * exp(-1.0 / 2.0)  # as foretold, of the time before
    assert pace.trim == pytest.approx((known_s + 0.02 * steps) / (known_s + 1.0))


# Aims.


def aimed(
    priority: Priority, prompt_tokens: int, cached_tokens: int = 0, **sections: dict[str, object]
) -> Ticket:
    made = ticket(
        spec=request_spec(priority=priority), prompt_tokens=prompt_tokens, arrived_at=100.0
    )
    aims, costs = Aims(config(**sections)), ModelCost(ModelSettings())
    aims.aim(made, Rates(), costs, cached_tokens=cached_tokens)
    return made


def test_a_request_aims_at_its_class_and_is_late_when_its_prefill_would_not_fit_any_more() -> None:
    made = aimed(P1, 1_000)
    alone_s = Rates().prefill_time_s(1_000, 0)
    assert made.prefill_s == alone_s
    assert made.ttft_target_s == 0.5
    assert made.late_at == pytest.approx(100 + 0.95 * 0.5 - alone_s)
    assert (made.rank, aimed(P0, 10).rank) == (1, 0)


def test_what_its_class_cannot_do_aims_at_the_nearest_class_that_can() -> None:
    assert aimed(P0, 2_500).ttft_target_s == 0.1
    assert aimed(P0, 4_000).ttft_target_s == 0.5
    assert aimed(P0, 30_000).ttft_target_s == 2.0
    assert aimed(P0, 10_000_000).ttft_target_s == 30.0


def test_what_is_cached_of_a_prompt_takes_no_time() -> None:
    rates, made = Rates(), aimed(P0, 20_000, cached_tokens=19_000)
    assert made.prefill_s == rates.prefill_time_s(1_000, 19_000) < 0.08
    assert made.ttft_target_s == 0.1
    assert made.late_at == pytest.approx(100 + 0.095 - made.prefill_s)
    whole = aimed(P0, 20_000)
    assert (whole.prefill_s, whole.ttft_target_s) == (rates.prefill_time_s(20_000, 0), 2.0)
    assert made.prefill_whole_s == whole.prefill_whole_s == whole.prefill_s
    assert made.ttft_target_whole_s == whole.ttft_target_whole_s == whole.ttft_target_s


@given(st.sampled_from(Priority), st.integers(0, 2_000_000))
def test_a_target_is_never_tighter_than_the_class_and_late_never_before_it_came(
    priority: Priority, prompt_tokens: int
) -> None:
    made = aimed(priority, prompt_tokens)
    own_s = config().classes.by_priority[priority].ttft_target_s
    assert made.ttft_target_s >= own_s
    feasible = made.prefill_s <= 0.8 * own_s
    assert (made.ttft_target_s == own_s) or not feasible
    assert made.late_at >= made.arrived_at


def test_never_relegated_is_never_late() -> None:
    assert aimed(P0, 1_000, queue={"relegate_ratio": 0}).late_at == inf


def test_a_decoded_token_costs_two() -> None:
    aims = Aims(config())
    assert aims.cost(1_000, 500) == 2.0
    made = ticket(spec=request_spec(samples=3), prompt_tokens=400, output_tokens=100)
    aims.aim(made, None, ModelCost(ModelSettings()), cached_tokens=0)
    assert made.cost == 1.0
    assert made.prefill_s == 0


def test_patience_is_the_classes_or_the_queues() -> None:
    aims = Aims(config(queue={"wait_s_max": 7.0}))
    assert [aims.patience_s(request_spec(priority=p)) for p in Priority] == [7.0, 7.0, 7.0, 600.0]
