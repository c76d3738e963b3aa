"""What routers tell each other of themselves through the registry."""

from __future__ import annotations

import asyncio
import time
from dataclasses import fields
from functools import partial
from random import Random

import pytest

from router.config import Config
from router.contract import WorkerId
from router.core.dispatcher import Dispatcher
from router.core.peers import PeerLine, PeerLoad
from router.core.replicas import Replica, Standing
from router.core.slo import NOTHING_JUDGED, Totals
from router.core.types import Endpoint, Priority, RequestSpec
from router.runtime.driver import Driver
from router.runtime.registry import Registry
from router.runtime.registry_store import (
    BadRegistry,
    decode_replica,
    encode_replica,
)
from router.runtime.upstream import Upstreams
from tests.redis_servers import Server
from tests.runtime.registry_world import (
    ENDED,
    Asked,
    W,
    loads_of,
    routers,
    spec,
    until,
)


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
        a.driver.finished(a.driver.tickets()[0], *ENDED)
        await until(lambda: loads_of(b, "a") == {})


async def test_who_leads_goes_by_what_all_of_them_serve(server: Server) -> None:
    async with routers(server, "a", "b") as two:
        await until(lambda: len({each.leads() for each in two}) == 1)
        leader, other = sorted(two, key=lambda each: each.name != each.leads())
        await leader.registry.add(spec())
        await until(lambda: other.has("w"))
        other.answer()
        other.driver.submit(RequestSpec("r", Endpoint.CHAT), Asked())  # type: ignore[arg-type]
        other.driver.finished(other.driver.tickets()[0], *ENDED)
        assert [each.judged for each in leader.driver.dispatcher.peering.judged] == [0] * 4
        monitor = leader.driver.dispatcher._slo._monitor
        await until(lambda: monitor.totals(Priority.P1) == Totals(1, 1, 0))
        assert monitor.own_totals(Priority.P1) == NOTHING_JUDGED


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
        judged=(Totals(9, 8, 7), *[NOTHING_JUDGED] * 3),
        lines=(PeerLine("cluster:cost", Priority.P2, 1.5, 2.5, 7.0, {"a": 0.5, "b": 2.0}, 3.0),),
    )  # fmt: skip
    for field in fields(Replica):
        assert getattr(replica, field.name) != field.default, f"{field.name} has to differ"
    assert decode_replica("r", encode_replica(replica)) == replica


def test_of_one_that_says_nothing_of_lines_nothing_is_known() -> None:
    assert decode_replica("r", b'{"loads": {}}').lines == ()


def test_only_so_many_lines_of_a_router_are_read() -> None:
    line = PeerLine("k", Priority.P1, 0.0, 1.0, 2.0, {"t": 1.0})
    replica = Replica(name="r", loads={}, lines=(line,) * 40)
    assert decode_replica("r", encode_replica(replica)).lines == (line,) * 32


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"loads": 3}',
        b'{"loads": {"w": ["x"]}}',
        b"{}",
        b'{"loads": {}, "judged": [[1, 2, 3]]}',
        b'{"loads": {}, "lines": 3}',
        b'{"loads": {}, "lines": [["k", 1, 0, 0, 0, {"t": 1}]]}',
        b'{"loads": {}, "lines": [["k", 9, 0, 0, 0, {"t": 1}, 0]]}',
        b'{"loads": {}, "lines": [["k", 1, 0, 0, 0, {"t": -1}, 2]]}',
        b'{"loads": {}, "lines": [["k", 1, 0, 0, 0, {}, 0]]}',
        b'{"loads": {}, "lines": [["k", 1, 0, null, 0, {"t": 1}, 0]]}',
        b'{"loads": {}, "lines": [["k", 1, 0, 0, 0, {"t": NaN}, 0]]}',
        b'{"loads": {}, "lines": [["k", 1, 0, 0, 0, {%s}, 0]]}'
        % b",".join(b'"t%d": 1' % n for n in range(65)),
    ],
)
def test_nonsense_of_a_replica_is_named(body: bytes) -> None:
    with pytest.raises(BadRegistry, match="router 'r'"):
        decode_replica("r", body)
