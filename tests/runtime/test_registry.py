"""Routers that share a registry in a real Valkey: what one is told of workers, all know."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import pairwise
from typing import Any

import pytest

from router.contract import WorkerSpec
from router.core.membership import Entry
from router.core.replicas import Standing
from router.core.types import Endpoint, RequestSpec, WorkerState
from router.errors import Reason, Refused
from router.redis_settings import RedisSettings
from router.runtime.redis_link import RedisLink
from router.runtime.registry_store import (
    RegistryStore,
)
from tests import redis_servers
from tests.redis_servers import Server
from tests.runtime.registry_world import (
    ENDED,
    Asked,
    W,
    router,
    routers,
    spec,
    sync,
    until,
)


async def test_a_worker_that_one_is_told_of_is_known_to_all_within_a_second(server: Server) -> None:
    async with routers(server, "a", "b", sync_interval_s=0.2, ttl_s=3.0) as (a, b):
        assert await a.registry.add(spec(cost=2.0, api_key="secret"))
        await until(lambda: b.has("w"), 1.0)
        (view,) = b.driver.snapshot().workers
        assert view.spec == spec(cost=2.0, api_key="secret")


async def test_one_that_has_met_the_others_knows_their_workers(server: Server) -> None:
    async with router(server, "a") as a:
        await a.registry.add(spec())
        async with router(server, "b") as b:
            assert b.has()
            await b.registry.met(within_s=5.0)
            assert b.has("w")


async def test_a_router_asks_more_rarely_while_it_knows_of_no_other(server: Server) -> None:
    async with router(server, "a", sync_interval_s=0.02, ttl_s=1.2) as a:
        store, asked_at = a.registry._store, list[float]()
        assert store is not None
        sync = store.sync

        async def watched(*args: Any, **figures: Any) -> Any:
            asked_at.append(time.monotonic())
            return await sync(*args, **figures)

        store.sync = watched  # type: ignore[method-assign]
        await until(lambda: len(asked_at) == 4)
        assert all(later - before >= 0.9 * 0.2 for before, later in pairwise(asked_at))
        async with router(server, "b", sync_interval_s=0.02, ttl_s=1.2) as b:
            await until(lambda: a.is_with("ab"), 1.0)
            assert await b.registry.add(spec())
            await until(lambda: a.has("w"), 1.0)


async def test_a_redis_that_is_away_is_not_waited_for() -> None:
    with redis_servers.single() as gone:
        gone.kill()
        async with router(gone, "a") as a:
            async with asyncio.timeout(4.0):
                await a.registry.met(within_s=60.0)
            assert a.has()


async def test_a_change_and_a_drain_at_one_hold_at_all(server: Server) -> None:
    async with routers(server, "a", "b") as (a, b):
        await a.registry.add(spec())
        await until(lambda: b.has("w"))
        assert await b.registry.change(spec(cost=3.0))
        await until(lambda: [v.spec.cost for v in a.driver.snapshot().workers] == [3.0])
        b.answer()
        b.driver.submit(RequestSpec("r", Endpoint.CHAT), Asked())  # type: ignore[arg-type]
        assert await a.registry.remove(spec(), drain_s=60.0, barred=True)
        await until(lambda: b.workers() == {"w": WorkerState.DRAINING.value})
        assert a.has()
        # Who drains it still has the name; who does not may register it again.
        await a.registry.add(spec(cost=4.0))
        assert b.workers() == {"w": WorkerState.DRAINING.value}
        b.driver.finished(b.driver.tickets()[0], *ENDED)
        await until(lambda: b.workers() == {"w": WorkerState.JOINING.value})
        assert b.driver.snapshot().workers[0].spec.cost == 4.0


async def test_the_same_worker_twice_is_a_conflict_wherever_it_was_registered(
    server: Server,
) -> None:
    async with routers(server, "a", "b", sync_interval_s=0.6, ttl_s=20.0) as (a, b):
        await a.registry.add(spec())
        for again in (spec(), spec(id="other"), spec(url="http://x:1")):
            with pytest.raises(Refused) as refused:
                await b.registry.add(again)
            assert refused.value.reason is Reason.CONFLICT


async def test_what_was_removed_at_one_cannot_be_changed_at_another(server: Server) -> None:
    async with routers(server, "a", "b", sync_interval_s=0.3, ttl_s=20.0) as (a, b):
        await a.registry.add(spec())
        await until(lambda: b.has("w"))
        await a.registry.remove(spec(), drain_s=0.0, barred=True)
        with pytest.raises(Refused) as refused:
            await b.registry.change(spec(cost=2.0))
        assert refused.value.reason is Reason.NOT_FOUND


async def test_an_agent_does_not_bring_back_at_one_what_was_removed_at_another(
    server: Server,
) -> None:
    async with routers(server, "a", "b") as (a, b):
        await a.registry.add(spec(ttl_s=30.0))
        await until(lambda: b.has("w"))
        await b.registry.remove(spec(), drain_s=0.0, barred=True)
        await until(a.has)
        with pytest.raises(Refused) as refused:
            await a.registry.add(spec(ttl_s=30.0))
        assert refused.value.reason is Reason.REMOVED
        await a.registry.add(spec())  # an operator does
        await until(lambda: b.has("w"))
        # An agent that withdrew by itself may come back.
        await a.registry.remove(spec(), drain_s=0.0, barred=False)
        await until(b.has)
        await b.registry.add(spec(ttl_s=30.0))
        await until(lambda: a.has("w"))


async def test_operators_workers_survive_all_routers_and_agents_leases_end(server: Server) -> None:
    async with routers(server, "a", "b") as (a, _):
        await a.registry.add(spec())
        await a.registry.add(spec(url="http://agent:1", id="agent", ttl_s=1.0))
    async with routers(server, "c") as (c,):
        await until(lambda: "w" in c.workers())
        await until(lambda: c.has("w"))
        assert c.has("w")
        await until(lambda: c.registry.view().workers == 1)
        await until(lambda: not c.has("agent"))


async def test_a_lease_goes_on_while_one_router_hears_of_the_worker(server: Server) -> None:
    async with routers(server, "a", "b") as (a, b):
        await a.registry.add(spec(ttl_s=1.0))
        await until(lambda: b.has("w"))
        ends_at = time.monotonic() + 1.6
        while time.monotonic() < ends_at:
            a.answer()
            await asyncio.sleep(0.05)
        assert a.has("w")
        # b heard nothing and let it go; it does not come and go there all the time.
        assert b.registry.view().workers == 1


async def test_a_pause_of_redis_that_is_longer_than_a_lease_ends_no_lease(
    own_server: Server,
) -> None:
    async with routers(own_server, "a", "b") as (a, b):
        await a.registry.add(spec(ttl_s=1.0))
        await until(lambda: b.has("w"))
        own_server.freeze()
        try:
            ends_at = time.monotonic() + 1.3
            while time.monotonic() < ends_at:
                a.answer()
                b.answer()
                await asyncio.sleep(0.05)
        finally:
            own_server.thaw()
        await until(lambda: a.registry.view().standing is Standing.TOGETHER)
        await until(lambda: b.registry.view().standing is Standing.TOGETHER)
        assert [each.has("w") for each in (a, b)] == [True, True]
        assert a.registry.view().workers == 1


async def test_workers_of_the_file_are_its_routers_until_somebody_touches_them(
    server: Server,
) -> None:
    filed = spec(url="http://file:1", id="file")
    async with (
        router(server, "a", workers=(filed,)) as a,
        router(server, "b", workers=(filed,)) as b,
        router(server, "c") as c,
    ):
        await until(lambda: len(c.replicas()) == 3)
        assert (a.has("file"), c.has()) == (True, True)
        await a.registry.change(filed.model_copy(update={"cost": 5.0}))
        await until(lambda: c.has("file"))
        await until(lambda: b.driver.snapshot().workers[0].spec.cost == 5.0)
        await b.registry.remove(filed, drain_s=0.0, barred=True)
        await until(lambda: a.has() and c.has())
    async with router(server, "d", workers=(filed,)) as d:
        await until(lambda: d.registry.view().standing is Standing.TOGETHER)
        await asyncio.sleep(0.1)
        assert d.has("file"), "its file names it, and it started after the removal"


async def test_a_worker_that_can_not_join_keeps_no_other_from_it(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.ERROR, "router.runtime.members")
    async with routers(server, "a", "b") as (a, b):
        join, broken = b.driver.on_worker_joined, True

        def on_worker_joined(joined: WorkerSpec) -> None:
            if broken and joined.worker_id == W:
                raise RuntimeError("it can't")
            join(joined)

        monkeypatch.setattr(b.driver, "on_worker_joined", on_worker_joined)
        await a.registry.add(spec())
        for name in ("x", "y"):
            await a.registry.add(spec(url=f"http://{name}:1", id=name))
        await until(lambda: b.has("x", "y"))
        await asyncio.sleep(0.1)
        assert len(caplog.records) == 1, "said once, tried each time"
        broken = False
        await until(lambda: b.has("w", "x", "y"))


async def test_what_is_no_registry_is_said_and_changes_nothing(server: Server) -> None:
    async with routers(server, "a") as (a,):
        await a.registry.add(spec())
        with server.admin() as admin:
            admin.hset("{laneway:registry}:workers", "x", "nonsense")
            admin.hincrby("{laneway:registry}:state", "version", 1)
        await until(lambda: a.registry.view().standing is Standing.AWAY)
        assert "a worker in the registry" in a.registry.view().why_away
        assert a.has("w")
        with server.admin() as admin:
            admin.hdel("{laneway:registry}:workers", "x")
        await until(lambda: a.registry.view().standing is Standing.TOGETHER)


async def test_one_server_serves_clusters_of_routers_apart(server: Server) -> None:
    link = RedisLink(RedisSettings(mode="single", urls=(server.url,)))
    one, other = (RegistryStore(link, prefix=prefix) for prefix in ("p", "q"))
    try:
        await one.put("new", Entry(spec=spec(), stamp="s"))
        assert list((await sync(one)).entries or {}) == [W]
        assert (await sync(other)).entries == {}
    finally:
        await link.aclose()


async def test_the_scripts_run_on_a_cluster() -> None:
    with redis_servers.cluster() as nodes:
        link = RedisLink(RedisSettings(mode="cluster", urls=(nodes[1].url,)))
        store = RegistryStore(link, prefix="p")
        try:
            assert (await store.put("new", Entry(spec=spec(), stamp="s"))).verdict == "ok"
            heard = await sync(store)
            assert heard.entries == {W: Entry(spec=spec(), stamp="s")}
            assert list(heard.replicas) == ["me"]
            gone = await store.remove(W, "http://w:1", drain_s=1.5, barred=True, remembered_s=60.0)
            assert (gone.drain_until_ms - gone.at_ms, gone.until_ms - gone.at_ms) == (1500, 61_500)
            await store.leave("me")
        finally:
            await link.aclose()
