"""When a line may ask, by what other routers said of theirs."""

from __future__ import annotations

import pytest

from router.core.line_pace import LinePace
from router.core.peers import PeerLine
from router.core.types import Priority

STEP_S = 0.2


def line(at: float, granted: float, *tenants: str, **fields: float) -> PeerLine:
    given = {"began": 0.0, "more": 0.0} | fields
    weights = dict.fromkeys(tenants, 1.0)
    return PeerLine("k", Priority.P1, given["began"], at, granted, weights, given["more"])


class Two:
    """A line here and one elsewhere, which are granted so much per second."""

    def __init__(self, *own: str) -> None:
        self.pace, self.own, self.now = LinePace(0.0), own, 0.0
        self.other_granted = 0.0

    def play(
        self,
        seconds: float,
        own_per_s: float,
        other_per_s: float,
        *tenants: str,
        more: float = 0.0,
    ) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            if own_per_s:
                self.pace.took(own_per_s * STEP_S, self.now)
            self.other_granted += other_per_s * STEP_S
            other = line(self.now, self.other_granted, *tenants, more=more)
            self.hear({"r2": other} if tenants else {})

    def hear(self, others: dict[str, PeerLine]) -> None:
        own = line(self.now, self.pace.granted, *self.own)
        self.pace.hear(own, others, self.now)

    def gap_s(self, amount: float) -> float:
        """For how long the line is held after a grant at the first moment at which it may ask."""
        self.now += self.held_s
        self.pace.took(amount, self.now)
        return self.held_s

    @property
    def held_s(self) -> float:
        return max(0.0, self.pace.due - self.now) if self.pace.is_held else 0.0


def test_one_that_is_ahead_is_held_to_its_part_and_a_little_more() -> None:
    two = Two("a")
    two.play(5.0, 10.0, 10.0, "b", "c", "d")
    assert two.gap_s(1.0) == pytest.approx(1 / (1.02 * 20 / 4), rel=0.05)


def test_one_that_is_behind_is_not_held() -> None:
    two = Two("a", "b", "c")
    two.play(5.0, 10.0, 10.0, "d")
    assert two.held_s == 0


def test_a_tenant_at_both_counts_with_half_of_its_weight_at_each() -> None:
    two = Two("a", "b")
    two.play(5.0, 10.0, 10.0, "b")
    assert two.pace.sharers == {"b": 2}
    assert two.held_s == 0, "it has half, and three quarters are its part"
    two.play(5.0, 18.0, 2.0, "b")
    assert two.gap_s(1.0) == pytest.approx(1 / (1.02 * 20 * 0.75), rel=0.1)


def test_tenants_that_are_not_named_count() -> None:
    two = Two("a")
    two.play(5.0, 10.0, 10.0, "b", more=8.0)
    assert two.gap_s(1.0) == pytest.approx(1 / (1.02 * 20 / 10), rel=0.05)


def test_nobody_is_held_where_no_other_waits() -> None:
    two = Two("a")
    two.play(5.0, 10.0, 0.0)
    assert (two.held_s, two.pace.is_shared) == (0, False)
    two.play(5.0, 10.0, 10.0, "b", "c")
    assert two.held_s > 0
    two.hear({})
    assert (two.held_s, two.pace.is_shared) == (0, False)


def test_a_line_that_began_anew_elsewhere_is_no_other_figure() -> None:
    two = Two("a")
    two.play(5.0, 10.0, 10.0, "b")
    held_s = two.held_s
    two.hear({"r2": line(two.now + 0.2, 0.0, "b", began=two.now)})
    assert 0 <= two.held_s <= held_s + 2.0
    assert two.pace._total_per_s() == pytest.approx(10.0, rel=0.1)


def test_who_waits_and_gets_nothing_holds_the_others_for_some_grants_or_a_second() -> None:
    two = Two("a")
    two.play(4.0, 10.0, 10.0, "b", more=98.0)
    assert two.gap_s(2.0) == pytest.approx(1.0), "a hundredth would be one in ten seconds"
    two.play(0.8, 0.0, 10.0, "b", more=98.0)
    assert two.held_s == pytest.approx(1.0)
    two.play(0.8, 0.0, 0.0, "b", more=98.0)
    assert two.held_s == pytest.approx(0.2)
    slow = Two("a")
    slow.play(60.0, 0.2, 0.2, "b", more=98.0)
    slow.gap_s(0.4)
    slow.play(STEP_S, 0.0, 0.2, "b", more=98.0)
    assert slow.held_s == pytest.approx(3 * 0.4 / 0.4, rel=0.1)
    slow.gap_s(20.0)
    slow.play(STEP_S, 0.0, 0.2, "b", more=98.0)
    assert slow.held_s == pytest.approx(5.0)
