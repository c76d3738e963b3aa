"""What reports add to the own account."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract import LoadReport
from router.core.correction import Foreign, Mark

COUNTS = st.integers(0, 500_000)


def mark(
    *, streams: int = 0, waiting: int = 0, pend: int = 0, held: int = 0, most: int | None = None
) -> Mark:
    return Mark(0.0, streams, waiting, pend, held, held if most is None else most)


def occupied(foreign: Foreign, own: Mark) -> float:
    """The KV use that is believed, at the moment of `own`."""
    return foreign.kv_scale * own.kv_held_tokens_max + foreign.kv_tokens


@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS), min_size=1, max_size=30))
def test_more_kv_in_use_is_believed_at_once(reports: list[tuple[int, int, int]]) -> None:
    foreign = Foreign()
    for used, held, waiting in reports:
        own = mark(held=held, most=held + waiting)
        foreign.learn(LoadReport(kv_used_tokens=used), own, weight=0.3)
        assert occupied(foreign, own) >= used - 1e-3
        assert foreign.kv_tokens >= 0
        assert 0.2 <= foreign.kv_scale <= 1


@given(held=st.integers(1_000, 400_000), used=st.integers(0, 400_000))
def test_steady_reports_are_met_from_either_side(held: int, used: int) -> None:
    foreign, own = Foreign(kv_tokens=50_000.0), mark(held=held)
    for _ in range(60):
        foreign.learn(LoadReport(kv_used_tokens=used), own, weight=0.3)
    believed = foreign.kv_scale * held + foreign.kv_tokens
    assert believed == pytest.approx(max(used, 0.2 * held), rel=0.01, abs=10)


def test_less_kv_in_use_moves_by_the_weight() -> None:
    foreign = Foreign()
    foreign.learn(LoadReport(kv_used_tokens=100_000), mark(), weight=0.3)
    foreign.learn(LoadReport(kv_used_tokens=0), mark(), weight=0.3)
    assert foreign.kv_tokens == pytest.approx(70_000)


def test_a_shared_prompt_is_scaled_and_leaves_nothing_when_its_streams_end() -> None:
    foreign = Foreign()
    for _ in range(60):
        foreign.learn(LoadReport(kv_used_tokens=60_000), mark(held=100_000), weight=0.3)
    assert foreign.kv_scale == pytest.approx(0.6, abs=0.01)
    assert foreign.kv_tokens == 0


def test_prompts_that_wait_explain_a_difference_either_way() -> None:
    foreign = Foreign()
    own = mark(held=10_000, most=40_000)
    foreign.learn(LoadReport(kv_used_tokens=30_000), own, weight=0.3)
    assert (foreign.kv_tokens, foreign.kv_scale) == (0, 1)


def test_own_requests_are_not_taken_for_others() -> None:
    foreign = Foreign()
    report = LoadReport(running_requests=6, queued_requests=4, queued_uncached_tokens=5_000)
    foreign.learn(report, mark(streams=10, waiting=4, pend=5_000), weight=0.3)
    assert (foreign.streams, foreign.waiting, foreign.pend_tokens) == (0, 0, 0)


def test_others_requests_are_taken_whole_at_first_then_by_the_weight() -> None:
    foreign = Foreign()
    first = LoadReport(running_requests=8, queued_requests=2, queued_uncached_tokens=3_000)
    foreign.learn(first, mark(), weight=0.3)
    assert (foreign.streams, foreign.waiting, foreign.pend_tokens) == (10, 2, 3_000)
    none = LoadReport(running_requests=0, queued_requests=0, queued_uncached_tokens=0)
    foreign.learn(none, mark(), weight=0.3)
    assert (foreign.streams, foreign.pend_tokens) == pytest.approx((7, 2_100))


def test_a_queue_without_token_figures_is_still_a_queue() -> None:
    foreign = Foreign()
    foreign.learn(LoadReport(queued_requests=10), mark(), weight=0.3)
    assert foreign.pend_tokens > 0


def test_a_figure_that_is_missing_changes_nothing() -> None:
    foreign = Foreign()
    full = LoadReport(running_requests=8, queued_requests=2, kv_used_tokens=9_000)
    foreign.learn(full, mark(), weight=0.3)
    before = (foreign.streams, foreign.waiting, foreign.pend_tokens, foreign.kv_tokens)
    foreign.learn(LoadReport(), mark(), weight=0.3)
    assert (foreign.streams, foreign.waiting, foreign.pend_tokens, foreign.kv_tokens) == before


def test_what_is_forgotten_is_unknown() -> None:
    foreign = Foreign()
    foreign.learn(LoadReport(kv_used_tokens=9_000), mark(), weight=0.3)
    foreign.forget()
    assert foreign == Foreign()


def test_one_absurd_report_of_the_pool_is_outweighed_as_a_full_one_is() -> None:
    after: list[float] = []
    for used in (10_000, 10_000_000):
        foreign = Foreign()
        said = LoadReport(kv_used_tokens=used)
        foreign.learn(said, mark(), weight=0.3, kv_total_tokens=10_000)
        assert foreign.kv_tokens == 10_000
        for _ in range(3):
            foreign.learn(LoadReport(kv_used_tokens=0), mark(), weight=0.3, kv_total_tokens=10_000)
        after.append(foreign.kv_tokens)
    assert after[0] == after[1] < 5_000
