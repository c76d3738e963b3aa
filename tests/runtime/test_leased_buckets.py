"""Leases grant what their store gave them and nothing more, and all of it comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.bucket import (
    DecidedBy,
    Family,
    Rule,
    Scope,
)
from router.core.ledger import Ledger
from tests.runtime.lease_world import BATCH_S, Shared, warmed
from tests.runtime.limit_world import ask, cost, permits

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 30)),
        st.tuples(st.just("same"), st.integers(0, 2), st.integers(1, 30)),
        st.tuples(st.just("end"), st.integers(0, 50), st.floats(0, 1)),
        st.tuples(st.just("answer"), st.just(0), st.just(0)),
        st.tuples(st.just("go"), st.just(0), st.floats(0, 1)),
    ),
    max_size=60,
)
CLUSTER = Rule("cluster", Scope.CLUSTER, 0.0, 4000.0, debt_max=1e9)
CLASS = Family(CLUSTER, (("p0", 0.6), ("p1", 0.4))).rules["p0"]
MANY = 60
TENANTS = [cost(300.0, key=f"tenant:{number}") for number in range(2)]
TENANT_BUCKETS = [cost(100_000.0, rate=1e6, key=f"bucket:{number}") for number in range(4)]
MODELS = [Rule(f"model:{number}", Scope.MODEL, 0.0, 300.0) for number in range(2)]


def played(rules: tuple[Rule, ...], steps: list[tuple[str, int, float]]) -> Iterator[Shared]:
    """A world after each step."""
    world = Shared(rules)
    for what, number, figure in steps:
        match what:
            case "ask":
                world.reserve(world.routers[number], figure)
            case "same":
                for _ in range(int(figure)):
                    world.reserve(world.routers[number], 3.0)
                    world.answer()
            case "end" if world.running:
                world.end(number, figure)
            case "answer":
                world.answer()
            case "go":
                world.loop.go(figure)
            case _:
                pass  # nothing runs that might end
        yield world
    world.settle_down()
    yield world


@settings(deadline=None)
@given(STEPS)
def test_without_refill_no_more_is_granted_than_there_was(
    steps: list[tuple[str, int, float]],
) -> None:
    rule = cost(300.0, debt_max=1e9)
    for world in played((rule, CLASS, permits(MANY)), steps):
        assert world.taken <= rule.burst + 1e-6
        assert len(world.running) <= MANY
    assert world.left(rule) == pytest.approx(300.0 - world.used, abs=1e-6)
    assert world.left(CLUSTER) == pytest.approx(4000.0 - world.used, abs=1e-6)
    assert world.left(permits(MANY)) == MANY


@settings(deadline=None)
@given(STEPS)
def test_what_is_fetched_ahead_is_never_borrowed(steps: list[tuple[str, int, float]]) -> None:
    above = cost(80.0, debt_max=1e9, key="t:borrowed")
    rule = replace(cost(120.0, debt_max=1e9), above=above)
    for world in played((rule, CLASS), steps):
        assert world.taken <= rule.burst + above.burst + 1e-6
        held = world.ledger._reservations.items()
        leased = [(one.own, c) for name, one in held if "lease" in name for c in one.charges]
        assert all(o.get(rule.key, c.amount) == c.amount for o, c in leased if c.rule is rule)
    left = world.left(rule) + world.left(above)
    assert left == pytest.approx(200.0 - world.used, abs=1e-6)


@settings(deadline=None)
@given(STEPS)
def test_with_refill_no_more_is_granted_than_burst_and_rate(
    steps: list[tuple[str, int, float]],
) -> None:
    rule = cost(200.0, rate=40.0)
    for world in played((rule,), steps):
        assert world.taken <= rule.burst + rule.rate_per_s * (world.loop.now - 1000.0) + 1e-6


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 20)), min_size=1, max_size=60))
def test_what_was_used_too_much_is_a_debt(steps: list[tuple[int, float]]) -> None:
    rule = cost(1000.0, debt_max=1e9)
    world = Shared((rule,))
    for number, ratio in steps:
        world.reserve(world.routers[number], 5.0)
        world.answer()
        if world.running:
            world.end(0, ratio)
    world.settle_down()
    assert world.ledger._buckets[rule.key].level == pytest.approx(1000.0 - world.used, abs=1e-6)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(TENANTS), st.sampled_from(MODELS), st.integers(1, 40),
            st.integers(1, 9), st.floats(0, 0.2),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_one_router_denies_nothing_that_there_is(
    plays: list[tuple[Rule, Rule, int, int, float]],
) -> None:
    """Whatever its leases hold: each tenant has one for each model."""
    world, taken = Shared(()), Counter[str]()
    router = world.routers[0]
    router.replicas = 1
    for tenant, model, requests, amount, pause_s in plays:
        keys = {tenant.key, model.key}
        for _ in range(requests):
            world.reserve(router, amount, tenant, model)
            world.answer()
            world.answer()  # it asks again when something was given back
            if world.denied:
                assert max(taken[key] for key in keys) + world.denied.pop() > tenant.burst
            else:
                taken.update(dict.fromkeys(keys, amount))
        world.loop.go(pause_s)


def test_a_request_gets_all_that_leases_hold_of_each_of_its_limits() -> None:
    world = Shared(())
    router = world.routers[0]
    for rules in ((TENANTS[0], MODELS[1]), (TENANTS[1], MODELS[0])):
        for _ in range(12):
            world.reserve(router, 1.0, *rules)
            world.answer()
    assert all(min(lease.free) > 0 for lease in router._leases.values())
    world.reserve(router, 300.0 - 12, TENANTS[0], MODELS[0])
    world.answer()
    world.answer()
    assert (len(world.running), world.denied) == (25, [])


def test_what_leases_hold_is_for_all_that_are_denied_at_once() -> None:
    whole = cost(300.0, key="whole")
    world = warmed(TENANTS[0], whole, amount=1.0)
    (lease,) = world.routers[0]._leases.values()
    held, before = int(lease.free[1]), len(world.running)
    assert held > 2
    world.ledger.reserve(ask((whole, world.left(whole))), world.loop.now)
    world.rules = (TENANTS[1], whole)
    for _ in range(held + 1):
        world.reserve(world.routers[0], 1.0)
    world.answer()
    world.answer()
    assert (len(world.running) - before, world.denied) == (held, [1.0])


def test_a_fetch_under_way_when_others_give_back_is_counted_once() -> None:
    rule = cost(3000.0)
    world = warmed(rule)
    (lease,) = world.routers[0]._leases.values()
    world.reserve(world.routers[0], 2999.0, cost(1e6, key="model"))
    while not lease.fetching:
        world.reserve(world.routers[0], 10.0)
    while world.running:
        world.end(0, 0.0)
    world.answer()
    world.answer()
    assert world.denied == []  # what was being fetched went back as well
    world.end(0, 0.0)
    for number in (1, 0):
        for _ in range(500):
            world.reserve(world.routers[number], 10.0)
            world.answer()
    assert world.taken == rule.burst


def test_steady_requests_are_mostly_granted_here() -> None:
    world = Shared((cost(100_000.0, rate=1e6),))
    for _ in range(1000):
        world.reserve(world.routers[0], 10.0)
        world.answer()
        world.end(0, 1.0)
        world.loop.go(0.002)
    assert world.by_lease > 990


def test_batches_are_filled_up_together_before_they_are_used_up() -> None:
    whole = cost(100_000.0, rate=1e6)
    world = Shared(())
    store, calls = world.stores[0], 0
    for number in range(2000):
        world.reserve(world.routers[0], 10.0, whole, TENANT_BUCKETS[number % 4])
        asked = len(store.queue)
        world.answer()
        world.end(0, 1.0)
        world.loop.go(0.002)
        calls += number >= 1000 and asked > 0
    assert world.by_lease > 1950
    assert calls < 10  # of four leases in two seconds


def test_leases_that_want_more_than_there_is_get_parts_in_proportion() -> None:
    whole = cost(3000.0, rate=1e6)  # a router may keep a third of a third of it
    world = Shared(())
    for number in range(3000):
        world.reserve(world.routers[0], 1.0, whole, TENANT_BUCKETS[number % 10 == 0])
        world.answer()
        world.end(0, 1.0)
        world.loop.go(0.0002)
    seldom, often = world.routers[0]._leases.values()
    assert often.wanted[0] + seldom.wanted[0] > 2 * 3000 / 9
    assert 0.8 < (often.booked[0] + seldom.booked[0]) / (3000 / 9) <= 1.0
    assert often.booked[0] / seldom.booked[0] == pytest.approx(9, rel=0.4)
    assert world.by_lease > 2900


def test_permits_come_back_while_others_of_the_lease_run() -> None:
    world = warmed(cost(10_000.0), permits(1000))
    while len(world.running) > 1:
        world.end(0, 1.0)
    (lease,) = world.routers[0]._leases.values()
    assert lease.running == 1
    for _ in range(3):
        world.loop.go(BATCH_S)
        world.answer()
    assert world.left(permits(1000)) == 999


def test_a_request_that_finds_too_little_sees_all_that_there_is() -> None:
    world = warmed(cost(3000.0))
    before = world.taken
    world.reserve(world.routers[0], 3000.0 - before)
    world.answer()
    assert world.taken == 3000.0


def test_in_one_turn_all_that_there_is_is_granted() -> None:
    """What a fetch of the same turn took is for those whom the store then denies."""
    world = warmed(cost(3000.0))
    for _ in range(500):
        world.reserve(world.routers[0], 10.0)
    world.answer()
    assert world.taken == 3000.0


def test_what_comes_back_while_a_batch_is_fetched_is_counted_once() -> None:
    rule = cost(3000.0)
    world = warmed(rule)
    (lease,) = world.routers[0]._leases.values()
    while not lease.fetching:
        world.reserve(world.routers[0], 10.0)
    while world.running:
        world.end(0, 0.0)
    world.loop.go(3 * BATCH_S)
    world.answer()
    for number in (1, 0):  # the other one leaves nothing
        for _ in range(500):
            world.reserve(world.routers[number], 10.0)
            world.answer()
    assert world.taken == rule.burst


def test_a_router_that_was_paused_grants_nothing_from_before() -> None:
    world = warmed(cost(3000.0))
    world.loop.now += 3600  # and no timer has run yet
    before = world.by_lease
    world.reserve(world.routers[0], 10.0)
    assert world.by_lease == before


def test_what_runs_is_charged_again_when_the_store_lost_the_reservation() -> None:
    """Its permits above all: they are held as before."""
    rule = permits(1000)
    world = warmed(cost(10_000.0), rule)
    router = world.routers[0]
    by_lease = len(router._running)
    assert by_lease > 0
    lost = len(world.running) - by_lease  # of these the store had each by itself
    world.ledger = Ledger(DecidedBy.MEMORY, now=world.loop.now)
    for store in world.stores:
        store._ledger = world.ledger
    for _ in range(100):
        world.reserve(router, 10.0)
        world.answer()
        world.loop.go(0.02)
    free = sum(lease.free[1] for lease in router._leases.values())
    assert rule.burst - world.left(rule) - free == len(world.running) - lost


def test_a_bucket_that_is_half_used_is_asked_one_by_one() -> None:
    world = Shared((cost(3000.0),))
    world.reserve(world.routers[1], 1500.0)
    world.answer()
    for _ in range(50):
        world.reserve(world.routers[0], 10.0)
        world.answer()
        world.loop.go(0.02)
    assert (len(world.running), world.by_lease) == (51, 0)


def test_what_is_left_comes_back_when_its_term_is_over() -> None:
    rule = cost(3000.0)
    world = Shared((rule,))
    for pause_s in (0.2, *[0.0] * 12):  # the first lease is looked at in between
        world.reserve(world.routers[0], 10.0)
        world.answer()
        world.loop.go(pause_s)
    assert world.left(rule) < 3000.0 - world.taken
    world.loop.go(BATCH_S - 0.2)
    world.loop.go(0.2)
    world.answer()
    assert world.left(rule) == 3000.0 - world.taken


def test_what_requests_leave_later_comes_back_at_once() -> None:
    rule, held = cost(3000.0), permits(1000)
    world = warmed(rule, held)
    world.loop.go(BATCH_S)
    world.answer()
    while world.running:
        world.end(0, 0.5)
    world.answer()
    assert world.left(rule) == 3000.0 - world.used
    assert world.left(held) == 1000


def test_what_remains_is_told_as_if_each_had_asked() -> None:
    world = Shared((cost(3000.0), permits(1000)))
    for _ in range(100):
        world.reserve(world.routers[0], 10.0)
        world.answer()
        told = [level.remaining for level in world.levels]
        assert told == [3000.0 - world.taken, 1000 - len(world.running)]
    assert world.by_lease > 50


def test_requests_under_changed_limits_take_nothing_from_before() -> None:
    world = warmed(cost(3000.0))
    before = world.by_lease
    world.rules = (cost(3000.0),)  # of the same key, as a new configuration has it
    world.reserve(world.routers[0], 10.0)
    assert world.by_lease == before


def test_a_small_bucket_is_never_batched() -> None:
    """At three routers a third of 100 is less than two requests of 6 for each."""
    world = Shared((cost(100.0, rate=1e6),))
    for _ in range(200):
        world.reserve(world.routers[0], 6.0)
        world.answer()
        world.loop.go(0.002)
    assert (len(world.running), world.by_lease) == (200, 0)


def test_all_routers_together_keep_a_third_of_a_bucket() -> None:
    rule = cost(3000.0)
    world, kept = Shared((rule,)), 0.0
    for _ in range(60):
        for router in world.routers:
            world.reserve(router, 1.0)
        world.answer()
        kept = rule.burst - world.left(rule) - world.taken
        assert kept <= rule.burst / 3 + 1e-6
    assert kept > 0


def test_a_lease_that_is_filled_up_has_one_timer_and_ends_with_its_last_batch() -> None:
    rule = cost(3000.0)
    world = warmed(rule)
    router, loop = world.routers[0], world.loop
    (lease,) = router._leases.values()
    for _ in range(5):
        loop.go(BATCH_S * 0.6)
        until = lease.until
        while lease.until == until:
            world.reserve(router, 10.0)
            world.answer()
        assert lease.until == loop.now + BATCH_S
        timers = [timer for timer in loop._timers if "_over" in str(timer)]
        assert len(timers) == 1
    loop.go(BATCH_S * 0.9)
    assert min(lease.free) > 0
    loop.go(BATCH_S * 0.1)
    assert max(lease.free) == 0, "given back when its term is over"


def test_leases_of_steady_tenants_are_filled_up_together() -> None:
    """Four at 125 requests/s each, at random moments; their class has room for 24 of each ahead."""
    world, rng = Shared((cost(210.0, rate=600.0, key="class"),)), Random(1)
    tenants = [cost(150.0, rate=150.0, key=f"t{number}") for number in range(4)]
    router, store, calls = world.routers[0], world.stores[0], 0
    router.replicas = 1
    for _ in range(5_000):
        world.loop.go(rng.expovariate(500))
        world.reserve(router, 0.7, rng.choice(tenants))
        if store.queue:
            calls += 1
            world.answer()
        while world.running:
            world.end(0, 1.0)
    assert world.by_lease > 4_900
    rate = calls / (world.loop.now - 1000.0)
    assert rate < 12, rate
