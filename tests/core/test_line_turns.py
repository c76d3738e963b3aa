"""Tenants that want more than a common limit has, at one router and at several."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.types import Priority
from tests.core.line_world import PER_REQUEST, World, jain

EIGHT = [f"t{number}" for number in range(8)]
PATIENT: dict[str, Any] = {
    "queue": {"depth_max": 10_000},
    "classes": {"p1": {"wait_s_max": 3600}},
}


def world(routers: int, *, runs_s: float = 0.01, seed: int = 1, **sections: Any) -> World:
    limits = {"cost": PER_REQUEST, "wait_s_max": 600, "degrade": False}
    limits |= sections.pop("limits")
    return World(routers, runs_s=runs_s, seed=seed, limits=limits, **PATIENT | sections)


def everywhere(made: World, at_once: int = 3) -> None:
    for router in range(len(made.routers)):
        for tenant in EIGHT:
            made.wants(router, tenant, at_once)


def one_is_alone(made: World, at_once: int = 3) -> None:
    made.wants(0, "t0", at_once)
    for router in range(1, len(made.routers)):
        for tenant in EIGHT[1:]:
            made.wants(router, tenant, at_once)


def one_sends_more(made: World) -> None:
    everywhere(made)
    for router in range(len(made.routers)):
        made.wants(router, "t0", 27)


def mixed(made: World) -> None:
    for number, tenant in enumerate(EIGHT):
        for router, _ in enumerate(made.routers):
            if number % len(made.routers) == router or number > 5:
                made.wants(router, tenant, 4 + 3 * number)


RATE = {"cluster": {"cost_per_s": 20}}
PERMITS = {"cluster": {"concurrency": 16}}
NO_BORROWING = {"cluster": {"cost_per_s": 40, "shares": {"borrow": False}}}
OF_MODEL = {"models": {"m": {"cost_per_s": 20}}}
# Of each limit what it gives in a second, and how long a request runs.
LIMITS: dict[str, tuple[dict[str, Any], float, float]] = {
    "rate": (RATE, 20.0, 0.01),
    "permits": (PERMITS, 16.0, 1.0),
    "part": (NO_BORROWING, 14.0, 0.01),
    "model": (OF_MODEL, 20.0, 0.01),
}


def test_parts_are_equal_of_a_limit_that_gives_little() -> None:
    made = world(2, limits={"cluster": {"cost_per_s": 0.25, "cost_burst": 1}})
    one_is_alone(made)
    made.run(100.0)
    got = made.run(2000.0)
    assert jain([got[tenant] for tenant in EIGHT]) >= 0.98
    assert sum(got.values()) >= 0.98 * 2000 * 0.25


@pytest.mark.parametrize(
    ("limit", "routers", "layout"),
    [
        ("rate", 1, one_sends_more),
        ("rate", 2, everywhere),
        ("rate", 2, one_is_alone),
        ("rate", 4, one_is_alone),
        ("rate", 4, one_sends_more),
        ("rate", 4, mixed),
        ("permits", 1, one_sends_more),
        ("permits", 2, one_is_alone),
        ("permits", 2, one_sends_more),
        ("permits", 4, mixed),
        ("part", 2, one_is_alone),
        ("model", 2, mixed),
    ],
)
def test_who_always_wants_more_gets_an_equal_part_of_all_there_is(
    limit: str, routers: int, layout: Any
) -> None:
    limits, per_s, runs_s = LIMITS[limit]
    made = world(routers, limits=limits, runs_s=runs_s)
    layout(made)
    made.run(10.0)
    asks = made.asks
    got = made.run(30.0)
    assert jain([got[tenant] for tenant in EIGHT]) >= 0.99
    total = sum(got.values())
    assert total >= 0.98 * 30 * per_s, "what one leaves another takes"
    # First come first served asked once for each router and each grant, and once at its end.
    assert made.asks - asks <= (routers + 1) * total * 1.02


def test_parts_go_by_weight_wherever_tenants_are() -> None:
    weights = {"t0": 1.0, "t1": 2.0, "t2": 4.0, "t3": 0.5}
    made = world(2, limits=RATE, tenants={name: {"weight": w} for name, w in weights.items()})
    made.wants(0, "t0", 3)
    made.wants(0, "t1", 3)
    made.wants(1, "t1", 3)
    made.wants(1, "t2", 3)
    made.wants(1, "t3", 30)
    made.run(10.0)
    got = made.run(60.0)
    assert jain([got[name] / weight for name, weight in weights.items()]) >= 0.99


def test_what_a_class_may_borrow_is_parted_alike() -> None:
    made = world(2, limits={"cluster": {"cost_per_s": 40}})
    one_is_alone(made)
    for router in range(2):
        made.wants(router, "urgent", 1, after_s=0.1, priority=Priority.P0)
    made.run(10.0)
    got = made.run(30.0)
    assert got["urgent"] > 30 * 15
    assert sum(got.values()) >= 0.98 * 30 * 40
    assert jain([got[tenant] for tenant in EIGHT]) >= 0.98


def test_parts_are_of_what_was_used_and_not_of_what_was_reserved() -> None:
    """An answer ends after 20 tokens; who allowed for ten times as much is charged for those."""
    cost = {"request_units": 0.0, "prompt_token_units": 0.0, "output_token_units": 0.05}
    made = world(2, limits={"cluster": {"cost_per_s": 20, "cost_burst": 40}, "cost": cost})
    for router in range(2):
        made.wants(router, "t0", 3, max_tokens=200)
        made.wants(router, "t1", 3, max_tokens=20)
    made.run(10.0)
    got = made.run(60.0)
    assert jain([got["t0"], got["t1"]]) >= 0.99


def test_one_that_uses_most_permits_and_never_waits_leaves_the_others_their_part() -> None:
    made = world(2, limits=PERMITS, runs_s=1.0)
    made.wants(0, "t0", 14)
    for tenant in EIGHT[1:]:
        made.wants(1, tenant, 20)
    made.run(20.0)
    got = made.run(60.0)
    assert jain([got[tenant] for tenant in EIGHT]) >= 0.98
    assert sum(got.values()) >= 0.95 * 60 * 16


def test_who_wants_less_than_its_part_gets_it_and_the_others_all_that_is_left() -> None:
    made = world(2, limits=RATE)
    made.wants(0, "t0", 1, after_s=1.0)
    for tenant in EIGHT[1:]:
        made.wants(1, tenant, 3)
    made.run(10.0)
    got = made.run(60.0)
    assert got["t0"] >= 50
    assert sum(got.values()) >= 0.99 * 60 * 20
    assert jain([got[tenant] for tenant in EIGHT[1:]]) >= 0.999


def test_a_router_that_died_holds_nobody_back_for_longer_than_a_second() -> None:
    made = world(2, limits=RATE)
    one_is_alone(made)
    made.run(10.0)
    made.dead.add(1)
    made.run(1.3)
    assert made.run(5.0)["t0"] >= 0.95 * 5 * 20


def test_one_that_hears_of_nobody_any_more_is_held_for_no_longer_than_a_second() -> None:
    made = world(2, limits=RATE)
    one_is_alone(made)
    made.run(10.0)
    made.dead.add(1)
    made.silent = True
    made.run(1.1)
    assert made.run(5.0)["t0"] >= 0.95 * 5 * 20


def test_nothing_is_told_and_nothing_kept_when_nobody_waits() -> None:
    made = world(2, limits={"cluster": {"cost_per_s": 1000}})
    for router in range(2):
        made.wants(router, "t0", 2, after_s=0.1)
    made.run(5.0)
    assert made.told == 0
    assert not any(router.core.reserving.lines for router in made.routers)


def test_when_all_had_what_they_wanted_nothing_is_left_of_the_lines() -> None:
    made = world(2, limits=RATE)
    one_is_alone(made)
    made.run(5.0)
    assert made.told > 0
    made.full.update(EIGHT)
    asked = made.asked
    made.run(5.0)
    assert made.ended == asked, "nobody is lost"
    for router in made.routers:
        view = router.core.snapshot(now=made.now).limits
        assert (view.waiting, view.held) == (0, 0)
        assert not router.core.reserving.lines


def test_deadlines_hold_for_a_line_that_is_held_back() -> None:
    made = world(2, limits=RATE | {"wait_s_max": 2.0})
    one_is_alone(made, at_once=200)
    made.run(20.0)
    assert made.refused > 100
    assert made.waited_s_max <= 2.01


def test_what_is_told_of_lines_is_bounded() -> None:
    made = world(1, limits=RATE)
    for number in range(100):
        made.wants(0, f"t{number}", 2)
    made.run(1.0)
    (line,) = made.routers[0].core.peering.lines(made.now)
    assert len(line.tenants) == 64
    assert line.more == 36
