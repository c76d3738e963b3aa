"""Leases lose nothing and keep nothing, whatever crosses on the way."""

from __future__ import annotations

from router.core.bucket import DecidedBy, Rule, Settlement
from router.core.ledger import Ledger
from router.runtime.leased_buckets import LeasedBuckets, _Lease
from tests.runtime.lease_world import BATCH_S, Shared, warmed
from tests.runtime.limit_world import ask, cost, permits


def leasing(world: Shared, *, requests: int) -> tuple[LeasedBuckets, _Lease]:
    """The only router that lives, and the lease that it has after so many requests."""
    router = world.routers[0]
    router.replicas = 1
    for _ in range(requests):
        world.reserve(router, 1.0)
        world.answer()
        world.loop.go(0.01)
    (lease,) = router._leases.values()
    return router, lease


def cross(world: Shared, others: tuple[Rule, ...], *, used_ratio: float) -> None:
    """One under other rules is denied all that there is while a batch is on its way and a request
    of the lease leaves something; then everything ends.
    """
    router, own = world.routers[0], world.rules
    (lease,) = router._leases.values()
    world.rules = others
    world.reserve(router, 1000.0)
    world.rules = own
    while not lease.fetching:
        world.reserve(router, 1.0)
    leased = [
        n for n, (_, one) in enumerate(world.running) if one.reservation_id in router._running
    ]
    world.end(leased[0], used_ratio)
    world.answer()
    world.answer()
    world.settle_down()
    world.settle_down()


def test_what_goes_back_while_its_lease_is_begun_anew_is_told() -> None:
    """The store lost the reservation; the next one is on its way when others need what is free."""
    units = cost(1000.0)
    world = Shared((units, permits(100)))
    router, lease = leasing(world, requests=30)
    ledger = world.ledger = Ledger(DecidedBy.MEMORY, now=world.loop.now)
    for store in world.stores:
        store._ledger = ledger
    world.loop.go(BATCH_S)
    world.answer()
    while lease.reservation_id is not None or lease.fetching:
        world.reserve(router, 1.0)
        world.answer()
        world.loop.go(0.005)
    cross(world, (units, cost(1000.0, key="tenant")), used_ratio=1.0)
    assert not router._leases
    assert not ledger._permits.get(world.rules[1].key)


def test_nothing_is_kept_from_others_for_a_lease_that_ended() -> None:
    """Its term was over, and what was being fetched for it went back as well."""
    rules = (cost(1000.0), cost(1000.0, key="a"))
    world = Shared(rules)
    router, _ = leasing(world, requests=60)
    world.loop.go(BATCH_S)
    world.answer()
    cross(world, (rules[0], cost(1000.0, key="b")), used_ratio=0.5)
    assert (len(router._leases), router._booked, router._wanted) == (0, {}, {})


def test_a_fetch_that_was_denied_says_again_what_is_taken() -> None:
    """What went back before it may have been dropped on the way, as this was to replace it."""
    rule = cost(3000.0)
    world = warmed(rule)
    (lease,) = world.routers[0]._leases.values()
    world.loop.go(BATCH_S)
    world.answer()
    taken = world.ledger.reserve(ask((rule, 0.6 * 3000.0)), world.loop.now)
    assert taken.granted
    store, told = world.stores[0], list[Settlement]()
    settle = store.settle

    def hear(one: Settlement) -> None:
        told.append(one)
        settle(one)

    store.settle = hear  # type: ignore[assignment, method-assign]
    while not lease.fetching:
        world.reserve(world.routers[0], 10.0)
    world.answer()
    world.answer()
    assert not lease.fetching
    assert [one.reservation_id for one in told if not one.ends] == [lease.reservation_id]
