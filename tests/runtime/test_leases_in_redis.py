"""Leases over real servers: exact across routers, and given back whatever happens to either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.config import Config
from router.core.bucket import (
    Ask,
    DecidedBy,
    Rule,
    Settlement,
)
from router.limit_settings import LimitsSettings
from router.runtime.leased_buckets import LeasedBuckets
from tests.redis_servers import Server
from tests.runtime.limit_world import ask, cost, decided, granted, left, permits, routers, used

LIMITS = LimitsSettings()  # as it ships
BATCH_S = LIMITS.batch_s


@pytest.fixture
def server(server_of_each_kind: Server) -> Server:
    return server_of_each_kind


@asynccontextmanager
async def leased(
    server: Server, number: int = 1, **limits: Any
) -> AsyncIterator[list[LeasedBuckets]]:
    """Routers with leases in one Redis."""
    async with routers([server.url], number, **limits) as stores:
        loop = asyncio.get_running_loop()
        found = [
            LeasedBuckets(store, LIMITS, name=f"r{n}", loop=loop) for n, store in enumerate(stores)
        ]
        for each in found:
            each.replicas = number
        yield found
        for each in found:
            await each.aclose()


async def steady(
    store: LeasedBuckets, *charges: tuple[Rule, float], requests: int = 12
) -> list[Ask]:
    """Ask so often that the store fetches ahead; what was granted and runs."""
    asks = [ask(*charges) for _ in range(requests)]
    return [one for one in asks if (await granted(store, one))[0]]


async def until_left(store: LeasedBuckets, rule: Rule, amount: float) -> None:
    """Wait until a bucket in Redis, which answers, holds so much."""
    async with asyncio.timeout(10):
        while True:
            (verdict,) = await decided(store._store, ask((rule, 0.0)))
            if verdict.by is DecidedBy.REDIS and verdict.levels[0].remaining == amount:
                return
            await asyncio.sleep(0.01)


def by_lease(*stores: LeasedBuckets) -> int:
    """How many requests run that leases granted."""
    return sum(len(store._running) for store in stores)


async def test_four_routers_admit_exactly_the_capacity_by_leases_lm01(server: Server) -> None:
    """LM01: capacity without refill, ten times as much asked; 20 runs."""
    async with leased(server, 4) as stores:
        for run in range(20):
            rule, before = cost(2000.0, key=f"run:{run}"), by_lease(*stores)

            async def offer(store: LeasedBuckets, rule: Rule = rule) -> int:
                found = [
                    await granted(store, *(ask((rule, 10.0)) for _ in range(10))) for _ in range(50)
                ]
                return sum(map(sum, found))

            assert sum(await asyncio.gather(*map(offer, stores))) == 200
            assert by_lease(*stores) > before


async def test_four_routers_admit_exactly_the_capacity_of_what_comes_at_once_lm01(
    server: Server,
) -> None:
    async with leased(server, 4) as stores:
        for run in range(20):
            rule = cost(2000.0, key=f"run:{run}")
            asked = [ask((rule, 10.0)) for _ in range(500)]
            found = await asyncio.gather(*(granted(store, *asked[:]) for store in stores))
            assert sum(map(sum, found)) == 200


async def test_a_request_gets_what_more_leases_hold_than_go_back_in_one_call(
    server: Server,
) -> None:
    whole = cost(10_000.0, key="whole")
    tenants = [cost(1e6, key=f"tenant:{number}") for number in range(150)]
    async with leased(server) as (store,):
        for _ in range(3):
            asks = [ask((tenant, 1.0), (whole, 1.0)) for tenant in tenants]
            assert all(await granted(store, *asks))
        rest = await left(store._store, whole)
        assert await granted(store._store, ask((whole, rest))) == [True]
        held = [lease.free[1] for lease in store._leases.values()]
        assert sum(map(bool, held)) == len(tenants)
        large = ask((cost(1e6, key="another"), 1.0), (whole, sum(held)))
        assert await granted(store, large) == [True]


async def test_four_routers_admit_exactly_the_permits_that_there_are(server: Server) -> None:
    """And of those that ended others may run at once, whoever had leased them."""
    held = permits(200)
    async with leased(server, 4) as stores:

        async def offer(store: LeasedBuckets) -> list[Ask]:
            return [one for _ in range(10) for one in await steady(store, (held, 1.0))]

        running = await asyncio.gather(*map(offer, stores))
        assert sum(map(len, running)) == 200
        assert by_lease(*stores) > 0
        for store, asks in zip(stores, running, strict=True):
            for one in asks:
                store.settle(used(one, 1.0))
        await until_left(stores[0], held, 200.0)


async def test_few_requests_ask_redis(server: Server) -> None:
    rule = cost(100_000.0, rate=1e6)
    async with leased(server) as (store,):
        with server.admin() as admin:
            before = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
            asks = await steady(store, (rule, 1.0), (permits(10_000), 1.0), requests=1000)
            granted_here = by_lease(store)
            for one in asks:
                store.settle(used(one, 1.0, 1.0))
            after = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert after - before < 50
    assert granted_here > 900


async def test_what_is_left_comes_back_when_nobody_asks(server: Server) -> None:
    rule, held = cost(1000.0), permits(1000)
    async with leased(server) as (store,):
        asks = await steady(store, (rule, 1.0), (held, 1.0))
        assert by_lease(store) > 0
        await until_left(store, rule, 1000.0 - len(asks))
        await until_left(store, held, 1000.0 - len(asks))
        for one in asks:
            store.settle(used(one, 0.5, 1.0))
        await until_left(store, held, 1000.0)
        await until_left(store, rule, 1000.0 - 0.5 * len(asks))
        with server.admin() as admin:
            for _ in range(500):
                if not admin.keys("*:lease:*"):
                    break
                await asyncio.sleep(0.01)
            assert admin.keys("*:lease:*") == []


async def test_long_requests_hold_their_permits_while_others_come_and_go(server: Server) -> None:
    held = permits(1000)
    async with leased(server) as (store,):
        store._lease_s = 1.8
        running = await steady(store, (held, 1.0))
        ends_at = store._clock() + 3.0
        while store._clock() < ends_at:
            for one in await steady(store, (held, 1.0), requests=5):
                store.settle(used(one, 1.0))
            await asyncio.sleep(0.01)
        await until_left(store, held, 1000.0 - len(running))


async def test_what_is_left_comes_back_at_the_end(server: Server) -> None:
    rule, held = cost(1000.0), permits(1000)
    async with routers([server.url]) as (other,):
        async with leased(server) as (store,):
            asks = await steady(store, (rule, 1.0), (held, 1.0))
            assert await left(other, rule) < 1000.0 - len(asks)
            for one in asks:
                store.settle(used(one, 1.0, 1.0))
        assert await left(other, rule) == 1000.0 - len(asks)
        assert await left(other, held) == 1000.0


async def test_a_dead_routers_permits_come_back(server: Server) -> None:
    held = permits(1000)
    async with routers([server.url], 2) as (dead, living):
        loop = asyncio.get_running_loop()
        short = LIMITS.model_copy(update={"lease_s": 1.0})
        store = LeasedBuckets(dead, short, name="dead", loop=loop)
        asks = await steady(store, (held, 1.0))
        for one in asks:
            if one.reservation_id not in store._running:
                store.settle(used(one, 1.0))
        assert await left(living, held) < 1000.0
        await dead.aclose()
        await asyncio.sleep(1.1)
        assert await left(living, held) == 1000.0
        assert store._timer is not None
        store._timer.cancel()


async def test_a_frozen_redis_leaves_no_more_than_there_was(server: Server) -> None:
    """What is asked when it freezes is told again, and counts once."""
    rule = cost(1000.0)
    async with leased(server, timeout_s=0.05) as (store,):
        asks = await steady(store, (rule, 1.0))
        server.freeze()
        try:
            while (await decided(store, ask((rule, 1.0), priority=asks[0].priority)))[0].by in (
                DecidedBy.LEASE,
                DecidedBy.REDIS,
            ):
                asks.append(asks[0])
        finally:
            server.thaw()
        for one in asks[:12]:
            store.settle(used(one, 1.0))
        await until_left(store, rule, 1000.0 - len(asks))


async def test_a_redis_that_lost_its_data_is_asked_anew(server: Server) -> None:
    rule = cost(1000.0)
    async with leased(server) as (store,):
        await steady(store, (rule, 1.0))
        runs = len(store._running)
        with server.admin() as admin:
            admin.flushall()
        assert len(await steady(store, (rule, 1.0), requests=200)) == 200
        await until_left(store, rule, 1000.0 - 200 - runs)  # of the lease, and since then
        for name in [*store._running]:
            store.settle(Settlement(name, ()))
        for _ in range(500):
            if not store._leases:
                break
            await asyncio.sleep(0.01)
        assert not any(":lease:" in name for name in store._store._held._asks)  # type: ignore[attr-defined]


async def test_leases_end_when_the_setting_is_taken_away(server: Server) -> None:
    rule = cost(1000.0)
    async with leased(server) as (store,):
        asks = await steady(store, (rule, 1.0))
        store.on_config(Config.model_validate({"limits": {"batch_s": 0}}))
        before = by_lease(store)
        asks += await steady(store, (rule, 1.0))
        assert by_lease(store) == before
        await until_left(store, rule, 1000.0 - len(asks))
