"""Workers of the configuration's list come and go with it, and no others do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from router.config import Config
from router.contract import WorkerId, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.types import WorkerState
from router.runtime.config_workers import ConfiguredWorkers
from router.runtime.driver import Driver
from router.runtime.upstream import Upstreams


class World:
    """A driver whose configuration lists workers."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        config = listing({"url": "http://a:1"}, {"url": "http://b:1"})
        upstreams = Upstreams(config.upstream, loop=loop)
        self.driver = Driver(config, Dispatcher(config, rng=Random(1)), upstreams, loop=loop)
        self.probed: list[WorkerId] = []
        self.driver.probe = self.probed.append
        self.listed = ConfiguredWorkers(config, self.driver)
        self.driver.start()

    def configure(self, *workers: dict[str, Any]) -> None:
        config = listing(*workers)
        self.driver.on_config(config)
        self.listed.on_config(config)

    def priorities(self) -> dict[str, int]:
        """Ids of the workers that are not on their way out, with their priority."""
        views = self.driver.snapshot().workers
        return {v.id: v.spec.priority for v in views if v.state is not WorkerState.DRAINING}


def listing(*workers: dict[str, Any]) -> Config:
    return Config.model_validate({"workers": workers})


A, B = {"url": "http://a:1"}, {"url": "http://b:1"}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.driver.stop()


async def test_they_join_change_and_leave_as_the_list_says(world: World) -> None:
    world.configure({**A, "priority": 3}, {"url": "http://c:1"})
    assert world.priorities() == {"a:1": 3, "c:1": 0}
    assert world.driver.upstreams.get(WorkerId("b:1")) is None


async def test_one_that_came_otherwise_is_never_touched(world: World) -> None:
    world.driver.on_worker_joined(WorkerSpec(url="http://c:1", priority=7))
    world.configure(A, B, {"url": "http://c:1", "priority": 1})
    assert world.priorities()["c:1"] == 7
    world.configure(A)
    assert world.priorities() == {"a:1": 0, "c:1": 7}


async def test_what_an_operator_did_stands_until_the_list_says_more_of_that_worker(
    world: World,
) -> None:
    world.driver.on_worker_left(WorkerId("a:1"))
    world.driver.on_worker_updated(WorkerSpec(url="http://b:1", priority=5))
    world.configure(A, B, {"url": "http://c:1"})
    assert world.priorities() == {"b:1": 5, "c:1": 0}
    world.configure({**A, "priority": 1}, {**B, "priority": 2})
    assert world.priorities() == {"b:1": 2, "a:1": 1}


async def test_one_that_an_operator_registered_anew_is_the_operators(world: World) -> None:
    world.driver.on_worker_left(WorkerId("a:1"))
    world.driver.on_worker_joined(WorkerSpec(url="http://a:1", priority=9))
    world.configure(B)
    assert world.priorities() == {"b:1": 0, "a:1": 9}


async def test_an_id_that_moves_to_another_address_is_another_worker(world: World) -> None:
    world.configure(A, B, {"id": "x", "url": "http://x:1"})
    world.configure(A, B, {"id": "x", "url": "http://x:2"})
    (view,) = [v for v in world.driver.snapshot().workers if v.id == "x"]
    assert view.spec.url == "http://x:2"
    pool = world.driver.upstreams.get(WorkerId("x"))
    assert "x:2" in repr(pool)


async def test_one_that_is_listed_again_while_it_drains_comes_back_when_it_has_left(
    world: World,
) -> None:
    worker = world.driver.dispatcher._fleet.workers[WorkerId("a:1")]
    worker.streams = 1  # something runs on it
    world.configure(B)
    assert "a:1" not in world.priorities()
    world.configure({**A, "priority": 4}, B)
    assert "a:1" not in world.priorities()
    worker.streams = 0
    world.driver.on_worker_left(WorkerId("a:1"))
    await asyncio.sleep(0)
    assert world.priorities() == {"b:1": 0, "a:1": 4}
    assert world.driver.upstreams.get(WorkerId("a:1")) is not None


async def test_another_name_for_an_address_is_another_worker(world: World) -> None:
    world.configure({"id": "renamed", "url": "http://a:1"}, B)
    await asyncio.sleep(0)
    assert world.priorities() == {"b:1": 0, "renamed": 0}
