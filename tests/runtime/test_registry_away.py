"""What the registry keeps and forgets while Redis, or what it held, is away."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial

import orjson
import pytest

from router.contract import WorkerSpec
from router.core.membership import Entry
from router.core.replicas import Standing
from router.core.types import WorkerState
from router.errors import Reason, Refused
from router.redis_settings import RedisSettings
from router.runtime.config_workers import ConfiguredWorkers
from router.runtime.redis_link import RedisLink
from router.runtime.registry_store import (
    RegistryStore,
)
from tests.redis_servers import Server
from tests.runtime.registry_world import (
    W,
    router,
    routers,
    spec,
    sync,
    until,
    with_cost,
)


async def test_while_redis_is_away_nothing_is_lost_and_afterwards_all_agree(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "router.runtime.registry")
    async with routers(own_server, "a", "b") as (a, b):
        await a.registry.add(spec())
        await a.registry.add(spec(url="http://old:1", id="old"))
        await until(lambda: b.has("w", "old"))
        own_server.kill()
        await until(lambda: a.registry.view().standing is Standing.AWAY)
        await until(lambda: b.registry.view().standing is Standing.AWAY)
        # Each does for itself what it is asked to do.
        assert not await a.registry.add(spec(url="http://new:1", id="new"))
        assert not await b.registry.remove(
            spec(url="http://old:1", id="old"), drain_s=0.0, barred=True
        )
        assert (a.has("w", "old", "new"), b.has("w")) == (True, True)
        await asyncio.sleep(0.8)  # longer than a router may be silent
        assert a.registry.view().untold == 1
        assert a.replicas() == {"a", "b"}, "they are not gone, only Redis is"
        assert a.registry.view().leader == ""
        own_server.start()  # and it has forgotten everything
        back_at = time.monotonic()
        await until(lambda: a.has("w", "new") and b.has("w", "new"))
        assert time.monotonic() - back_at < 5.0
        for each in (a, b):
            view = each.registry.view()
            assert (view.standing, view.untold, view.workers) == (Standing.TOGETHER, 0, 2)
    lines = [r.getMessage() for r in caplog.records if "registry is away" in r.getMessage()]
    assert len(lines) == 2, lines  # once each


async def test_all_that_is_said_of_a_worker_while_redis_is_away_is_told_in_its_order(
    own_server: Server,
) -> None:
    old, young = spec(url="http://old:1", id="old"), spec(url="http://new:1", id="new")
    gone = spec(url="http://gone:1", id="gone")
    async with routers(own_server, "a", "b") as (a, b):
        for each in (old, gone):
            await a.registry.add(each)
        await until(lambda: b.has("old", "gone"))
        own_server.freeze()
        try:
            await a.registry.add(young)
            await a.registry.change(with_cost(young, 2.0))
            await a.registry.change(with_cost(young, 3.0))
            await a.registry.remove(old, drain_s=0.0, barred=True)
            await a.registry.add(with_cost(old, 4.0))
            await a.registry.change(with_cost(old, 5.0))
            await a.registry.remove(gone, drain_s=0.0, barred=True)
            again = spec(url="http://gone:1", id="again")
            await a.registry.add(again)
            await a.registry.remove(again, drain_s=0.0, barred=True)
            with pytest.raises(Refused) as refused:
                await a.registry.add(spec(url="http://gone:1", id="gone", ttl_s=30.0))
            assert refused.value.reason is Reason.REMOVED
        finally:
            own_server.thaw()
        for each_router in (a, b):
            await until(partial(each_router.has_costs, {"new": 3.0, "old": 5.0}))
            await until(lambda: a.registry.view().workers == 2)
        await asyncio.sleep(0.1)
        assert [each.has_costs({"new": 3.0, "old": 5.0}) for each in (a, b)] == [True, True]


async def test_a_removal_that_waited_for_redis_takes_out_no_worker_of_a_later_file(
    own_server: Server,
) -> None:
    filed = spec(url="http://file:1", id="file")
    async with router(own_server, "a", workers=(filed,)) as a:
        await until(lambda: a.is_with("a"))
        own_server.freeze()
        try:
            await a.registry.remove(filed, drain_s=0.0, barred=True)
            a.driver.on_worker_joined(filed)  # the file names it again
        finally:
            own_server.thaw()
        await until(lambda: a.is_with("a") and not a.registry.view().untold)
        await asyncio.sleep(0.1)
        assert a.has("file")


async def test_a_registration_whose_answer_was_lost_is_said_again(server: Server) -> None:
    link = RedisLink(RedisSettings(mode="single", urls=(server.url,)))
    store = RegistryStore(link, prefix="p")
    try:
        await store.put("new", Entry(spec=spec(), stamp="s"))
        changed = Entry(spec=spec(cost=2.0), stamp="s")
        assert (await store.put("new", changed)).verdict == "ok"
        assert (await sync(store)).entries == {W: changed}
        assert (await store.put("new", Entry(spec=spec(), stamp="t"))).verdict == "exists"
    finally:
        await link.aclose()


async def test_a_redis_that_has_forgotten_all_gets_no_old_removal_for_a_new_one(
    server: Server,
) -> None:
    filed = spec(url="http://file:1", id="file")
    async with router(server, "a", workers=(filed,)) as a:
        await a.registry.add(spec(url="http://moved:1", id="moved"))
        await a.registry.remove(filed, drain_s=0.0, barred=True)
        await a.registry.remove(spec(url="http://moved:1", id="moved"), drain_s=0.0, barred=True)
        await a.registry.add(spec(url="http://moved:2", id="moved"))
        await until(lambda: a.registry.view().workers == 1)
        async with router(server, "b", workers=(filed,)) as b:
            await until(lambda: b.has("file", "moved"))
            epoch = a.registry._known.epoch
            with server.admin() as admin:
                admin.flushall()
            await until(lambda: epoch not in (a.registry._known.epoch, b.registry._known.epoch))
            await until(lambda: a.registry.view().workers == b.registry.view().workers == 1)
            await asyncio.sleep(0.1)
            assert (a.has("moved"), b.has("file", "moved")) == (True, True)
            with pytest.raises(Refused) as refused:  # and it still bars its agent
                await b.registry.add(spec(url="http://moved:1", id="m", ttl_s=30.0))
            assert refused.value.reason is Reason.REMOVED


async def test_a_removal_that_is_said_again_keeps_its_time_and_takes_nothing_out(
    server: Server,
) -> None:
    link = RedisLink(RedisSettings(mode="single", urls=(server.url,)))
    store = RegistryStore(link, prefix="p")
    try:
        gone = await store.remove(W, "http://w:1", drain_s=1.5, barred=True, remembered_s=60.0)
        late = await store.remove(
            W, "http://w:4", drain_s=1.5, barred=True, remembered_s=60.0, age_s=9.0
        )
        assert gone.at_ms - 9000 <= late.at_ms < gone.at_ms - 4000
        assert late.until_ms - late.at_ms == 61_500
        lost = replace(gone, at_ms=gone.at_ms - 5000, url="http://w:2", barred=False)
        older = replace(gone, at_ms=gone.at_ms - 5000)
        over = replace(gone, until_ms=gone.at_ms - 1, drain_until_ms=gone.at_ms - 2,
                       at_ms=gone.at_ms - 9, url="http://w:3")  # fmt: skip
        for each in (lost, older, over):
            await store.restore_removal(each)
        assert (await sync(store)).removals == {
            "http://w:1": gone, "http://w:2": lost, "http://w:4": late,
        }  # fmt: skip
        await store.put("new", Entry(spec=spec(), stamp="s"))
        await store.restore_removal(gone)
        await store.remove(W, "http://w:2", drain_s=0.0, barred=True, remembered_s=60.0)
        heard = await sync(store)
        assert list(heard.entries or {}) == [W]
        assert set(heard.removals or {}) == {"http://w:2", "http://w:4"}
    finally:
        await link.aclose()


async def test_a_worker_that_answers_is_put_back_when_its_lease_ended_unseen(
    server: Server,
) -> None:
    async with routers(server, "a", "b") as (a, b):
        await a.registry.add(spec(ttl_s=30.0))
        await until(lambda: b.has("w"))
        a.answer()  # b does not hear of it
        await until(lambda: W in a.registry._renewed)  # the next time is ten seconds later
        with server.admin() as admin:
            admin.zadd("{laneway:registry}:leases", {"w": 1})
            await until(lambda: admin.zscore("{laneway:registry}:leases", "w") != 1)
        await until(lambda: b.has("w") and a.registry.view().workers == 1)
        assert a.workers() != {"w": WorkerState.JOINING.value}, "it never left here"
        await b.registry.remove(spec(ttl_s=30.0), drain_s=0.0, barred=True)
        await until(a.has)


async def test_a_failover_is_seen_although_the_count_of_changes_is_the_same_again(
    server: Server,
) -> None:
    async with routers(server, "a") as (a,):
        await a.registry.add(spec())
        await until(lambda: a.registry._known.version.startswith("1:"))
        other = Entry(spec=spec(url="http://x:1", id="x"), stamp="x")
        keys = "{laneway:registry}:workers", "{laneway:registry}:state"
        body = orjson.dumps({"stamp": "x", "spec": other.spec.model_dump(exclude_unset=True)})
        with server.admin() as admin, admin.pipeline() as at_once:
            # As a replica that never heard of w, and was told of x since.
            at_once.hdel(keys[0], "w").hset(keys[0], "x", body).hset(keys[1], "token", "another")
            at_once.execute()
        await until(lambda: a.registry.view().workers == 2)
        assert a.has("w", "x")


async def test_a_worker_from_before_this_process_goes_if_it_was_removed_meanwhile(
    server: Server,
) -> None:
    filed = spec(url="http://file:1", id="file")
    async with router(server, "a") as a:
        await a.registry.remove(spec(), drain_s=0.0, barred=True)
        await a.registry.remove(filed, drain_s=0.0, barred=True)
        async with router(server, "b", workers=(filed,)) as b:
            b.driver.on_worker_joined(spec())
            b.driver.on_worker_joined(spec(url="http://x:1", id="x"))
            await until(lambda: b.has("file", "x"))
            b.driver.on_worker_joined(spec())  # a relay that is late
            await until(lambda: b.has("file", "x"))


async def test_a_worker_of_the_file_that_was_changed_still_goes_as_the_file_says(
    server: Server,
) -> None:
    filed = spec(url="http://file:1", id="file")
    async with router(server, "a", workers=(filed,)) as a, router(server, "b") as b:
        config = a.driver.config
        listed = ConfiguredWorkers(config, a.driver, a.registry)

        def configure(*workers: WorkerSpec) -> None:
            told = config.model_copy(update={"workers": workers})
            a.driver.on_config(told)
            listed.on_config(told)

        await until(lambda: a.is_with("ab"))
        await a.registry.change(with_cost(filed, 2.0))
        await until(partial(b.has_costs, {"file": 2.0}))
        configure(with_cost(filed, 3.0))
        for each in (a, b):
            await until(partial(each.has_costs, {"file": 3.0}))
        moved = spec(url="http://file:2", id="file")
        configure(moved)
        await until(lambda: [v.spec.url for v in a.driver.snapshot().workers] == [moved.url])
        await until(b.has)
        await a.registry.change(with_cost(moved, 4.0))
        await until(partial(b.has_costs, {"file": 4.0}))
        configure()
        configure(with_cost(moved, 5.0))  # before the registry was told
        await until(b.has)
        await until(partial(a.has_costs, {"file": 5.0}))
        await asyncio.sleep(0.1)
        assert a.has_costs({"file": 5.0}), "it came after the removal"
        await a.registry.change(with_cost(moved, 6.0))
        await until(partial(b.has_costs, {"file": 6.0}))
        configure()
        await until(lambda: a.has() and b.has())
        await asyncio.sleep(0.1)
        assert (a.has(), b.has()) == (True, True)


async def test_a_frozen_redis_delays_no_registration_for_long(own_server: Server) -> None:
    async with routers(own_server, "a") as (a,):
        own_server.freeze()
        try:
            began = time.monotonic()
            assert not await a.registry.add(spec())
            assert time.monotonic() - began < 1.0
            assert a.has("w")
        finally:
            own_server.thaw()
        await until(lambda: a.registry.view().workers == 1 and not a.registry.view().untold)
