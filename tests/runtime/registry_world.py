"""Routers without anything that serves, which share a registry, for the tests of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.peers import PeerLoad
from router.core.replicas import Replica, Standing
from router.core.types import Outcome
from router.redis_settings import RedisSettings
from router.runtime.driver import Driver
from router.runtime.redis_link import RedisLink
from router.runtime.registry import Registry
from router.runtime.registry_store import (
    Known,
    RegistryStore,
)
from router.runtime.upstream import Upstreams
from tests.redis_servers import Server

SOON_S = 5.0
W = WorkerId("w")
ENDED = Outcome.SUCCESS, None, None


class Asked:
    """A request that only takes its place."""

    def dispatch(self) -> None:
        """It is sent nowhere."""

    def refuse(self, refusal: object) -> None:
        raise AssertionError(refusal)

    def sweep(self, now: float) -> None:
        """It has no deadline."""


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
    server: Server,
    name: str,
    *,
    workers: tuple[WorkerSpec, ...] = (),
    sections: Mapping[str, Any] = MappingProxyType({}),
    **cluster: Any,
) -> AsyncIterator[Router]:
    given = {"sync_interval_s": 0.03, "ttl_s": 0.6} | cluster
    redis = RedisSettings(mode="single", urls=(server.url,), timeout_s=0.2, retry_s=0.05)
    config = Config(cluster=given, workers=workers, **sections)
    upstreams = Upstreams(config.upstream, loop=asyncio.get_running_loop())
    driver = Driver(
        config,
        Dispatcher(config, rng=Random(1), router_id=name),
        upstreams,
        loop=asyncio.get_running_loop(),
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


def loads_of(at: Router, name: str) -> dict[WorkerId, PeerLoad]:
    return next(dict(r.loads) for r in at.registry.view().replicas if r.name == name)


async def sync(store: RegistryStore) -> Any:
    return await store.sync(
        Replica(name="me", loads={}), Known(), ttl_s=5.0, epoch="e", leads=True, shares=None,
        renewals={},
    )  # fmt: skip
