"""Relays' drivers and brains over a real socket, without the processes around them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core.bucket import Ask, Settlement
from router.core.dispatcher import Dispatcher
from router.core.types import Endpoint, Refusal, RequestRecord, RequestSpec, WorkerState
from router.errors import Reason
from router.metrics_limits import LimitsView
from router.runtime.brain_link import Hub
from router.runtime.bucket_store import BucketStore, Decided
from router.runtime.config_workers import ConfiguredWorkers
from router.runtime.driver import Driver
from router.runtime.local_buckets import LocalBuckets
from router.runtime.remote_driver import RemoteDriver
from router.runtime.roster import Roster
from router.runtime.upstream import Upstreams
from tests.runtime.relay.rig import eventually

SPEC = RequestSpec("r", Endpoint.CHAT, "m", stream=True, prompt_bytes=400, max_tokens=10)
WORKER = WorkerSpec(url="http://127.0.0.1:9", models=("m",))  # nobody connects to it
REPORT = LoadReport(running_requests=0, queued_requests=0, kv_used_tokens=0, kv_total_tokens=10**6)


@dataclass(eq=False)
class Owner:
    """What an exchange would be told."""

    told: list[str] = field(default_factory=list)
    refusal: Refusal | None = None
    ticket: Any = None

    def dispatch(self) -> None:
        self.told.append("dispatch")

    def refuse(self, refusal: Refusal) -> None:
        self.told.append("refuse")
        self.refusal = refusal

    def judged(self, *, again: bool) -> None:
        self.told.append("again" if again else "over")

    def preempt(self) -> bool:
        return False

    def sweep(self, now: float) -> None:
        pass

    def cut(self, reason: Reason, message: str) -> None:
        self.told.append(f"cut {reason}")


class Mortal:
    """A store whose process may die: then it says no more to anybody."""

    def __init__(self, store: BucketStore) -> None:
        self.store = store
        self.dead = False

    async def start(self) -> None:
        await self.store.start()

    def reserve(self, ask: Ask, decided: Decided) -> None:
        self.store.reserve(ask, decided)

    def adopt(self, ask: Ask) -> None:
        self.store.adopt(ask)

    def reclaim(self, prefix: str, *, own: str) -> None:
        self.store.reclaim(prefix, own=own)

    def settle(self, settlement: Settlement) -> None:
        if not self.dead:
            self.store.settle(settlement)

    def on_config(self, config: Config) -> None:
        self.store.on_config(config)

    def view(self) -> LimitsView:
        return self.store.view()

    async def aclose(self) -> None:
        await self.store.aclose()


@dataclass
class Brain:
    """A driver that relays may reach."""

    driver: Driver
    hub: Hub
    records: list[RequestRecord] = field(default_factory=list)
    refused: list[tuple[Reason, str, bytes]] = field(default_factory=list)

    @property
    def streams(self) -> int:
        return sum(view.streams for view in self.driver.snapshot().workers)


@contextlib.asynccontextmanager
async def brain(
    path: Path, config: Config, *, buckets: BucketStore | None = None
) -> AsyncIterator[Brain]:
    """A brain at `path`; at the end it is gone as if killed: what it held it settles nowhere."""
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(path.unlink, missing_ok=True)
    upstreams = Upstreams(config.upstream, loop=loop)
    name = f"router.{random.randbytes(8).hex()}"
    dispatcher = Dispatcher(config, rng=random.Random(1), router_id=name)
    driver = Driver(config, dispatcher, upstreams, loop=loop)
    driver.probe = partial(_answer, driver)
    driver.buckets = store = Mortal(buckets or LocalBuckets())
    refused: list[tuple[Reason, str, bytes]] = []
    listed = ConfiguredWorkers(config, driver)
    hub = Hub(
        driver,
        loop=loop,
        on_refused=lambda *all_of_it: refused.append(all_of_it),
        is_listed=listed.__contains__,
        roster=Roster(path.with_name("workers"), loop=loop),
    )
    made = Brain(driver, hub, refused=refused)
    driver.on_record.append(made.records.append)
    driver.start()
    hub.start()
    server = await loop.create_unix_server(hub.protocol, str(path))
    try:
        yield made
    finally:
        server.close()
        store.dead = True
        hub._roster._write()  # as at the end of this turn of the loop
        hub._roster._path = path.with_name("nothing more")  # is written by one that was killed
        for relay in list(hub.links):
            relay.link.give_up("killed")
        await eventually(lambda: not hub.links)
        driver.stop()


def _answer(driver: Driver, worker_id: WorkerId) -> None:
    asyncio.get_running_loop().call_soon(driver.on_report, worker_id, REPORT)


@contextlib.asynccontextmanager
async def relay(path: Path, config: Config) -> AsyncIterator[RemoteDriver]:
    """A relay's driver that looks for a brain at `path`."""
    loop = asyncio.get_running_loop()
    driver = RemoteDriver(config, Upstreams(config.upstream, loop=loop), path, loop=loop)
    driver.start()
    try:
        yield driver
    finally:
        await driver.aclose()


def settings(**of_relays: Any) -> Config:
    return Config(workers=(WORKER,), relays={"count": 2, **of_relays})


async def submitted(driver: RemoteDriver) -> Owner:
    owner = Owner()
    driver.submit(SPEC, owner)
    await eventually(lambda: bool(owner.told))
    return owner


def state_of(there: Brain, spec: WorkerSpec) -> WorkerState | None:
    views = there.driver.snapshot().workers
    return next((view.state for view in views if view.id == spec.worker_id), None)
