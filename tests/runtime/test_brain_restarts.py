"""What a brain has of the one before it: workers as they are by now, and what runs on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.contract import WorkerSpec
from router.core.types import Failure, Outcome, WorkerState
from router.errors import Reason
from router.runtime.remote_driver import RemoteDriver
from tests.runtime.brain_rig import WORKER, Brain, brain, relay, settings, state_of, submitted
from tests.runtime.relay.rig import eventually

LISTED = WorkerSpec.model_validate({"url": "http://127.0.0.1:7", "id": "w", "models": ["m"]})
MOVED = LISTED.model_copy(update={"url": "http://127.0.0.1:6"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "link"


async def test_a_worker_at_another_address_by_now_is_reached_there(path: Path) -> None:
    before = settings().model_copy(update={"workers": (LISTED,)})
    after = settings().model_copy(update={"workers": (MOVED,)})
    async with relay(path, before) as driver:
        async with brain(path, before):
            owner = await submitted(driver)
            old = driver.upstreams.get(LISTED.worker_id)
        await eventually(lambda: not driver.ready)
        async with brain(path, after) as second:
            await eventually(lambda: driver.ready)
            new = driver.upstreams.get(LISTED.worker_id)
            assert old is not None
            assert new is not None
            assert (old.url, new.url) == (LISTED.url, MOVED.url)
            # What runs at the old address is no load of the one at the new.
            assert second.streams == 0
            driver.attempt_failed(owner.ticket, Failure(reason=Reason.UPSTREAM_ERROR))
            await eventually(lambda: len(second.records) == 1)
            assert second.records[0].outcome is Outcome.FAILED
            assert owner.told == ["dispatch", "over"]
            driver.left(owner)


async def test_a_worker_that_drained_at_its_old_address_does_not_at_its_new(path: Path) -> None:
    before = settings(count=1).model_copy(update={"workers": (LISTED, WORKER)})
    after = settings(count=1).model_copy(update={"workers": (MOVED, WORKER)})
    async with relay(path, before) as driver:
        async with brain(path, before) as first:
            first.driver.on_worker_left(WORKER.worker_id)
            owner = await submitted(driver)
            first.driver.on_drain(LISTED.worker_id, deadline_s=60)
            await eventually(lambda: driver._workers[LISTED.worker_id][4])
        await eventually(lambda: not driver.ready)
        async with brain(path, after) as second:
            await eventually(lambda: driver.ready)
            await eventually(lambda: state_of(second, MOVED) is WorkerState.ACTIVE)
            driver.finished(owner.ticket, Outcome.SUCCESS, None, None)
            driver.left(owner)
            await eventually(lambda: len(second.records) == 1)
            assert state_of(second, MOVED) is WorkerState.ACTIVE


async def test_a_relay_that_was_silent_brings_back_no_worker_that_left_meanwhile(
    path: Path,
) -> None:
    config = settings()
    async with brain(path, config) as there, relay(path, config) as driver:
        there.driver.on_worker_joined(LISTED)
        await eventually(lambda: driver.ready and driver.upstreams.get(LISTED.worker_id))
        owner = await submitted(driver)
        (silent,) = there.hub.links
        silent.link.give_up("a relay says nothing any more")
        there.driver.on_worker_left(LISTED.worker_id)
        await eventually(lambda: any(link.announced for link in there.hub.links - {silent}))
        assert state_of(there, LISTED) is None
        await eventually(lambda: driver.upstreams.get(LISTED.worker_id) is None)
        driver.finished(owner.ticket, Outcome.ABORTED, None, None)
        driver.left(owner)


async def test_a_relay_that_was_silent_drains_no_worker_anew(path: Path) -> None:
    config = settings(count=1)
    async with brain(path, config) as there, relay(path, config) as driver:
        owner = await submitted(driver)
        there.driver.on_drain(WORKER.worker_id, deadline_s=60)
        await eventually(lambda: driver._workers[WORKER.worker_id][4])
        (silent,) = there.hub.links
        silent.link.give_up("a relay says nothing any more")  # its request ends, the worker leaves
        there.driver.on_worker_joined(WORKER)
        await eventually(lambda: any(link.announced for link in there.hub.links - {silent}))
        await eventually(lambda: state_of(there, WORKER) is WorkerState.ACTIVE)
        assert not there.hub._to_drain
        driver.finished(owner.ticket, Outcome.ABORTED, None, None)
        driver.left(owner)


async def test_a_worker_that_the_file_names_no_more_is_not_taken_back(path: Path) -> None:
    before = settings().model_copy(update={"workers": (WORKER, LISTED)})
    after = settings().model_copy(update={"workers": ()})
    registered = WorkerSpec(url="http://127.0.0.1:5", models=("m",))
    async with relay(path, before) as driver:
        async with brain(path, before) as first:
            first.driver.on_worker_joined(registered)
            first.driver.on_worker_left(WORKER.worker_id)
            first.driver.on_worker_joined(WORKER)  # by an operator: it is no more the file's
            await eventually(lambda: driver.ready and len(driver._workers) == 3)
        await eventually(lambda: not driver.ready)
        async with brain(path, after) as second:
            await eventually(lambda: driver.ready)
            there = {view.id for view in second.driver.snapshot().workers}
            assert there == {registered.worker_id, WORKER.worker_id}
            await eventually(lambda: set(driver._workers) == there)


async def test_one_that_drained_as_the_file_named_it_no_more_goes_on_with_that(path: Path) -> None:
    before = settings(count=1)
    after = before.model_copy(update={"workers": ()})
    async with relay(path, before) as driver:
        async with brain(path, before) as first:
            owner = await submitted(driver)
            first.driver.on_drain(WORKER.worker_id, deadline_s=60)
            await eventually(lambda: driver._workers[WORKER.worker_id][4])
        await eventually(lambda: not driver.ready)
        async with brain(path, after) as second:
            await eventually(lambda: state_of(second, WORKER) is WorkerState.DRAINING)
            driver.finished(owner.ticket, Outcome.SUCCESS, None, None)
            driver.left(owner)
            await eventually(lambda: state_of(second, WORKER) is None)


async def test_a_worker_removed_while_a_relay_hung_does_not_come_back_to_the_next_brain(
    path: Path,
) -> None:
    config = settings(count=1)
    async with relay(path, config) as hung:
        async with brain(path, config) as first:
            await listed_too(first, hung)
            hangs(first)
            first.driver.on_worker_left(LISTED.worker_id)
        await eventually(lambda: not hung.ready)
        async with brain(path, config) as second:
            await eventually(lambda: hung.ready)
            assert state_of(second, LISTED) is None
            assert state_of(second, WORKER) is WorkerState.ACTIVE
            await eventually(lambda: hung.upstreams.get(LISTED.worker_id) is None)


async def test_a_drain_that_a_relay_did_not_hear_of_goes_on_under_the_next_brain(
    path: Path,
) -> None:
    config = settings(count=1)
    async with relay(path, config) as hung:
        async with brain(path, config) as first:
            await listed_too(first, hung)
            first.driver.on_worker_left(WORKER.worker_id)
            owner = await submitted(hung)
            hangs(first, running=True)
            first.driver.on_drain(LISTED.worker_id, deadline_s=60)
        await eventually(lambda: not hung.ready)
        async with brain(path, config) as second:
            await eventually(lambda: hung.ready)
            assert state_of(second, LISTED) is WorkerState.DRAINING
            assert second.streams == 1
            hung.finished(owner.ticket, Outcome.SUCCESS, None, None)
            hung.left(owner)
            await eventually(lambda: state_of(second, LISTED) is None)


async def test_workers_that_no_relay_has_told_of_yet_outlive_a_brain_that_died_soon(
    path: Path,
) -> None:
    config = settings(count=2)
    async with relay(path, config) as driver:
        async with brain(path, config) as first:
            await listed_too(first, driver)
        async with brain(path, config) as second:
            for link in second.hub.links:
                link.link.give_up("it dies before it was told")
        async with brain(path, config) as third:
            await eventually(lambda: state_of(third, LISTED) is WorkerState.ACTIVE)


async def listed_too(there: Brain, here: RemoteDriver) -> None:
    """Let a brain have a second worker, of which its relay knows."""
    there.driver.on_worker_joined(LISTED)
    await eventually(lambda: here.ready and here.upstreams.get(LISTED.worker_id))


def hangs(there: Brain, *, running: bool = False) -> None:
    """Let the relay of a brain hear nothing any more, without the brain noticing."""
    (link,) = there.hub.links
    assert bool(link._requests) is running
    link.announced = False
