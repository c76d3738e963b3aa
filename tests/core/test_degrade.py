"""The ladder: when its levels begin and end, and whom they touch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.config import Config
from router.core.degrade import Act, Decision, Facts, Ladder, Level, decide, saturation
from router.core.types import Priority
from router.qos_settings import DegradeSettings

P0, P1, P2, P3 = Priority


def facts(**changes: Any) -> Facts:
    """A P2 request for 1000 tokens that does not fit."""
    figures: dict[str, Any] = {
        "priority": P2,
        "fits": False,
        "times_out": True,
        "changeable": True,
        "structured": False,
        "generates": True,
        "max_tokens": 1000,
        "fallback": None,
    }
    return Facts(**(figures | changes))


def decided(level: int, settings: dict[str, Any] | None = None, **changes: Any) -> Decision:
    return decide(
        facts(**changes),
        level=Level(level),
        settings=DegradeSettings.model_validate(settings or {}),
    )


def lasting(ladder: Ladder, saturation: float | None, *, since: float, until: float) -> list[int]:
    """The levels while saturation stands, observed four times a second, both ends included."""
    levels = []
    for tick in range(int((until - since) * 4) + 1):
        ladder.observe(saturation, now=since + tick / 4)
        levels.append(int(ladder.level))
    return levels


# Levels.


@pytest.mark.parametrize(
    ("saturation", "level"),
    [(0.5, 0), (0.8, 0), (0.81, 1), (0.9, 1), (0.91, 2), (1.0, 2), (1.01, 3), (50.0, 3)],
)
def test_a_level_begins_above_its_threshold(saturation: float, level: int) -> None:
    ladder = Ladder(DegradeSettings())
    assert lasting(ladder, saturation, since=0, until=5)[-1] == level


def test_a_spike_begins_nothing() -> None:
    ladder = Ladder(DegradeSettings())
    for start in range(0, 60, 2):
        assert set(lasting(ladder, 3.0, since=start, until=start + 0.75)) == {0}
        assert set(lasting(ladder, 0.2, since=start + 1, until=start + 1.75)) == {0}


def test_a_level_begins_after_a_second_and_not_before() -> None:
    assert lasting(Ladder(DegradeSettings()), 1.5, since=0, until=1.25) == [0, 0, 0, 0, 3, 3]


def test_a_level_ends_after_ten_seconds_clearly_below_its_threshold() -> None:
    ladder = Ladder(DegradeSettings())
    lasting(ladder, 0.95, since=0, until=2)
    assert set(lasting(ladder, 0.81, since=2.25, until=60)) == {2}  # 0.9 - 0.1 and a little
    levels = lasting(ladder, 0.79, since=60.25, until=75)
    assert levels.index(1) == 39  # 10 s after the last observation at 0.81
    assert set(levels) == {2, 1}
    assert lasting(ladder, 0.1, since=75.25, until=90)[-1] == 0


def test_one_high_moment_on_the_way_down_starts_the_wait_anew() -> None:
    ladder = Ladder(DegradeSettings())
    lasting(ladder, 1.5, since=0, until=2)
    assert set(lasting(ladder, 0.0, since=2.25, until=11)) == {3}
    ladder.observe(0.95, now=11.25)  # not clearly below 1
    assert set(lasting(ladder, 0.0, since=11.5, until=21)) == {3}
    assert lasting(ladder, 0.0, since=21.25, until=22)[-1] == 0


def test_it_falls_straight_to_where_saturation_has_been() -> None:
    ladder = Ladder(DegradeSettings())
    lasting(ladder, 1.5, since=0, until=2)
    assert set(lasting(ladder, 0.0, since=2.25, until=30)) == {3, 0}


def test_unknown_saturation_neither_begins_nor_ends_a_level() -> None:
    ladder = Ladder(DegradeSettings())
    assert set(lasting(ladder, None, since=0, until=20)) == {0}
    lasting(ladder, 0.95, since=20.25, until=22)
    assert set(lasting(ladder, None, since=22.25, until=60)) == {2}


def test_time_without_figures_is_no_evidence_for_either_side() -> None:
    ladder = Ladder(DegradeSettings())
    ladder.observe(1.5, now=0.0)
    ladder.observe(None, now=0.5)
    ladder.observe(1.5, now=30.0)
    assert ladder.level is Level.NORMAL
    lasting(ladder, 1.5, since=30, until=31)
    ladder.observe(None, now=60.0)
    assert set(lasting(ladder, 0.0, since=60.25, until=69.75)) == {3}
    assert lasting(ladder, 0.0, since=70, until=70.5)[-1] == 0


def test_a_disabled_ladder_stands_on_the_ground() -> None:
    ladder = Ladder(DegradeSettings())
    lasting(ladder, 1.5, since=0, until=2)
    ladder.configure(DegradeSettings(enabled=False))
    assert lasting(ladder, 1.5, since=2.25, until=3)[-1] == 0
    assert decided(3, {"enabled": False}).act is Act.KEEP


def test_moves_of_the_level_are_remembered_within_bounds() -> None:
    ladder = Ladder(DegradeSettings(rise_s=0, fall_s=0))
    for tick in range(400):
        ladder.observe(1.5 if tick % 2 else 0.0, now=float(tick))
    assert len(ladder.changes) == 100
    last = ladder.changes[-1]
    assert (last.old, last.new, last.saturation, last.at) == (Level.NORMAL, Level.SHED_P2, 1.5, 399)


@given(st.lists(st.floats(0, 2), min_size=1, max_size=300))
def test_levels_never_change_direction_faster_than_the_waits_allow(figures: list[float]) -> None:
    ladder = Ladder(DegradeSettings())
    for tick, figure in enumerate(figures):
        ladder.observe(figure, now=tick / 4)
    falls = [c.at for c in ladder.changes if c.new < c.old]
    for change in ladder.changes:
        recent = [f for n, f in enumerate(figures) if change.at - 10 <= n / 4 < change.at]
        if change.new < change.old:
            # Whatever ended had been clearly below its threshold for the whole wait.
            assert max(recent, default=0) <= (0.8, 0.9, 1.0)[change.old - 1] - 0.1
            assert change.at >= 10
        else:
            rising = [f for n, f in enumerate(figures) if change.at - 1 <= n / 4 <= change.at]
            assert min(rising) > (0.8, 0.9, 1.0)[change.new - 1]
    assert len(falls) <= len(figures) / 4


@pytest.mark.parametrize(
    ("parts", "worst"),
    [
        ({"hold_ratio": 0.5, "duty_min": 0.4, "kv_ratio": 0.3}, 0.6),
        ({"hold_ratio": 2.0, "duty_min": 0.4, "kv_ratio": 0.3}, 2.0),
        ({"hold_ratio": 0.0, "duty_min": None, "kv_ratio": 0.92}, 0.92),
        ({"hold_ratio": 0.1, "duty_min": None, "kv_ratio": None}, 0.1),
        ({"hold_ratio": None, "duty_min": None, "kv_ratio": None}, None),
    ],
)
def test_saturation_is_the_worst_of_what_is_known(
    parts: dict[str, float | None], worst: float | None
) -> None:
    assert saturation(**parts) == worst


# Decisions.


@pytest.mark.parametrize(
    ("level", "acts"),
    [
        (0, ["keep", "keep", "keep", "keep"]),
        (1, ["keep", "keep", "cut", "cut"]),
        (2, ["keep", "keep", "cut", "refuse"]),
        (3, ["keep", "keep", "refuse", "refuse"]),
    ],
)
def test_each_level_touches_the_lowest_classes_first(level: int, acts: list[str]) -> None:
    assert [decided(level, priority=p).act for p in Priority] == acts


@pytest.mark.parametrize(
    ("level", "acts"),
    [
        (1, ["keep", "keep", "cut", "cut"]),
        (2, ["keep", "keep", "cut", "other_model"]),
        (3, ["keep", "keep", "other_model", "other_model"]),
    ],
)
def test_a_smaller_model_comes_before_refusal(level: int, acts: list[str]) -> None:
    assert [decided(level, priority=p, fallback="small").act for p in Priority] == acts


def test_an_operator_may_send_paid_classes_to_the_smaller_model_too() -> None:
    acts = [decided(3, {"fallback_from": 1}, priority=p, fallback="s").act for p in Priority]
    assert acts == ["keep", "other_model", "other_model", "other_model"]
    acts = [decided(3, {"fallback_from": 3}, priority=p, fallback="s").act for p in Priority]
    assert acts == ["keep", "keep", "refuse", "other_model"]


@pytest.mark.parametrize(
    ("level", "asked", "cut"),
    [
        (1, 1000, 256),
        (2, 1000, 128),
        (1, None, 256),
        (1, 257, 256),
        (1, 256, None),
        (1, 10, None),
        (2, 129, 128),
        (2, 128, None),
    ],
)
def test_answers_are_cut_to_the_cap_and_never_lengthened(
    level: int, asked: int | None, cut: int | None
) -> None:
    decision = decided(level, max_tokens=asked)
    assert decision.max_tokens == cut
    assert decision.act is (Act.KEEP if cut is None else Act.CUT)


def test_no_answer_is_cut_below_the_floor() -> None:
    assert decided(2, {"tokens_cap": 256, "tokens_floor": 200}).max_tokens == 200
    assert decided(2, {"tokens_cap": 256, "tokens_floor": 200}, max_tokens=200).act is Act.KEEP


def test_structured_output_is_changed_only_where_that_is_allowed() -> None:
    assert decided(1, structured=True).act is Act.KEEP
    assert decided(1, {"structured": True}, structured=True).act is Act.CUT
    assert decided(3, structured=True, fallback="small").act is Act.REFUSE


def test_a_tenant_may_forbid_changes_but_not_refusal() -> None:
    assert decided(1, changeable=False).act is Act.KEEP
    assert decided(3, changeable=False, fallback="small").act is Act.REFUSE


def test_requests_that_generate_nothing_are_not_cut() -> None:
    assert decided(1, generates=False).act is Act.KEEP
    assert decided(3, generates=False).act is Act.REFUSE


@pytest.mark.parametrize(
    ("decision", "header"),
    [
        (decided(1), "max_tokens=256; level=1"),
        (decided(3, fallback="small", max_tokens=10), "model=small; level=3"),
        (decided(2, priority=P3, fallback="s"), "model=s; max_tokens=128; level=2"),
        (decided(0), None),
        (decided(3), None),
    ],
)
def test_every_change_is_announced(decision: Decision, header: str | None) -> None:
    assert decision.header == header


FACTS = st.builds(
    Facts,
    priority=st.sampled_from(Priority),
    fits=st.booleans(),
    changeable=st.booleans(),
    structured=st.booleans(),
    generates=st.booleans(),
    max_tokens=st.none() | st.integers(1, 5000),
    fallback=st.none() | st.just("small"),
)


@given(FACTS, st.sampled_from(Level), st.integers(1, 300), st.booleans(), st.integers(0, 3))
def test_what_must_never_happen_never_does(
    asked: Facts, level: Level, floor: int, structured: bool, fallback_from: int
) -> None:
    settings = DegradeSettings(
        tokens_cap=300, tokens_floor=floor, structured=structured, fallback_from=fallback_from
    )
    decision = decide(asked, level=level, settings=settings)
    changed = decision.max_tokens is not None or decision.model is not None
    if asked.fits or level is Level.NORMAL:
        assert decision.act is Act.KEEP
    if not asked.changeable or (asked.structured and not structured):
        assert not changed
    if decision.max_tokens is not None:
        assert asked.generates
        assert asked.priority >= P2
        assert floor <= decision.max_tokens <= 300
        assert asked.max_tokens is None or decision.max_tokens < asked.max_tokens
    if decision.act is Act.REFUSE:
        assert asked.priority >= P2
    assert (decision.act in (Act.CUT, Act.OTHER_MODEL)) == changed
    assert (decision.header is None) == (not changed)


def test_settings_that_contradict_themselves_are_refused() -> None:
    for faulty in (
        {"cut_above": 0.95},
        {"shed_p2_above": 0.85},
        {"tokens_floor": 300},
    ):
        with pytest.raises(ValidationError):
            DegradeSettings.model_validate(faulty)
    with pytest.raises(ValidationError, match="falls back to itself"):
        Config.model_validate({"models": {"m": {"aliases": ["n"], "fallback": "n"}}})
