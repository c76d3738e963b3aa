"""The slow loop on made-up classes: it settles, goes back, chases nobody and does not swing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import Config
from router.core.rate_loop import Act, RateLoop, Shares, Step
from router.core.slo import SloMonitor
from router.core.types import Outcome, Priority, RequestRecord
from router.errors import Reason
from tests.core.test_slo import record

P0, P1, P2, P3 = Priority
CONFIGURED = (0.6, 0.3, 0.08, 0.02)
GOOD = [record(priority=p) for p in Priority]
LATE = [record(priority=p, first_token_at=200.0, finished_at=300.0) for p in Priority]
BROKEN = [
    record(priority=p, outcome=Outcome.FAILED, reason=Reason.UPSTREAM_ERROR) for p in Priority
]
Plant = Callable[[Shares], Sequence[float]]  # attainment of each class by the shares


class World:
    """Classes whose requests meet their targets by chance, with probabilities from a plant."""

    def __init__(self, seed: int = 1, *, rates: Sequence[float] = (8, 8, 8, 3), **slo: Any):
        self.config = Config.model_validate({"slo": slo})
        self.monitor = SloMonitor(self.config)
        self.loop = RateLoop(self.config)
        self.rng = Random(seed)
        self.rates = rates
        self.now = 0.0
        self.steps: list[Step] = []

    def play(self, plant: Plant, *, seconds: float, infeasible: float = 0.0) -> World:
        """Live for `seconds`, looking every interval; `infeasible` P0 requests are late, always."""
        for _ in range(int(seconds / 5)):
            chances = plant(self.loop.shares)
            for p in Priority:
                for _ in range(self.requests(p)):
                    if p is P0 and self.rng.random() < infeasible:
                        self.monitor.count(LATE[p], feasible=False)
                        continue
                    self.count(GOOD[p] if self.rng.random() < chances[p] else LATE[p])
            self.look()
        return self

    def requests(self, p: Priority) -> int:
        mean = self.rates[p] * 5
        return max(0, round(self.rng.gauss(mean, mean**0.5)))

    def count(self, finished: RequestRecord, times: int = 1) -> None:
        for _ in range(times):
            self.monitor.count(finished)

    def look(self) -> Step:
        self.now += 5
        step = self.loop.step(self.monitor, now=self.now)
        assert step is not None
        self.steps.append(step)
        return step

    @property
    def moves(self) -> list[Step]:
        return [step for step in self.steps if step.act.moves]


def constant(*chances: float) -> Plant:
    return lambda _shares: chances


def hungry(*needs: float) -> Plant:
    """A class meets its targets once its share covers its need, and fails three times the rest."""
    return lambda shares: [
        max(0.3, min(1.0, 1 - 3 * (need - share)))
        for need, share in zip(needs, shares, strict=True)
    ]


def reversals(steps: Sequence[Step]) -> list[float]:
    """The moments at which some class got after it had given, or the other way round."""
    signs, found = [0] * 4, []
    for step in steps:
        new = [
            (a - b > 1e-9) - (b - a > 1e-9) for b, a in zip(step.before, step.after, strict=True)
        ]
        if any(n * s < 0 for n, s in zip(new, signs, strict=True)):
            found.append(step.at)
        signs = [n or s for n, s in zip(new, signs, strict=True)]
    return found


def most_per_minute(moments: Sequence[float]) -> int:
    return max((sum(t <= m < t + 60 for m in moments) for t in moments), default=0)


def test_it_starts_at_the_configured_shares_and_stays_there_while_all_is_well() -> None:
    world = World().play(constant(1, 1, 1, 1), seconds=300)
    assert world.loop.shares == pytest.approx(CONFIGURED)
    assert world.moves == []
    assert world.steps[-1].act is Act.CONTENT


def test_the_worst_class_gets_a_twentieth_of_the_best_ones_share() -> None:
    world = World()
    world.look()
    world.count(GOOD[P0], 200)
    world.count(GOOD[P1], 185)
    world.count(LATE[P1], 15)
    step = world.look()
    assert step.act is Act.LIFT
    assert step.applied
    assert step.before == pytest.approx(CONFIGURED)
    assert step.after == pytest.approx((0.57, 0.33, 0.08, 0.02))
    assert "P1 at 92.5% of 200" in step.why


def test_far_below_target_it_gets_a_tenth() -> None:
    world = World()
    world.look()
    world.count(GOOD[P0], 200)
    world.count(LATE[P1], 200)
    assert world.look().after == pytest.approx((0.54, 0.36, 0.08, 0.02))


def test_among_equally_good_classes_the_least_urgent_gives() -> None:
    world = World()
    world.look()
    for p in (P1, P2, P3):
        world.count(GOOD[p], 200)
    world.count(LATE[P0], 200)
    # P3 stands at its floor, so it is P2's turn.
    assert world.look().after == pytest.approx((0.608, 0.3, 0.072, 0.02))


def test_a_shortfall_within_the_noise_moves_nothing() -> None:
    world = World()
    world.look()
    world.count(GOOD[P0], 200)
    world.count(GOOD[P1], 196)  # 98 %: within the dead band
    world.count(LATE[P1], 4)
    world.count(GOOD[P2], 28)  # 93 %, but of 30
    world.count(LATE[P2], 2)
    assert world.look().act is Act.CONTENT


def test_few_requests_move_nothing() -> None:
    world = World()
    world.look()
    world.count(GOOD[P0], 200)
    world.count(LATE[P1], 29)
    step = world.look()
    assert step.act is Act.FEW_REQUESTS
    assert step.after == step.before


def test_what_was_measured_before_a_move_justifies_no_second_one() -> None:
    world = World()
    world.look()
    world.count(GOOD[P0], 200)
    world.count(LATE[P1], 200)
    assert world.look().act is Act.LIFT
    assert world.look().act is Act.FEW_REQUESTS
    world.count(GOOD[P0], 200)
    world.count(LATE[P1], 30)
    assert world.look().act is Act.LIFT


def test_after_a_move_there_is_a_pause() -> None:
    world = World(cool_down_s=12)
    acts = []
    for _ in range(5):
        world.count(GOOD[P0], 200)
        world.count(LATE[P1], 200)
        acts.append(world.look().act)
    assert acts[1:] == [Act.LIFT, Act.COOLING, Act.COOLING, Act.LIFT]


def test_when_everybody_is_below_target_it_says_so_and_moves_nothing() -> None:
    world = World().play(constant(0.9, 0.7, 0.5, 0.5), seconds=60)
    assert world.moves == []
    assert world.loop.overloaded
    assert world.loop.shed is P3
    world.play(constant(1, 1, 1, 1), seconds=120)
    assert not world.loop.overloaded
    assert world.loop.shed is None


def test_a_class_that_is_alone_and_below_target_is_never_shed() -> None:
    world = World(rates=(20, 0, 0, 0)).play(constant(0.5, 1, 1, 1), seconds=60)
    assert world.loop.overloaded
    assert world.loop.shed is None


def test_losses_by_failing_workers_move_nothing() -> None:
    world = World()
    for _ in range(10):
        for p in Priority:
            world.count(GOOD[p], 100)
        world.count(BROKEN[P1], 100)
        world.look()
    assert world.moves == []
    assert world.steps[-1].act is Act.ENGINE_ERRORS


@pytest.mark.parametrize("seed", range(20))
def test_infeasible_requests_are_never_chased(seed: int) -> None:
    world = World(seed).play(constant(1, 1, 1, 1), seconds=600, infeasible=0.4)
    assert world.moves == []
    view = world.monitor.view(P0)
    assert view.attainment is not None
    assert view.attainment < 0.7


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "chances",
    [
        (0.985, 0.995, 0.985, 0.995),
        (0.97, 0.99, 0.98, 1.0),
        (0.99, 0.99, 0.99, 0.99),
        (0.95, 0.95, 0.995, 0.95),
    ],
)
def test_constant_attainment_never_makes_it_swing(seed: int, chances: tuple[float, ...]) -> None:
    world = World(seed).play(constant(*chances), seconds=600)
    assert most_per_minute(reversals(world.moves)) <= 2, f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_at_the_target_noise_hardly_moves_it(seed: int) -> None:
    world = World(seed).play(constant(0.99, 0.99, 0.99, 0.99), seconds=600)
    for share, configured in zip(world.loop.shares, CONFIGURED, strict=True):
        assert abs(share - configured) < 0.07, f"seed {seed}: {world.loop.shares}"


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_the_share_that_a_class_needs_and_goes_back_afterwards(seed: int) -> None:
    world = World(seed).play(hungry(0.45, 0.42, 0.05, 0.01), seconds=600)
    tail = [step.before for step in world.steps[-36:]]  # three minutes
    assert sum(0.37 < shares[P1] < 0.52 for shares in tail) >= 33, f"seed {seed}"
    assert most_per_minute(reversals(world.moves)) <= 2
    world.play(constant(1, 1, 1, 1), seconds=300)
    assert world.loop.shares == pytest.approx(CONFIGURED), f"seed {seed}"


def test_it_goes_back_by_a_hundredth_at_a_time_once_all_are_well() -> None:
    world = World().play(hungry(0.45, 0.42, 0.05, 0.01), seconds=120)
    count = len(world.steps)
    world.play(constant(1, 1, 1, 0.9925), seconds=400)
    back = [s for s in world.steps[count:] if s.act is Act.RETURN]
    assert back
    for step in back:
        got = sum(max(0.0, a - b) for b, a in zip(step.before, step.after, strict=True))
        assert got <= 0.01 + 1e-9


def test_a_class_far_above_target_gives_back_what_it_got() -> None:
    world = World()
    world.look()
    world.count(GOOD[P0], 200)
    world.count(LATE[P1], 200)
    world.look()
    for _ in range(8):
        world.count(GOOD[P1], 200)
        world.count(GOOD[P0], 197)  # below target, within the dead band: no return
        world.count(LATE[P0], 3)
        world.look()
    back = [s for s in world.steps if s.act is Act.GIVE_BACK]
    assert back[0].at - world.moves[0].at >= 30
    assert back[0].after == pytest.approx((0.54 + 0.018, 0.36 - 0.018, 0.08, 0.02))
    assert all(s.after[P1] >= 0.3 - 1e-9 for s in back)


def test_a_class_at_its_ceiling_gets_no_more() -> None:
    world = World(share_ceiling=0.62)
    for _ in range(30):
        world.count(GOOD[P1], 200)
        world.count(LATE[P0], 200)
        world.look()
    assert world.loop.shares[P0] == pytest.approx(0.62)
    assert world.steps[-1].act is Act.CLAMPED


def test_observing_records_moves_and_changes_nothing() -> None:
    world = World(loop="observe").play(constant(0.7, 1, 1, 1), seconds=300)
    assert world.moves
    assert not any(step.applied for step in world.steps)
    assert world.loop.shares == pytest.approx(CONFIGURED)
    assert world.loop.view().moves[-1].act is Act.LIFT


@pytest.mark.parametrize(("mode", "taken"), [("adjust", True), ("observe", False), ("off", False)])
def test_shares_of_the_router_that_leads_are_taken_over_where_they_are_adjusted(
    mode: str, taken: bool
) -> None:
    loop, theirs = RateLoop(Config.model_validate({"slo": {"loop": mode}})), (0.5, 0.4, 0.08, 0.02)
    loop.adopt(theirs)
    assert loop.shares == pytest.approx(theirs if taken else CONFIGURED)


def test_off_is_off() -> None:
    config = Config.model_validate({"slo": {"loop": "off"}})
    loop = RateLoop(config)
    assert loop.step(SloMonitor(config), now=5.0) is None
    assert loop.due_at == 10.0
    assert loop.view().last is None


def test_the_record_is_bounded_and_holds_each_mind_once() -> None:
    world = World(history_max=5).play(constant(0.9, 0.95, 1, 1), seconds=600)
    assert len(world.loop.view().moves) == 5
    calm = World().play(constant(1, 1, 1, 1), seconds=600)
    assert len(calm.loop.view().moves) == 1


def test_guarantees_are_shares_of_what_is_promised_in_all() -> None:
    classes = {
        f"p{n}": {"ttft_target_s": 1, "tpot_target_s": 1, "share_min": s, "wait_s_max": 1}
        for n, s in enumerate((0.3, 0.1, 0.1, 0.0))
    }
    loop = RateLoop(Config.model_validate({"classes": classes}))
    assert loop.shares == pytest.approx((0.6, 0.2, 0.2, 0.0))
    assert loop.guarantees == pytest.approx((0.3, 0.1, 0.1, 0.0))


def test_new_configured_shares_start_anew_and_other_settings_do_not() -> None:
    world = World().play(constant(0.7, 1, 1, 1), seconds=60)
    moved = world.loop.shares
    assert moved != pytest.approx(CONFIGURED)
    world.loop.configure(Config.model_validate({"slo": {"dead_band": 0.02}}))
    assert world.loop.shares == moved
    world.loop.configure(Config.model_validate({"slo": {"share_floor": 0.01}}))
    assert world.loop.shares == pytest.approx(CONFIGURED)


COUNTS = st.lists(
    st.tuples(*[st.tuples(st.integers(0, 60), st.integers(0, 60)) for _ in Priority]),
    max_size=60,
)


@settings(max_examples=60)
@given(COUNTS, st.floats(0, 0.25), st.floats(0.3, 1))
def test_shares_add_up_to_one_within_bounds_whatever_happens(
    looks: list[tuple[tuple[int, int], ...]], floor: float, ceiling: float
) -> None:
    world = World(share_floor=floor, share_ceiling=ceiling)
    for look in looks:
        for p, (good, late) in zip(Priority, look, strict=True):
            world.count(GOOD[p], good)
            world.count(LATE[p], late)
        step = world.look()
        assert sum(step.after) == pytest.approx(1, abs=1e-9)
        for share, configured in zip(step.after, CONFIGURED, strict=True):
            assert min(floor, configured) - 1e-9 <= share <= max(ceiling, configured) + 1e-9
        assert step.after == world.loop.shares
    assert most_per_minute(reversals(world.moves)) <= 2


def moved() -> World:
    """P1 has just got some of P0's share, and has no more to wish for."""
    world = World()
    world.look()
    world.count(GOOD[P0], 200)
    world.count(LATE[P1], 200)
    assert world.look().act is Act.LIFT
    return world


def test_what_was_seen_before_a_return_still_counts() -> None:
    """Only a transfer is judged by what came after it."""
    world = moved()
    for _ in range(12):
        for p in (P0, P1):  # in SLO, but not so well that P1 would give back
            world.count(GOOD[p], 497)
            world.count(LATE[p], 3)
        if world.look().act is Act.RETURN:
            break
    assert world.steps[-1].act is Act.RETURN
    assert world.look().evidence[P1].fresh_requests >= 2_000


@pytest.mark.parametrize("loop", ["observe", "off"])
def test_shares_that_are_adjusted_no_more_are_the_configured_ones(loop: str) -> None:
    world = moved()
    assert world.loop.shares != pytest.approx(CONFIGURED)
    world.loop.configure(Config.model_validate({"slo": {"loop": "adjust", "samples_min": 31}}))
    assert world.loop.shares != pytest.approx(CONFIGURED)
    world.loop.configure(Config.model_validate({"slo": {"loop": loop}}))
    assert world.loop.shares == pytest.approx(CONFIGURED)
