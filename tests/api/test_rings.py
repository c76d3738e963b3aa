"""Routers that are each other's workers, in any graph: who is ready, and how soon no longer.

Every router is a real one without a listener. A round lets each of them poll its workers once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import pytest

from router.contract import ROUTERS_MAX, Links, LoadReport, WorkerId, decode_report
from tests.api.cluster import Cluster, cluster

Edges = dict[str, set[str]]

ENGINE = "http://engine:1"
# As many rounds as what is told takes to cross the longest way among so many routers, and be told.
_SETTLES = 2


class Ring:
    """Routers by name, each with other ones as its workers and perhaps an engine."""

    def __init__(self, routers: dict[str, Cluster], edges: Edges, order: Random) -> None:
        self._routers = routers
        self._edges = edges
        self._order = order
        self._with_engine = dict[str, WorkerId]()

    async def start(self, *with_engine: str) -> None:
        for name, router in self._routers.items():
            for other in sorted(self._edges[name]):
                answer = await router.client.post("/workers", json={"url": url_of(other)})
                assert answer.status_code == 202
        for name in with_engine:
            self._with_engine[name] = await self._routers[name].add(ENGINE)

    def engine_dies(self, name: str) -> None:
        self._routers[name].driver.on_probe_failed(self._with_engine.pop(name), "gone")

    async def round(self) -> None:
        edges = [(name, other) for name in self._routers for other in sorted(self._edges[name])]
        self._order.shuffle(edges)
        for name, other in edges:
            driver, worker = self._routers[name].driver, WorkerId(url_of(other)[len("http://") :])
            headers = {"x-laneway-via": name}
            answer = await self._routers[other].client.get("/health", headers=headers)
            report = decode_report(answer.content)
            if report.ready:
                driver.on_report(worker, report)
            else:
                driver.on_probe_failed(worker, "not ready")

    async def ready(self) -> set[str]:
        """Those that say that they are, each of which must be asked by a balancer to say so."""
        answers = {name: await r.client.get("/readyz") for name, r in self._routers.items()}
        return {name for name, answer in answers.items() if answer.status_code == 200}

    def reaching(self) -> set[str]:
        """Those from which an engine can be reached."""
        found, before = set(self._with_engine), set[str]()
        while found != before:
            before = set(found)
            found |= {name for name, others in self._edges.items() if others & found}
        return found


def url_of(name: str) -> str:
    return f"http://{name}:1"


@asynccontextmanager
async def ring(edges: Edges, *, seed: int = 1) -> AsyncIterator[Ring]:
    settings: dict[str, Any] = {"probe": {"failures_to_eject": 1}, "policy": {"slow_start_s": 0}}
    async with AsyncExitStack() as stack:
        routers = {
            name: await stack.enter_async_context(cluster(router_id=name, **settings))
            for name in edges
        }
        yield Ring(routers, edges, Random(seed))


BOTH_WAYS = {"aa": {"bb", "dd"}, "bb": {"aa", "cc"}, "cc": {"bb", "dd"}, "dd": {"cc", "aa"}}
ONE_WAY = {"aa": {"bb"}, "bb": {"cc"}, "cc": {"dd"}, "dd": {"aa"}}
# Two without an engine, that have only each other behind a router each, with a ring behind those.
FRONTS = {
    "aa": {"bb"}, "bb": {"cc"}, "cc": {"dd"}, "dd": {"bb", "ee"}, "ee": {"aa", "ff"}, "ff": {"cc"},
}  # fmt: skip


@pytest.mark.parametrize("edges", [BOTH_WAYS, ONE_WAY, FRONTS])
async def test_a_ring_is_ready_as_long_as_one_of_it_has_an_engine(edges: Edges) -> None:
    async with ring(edges) as made:
        await made.start("cc")
        for _ in edges:
            await made.round()
        assert await made.ready() == set(edges)
        made.engine_dies("cc")
        for _ in range(_SETTLES * len(edges)):
            await made.round()
        assert await made.ready() == set()
        for _ in edges:
            await made.round()
            assert await made.ready() == set()


@pytest.mark.parametrize("seed", range(12))
async def test_readiness_is_what_a_search_of_the_whole_graph_finds(seed: int) -> None:
    draw = Random(seed)
    names = ["aa", "bb", "cc", "dd", "ee", "ff"]
    edges = {name: {o for o in names if o != name and draw.random() < 0.35} for name in names}
    async with ring(edges, seed=seed) as made:
        await made.start(*draw.sample(names, 2))
        for name in (None, *made._with_engine):
            if name is not None:
                made.engine_dies(name)
            for _ in range(_SETTLES * len(names)):
                await made.round()
            assert await made.ready() == made.reaching()


async def test_a_router_of_more_routers_than_a_report_may_name_tells_of_some() -> None:
    async with cluster(router_id="aa") as made:
        for number in range(ROUTERS_MAX + 2):
            name, last = f"b{number:02x}", number == ROUTERS_MAX + 1
            links = (Links(name, 1.0, int(last), ()),)
            report = LoadReport(ready=True, workers=int(last), routers=(name,), links=links)
            made.driver.on_report(await made.add(url_of(name)), report)
        report = decode_report((await made.client.get("/health")).content)
    assert report.ready, "the last of them has an engine"
    assert report.links is not None
    assert len(report.links) == len(report.links[0].routers) == ROUTERS_MAX


async def test_what_a_router_said_holds_as_long_as_it_serves() -> None:
    """Between polls that are further apart than its figures count, it is as reachable as before."""
    async with cluster(router_id="aa", probe={"stale_after_s": 1e-6}) as made:
        links = (Links("bb", 1.0, 1, ()),)
        report = LoadReport(ready=True, workers=1, routers=("bb",), links=links)
        worker_id = await made.add(url_of("bb"))
        made.driver.on_report(worker_id, report)
        assert decode_report((await made.client.get("/health")).content).ready
        for _ in range(made.driver.config.probe.failures_to_eject):
            made.driver.on_probe_failed(worker_id, "gone")
        assert decode_report((await made.client.get("/health")).content).ready is False
