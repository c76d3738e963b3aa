"""A fault of the router's own in any event of a request: it ends that request at most.

What the request held is given back, exactly once, whatever had been done when the fault came up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from router.core.types import Outcome
from router.errors import Reason
from tests.runtime.raw_worker import (
    DONE,
    PLAIN,
    SSE_HEAD,
    Close,
    RawWorker,
    Step,
    Wait,
    delta,
)
from tests.runtime.relay.rig import Router, chat, eventually, post, running_router


class Broken(Exception):
    """A fault of ours."""


def break_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, before: bool = False
) -> Callable[[], int]:
    """Let the next call of a method fail, when its work is done or `before`; returns how often."""
    whole, calls = getattr(owner, name), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) > 1:
            return whole(*args, **kwargs)
        if not before:
            whole(*args, **kwargs)
        raise Broken

    monkeypatch.setattr(owner, name, broken)
    return lambda: len(calls)


def part(router: Router, path: str) -> Any:
    """A part of the router's core."""
    found: Any = router.driver.dispatcher
    for name in path.split("."):
        found = getattr(found, name)
    return found


async def all_is_given_back(router: Router) -> None:
    await eventually(lambda: not router.driver.running)
    snapshot = router.driver.snapshot()
    for worker in snapshot.workers:
        held = worker.streams, worker.kv_reserved_tokens, worker.pending_tokens, worker.waiting
        assert held == (0, 0, 0, 0)
    assert [(lane.running, lane.queued) for lane in snapshot.lanes.values()] == [(0, 0)] * 2
    assert (snapshot.limits.held, snapshot.limits.waiting) == (0, 0)
    assert snapshot.counters.requests == snapshot.counters.finished
    assert (await router.post(chat())).status == 200


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "where", ["_prospects.at_arrival", "_scheduler.place", "_scheduler.came", "_aims.aim"]
)
@pytest.mark.patches
async def test_a_request_that_cannot_be_taken_in_is_500_and_leaves_nothing(
    where: str, before: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with RawWorker([[PLAIN], [PLAIN]]) as worker, running_router(worker) as router:
        owner, _, name = where.rpartition(".")
        calls = break_once(monkeypatch, part(router, owner), name, before=before)
        got = await router.post(chat())
        assert (got.status, got.one(b"x-laneway-reason")) == (500, b"internal_error")
        assert calls() == 1
        assert "Broken" in caplog.text
        await all_is_given_back(router)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("where", ["_room.flow.push", "_degrading.watch", "_scheduler.pump"])
@pytest.mark.patches
async def test_nor_one_that_has_to_wait(
    where: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    steps: list[list[Step]] = [[Wait(gate), PLAIN], [PLAIN], [PLAIN], [PLAIN]]
    room = {"concurrency_default": 1}
    async with RawWorker(steps) as worker, running_router(worker, headroom=room) as router:
        first, second, third = [await router.client() for _ in range(3)]
        first.send(post(chat()))
        await eventually(lambda: worker.requests)
        second.send(post(chat()))
        await eventually(lambda: router.driver.dispatcher.queued == 1)
        owner, _, name = where.rpartition(".")
        break_once(monkeypatch, part(router, owner), name, before=before)
        third.send(post(chat()))
        assert (await third.answer()).status == 500
        gate.set()
        assert (await first.answer()).status == 200
        assert (await second.answer()).status == 200
        await all_is_given_back(router)


@pytest.mark.patches
async def test_a_fault_in_news_of_an_answer_costs_it_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[list[Step]] = [[SSE_HEAD, delta("a"), delta("b"), DONE], [PLAIN]]
    async with RawWorker(steps) as worker, running_router(worker) as router:
        core = router.driver.dispatcher
        break_once(monkeypatch, core, "on_first_token")
        break_once(monkeypatch, core, "on_tokens", before=True)
        got = await router.post(chat(stream=True))
        assert (got.status, got.complete) == (200, True)
        assert caplog.text.count("Broken") >= 1
        await all_is_given_back(router)


@pytest.mark.parametrize(
    "where", ["_costs.learn", "_slo.count", "_room.flow.settle", "_has_room", "_scheduler.pump"]
)
@pytest.mark.patches
async def test_a_fault_at_the_end_leaves_nothing_charged(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    steps: list[list[Step]] = [[Wait(gate), PLAIN], [PLAIN], [PLAIN], [PLAIN]]
    room = {"concurrency_default": 1}
    async with RawWorker(steps) as worker, running_router(worker, headroom=room) as router:
        first, second, third = [await router.client() for _ in range(3)]
        first.send(post(chat()))
        await eventually(lambda: worker.requests)
        second.send(post(chat()))
        third.send(post(chat()))
        await eventually(lambda: router.driver.dispatcher.queued == 2)
        owner, _, name = where.rpartition(".")
        whole = part(router, owner) if owner else router.driver.dispatcher
        calls = break_once(monkeypatch, whole, name, before=True)
        gate.set()
        assert (await first.answer()).status == 200
        assert (await second.answer()).status == 200
        assert (await third.answer()).status == 200
        assert calls()
        await all_is_given_back(router)


@pytest.mark.patches
async def test_a_fault_after_a_failed_attempt_ends_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        RawWorker([[Close()], [PLAIN]]) as one,
        RawWorker([[PLAIN], [PLAIN]]) as other,
        running_router(one, other, policy={"name": "round_robin"}) as router,
    ):
        break_once(monkeypatch, part(router, "_timers"), "call_at", before=True)
        got = await router.post(chat())
        if not one.requests:
            got = await router.post(chat())
        assert (got.status, got.one(b"x-laneway-reason")) == (500, b"internal_error")
        assert router.records[-1].reason is Reason.INTERNAL
        assert router.records[-1].outcome is Outcome.ABORTED
        await all_is_given_back(router)
