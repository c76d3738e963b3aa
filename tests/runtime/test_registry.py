"""Routers that share a registry in a real Valkey: what one is told, all know, whatever happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from random import Random
from typing import Any

import orjson
import pytest

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.membership import Entry
from router.core.peers import PeerLoad
from router.core.replicas import Replica, Standing
from router.core.types import Endpoint, Outcome, RequestSpec, WorkerState
from router.errors import Reason, Refused
from router.redis_settings import RedisSettings
from router.runtime.config_workers import ConfiguredWorkers
from router.runtime.driver import Driver
from router.runtime.redis_link import RedisLink
from router.runtime.registry import Registry
from router.runtime.registry_store import (
    BadRegistry,
    Known,
    RegistryStore,
    decode_replica,
    encode_replica,
)
from router.runtime.upstream import Upstreams
from tests import redis_servers
from tests.redis_servers import Server

SOON_S = 5.0
W = WorkerId("w")
_ENDED = Outcome.SUCCESS, None, None


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with redis_servers.single() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    with shared_server.admin() as admin:
        admin.flushall()
    return shared_server


@pytest.fixture
def own_server() -> Iterator[Server]:
    with redis_servers.single() as server:
        yield server


class Asked:
    """A request that only takes its place."""

    def dispatch(self) -> None:
        """It is sent nowhere."""

    def refuse(self, refusal: object) -> None:
        raise AssertionError(refusal)


@dataclass
class Router:
    """A core, its driver and its registry, without anything that serves."""

    name: str
    driver: Driver
    registry: Registry
    link: RedisLink
    draining: bool = False

    def workers(self) -> dict[str, str]:
        return {view.id: view.state.value for view in self.driver.snapshot().workers}

    def has(self, *names: str) -> bool:
        return set(self.workers()) == set(names)

    def has_costs(self, costs: dict[str, float]) -> bool:
        return {v.id: v.spec.cost for v in self.driver.snapshot().workers} == costs

    def replicas(self) -> set[str]:
        return {replica.name for replica in self.registry.view().replicas}

    def is_with(self, names: Collection[str]) -> bool:
        """Whether it has heard of exactly these routers."""
        together = self.registry.view().standing is Standing.TOGETHER
        return together and self.replicas() == set(names)

    def leads(self) -> str:
        """Who leads, as far as it knows."""
        return self.registry.view().leader

    def answer(self, worker_id: WorkerId = W, **figures: Any) -> None:
        """A worker answers its poll."""
        self.driver.on_report(worker_id, LoadReport(running_requests=0, **figures))


@asynccontextmanager
async def router(
    server: Server, name: str, *, workers: tuple[WorkerSpec, ...] = (), **cluster: Any
) -> AsyncIterator[Router]:
    given = {"sync_interval_s": 0.03, "ttl_s": 0.6} | cluster
    redis = RedisSettings(mode="single", urls=(server.url,), timeout_s=0.2, retry_s=0.05)
    config = Config(cluster=given, workers=workers)
    upstreams = Upstreams(config.upstream, loop=asyncio.get_running_loop())
    driver = Driver(
        config, Dispatcher(config, rng=Random(1)), upstreams, loop=asyncio.get_running_loop()
    )
    driver.probe = lambda _: None
    link = RedisLink(redis)
    made: Router
    registry = Registry(
        driver,
        config.cluster,
        store=RegistryStore(link, prefix=redis.key_prefix),
        name=name,
        version="1",
        started_at=1.0,
        is_draining=lambda: made.draining,
        config_version=lambda: f"of-{name}",
    )
    made = Router(name, driver, registry, link)
    driver.start()
    registry.start()
    try:
        yield made
    finally:
        await registry.aclose()
        await link.aclose()
        driver.stop()


@asynccontextmanager
async def routers(server: Server, *names: str, **cluster: Any) -> AsyncIterator[list[Router]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(router(server, name, **cluster)) for name in names]
        for each in found:
            await until(partial(each.is_with, names))
        yield found


async def until(holds: Callable[[], bool], timeout_s: float = SOON_S) -> None:
    ends_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_at, "waited in vain"
        await asyncio.sleep(0.005)


def spec(**fields: Any) -> WorkerSpec:
    return WorkerSpec.model_validate({"url": "http://w:1", "id": "w"} | fields)


def with_cost(of: WorkerSpec, cost: float) -> WorkerSpec:
    return of.model_copy(update={"cost": cost})


async def test_a_worker_that_one_is_told_of_is_known_to_all_within_a_second(server: Server) -> None:
    async with routers(server, "a", "b", sync_interval_s=0.2, ttl_s=3.0) as (a, b):
        assert await a.registry.add(spec(cost=2.0, api_key="secret"))
        await until(lambda: b.has("w"), 1.0)
        (view,) = b.driver.snapshot().workers
        assert view.spec == spec(cost=2.0, api_key="secret")


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
        b.driver.finished(b.driver.tickets()[0], *_ENDED)
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
        await asyncio.sleep(0.1)
        assert c.has("w")


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


async def test_routers_tell_each_other_their_loads_and_versions(server: Server) -> None:
    async with routers(server, "a", "b") as (a, b):
        await a.registry.add(spec(kv_total_tokens=100_000))
        await until(lambda: b.has("w"))
        for each in (a, b):
            each.answer(kv_used_tokens=0)
        a.driver.submit(RequestSpec("r", Endpoint.CHAT), Asked())  # type: ignore[arg-type]
        reserved = a.driver.dispatcher.peering.loads[W].kv_reserved_tokens
        await until(lambda: loads_of(b, "a") == {W: PeerLoad(1, reserved, 0, reserved)})
        versions = {r.name: r.config_version for r in b.registry.view().replicas}
        assert versions == {"a": "of-a", "b": "of-b"}
        a.driver.finished(a.driver.tickets()[0], *_ENDED)
        await until(lambda: loads_of(b, "a") == {})


async def test_a_router_that_leaves_or_dies_is_gone_and_its_lead_passes_on(server: Server) -> None:
    async with routers(server, "a", "b", "c") as three:
        await until(lambda: len({each.registry.view().leader for each in three}) == 1)
        leader = next(each for each in three if each.name == each.registry.view().leader)
        others = [each for each in three if each is not leader]
        term = leader.registry.view().term
        task = leader.registry._task
        assert task is not None
        task.cancel()  # as if it were killed: it says nothing more
        for each in others:
            await until(partial(each.is_with, [other.name for other in others]))
            assert each.leads() in each.replicas()
            assert each.registry.view().term == term + 1
        assert len({each.registry.view().leader for each in others}) == 1
        await others[0].registry.aclose()
        began = time.monotonic()
        await until(lambda: others[1].replicas() == {others[1].name})
        assert time.monotonic() - began < 0.4, "one that says goodbye is not waited for"
        await until(lambda: others[1].registry.view().leader == others[1].name)


async def test_only_what_the_leader_says_of_shares_counts(server: Server) -> None:
    async with routers(server, "a", "b") as two:
        await until(lambda: len({each.registry.view().leader for each in two} - {""}) == 1)
        leader, other = sorted(two, key=lambda each: each.name != each.registry.view().leader)
        given = (0.5, 0.3, 0.15, 0.05)
        leader.driver.dispatcher.peering.on_shares(given)
        await until(lambda: other.driver.dispatcher.peering.shares == given)
        other.driver.dispatcher.peering.on_shares((0.4, 0.4, 0.1, 0.1))
        await until(lambda: other.driver.dispatcher.peering.shares == given)
        leader.draining = True  # who stops leads no more
        await until(lambda: leader.registry.view().leader == other.name)
        assert other.driver.dispatcher.peering.shares == given


async def test_a_router_that_drains_owns_nothing(server: Server) -> None:
    async with routers(server, "a", "b") as (a, b):
        for number in range(4):
            await a.registry.add(spec(url=f"http://w:{number + 1}", id=f"w{number}"))
        await until(lambda: len(b.workers()) == 4)
        for each in (a, b):
            for number in range(4):
                each.answer(WorkerId(f"w{number}"))
        owned = a.driver.dispatcher.peering.owned, b.driver.dispatcher.peering.owned
        assert [len(each) for each in owned] == [2, 2]
        assert not owned[0] & owned[1]
        a.draining = True
        await until(lambda: len(b.driver.dispatcher.peering.owned) == 4)


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


async def test_without_redis_a_router_stands_alone_and_says_so() -> None:
    config = Config()
    loop = asyncio.get_running_loop()
    upstreams = Upstreams(config.upstream, loop=loop)
    driver = Driver(config, Dispatcher(config, rng=Random(1)), upstreams, loop=loop)
    driver.probe = lambda _: None
    registry = Registry(driver, config.cluster, store=None, name="a", version="1", started_at=0.0)
    registry.start()
    assert await registry.add(spec())
    view = registry.view()
    assert (view.standing, view.leader, len(view.replicas)) == (Standing.ALONE, "a", 1)
    await registry.aclose()
    driver.stop()


def test_a_replica_is_read_as_it_was_written() -> None:
    replica = Replica(
        name="r", address="http://r:1", version="1", config_version="c", started_at=1.5,
        draining=True, workers=2, running=3, queued=4, owns=5, loads={W: PeerLoad(1, 2, 3, 4)},
    )  # fmt: skip
    for field in fields(Replica):
        assert getattr(replica, field.name) != field.default, f"{field.name} has to differ"
    assert decode_replica("r", encode_replica(replica)) == replica


@pytest.mark.parametrize("body", [b"", b"[]", b'{"loads": 3}', b'{"loads": {"w": ["x"]}}', b"{}"])
def test_nonsense_of_a_replica_is_named(body: bytes) -> None:
    with pytest.raises(BadRegistry, match="router 'r'"):
        decode_replica("r", body)


def loads_of(at: Router, name: str) -> dict[WorkerId, PeerLoad]:
    return next(dict(r.loads) for r in at.registry.view().replicas if r.name == name)


async def sync(store: RegistryStore) -> Any:
    return await store.sync(
        Replica(name="me", loads={}), Known(), ttl_s=5.0, epoch="e", leads=True, shares=None,
        renewals={},
    )  # fmt: skip
