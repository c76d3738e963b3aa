"""Limits in Redis hold for all routers together, to the unit, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest

from router.core.bucket import DecidedBy, Family, Rule, Scope
from router.core.types import Priority
from router.runtime.local_buckets import LocalBuckets
from tests.redis_servers import Server
from tests.runtime.limit_world import (
    ask,
    cost,
    decided,
    granted,
    left,
    permits,
    routers,
    slowed,
    used,
)

CLUSTER = Rule("cluster", Scope.CLUSTER, 1000.0, 500.0)
CLASSES = Family(CLUSTER, (("class:p0", 0.6), ("class:p1", 0.35), ("class:p2", 0.05))).rules


@pytest.fixture
def server(server_of_each_kind: Server) -> Server:
    return server_of_each_kind


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
async def test_four_routers_admit_exactly_the_capacity_lm01(server: Server, delay_s: float) -> None:
    """LM01: capacity without refill, ten times as much asked at once; 20 runs, also over 20 ms."""
    async with (
        slowed(server.port, delay_s) as port,
        routers([f"redis://127.0.0.1:{port if delay_s else server.port}"], 4) as stores,
    ):
        for run in range(20):
            rule = cost(100.0, key=f"run:{run}")
            answers = await asyncio.gather(
                *(decided(store, *(ask((rule, 10.0)) for _ in range(25))) for store in stores)
            )
            verdicts = [verdict for found in answers for verdict in found]
            assert sum(verdict.granted for verdict in verdicts) == 10
            assert {verdict.by for verdict in verdicts} == {DecidedBy.REDIS}


async def test_with_refill_they_admit_rate_times_time(server: Server) -> None:
    """The server's clock counts: the routers' are half a minute apart, and nobody cares."""
    rate, burst, seconds, amount = 400.0, 800.0, 2.0, 4.0
    rule, total = cost(burst, rate=rate), burst
    async with routers([server.url], 4) as stores:
        for number, store in enumerate(stores):
            skew_s = (number - 1.5) * 20
            store._clock = lambda skew_s=skew_s: time.monotonic() + skew_s  # type: ignore[misc]
        earliest = time.monotonic()
        assert await granted(stores[0], ask((rule, burst))) == [True]  # a full one refills nothing
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            answers = await asyncio.gather(
                *(granted(store, *(ask((rule, amount)) for _ in range(60))) for store in stores)
            )
            total += amount * sum(map(sum, answers))
            await asyncio.sleep(0.01)
        least = burst + rate * (time.monotonic() - began)
        total += await left(stores[0], rule)
        most = burst + rate * (time.monotonic() - earliest)
    assert 0.99 * least <= total <= 1.01 * most


async def test_all_or_nothing_lm03(server: Server) -> None:
    """LM03: who is refused by concurrency has cost the other bucket nothing."""
    requests = Rule("t:requests", Scope.TENANT_REQUESTS, 0.0, 2.0)
    async with routers([server.url]) as (store,):
        first = ask((requests, 1.0), (permits(1), 1.0))
        assert await granted(store, first) == [True]
        (refused,) = await decided(store, ask((requests, 1.0), (permits(1), 1.0)))
        assert (refused.granted, refused.scope) == (False, Scope.TENANT_CONCURRENCY)
        store.settle(used(first, 1.0, 1.0))
        assert await granted(store, ask((requests, 1.0), (permits(1), 1.0))) == [True]


async def test_a_big_cost_leaves_room_for_small_ones_lm07(server: Server) -> None:
    """LM07: 10 without refill; 8, 3, 2, 1: yes, no, yes, no; asked together or one by one."""
    async with routers([server.url]) as (store,):
        together = [ask((cost(10.0, key="a"), amount)) for amount in (8, 3, 2, 1)]
        assert await granted(store, *together) == [True, False, True, False]
        one_by_one = [
            (await granted(store, ask((cost(10.0, key="b"), amount))))[0] for amount in (8, 3, 2, 1)
        ]
        assert one_by_one == [True, False, True, False]


async def test_what_was_not_used_comes_back_once_lm05(server: Server) -> None:
    """LM05: settled for what was used, whoever asks next finds the rest; a debt stays a debt."""
    rule = cost(100.0, debt_max=50.0)
    async with routers([server.url], 2) as (here, there):
        first = ask((rule, 80.0))
        assert await granted(here, first) == [True]
        assert await left(there, rule) == 20.0
        here.settle(used(first, 15.0))
        here.settle(used(first, 0.0))  # not its second word
        assert await left(here, rule) == 85.0
        assert await left(there, rule) == 85.0
        second = ask((rule, 85.0))
        assert await granted(there, second) == [True]
        there.settle(used(second, 500.0))
        (verdict,) = await decided(there, ask((rule, 1.0)))
        assert (verdict.granted, verdict.wait_s) == (False, None)  # no refill, nobody knows
        assert there.view().unsettled == 0


async def test_the_wait_is_long_enough_lm15(server: Server) -> None:
    """LM15: after the wait that was told the same ask passes, well before it does not."""
    rule = cost(10.0, rate=20.0)
    async with routers([server.url]) as (store,):
        assert await granted(store, ask((rule, 10.0))) == [True]
        (refused,) = await decided(store, ask((rule, 8.0)))
        assert refused.wait_s == pytest.approx(0.4, abs=0.1)
        await asyncio.sleep((refused.wait_s or 0.0) / 2)
        (again,) = await decided(store, ask((rule, 8.0)))
        assert not again.granted
        assert again.wait_s is not None
        await asyncio.sleep(again.wait_s + 0.005)
        assert await granted(store, ask((rule, 8.0))) == [True]


async def test_a_cost_above_the_capacity_never_fits(server: Server) -> None:
    async with routers([server.url]) as (store,):
        (verdict,) = await decided(store, ask((cost(10.0, rate=1.0), 10.5)))
        assert (verdict.granted, verdict.never, verdict.wait_s) == (False, True, None)


async def test_every_key_has_a_time_to_live_and_a_planted_one_heals_lm13(server: Server) -> None:
    """LM13: also keys of another kind, keys that hold nonsense, and one that is empty for ever."""
    rng, rates = Random(5), [cost(50.0, rate=5.0, key=f"k{n}") for n in range(8)]
    with server.admin() as admin:
        admin.set("{laneway}:k0", "nonsense")
        admin.hset("{laneway}:k1", "a", "1")
        admin.set("{laneway}:k2", f"-1e300 {time.time()}")
        admin.set("{laneway}:k3", f"0 {time.time() + 1e9}")
        admin.set("{laneway}:t:concurrency", "nonsense")
        admin.zadd("{laneway}:held", {"planted": 9e18})
        async with routers([server.url]) as (store,):
            for _ in range(200):
                some = [(rule, 1.0) for rule in rng.sample(rates, 3)]
                one = ask(*some, (permits(9), 1.0), (CLASSES["class:p2"], 2.0))
                if (await granted(store, one))[0] and rng.random() < 0.9:
                    store.settle(used(one, *(0.5 for _ in one.charges)))
            assert await granted(store, ask((permits(1, "held"), 1.0))) == [True]
            for rule in rates:
                await granted(store, ask((rule, 49.0)))
        lives = {key: admin.pttl(key) for key in admin.scan_iter()}
    assert len(lives) > 15
    assert [key for key, life in lives.items() if not 0 < life <= 31 * 86_400_000] == []


async def test_a_clock_that_went_back_takes_nothing_and_counts_from_then_on(
    server: Server,
) -> None:
    """As that of a stand-in may be behind the clock of the server that failed."""
    rule = cost(1e6, rate=1000.0, key="ahead")
    with server.admin(decode_responses=True) as admin:
        now = admin.time()[0]
        admin.set("{laneway}:ahead", f"500000 {now + 3600}", px=60_000)
        async with routers([server.url]) as (store,):
            assert await granted(store, ask((rule, 4e5)), ask((rule, 4e5))) == [True, False]
        _, moment = admin.get("{laneway}:ahead").split()
    assert now <= float(moment) < now + 1800


async def test_idle_buckets_vanish_when_they_are_full(server: Server) -> None:
    async with routers([server.url]) as (store,):
        await granted(store, ask((cost(50.0, rate=5.0), 10.0)))
        with server.admin() as admin:
            assert 60_000 < int(admin.pttl("{laneway}:t:cost")) <= 62_000


async def test_a_dead_routers_permits_come_back(server: Server) -> None:
    async with routers([server.url], 2) as (dead, living):
        assert await granted(dead, ask((permits(1), 1.0), lease_s=0.3)) == [True]
        await dead.aclose()  # which settles nothing that its owner has not ended
        assert await granted(living, ask((permits(1), 1.0))) == [False]
        await asyncio.sleep(0.31)
        assert await granted(living, ask((permits(1), 1.0))) == [True]


async def test_a_long_requests_permit_is_renewed(server: Server) -> None:
    async with routers([server.url]) as (store,):
        long = ask((permits(1), 1.0), lease_s=1.8)
        assert await granted(store, long) == [True]
        await asyncio.sleep(2.4)
        assert await granted(store, ask((permits(1), 1.0))) == [False]
        store.settle(used(long, 1.0))
        assert await granted(store, ask((permits(1), 1.0))) == [True]


async def test_classes_lend_what_they_do_not_need_and_keep_their_guarantee(server: Server) -> None:
    async with routers([server.url], 2) as (one, other):
        free = [ask((CLASSES["class:p2"], 5.0), priority=Priority.P2) for _ in range(30)]
        taken = sum(await granted(one, *free)) * 5.0
        assert 25 <= taken <= 80  # its part of the burst, and of what was refilled meanwhile
        premium = [ask((CLASSES["class:p0"], 10.0), priority=Priority.P0) for _ in range(30)]
        assert all(await granted(other, *premium))


async def test_limits_stay_in_redis_when_the_shares_change(server: Server) -> None:
    """What ends by the old shares goes with what is asked by the new ones, either way round."""
    two = Family(CLUSTER, (("class:p0", 0.6), ("class:p1", 0.4))).rules
    plain = [Rule(key, Scope.CLASS, r.rate_per_s, r.burst) for key, r in CLASSES.items()]
    async with routers([server.url]) as (store,):
        for old, new in (
            ([*two.values()], [*CLASSES.values()]),
            ([*CLASSES.values()], [*two.values()]),
            (plain, [*CLASSES.values()]),
            ([*CLASSES.values()], [*plain, CLUSTER]),
        ):
            before = [ask((rule, 1.0)) for rule in old]
            assert all(await granted(store, *before))
            for one in before:
                store.settle(used(one, 0.5))
            after = [ask((rule, 1.0)) for rule in reversed(new)]
            found = await decided(store, *after)
            assert [(v.granted, v.by) for v in found] == [(True, DecidedBy.REDIS)] * len(new)
            assert [v.levels[0].limit for v in found] == [rule.burst for rule in reversed(new)]
            for one in after:
                store.settle(used(one, 1.0))
        await left(store, CLUSTER)
        assert (store.view().unsettled, store.view().settlements_lost) == (0, 0)


async def test_what_the_script_fails_on_is_lost_and_nothing_else(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    rule = cost(100.0)
    async with routers([server.url]) as (store,):
        asks = [ask((rule, 10.0)) for _ in range(5)]
        assert all(await granted(store, *asks))
        connection = store._connection
        with server.admin() as admin:
            for bad in asks[:2]:
                (key,) = admin.keys(f"*reservation:{bad.reservation_id}")
                admin.set(key, "planted")
        for one in asks:
            store.settle(used(one, 0.0))
        (verdict,) = await decided(store, ask((rule, 1.0)))
        assert (verdict.granted, verdict.by) == (True, DecidedBy.LOCAL)
        for _ in range(500):
            if not store.view().unsettled:
                break
            await asyncio.sleep(0.01)
        assert (store.view().unsettled, store.view().settlements_lost) == (0, 2)
        assert await left(store, rule) == 80.0
        assert store._connection is connection
    assert [r.getMessage()[:35] for r in caplog.records if r.levelname == "WARNING"] == [
        "the script of the limits failed in "
    ]


async def test_asks_of_one_turn_take_one_round_trip(server: Server) -> None:
    async with routers([server.url]) as (store,):
        with server.admin() as admin:
            before = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
            asks = [ask((cost(1000.0), 1.0)) for _ in range(50)]
            await decided(store, *asks)
            for one in asks:
                store.settle(used(one, 1.0))
            await left(store, cost(1000.0))
            after = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert after - before == 2  # all asks; what they settle, with one more


async def test_without_redis_limits_are_kept_in_the_process_cf05() -> None:
    """CF05: the same port, decided at once."""
    store, rule = LocalBuckets(), cost(100.0)
    asks = [ask((rule, 10.0)) for _ in range(25)]
    verdicts = await decided(store, *asks)
    assert sum(verdict.granted for verdict in verdicts) == 10
    assert verdicts[0].by is DecidedBy.MEMORY
    store.settle(used(asks[0], 0.0))
    assert await left(store, rule) == 10.0
    await store.aclose()
