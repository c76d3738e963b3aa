"""The loop inside the dispatcher: its looks, what its moves change, and what observing leaves."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from router.core.dispatcher import Dispatcher
from router.core.effects import SharesJudged
from router.core.rate_loop import Act
from router.core.types import Outcome, Priority, Ticket, Usage
from router.errors import Reason
from tests.core.builders import Bench, bench, config, plain_config
from tests.core.test_rate_loop import most_per_minute, reversals

P0, P1, P2, P3 = Priority
CONFIGURED = (0.6, 0.3, 0.08, 0.02)


def life(
    seconds: int,
    late: dict[Priority, float],
    *,
    seed: int = 1,
    per_s: int = 10,
    target_s: tuple[float, ...] = (0.1, 0.5, 2.0, 30.0),
    **slo: Any,
) -> Bench:
    """Each class sends `per_s` requests a second; a share of each class is answered late."""
    classes = {f"p{n}": {"ttft_target_s": s} for n, s in enumerate(target_s)}
    b, rng = bench("w1", "w2", slo=slo, classes=classes), Random(seed)
    for second in range(seconds):
        b.pass_to(float(second))
        made: list[tuple[Ticket, bool]] = []
        for priority in Priority:
            for _ in range(per_s):
                slow = rng.random() < late.get(priority, 0.0)
                made.append((b.ask(priority=priority), slow))
        for wanted_slow in (False, True):
            b.pass_to(second + (0.9 if wanted_slow else 0.05))
            for one, slow in made:
                if slow is wanted_slow:
                    b.core.on_first_token(one, now=b.now)
                    b.end(one)
    return b


def judged(b: Bench) -> list[SharesJudged]:
    return [effect for effect in b.effects if isinstance(effect, SharesJudged)]


def shares(b: Bench) -> list[float]:
    (domain,) = b.core._room.flow.domains
    return [band.share for band in domain.bands]


def test_requests_are_counted_by_class_and_infeasible_ones_apart() -> None:
    b = bench("w1")
    for prompt_bytes in (396, 40_000):
        made = b.ask(priority=P0, prompt_bytes=prompt_bytes)
        b.now += 0.2
        b.core.on_first_token(made, now=b.now)
        b.end(made)
    view = b.core.snapshot(now=b.now).slo.classes[P0]
    assert (view.requests, view.met) == (2, 0)
    assert (view.feasible_requests, view.feasible_met) == (1, 0)


CACHED = 64 * 512  # bytes of a conversation so far, with a short turn behind it


def turn(b: Bench) -> Ticket:
    return b.ask(priority=P0, prompt_bytes=CACHED + 400, prefix=tuple(range(64)))


def feasible(b: Bench) -> tuple[int, int]:
    view = b.core.snapshot(now=b.now).slo.classes[P0]
    return view.requests, view.feasible_requests


@pytest.mark.parametrize(
    ("cached_tokens", "judged"),
    [(None, 1), (8_192, 1), (0, 0), (4_096, 0), (9_999_999, 1)],
    ids=["as expected", "all but the turn", "nothing", "half", "more than there is"],
)
def test_what_was_cached_of_a_prompt_is_no_work(cached_tokens: int | None, judged: int) -> None:
    b = bench("w1")
    b.end(turn(b))
    assert feasible(b) == (1, 0)  # all of it is to be computed
    usage = Usage(prompt_tokens=8_292, cached_tokens=cached_tokens, output_tokens=1)
    b.core.on_finished(turn(b), Outcome.SUCCESS, now=b.now, usage=usage)
    assert feasible(b) == (2, judged)


def test_what_would_have_been_cached_is_no_work_for_one_that_was_never_sent() -> None:
    b = bench()
    b.join("w1", concurrency_max=1)
    b.end(turn(b))
    b.ask(priority=P0)
    refused = turn(b)
    b.pass_to(60.0)
    assert refused.dispatched_at is None
    assert b.records[-1].reason is Reason.QUEUE_TIMEOUT
    assert feasible(b) == (2, 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("samples", [1, 4])
def test_each_sequence_of_an_answer_has_to_keep_its_pace(samples: int, *, stream: bool) -> None:
    b = bench("w1")
    made = b.ask(priority=P0, samples=samples, stream=stream)  # due at 50 ms per token
    b.now = 0.05
    if stream:
        b.core.on_first_token(made, now=b.now)
    b.now += 99 * 0.06
    usage = Usage(output_tokens=100 * samples)
    b.core.on_finished(made, Outcome.SUCCESS, now=b.now, usage=usage)
    view = b.core.snapshot(now=b.now).slo.classes[P0]
    assert (view.requests, view.met) == (1, 0)


def test_the_loop_looks_every_interval_from_the_first_end_on() -> None:
    b = life(31, {})
    looks = b.core.snapshot(now=b.now).slo.looks
    assert sum(looks.values()) == 7
    assert not judged(b)


def test_a_class_below_target_gets_a_larger_minimum_share_at_once() -> None:
    b = life(20, {P1: 0.3})
    moved = judged(b)
    assert moved
    assert moved[0].step.act is Act.LIFT
    assert moved[0].step.applied
    view = b.core.snapshot(now=b.now).slo.loop
    assert b.core._room.flow.shares == view.guarantees
    assert view.guarantees[P1] > 0.3
    assert sum(view.guarantees) == pytest.approx(1)
    assert moved[-1].step in view.moves


def test_observing_records_moves_and_changes_nothing() -> None:
    b = life(20, {P1: 0.3}, loop="observe")
    assert judged(b)
    assert not any(effect.step.applied for effect in judged(b))
    assert b.core._room.flow.shares == pytest.approx(CONFIGURED)
    assert b.core.snapshot(now=b.now).slo.loop.moves


def test_switched_off_it_does_not_look_and_on_again_it_does() -> None:
    b = life(20, {P1: 0.3}, loop="off")
    assert not judged(b)
    assert sum(b.core.snapshot(now=b.now).slo.looks.values()) == 0
    b.core.on_config(plain_config(), now=b.now)
    b.end(b.ask())
    b.pass_to(b.now + 11)
    assert sum(b.core.snapshot(now=b.now).slo.looks.values()) == 3
    b.core.on_config(plain_config(slo={"loop": "off"}), now=b.now)
    b.pass_to(b.now + 60)
    assert sum(b.core.snapshot(now=b.now).slo.looks.values()) == 3


def test_a_reload_keeps_moved_shares_unless_others_are_configured() -> None:
    b = life(20, {P1: 0.3})
    before = b.core._room.flow.shares
    b.core.on_config(plain_config(queue={"depth_max": 7}), now=b.now)
    assert b.core._room.flow.shares == before
    classes = {f"p{n}": {"share_min": 0.25} for n in range(4)}
    b.core.on_config(plain_config(classes=classes), now=b.now)
    assert b.core._room.flow.shares == pytest.approx((0.25,) * 4)


def test_all_below_target_is_said_once_and_moves_nothing() -> None:
    b = life(40, dict.fromkeys(Priority, 0.5), target_s=(0.5,) * 4)
    assert [effect.step.act for effect in judged(b)] == [Act.OVERLOADED]
    assert b.core.snapshot(now=b.now).slo.loop.overloaded
    assert b.core._room.flow.shares == pytest.approx(CONFIGURED)


@pytest.mark.parametrize("seed", range(20))
def test_at_constant_load_shares_stay_in_bounds_and_hardly_swing(seed: int) -> None:
    late = {P0: 0.01, P1: 0.03, P2: 0.012}
    b = life(180, late, seed=seed, per_s=4, target_s=(0.5,) * 4)
    steps = [effect.step for effect in judged(b) if effect.step.act.moves]
    assert most_per_minute(reversals(steps)) <= 2
    for step in steps:
        assert sum(step.after) == pytest.approx(1)
        assert all(0.02 - 1e-9 <= share <= 0.9 + 1e-9 for share in step.after)


def test_shares_that_were_moved_hold_for_queues_that_begin_later() -> None:
    b = life(20, {P1: 0.3})
    waiting = [b.ask() for _ in range(600)]
    assert any(one.worker is None for one in waiting)
    assert shares(b) == list(b.core._room.flow.shares)
    assert shares(b)[P1] > 0.3


def test_p3_is_served_its_share_under_permanent_overload_by_p0() -> None:
    b = Bench(
        Dispatcher(
            config(
                pacing={"enabled": False},
                queue={"relegate_ratio": 0.0},
                classes={"p0": {"wait_s_max": 1e4}, "p3": {"wait_s_max": 1e4}},
                slo={"loop": "off"},
            ),
            rng=Random(1),
        )
    )
    b.join("w1", concurrency_max=2)
    running = [b.ask(priority=P0) for _ in range(2)]
    for _ in range(5):
        b.ask(priority=P0)
        b.ask(priority=P3)
    for step in range(3_000):
        b.now = step * 0.01
        b.core.on_finished(running.pop(0), Outcome.SUCCESS, now=b.now)
        new = b.take()
        running += [effect.ticket for effect in new if hasattr(effect, "ticket")]
        b.ask(priority=P0)
        if step % 10 == 0:
            b.ask(priority=P3)
    served = [made.cost for made in b.dispatched if made.spec.priority is P3]
    assert sum(served) / sum(made.cost for made in b.dispatched) >= 0.019


def answer_late(b: Bench, seconds: int) -> None:
    """For so long every answer of three classes begins a second late."""
    for _ in range(seconds):
        made = [b.ask(priority=priority) for priority in (P0, P1, P2) for _ in range(5)]
        b.pass_to(b.now + 1)
        for one in made:
            b.core.on_first_token(one, now=b.now)
            b.end(one)


def test_a_router_that_leads_no_longer_says_nothing_of_overload() -> None:
    b = bench("w1", "w2", classes={f"p{n}": {"ttft_target_s": 0.1} for n in range(4)})
    answer_late(b, 40)
    found = b.core.snapshot(now=b.now).slo.loop
    assert (found.overloaded, found.shed) == (True, P2)
    b.core.peering.on_leadership(leads=True)  # as it is told each time
    assert b.core.snapshot(now=b.now).slo.loop == found
    b.core.peering.on_leadership(leads=False)
    left = b.core.snapshot(now=b.now).slo.loop
    assert (left.overloaded, left.shed, left.last) == (False, None, None)
    assert left.moves == found.moves  # which have been made
    said = len(judged(b))
    answer_late(b, 40)
    assert len(judged(b)) == said
    b.core.peering.on_leadership(leads=True)
    answer_late(b, 6)  # one look: of what it saw before, nothing counts
    assert not b.core.snapshot(now=b.now).slo.loop.overloaded
    answer_late(b, 40)
    assert b.core.snapshot(now=b.now).slo.loop.overloaded
    assert len(judged(b)) == said + 1
