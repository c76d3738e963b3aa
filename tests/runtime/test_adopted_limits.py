"""What limits granted under one brain is held, renewed and settled by the next, once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.config import Config
from router.core.bucket import Ask, Charge, Rule, Verdict
from router.core.types import Outcome, Priority, Usage
from router.errors import Reason
from router.limit_settings import LimitsSettings
from router.runtime.leased_buckets import LeasedBuckets
from router.runtime.remote_driver import RemoteDriver
from tests.redis_servers import Server
from tests.runtime.brain_rig import SPEC, WORKER, Brain, Owner, brain, relay, settings, submitted
from tests.runtime.limit_world import ask, cost, granted, permits, routers, used
from tests.runtime.limit_world import left as bucket
from tests.runtime.relay.rig import eventually

# Some 110 cost units of each request are reserved, 150 are used: a token is one.
TENANT = {"concurrency": 2, "cost_per_s": 0.001, "cost_burst": 1000.0}
TOKENS = {"request_units": 0.0, "prompt_token_units": 1.0, "output_token_units": 1.0}
LIMITS: dict[str, Any] = {"tenant": TENANT, "cost": TOKENS, "wait_s_max": 0.0}
PERMITS, COST = "tenant:anonymous:concurrency", "tenant:anonymous:cost"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "link"


def limited(**others: Any) -> Config:
    plain = settings(count=1)
    return Config.model_validate({**plain.model_dump(), "limits": LIMITS, **others})


async def left(there: Brain, key: str) -> float:
    """What is left of a limit."""
    rule = there.driver.dispatcher.reserving.limits.rule(key, "anonymous")
    assert rule is not None
    found: list[float] = []
    assert there.driver.buckets is not None
    name = f"look-{id(found)}-{asyncio.get_running_loop().time()}"
    look = Ask(name, (Charge(rule, 0.0),), Priority.P1, 60.0)
    there.driver.buckets.reserve(look, lambda v: found.append(v.levels[0].remaining))
    await eventually(lambda: bool(found))
    there.driver.buckets.settle(look.given_back())
    return found[0]


async def until_left(there: Brain, key: str, amount: float) -> None:
    """Wait until that is left."""
    async with asyncio.timeout(15):
        while await left(there, key) != amount:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


def end(driver: RemoteDriver, owner: Owner, outcome: Outcome = Outcome.SUCCESS) -> None:
    driver.finished(owner.ticket, outcome, None, Usage(100, None, 50))
    driver.left(owner)


async def test_permits_of_what_runs_count_under_the_next_brain(path: Path) -> None:
    config = limited()
    async with relay(path, config) as driver:
        async with brain(path, config):
            owners = [await submitted(driver) for _ in range(2)]
            assert [owner.told for owner in owners] == [["dispatch"]] * 2
        await eventually(lambda: not driver.ready)
        async with brain(path, config) as second:
            third = await submitted(driver)
            assert third.told == ["refuse"]
            assert third.refusal is not None
            assert third.refusal.reason is Reason.RATE_LIMITED
            assert second.driver.snapshot().limits.held == 2
            for owner in owners:
                end(driver, owner)
            await eventually(lambda: len(second.records) == 3)
            assert second.driver.snapshot().limits.held == 0
            assert await left(second, PERMITS) == 2
            # Its buckets began anew, so what was used is charged as a whole, and only now.
            assert round(await left(second, COST)) == 1000 - 2 * 150


async def test_one_that_waits_keeps_what_it_was_granted(path: Path) -> None:
    one_at_once = WORKER.model_copy(update={"concurrency_max": 1})
    config = limited(workers=[one_at_once.model_dump()])
    async with relay(path, config) as driver:
        async with brain(path, config) as first:
            runs, waits = await submitted(driver), Owner()
            driver.submit(SPEC, waits)
            await eventually(lambda: waits.ticket.reservation is not None)
            assert first.driver.dispatcher.queued == 1
            before = waits.ticket.reservation
        await eventually(lambda: not driver.ready)
        async with brain(path, config) as second:
            await eventually(lambda: driver.ready and second.driver.dispatcher.queued == 1)
            assert second.driver.snapshot().limits.held == 2
            assert await left(second, PERMITS) == 0
            end(driver, runs)
            await eventually(lambda: waits.told == ["dispatch"])
            assert waits.ticket.reservation.id == before.id
            end(driver, waits)
            await eventually(lambda: len(second.records) == 2)
            assert await left(second, PERMITS) == 2


async def test_what_a_brain_settled_when_it_lost_a_relay_it_settles_no_second_time(
    path: Path,
) -> None:
    config = limited()
    async with brain(path, config) as there, relay(path, config) as driver:
        owner = await submitted(driver)
        (lost,) = there.hub.links
        lost.link.give_up("a relay says nothing any more")
        await eventually(lambda: any(link.announced for link in there.hub.links - {lost}))
        assert there.streams == 1
        assert there.driver.snapshot().limits.held == 0
        assert owner.ticket.reservation is None
        before = await left(there, COST)
        end(driver, owner)
        await eventually(lambda: len(there.records) == 2)
        assert await left(there, PERMITS) == 2
        assert round(await left(there, COST)) == round(before)


async def test_limits_that_are_gone_by_now_are_nobodys(path: Path) -> None:
    config = limited()
    plain = {**LIMITS, "tenant": {"concurrency": 2}}
    async with relay(path, config) as driver:
        async with brain(path, config):
            owners = [await submitted(driver) for _ in range(2)]
        await eventually(lambda: not driver.ready)
        async with brain(path, limited(limits=plain)) as second:
            await eventually(lambda: driver.ready)
            assert await left(second, PERMITS) == 0
            end(driver, owners[0])
            await eventually(lambda: len(second.records) == 1)
            assert await left(second, PERMITS) == 1
        await eventually(lambda: not driver.ready)
        async with brain(path, settings()) as third:
            await eventually(lambda: driver.ready)
            assert third.driver.snapshot().limits.held == 0
            end(driver, owners[1])
            await eventually(lambda: len(third.records) == 1)


@pytest.mark.parametrize("in_vain", [True, False])
async def test_of_one_that_ends_while_it_waits_for_a_brain_all_comes_back(
    path: Path, in_vain: bool, server: Server
) -> None:
    one_at_once = WORKER.model_copy(update={"concurrency_max": 1})
    wait_s = 0.05 if in_vain else 60.0
    config = limited(
        workers=[one_at_once.model_dump()], relays={"count": 1, "brain_wait_s": wait_s}
    )
    async with relay(path, config) as driver, routers([server.url], 2) as (one, two):
        async with brain(path, config, buckets=one) as first:
            runs, waits = await submitted(driver), Owner()
            driver.submit(SPEC, waits)
            await eventually(lambda: waits.ticket.reservation is not None)
            assert await left(first, PERMITS) == 0
        await eventually(lambda: not driver.ready)
        if in_vain:
            await eventually(lambda: waits.told == ["refuse"])
        else:
            driver.finished(waits.ticket, Outcome.ABORTED, None, None)
        driver.left(waits)
        end(driver, runs)
        async with brain(path, config, buckets=two) as second:
            await eventually(lambda: len(second.records) == 1)
            await until_left(second, PERMITS, 2)
            assert round(await left(second, COST)) == 1000 - 150


@pytest.mark.parametrize("leased", [True, False])
async def test_in_redis_they_are_settled_once_by_whoever_lives(
    path: Path, leased: bool, server: Server
) -> None:
    """What runs is held by the next brain, whether the last one had it of a lease or not."""
    tenant = {"concurrency": 60, "cost_per_s": 0.001, "cost_burst": 10_000.0}
    config = limited(limits={**LIMITS, "tenant": tenant, "lease_s": 10.0})
    async with relay(path, config) as driver, routers([server.url], 2, lease_s=10.0) as stores:
        one, two = [
            LeasedBuckets(store, LimitsSettings(batch_s=5.0 * leased), name=name, loop=driver._loop)
            for name, store in zip("ab", stores, strict=True)
        ]
        async with brain(path, config, buckets=one) as first:
            owners = [await submitted(driver) for _ in range(12)]
            assert all(owner.told == ["dispatch"] for owner in owners)
            assert bool(one._running) is leased
            for owner in owners[:4]:  # they end under the brain that granted it
                end(driver, owner)
            await eventually(lambda: len(first.records) == 4)
            await eventually(lambda: not one.view().unsettled)
            stores[0]._drop_connection()
        await eventually(lambda: not driver.ready)
        end(driver, owners[4])  # under none
        async with brain(path, config, buckets=two) as second:
            await eventually(lambda: len(second.records) == 1)
            assert second.driver.snapshot().limits.held == two.view().held == 7
            for owner in owners[5:]:
                end(driver, owner)
            await eventually(lambda: len(second.records) == 8)
            assert second.driver.snapshot().limits.held == 0
            await eventually(lambda: not two.view().unsettled)
            taken = 10_000 - await left(second, COST)
            if not leased:
                assert round(taken) == 12 * 150
                assert await left(second, PERMITS) == 60
                return
            # Cost that the lease had ahead is lost; its permits come back when it is over.
            assert 12 * 150 - 4 * 40 - 1 <= taken <= 10_000 / 3
            with server.admin() as admin:
                (key,) = admin.keys(f"*{PERMITS}")
                held = admin.zrange(key, 0, -1)
                assert held
                assert all(b":lease:" in member for member in map(_bytes, held))


async def test_what_another_process_reserved_is_renewed_and_settled(server: Server) -> None:
    held, free = permits(1), cost(100.0, debt_max=100.0)
    async with routers([server.url], 2, lease_s=10.0) as (one, two):
        first = ask((held, 1.0), (free, 40.0), lease_s=10.0)
        assert await granted(one, first) == [True]
        one._drop_connection()
        with server.admin() as admin:
            (name,) = admin.keys("*:reservation:*")
            admin.pexpire(name, 5000)
            two.adopt(Ask(first.reservation_id, first.charges, Priority.P1, 10.0, adopted=True))
            await eventually(lambda: admin.pttl(name) > 5000)
        assert (await bucket(two, held), await bucket(two, free)) == (0, 60)
        two.settle(used(first, 1.0, 55.0))
        two.settle(used(first, 1.0, 55.0))
        assert (await bucket(two, held), await bucket(two, free)) == (1, 45)


async def test_what_came_from_a_lease_takes_permits_and_no_more(server: Server) -> None:
    held, free = permits(1), cost(100.0, debt_max=100.0)
    async with routers([server.url]) as (store,):
        asks = [ask((held, 1.0), (free, 40.0)) for _ in range(2)]
        for each in asks:
            store.adopt(Ask(each.reservation_id, each.charges, Priority.P1, 10.0, adopted=True))
        third = ask((held, 1.0))
        assert await granted(store, third) == [False]
        assert await bucket(store, free) == 100
        store.settle(used(asks[0], 1.0, 70.0))
        assert await granted(store, ask((held, 1.0))) == [False], "of one permit, one is held"
        assert await bucket(store, free) == 70
        store.settle(asks[1].given_back())
        assert await granted(store, ask((held, 1.0))) == [True]


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


async def test_leases_of_a_router_that_died_end_soon(path: Path, server: Server) -> None:
    """However long reservations of requests last."""
    config = limited(limits={**LIMITS, "tenant": {"concurrency": 60}})
    async with relay(path, config) as driver, routers([server.url]) as (store,):
        leased = LeasedBuckets(store, LimitsSettings(), name="a", loop=driver._loop)
        async with brain(path, config, buckets=leased):
            owners = [await submitted(driver) for _ in range(12)]
            assert leased._running
            with server.admin() as admin:
                (lease,) = admin.keys("*:lease:*")
                assert 0 < admin.ttl(lease) <= 30
            for owner in owners:
                end(driver, owner)


@pytest.mark.parametrize("hangs", [False, True])
async def test_permits_that_nobody_holds_any_more_are_given_to_others_at_once(
    path: Path, hangs: bool, server: Server
) -> None:
    """What a brain that died had ahead, or was granting: not while a relay has not spoken."""
    tenant = {"concurrency": 30}
    config = limited(limits={**LIMITS, "tenant": tenant}, relays={"count": 1 + hangs})
    async with relay(path, config) as driver, routers([server.url], 2) as stores:
        one, two = [
            LeasedBuckets(store, LimitsSettings(), name=f"router.{name}", loop=driver._loop)
            for name, store in zip("ab", stores, strict=True)
        ]
        async with brain(path, config, buckets=one) as first:
            runs = [await submitted(driver) for _ in range(12)]
            assert one._running
            lost = ask(*[(r, 1.0) for r in rules_of(first)])
            name = f"{first.driver.dispatcher.router_id}:lost"
            assert await granted(one, Ask(name, lost.charges, Priority.P1, 60.0)) == [True]
            stores[0]._drop_connection()
        await eventually(lambda: not driver.ready)
        with server.admin() as admin:
            (key,) = admin.keys(f"*{PERMITS}")
            assert admin.zcard(key) > 12
        async with brain(path, config, buckets=two) as second:
            await eventually(lambda: driver.ready and two.view().held == 12)
            more = [await submitted(driver) for _ in range(30 - 12)]
            told = [owner.told for owner in more]
            assert (told == [["dispatch"]] * 18) is not hangs
            assert (await submitted(driver)).told == ["refuse"]
            if not hangs:
                assert second.streams == 30
                assert await left(second, PERMITS) == 0
            for owner in (*runs, *(owner for owner in more if owner.told == ["dispatch"])):
                end(driver, owner)
            await eventually(lambda: not second.driver.snapshot().limits.held)
            if not hangs:
                await until_left(second, PERMITS, 30)


def rules_of(there: Brain) -> list[Rule]:
    rule = there.driver.dispatcher.reserving.limits.rule(PERMITS, "anonymous")
    assert rule is not None
    return [rule]


async def test_one_that_is_to_be_asked_again_is_decided_once_if_redis_goes(server: Server) -> None:
    held = permits(1)
    async with routers([server.url]) as (store,):
        connection, verdicts = store._connection, list[Verdict]()
        assert connection is not None
        store._reclaim(connection, [held], ask((held, 1.0)), verdicts.append)
        assert not verdicts, "the permits of those who died are looked for"
        store._drop_connection()
        assert len(verdicts) == 1
        assert await granted(store, ask((held, 1.0)))  # some turns later
        assert len(verdicts) == 1
