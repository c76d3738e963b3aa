"""Speeds measured from counters, step moments and first tokens."""

from __future__ import annotations

from random import Random

import pytest

from router.contract import LoadReport
from router.core.rates import PREFILL_S, Rates


def test_counters_give_the_prefill_speed_at_the_first_difference() -> None:
    rates = Rates()
    rates.learn_report(LoadReport(prefill_tokens_total=1_000, prefill_busy_s_total=1.0))
    assert rates.prefill_s == PREFILL_S
    rates.learn_report(LoadReport(prefill_tokens_total=11_000, prefill_busy_s_total=2.0))
    assert rates.prefill_s == pytest.approx(1e-4)
    assert rates.counted


def test_small_differences_are_saved_up() -> None:
    rates = Rates()
    for step in range(12):
        rates.learn_report(
            LoadReport(prefill_tokens_total=100 * step, prefill_busy_s_total=0.01 * step)
        )
    assert rates.prefill_s == pytest.approx(1e-4)


def test_a_restarted_engine_does_not_count_backwards() -> None:
    rates = Rates()
    for tokens, busy_s in ((50_000, 5.0), (60_000, 6.0), (100, 0.1), (10_100, 1.1)):
        report = LoadReport(prefill_tokens_total=tokens, prefill_busy_s_total=busy_s)
        rates.learn_report(report)
    assert rates.prefill_s == pytest.approx(1e-4)


@pytest.mark.parametrize("busy_s", [0.0, 1e9])
def test_impossible_speeds_are_not_believed(busy_s: float) -> None:
    rates = Rates()
    rates.learn_report(LoadReport(prefill_tokens_total=0, prefill_busy_s_total=0.0))
    rates.learn_report(LoadReport(prefill_tokens_total=10_000, prefill_busy_s_total=busy_s))
    assert rates.prefill_s == PREFILL_S


def test_first_tokens_teach_only_while_the_worker_counts_nothing() -> None:
    rates = Rates()
    for _ in range(60):
        rates.learn_first_token(uncached=2_000, elapsed_s=0.2065)
    assert rates.prefill_time_s(2_000, 0) == pytest.approx(0.2, rel=0.01)
    rates.counted = True
    rates.learn_first_token(uncached=2_000, elapsed_s=2.0)
    assert rates.prefill_time_s(2_000, 0) == pytest.approx(0.2, rel=0.01)


def test_counters_of_long_prompts_do_not_count_attention_twice() -> None:
    rates = Rates()
    tokens, busy_s = 0, 0.0
    for _ in range(60):
        rates.learn_report(LoadReport(prefill_tokens_total=tokens, prefill_busy_s_total=busy_s))
        rates.sent(40_000, 0)
        tokens, busy_s = tokens + 40_000, busy_s + 4.0
    assert rates.prefill_time_s(40_000, 0) == pytest.approx(4.0, rel=0.01)
    assert rates.prefill_time_s(400, 0) < 0.03  # a short one has hardly any
    small = Rates()
    small.learn_first_token(uncached=100, elapsed_s=2.0)
    assert small.prefill_s == PREFILL_S


def test_step_moments_give_base_and_slope() -> None:
    rates, rng = Rates(), Random(1)
    totals = [0.0] * 6
    for _ in range(60):
        for _ in range(100):
            streams = rng.randint(1, 100)
            step_us = 9_000 + 50 * streams + rng.gauss(0, 100)
            for i, more in enumerate((1, streams, step_us, streams**2, streams * step_us, streams)):
                totals[i] += more
        rates.learn_report(LoadReport(decode_moments=tuple(totals)))
    assert rates.step_time_s(1, 0) == pytest.approx(9.05e-3, rel=0.05)
    assert rates.step_time_s(100, 0) == pytest.approx(14e-3, rel=0.05)


def test_one_batch_size_moves_the_base_only() -> None:
    rates = Rates()
    slope = rates.step_s_per_stream
    for poll in range(1, 61):
        n = 100.0 * poll
        moments = (n, 8 * n, 20_000 * n, 64 * n, 160_000 * n, 8 * n)
        rates.learn_report(LoadReport(decode_moments=moments))
    assert rates.step_s_per_stream == slope
    assert rates.step_time_s(8, 0) == pytest.approx(20e-3, rel=0.02)


def test_prefill_time_grows_faster_than_the_prompt() -> None:
    rates = Rates()
    assert rates.prefill_time_s(32_000, 0) > 4 * rates.prefill_time_s(8_000, 0)
    assert rates.prefill_time_s(1_000, 7_000) > rates.prefill_time_s(1_000, 0)


def test_a_worker_that_counts_nothing_is_at_least_as_fast_as_its_answers() -> None:
    rates = Rates()
    for _ in range(60):
        rates.learn_bound(uncached=400, elapsed_s=0.002)
    assert rates.prefill_time_s(400, 0) == pytest.approx(0.002, rel=0.05)
    rates.learn_bound(uncached=400, elapsed_s=2.0)  # it may have waited: nothing is learnt
    assert rates.prefill_time_s(400, 0) == pytest.approx(0.002, rel=0.05)
    counted = Rates()
    counted.counted = True
    counted.learn_bound(uncached=400, elapsed_s=0.002)
    assert counted.prefill_s == PREFILL_S
