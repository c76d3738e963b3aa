"""Redis with stand-ins: Sentinel and Cluster lead to whoever takes writes now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.core.bucket import Ask, DecidedBy
from router.runtime.redis_buckets import RedisBuckets
from router.runtime.redis_link import RedisLink
from tests.redis_servers import BINARIES, VALKEY, Server, cluster, with_sentinels
from tests.runtime.limit_world import ask, cost, decided, granted, routers
from tests.runtime.test_redis_away import by_redis
from tests.runtime.test_redis_link import again, settings_of

_WITHIN_S = 12.0  # of which the Sentinels or the nodes need most
_TIMEOUT_S = 0.1
_SENTINEL_WAITS_S = 6.0  # less than it lets a replaced master be


async def test_sentinel_leads_to_the_stand_in_of_a_dead_master() -> None:
    with with_sentinels(VALKEY) as (master, replica, sentinels):
        urls = [each.url for each in sentinels]
        async with (
            linked("sentinel", *sentinels) as link,
            routers(urls, 2, mode="sentinel", timeout_s=_TIMEOUT_S) as stores,
        ):
            rule = cost(100.0)
            assert await granted(stores[0], ask((rule, 60.0))) == [True]
            await again(link)
            await _has_all_of(replica, master)
            master.kill()
            await again(link, within_s=_WITHIN_S)
            assert (await link.endpoint("k")).port == replica.port
            for store in stores:
                await by_redis(store, within_s=_WITHIN_S)
            assert await granted(stores[1], ask((rule, 60.0)), ask((rule, 40.0))) == [False, True]


async def test_a_master_that_was_replaced_is_left_although_it_still_takes_writes() -> None:
    """Sentinel lets the old one be for some eight seconds: what it is told is lost."""
    with with_sentinels(BINARIES[-1]) as (master, replica, sentinels):
        urls = [each.url for each in sentinels]
        async with (
            linked("sentinel", *sentinels) as link,
            routers(urls, 2, mode="sentinel", timeout_s=_TIMEOUT_S) as stores,
        ):
            rule = cost(100.0)
            assert await granted(stores[0], ask((rule, 60.0))) == [True]
            await again(link)
            await _has_all_of(replica, master)
            with sentinels[0].admin() as admin:
                admin.sentinel_failover("mymaster")
            await _serves(replica, routers=2)
            for store in stores:
                await by_redis(store)
            assert await granted(stores[1], ask((rule, 60.0)), ask((rule, 40.0))) == [False, True]
            assert (await link.endpoint("k")).port == replica.port
            info = await link.ask("INFO", "server")
            assert b"tcp_port:%d\r" % replica.port in info


async def test_a_cluster_decides_on_one_node_and_then_on_its_stand_in() -> None:
    """LM01 on a Cluster too; other keys are reached on whichever node they are."""
    with cluster(VALKEY, replicas=True) as servers:
        urls = [each.url for each in servers]
        async with (
            linked("cluster", servers[1]) as link,
            routers(urls, 4, mode="cluster", timeout_s=_TIMEOUT_S) as stores,
        ):
            for number in range(20):
                await link.ask("SET", f"key{number}", "v")
            ports = {(await link.endpoint(f"key{number}")).port for number in range(20)}
            assert ports == {server.port for server in servers[:3]}
            for store in stores:
                await by_redis(store)
            rule = cost(100.0)
            asks = [[ask((rule, 10.0)) for _ in range(25)] for _ in stores]
            answers = await asyncio.gather(*map(_all_granted, stores, asks))
            assert sum(map(sum, answers)) == 10
            port = (await link.endpoint("{laneway}:any")).port
            next(server for server in servers if server.port == port).kill()
            (verdict,) = await decided(stores[0], ask((cost(10.0), 1.0)))
            assert verdict.by is DecidedBy.LOCAL
            for store in stores:
                await by_redis(store, within_s=_WITHIN_S)


@asynccontextmanager
async def linked(mode: str, *servers: Server) -> AsyncIterator[RedisLink]:
    """A link that is closed in the end."""
    link = RedisLink(settings_of(mode, *servers, timeout_s=2.0, connect_timeout_s=1.0))
    try:
        yield link
    finally:
        await link.aclose()


async def _all_granted(store: RedisBuckets, asks: list[Ask]) -> list[bool]:
    return await granted(store, *asks)


async def _has_all_of(server: Server, master: Server) -> None:
    """Wait until `server` is a replica of `master` and has all that it has."""
    for _ in range(int(_WITHIN_S / 0.05)):
        with server.admin() as admin:
            state = admin.info("replication")
        with master.admin() as admin:
            offset = admin.info("replication")["master_repl_offset"]
        if state.get("master_port") == master.port and state["slave_repl_offset"] >= offset:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it is not its replica")


async def _serves(server: Server, *, routers: int) -> None:
    """Wait until so many routers keep their limits there."""
    names = list[str]()
    for _ in range(int(_SENTINEL_WAITS_S / 0.05)):
        with server.admin() as admin:
            names = [client["name"] for client in admin.client_list()]
        if names.count("laneway-limits") == routers:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"its clients are {names}")
