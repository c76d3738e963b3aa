"""Failures in a row take a worker out; one trial at a time lets it back."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from router.config import BreakerSettings
from router.core.breaker import Breaker, BreakerState

SETTINGS = BreakerSettings(failures=3, open_s=10.0, successes=1)


def opened(settings: BreakerSettings = SETTINGS) -> Breaker:
    breaker = Breaker(settings)
    for _ in range(settings.failures):
        breaker.on_failure(object(), now=0.0)
    return breaker


def test_failures_in_a_row_open_it_for_its_time() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(2):
        breaker.on_failure(object(), now=0.0)
    assert (breaker.state, breaker.out_until) == (BreakerState.CLOSED, 0.0)
    breaker.on_failure(object(), now=5.0)
    assert (breaker.state, breaker.out_until) == (BreakerState.OPEN, 15.0)


def test_a_success_breaks_the_row() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(10):
        breaker.on_failure(object(), now=0.0)
        breaker.on_failure(object(), now=0.0)
        breaker.on_success(object(), now=0.0)
    assert breaker.state is BreakerState.CLOSED


def test_what_says_nothing_neither_breaks_the_row_nor_adds_to_it() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(2):
        breaker.on_failure(object(), now=0.0)
        breaker.on_nothing_learnt(object(), now=0.0)
    assert breaker.out_until == 0.0
    breaker.on_failure(object(), now=0.0)
    assert breaker.state is BreakerState.OPEN


def test_while_a_trial_runs_no_other_may_pass() -> None:
    breaker, trial = opened(), object()
    breaker.on_dispatch(trial, now=10.0)
    assert (breaker.state, breaker.out_until) == (BreakerState.HALF_OPEN, 20.0)
    assert breaker.is_trial(trial)
    assert not breaker.is_trial(object())


def test_a_good_trial_closes_it_and_old_failures_are_forgotten() -> None:
    breaker, trial = opened(), object()
    breaker.on_dispatch(trial, now=10.0)
    breaker.on_success(trial, now=11.0)
    assert (breaker.state, breaker.out_until) == (BreakerState.CLOSED, 0.0)
    breaker.on_failure(object(), now=12.0)
    assert breaker.state is BreakerState.CLOSED


def test_a_bad_trial_opens_it_anew() -> None:
    breaker, trial = opened(), object()
    breaker.on_dispatch(trial, now=10.0)
    breaker.on_failure(trial, now=11.0)
    assert (breaker.state, breaker.out_until) == (BreakerState.OPEN, 21.0)


def test_a_lost_trial_lets_the_next_try_at_once() -> None:
    breaker, trial = opened(), object()
    breaker.on_dispatch(trial, now=10.0)
    breaker.on_nothing_learnt(trial, now=11.0)
    assert (breaker.state, breaker.out_until) == (BreakerState.OPEN, 11.0)


def test_streams_from_before_decide_nothing_during_a_trial() -> None:
    breaker, trial, old = opened(), object(), object()
    breaker.on_dispatch(trial, now=10.0)
    breaker.on_success(old, now=11.0)
    breaker.on_failure(old, now=11.0)
    breaker.on_nothing_learnt(old, now=11.0)
    assert breaker.is_trial(trial)


def test_several_good_trials_in_a_row_may_be_asked_for() -> None:
    breaker = opened(BreakerSettings(failures=1, open_s=10.0, successes=2))
    for passed in (1, 2):
        trial = object()
        breaker.on_dispatch(trial, now=10.0)
        breaker.on_success(trial, now=11.0)
        assert (breaker.state is BreakerState.CLOSED) == (passed == 2)


def test_a_trial_that_runs_for_long_lets_another_one_run_beside_it() -> None:
    """A plain answer of minutes says nothing before its end."""
    breaker, slow, quick = opened(), object(), object()
    breaker.on_dispatch(slow, now=10.0)
    breaker.on_dispatch(quick, now=20.0)
    assert breaker.is_trial(slow)
    assert breaker.is_trial(quick)
    assert breaker.out_until == 30.0
    breaker.on_success(quick, now=21.0)
    assert breaker.state is BreakerState.CLOSED


def test_any_trial_that_fails_opens_it_anew() -> None:
    breaker, slow, quick = opened(), object(), object()
    breaker.on_dispatch(slow, now=10.0)
    breaker.on_dispatch(quick, now=20.0)
    breaker.on_failure(slow, now=21.0)
    assert (breaker.state, breaker.out_until) == (BreakerState.OPEN, 31.0)
    breaker.on_success(quick, now=22.0)
    assert breaker.state is BreakerState.OPEN


def test_a_lost_trial_beside_another_leaves_its_place_to_the_next() -> None:
    breaker, slow, lost = opened(), object(), object()
    breaker.on_dispatch(slow, now=10.0)
    breaker.on_dispatch(lost, now=20.0)
    breaker.on_nothing_learnt(lost, now=21.0)
    assert (breaker.state, breaker.out_until) == (BreakerState.HALF_OPEN, 21.0)


def test_a_worker_that_never_answers_gets_a_bounded_number_of_trials() -> None:
    breaker = opened()
    trials = [object() for _ in range(8)]
    for trial in trials:
        assert breaker.out_until < inf
        breaker.on_dispatch(trial, now=breaker.out_until)
    assert breaker.out_until == inf
    breaker.on_nothing_learnt(trials[0], now=500.0)
    assert breaker.out_until == 500.0


EVENTS = st.lists(
    st.tuples(st.sampled_from(["dispatch", "good", "bad", "nothing"]), st.floats(0, 20)),
    max_size=60,
)


@given(EVENTS)
def test_it_is_never_stuck_and_trials_come_one_by_one(events: list[tuple[str, float]]) -> None:
    """A caller that respects out_until: always a moment to try, unless all trials run."""
    breaker, now = Breaker(SETTINGS), 0.0
    running: list[object] = []
    for what, gap_s in events:
        now += gap_s
        if what == "dispatch":
            if breaker.out_until <= now:
                running.append(attempt := object())
                breaker.on_dispatch(attempt, now=now)
        elif running:
            attempt = running.pop()
            if what == "good":
                breaker.on_success(attempt, now=now)
            elif what == "bad":
                breaker.on_failure(attempt, now=now)
            else:
                breaker.on_nothing_learnt(attempt, now=now)
        trials = [attempt for attempt in running if breaker.is_trial(attempt)]
        assert len(trials) <= 8
        assert bool(trials) == (breaker.state is BreakerState.HALF_OPEN)
        assert len(trials) == 8 or breaker.out_until <= now + SETTINGS.open_s
