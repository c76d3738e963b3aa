"""Headroom, drain rate, retry pauses and budget, timers."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import RetrySettings
from router.core.fading import FadingRate
from router.core.headroom import grown_tokens, need_tokens, usable_tokens
from router.core.retries import RetryBudget, pause_s
from router.core.timers import Timers

TOKENS = st.integers(0, 100_000)


@given(TOKENS, TOKENS, st.integers(1, 16), TOKENS)
def test_the_need_never_exceeds_what_could_be_used(
    prompt: int, output: int, samples: int, reserve: int
) -> None:
    need = need_tokens(prompt, output, samples, reserve_tokens=reserve)
    assert prompt <= need <= prompt + samples * output
    assert need <= prompt + samples * reserve


@given(TOKENS, TOKENS, TOKENS)
def test_a_reservation_only_grows_and_covers_what_is_held(
    need: int, prompt: int, seen: int
) -> None:
    grown = grown_tokens(need, prompt_tokens=prompt, output_seen_tokens=seen)
    assert grown >= need
    assert grown >= prompt + seen


@pytest.mark.parametrize(
    ("total", "margin_mb", "bytes_per_token", "usable"),
    [
        (420_000, 512, None, 378_000),  # a token of unknown size: the ratio alone
        (420_000, 512, 131_072, 378_000),  # 51 GiB, of which the ratio leaves 5 free
        (20_000, 512, 131_072, 15_904),  # 2.4 GiB: 4,096 tokens are 512 MiB
        (8_000, 512, 131_072, 6_000),  # 1 GiB: not more than a quarter
        (400_000, 512, 255, 300_000),  # 0.1 GiB
        (8_000, 0, 131_072, 7_200),
        (8_000, 100, 131_072, 7_200),  # 800 tokens, as many as the ratio leaves
    ],
)
def test_the_usable_part_of_a_pool(
    total: int, margin_mb: float, bytes_per_token: float | None, usable: float
) -> None:
    assert usable == usable_tokens(
        total, ratio_max=0.9, margin_bytes=margin_mb * 2**20, bytes_per_token=bytes_per_token
    )


@given(
    st.integers(1, 10**9),
    st.floats(0.01, 1),
    st.floats(0, 2**40),
    st.floats(1, 2**26) | st.none(),
)
def test_ratio_and_margin_both_hold_and_a_pool_stays_usable(
    total: int, ratio: float, margin: float, size: float | None
) -> None:
    usable = usable_tokens(total, ratio_max=ratio, margin_bytes=margin, bytes_per_token=size)
    assert min(ratio, 0.75) * total <= usable <= ratio * total
    if size is not None:
        assert total - usable >= min(margin / size, total / 4) - 1e-6


@given(st.floats(0.5, 500), st.floats(50, 200))
def test_a_steady_rate_is_measured_and_fades(per_s: float, seconds: float) -> None:
    rate = FadingRate(10.0)
    assert rate.per_s(0.0) == 0
    for step in range(int(per_s * seconds)):
        rate.add(2.0, step / per_s)
    end = int(per_s * seconds) / per_s
    assert rate.per_s(end) == pytest.approx(2 * per_s, rel=0.2)
    assert rate.per_s(end + 100) < 1e-4 * rate.per_s(end)


@given(st.integers(0, 999), st.floats(2.0, 4.0))
def test_pauses_grow_whatever_the_luck(seed: int, factor: float) -> None:
    settings, rng = RetrySettings(backoff_factor=factor, backoff_s_max=600.0), Random(seed)
    pauses = [pause_s(settings, failed_attempts=n, rng=rng) for n in (1, 2, 3)]
    assert pauses == sorted(set(pauses))


def test_a_pause_has_a_longest() -> None:
    settings = RetrySettings(backoff_s_max=0.5)
    assert pause_s(settings, failed_attempts=20, rng=Random(1)) == 0.5


@given(st.lists(st.booleans(), max_size=300))
def test_retries_stay_a_share_of_successes(steps: list[bool]) -> None:
    budget = RetryBudget(RetrySettings(budget_ratio=0.1, budget_tokens_max=3.0))
    successes = retries = 0
    for succeeded in steps:
        if succeeded:
            successes += 1
            budget.on_success()
        elif budget.take():
            retries += 1
        assert retries <= 3 + 0.1 * successes + 1e-6
        assert 0 <= budget.tokens <= 3


def test_ten_successes_earn_a_retry_in_spite_of_rounding() -> None:
    budget = RetryBudget(RetrySettings(budget_ratio=0.1, budget_tokens_max=1.0))
    assert budget.take()
    assert not budget.take()
    for _ in range(10):
        budget.on_success()
    assert budget.take()


def test_timers_run_in_order_and_what_they_add_runs_next_time() -> None:
    timers, ran = Timers(), list[str]()

    def run(name: str, now: float) -> None:
        ran.append(name)
        timers.call_at(now, partial(run, name + "+"))

    for name, at in (("b", 2.0), ("a", 1.0), ("c", 2.0), ("later", 9.0)):
        timers.call_at(at, partial(run, name))
    assert timers.next_at == 1.0
    timers.run_due(2.0)
    assert ran == ["a", "b", "c"]
    timers.run_due(2.0)
    assert ran == ["a", "b", "c", "a+", "b+", "c+"]
