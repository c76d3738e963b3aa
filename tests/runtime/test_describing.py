"""How the prober learns what a worker is, and what a changed registration does to its polls."""

from __future__ import annotations

import asyncio

import pytest

from router.load_formats import WorkerDescription
from router.runtime.probed import Dead
from tests.runtime.prober_bench import (
    CONFIG,
    INFO,
    MODELS,
    OK,
    WORKER,
    Bench,
    bench,
    own,
    running,
    sglang,
    spec,
)
from tests.runtime.scripted_worker import HANG, Scripted, ScriptedWorker

__all__ = ["bench"]  # a fixture

ADAPTED = Scripted(200, {"data": [{"id": "m"}, {"id": "m:adapter"}]})


async def polls(bench: Bench, count: int) -> None:
    """Poll so often, and let each description end that a poll began."""
    for _ in range(count):
        await bench.poll()
        for task in list(bench.prober._tasks):
            await task


@pytest.mark.parametrize("failure", [Scripted(500, b"x"), Scripted(502), Scripted(200, b"{")])
async def test_models_that_were_not_said_once_are_asked_for_again_soon(
    bench: Bench, failure: Scripted
) -> None:
    async with running(sglang(v1__models=failure)) as worker:
        bench.prober.watch(spec(worker))
        await polls(bench, 1)
        worker.script["/v1/models"] = MODELS
        await polls(bench, 2)
        assert bench.heard.descriptions[-1][1]["models"] == ("m",)
        worker.asked.clear()
        await polls(bench, 20)
        assert worker.count("/v1/models") == 0, "all is known: there is no hurry"


async def test_what_stays_unknown_is_asked_for_ever_less_often(bench: Bench) -> None:
    async with running(sglang(v1__models=Scripted(500))) as worker:
        bench.prober.watch(spec(worker))
        await polls(bench, 64)
        assert 5 <= worker.count("/v1/models") <= 8


async def test_sizes_that_were_not_said_once_are_asked_for_again(bench: Bench) -> None:
    async with running(sglang(server_info=HANG)) as worker:
        bench.prober.watch(spec(worker))
        await polls(bench, 1)
        worker.script["/server_info"] = INFO
        await polls(bench, 2)
        assert bench.heard.descriptions[-1][1]["kv_total_tokens"] == 9_000


async def test_models_loaded_later_are_seen_and_unloaded_ones_forgotten(bench: Bench) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await polls(bench, 1)
        for answer, models in ((ADAPTED, ("m", "m:adapter")), (MODELS, ("m",))):
            worker.script["/v1/models"] = answer
            await polls(bench, 40)
            assert bench.heard.descriptions[-1][1]["models"] == models


async def test_a_list_that_fails_later_leaves_the_known_one(bench: Bench) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await polls(bench, 1)
        worker.script["/v1/models"] = Scripted(500)
        await polls(bench, 40)
        assert bench.heard.descriptions[-1][1]["models"] == ("m",)


async def test_a_worker_that_comes_back_without_a_list_is_asked_until_it_has_one(
    bench: Bench,
) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await polls(bench, 1)
        await worker.stop()
        await polls(bench, 1)
        worker.script["/v1/models"] = Scripted(503)
        await worker.start()
        await polls(bench, 1)
        worker.script["/v1/models"] = Scripted(200, {"data": [{"id": "new"}]})
        await polls(bench, 2)
        assert bench.heard.descriptions[-1][1]["models"] == ("new",)


async def test_a_key_that_is_refused_later_fails_the_worker(bench: Bench) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker, api_key="w-key"))
        await polls(bench, 1)
        worker.script["/v1/models"] = Scripted(401)
        await polls(bench, 40)
        assert (await bench.poll())[0] == "failed"


async def refused(_until: float) -> WorkerDescription:
    raise Dead("its api_key is another one")


async def test_a_key_that_is_refused_while_a_poll_is_under_way_fails_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker, api_key="w-key"))
        await polls(bench, 2)
        watch = bench.prober._watches[WORKER]
        with monkeypatch.context() as patch:
            patch.setattr(watch.worker, "described_models", refused)
            before = len(bench.heard.events)
            bench.prober.probe(WORKER)
            await bench.prober._describe_anew(watch)
            await bench.heard.until(lambda: len(bench.heard.events) > before)
        assert bench.heard.events[-1][0] == "report"
        worker.script["/v1/models"] = Scripted(401)
        assert (await bench.poll())[0] == "failed"


async def test_a_poll_under_way_ends_with_its_worker_though_its_key_was_refused_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await polls(bench, 2)
        watch = bench.prober._watches[WORKER]
        monkeypatch.setattr(watch.worker, "described_models", refused)
        bench.prober.probe(WORKER)
        await bench.prober._describe_anew(watch)
        bench.prober.forget(WORKER)
        assert bench.prober._quick._new | bench.prober._quick._old == {}


async def test_a_worker_that_comes_back_is_asked_afresh_though_a_description_had_the_line(
    bench: Bench,
) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await polls(bench, 2)
        watch = bench.prober._watches[WORKER]
        worker.script["/server_info"] = HANG
        watch.polls_to_description = 0
        await bench.poll()
        assert watch.describing
        worker.script["/ready"] = Scripted(503)
        watch.failures = CONFIG.probe.failures_to_eject
        assert (await bench.poll())[0] == "failed"
        worker.script.update(sglang())
        assert [(await bench.poll())[0] for _ in range(4)] == ["report"] * 4
        assert watch.source is not None


async def poll_under_way(bench: Bench, worker: ScriptedWorker) -> None:
    """Let a poll hang at the worker."""
    await polls(bench, 1)
    worker.script["/v1/loads"] = HANG
    worker.asked.clear()
    bench.heard.events.clear()
    bench.prober.probe(WORKER)
    async with asyncio.timeout(CONFIG.probe.timeout_s):
        while not worker.count("/v1/loads"):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)


async def test_a_change_of_what_no_poll_depends_on_keeps_the_poll_that_is_under_way(
    bench: Bench,
) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await poll_under_way(bench, worker)
        bench.prober.watch(spec(worker, cost=2.0, lanes=["short"]))
        await bench.heard.until(lambda: bool(bench.heard.events))
        assert bench.heard.events[0][:2] == ("missing", WORKER)
        assert worker.count("/v1/models") == 0, "nor is it described anew"


@pytest.mark.parametrize("change", ["api_key", "health_url"])
async def test_a_poll_of_a_worker_that_is_reached_otherwise_now_begins_anew(
    bench: Bench, change: str
) -> None:
    """The core waits for the end of every poll that it asked for."""
    async with running(sglang()) as worker, running({"/health": own(7), "/ready": OK}) as agent:
        bench.prober.watch(spec(worker))
        await poll_under_way(bench, worker)
        worker.script.update(sglang())
        value = {"api_key": "w-key", "health_url": agent.url}[change]
        bench.prober.watch(spec(worker, **{change: value}))
        await bench.heard.until(lambda: bool(bench.heard.events))
        ((kind, _, report),) = bench.heard.events
        assert kind == "report"
        assert report.running_requests == (7 if change == "health_url" else 1)


PRIORITIES = "enable_priority_scheduling"
LOW_FIRST = "schedule_low_priority_values_first"


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ({PRIORITIES: True, LOW_FIRST: True}, "low_first"),
        ({PRIORITIES: True, LOW_FIRST: False}, "high_first"),
        ({PRIORITIES: False, LOW_FIRST: True}, None),
        ({PRIORITIES: True}, None),  # it does not say which is first
        ({}, None),
    ],
)
async def test_whether_a_worker_goes_by_priorities_is_told(
    bench: Bench, flags: dict[str, bool], order: str | None
) -> None:
    info = Scripted(200, {"max_total_num_tokens": 9_000, **flags})
    async with running(sglang(server_info=info)) as worker:
        bench.prober.watch(spec(worker))
        await polls(bench, 1)
        assert bench.heard.descriptions[-1][1]["priority_order"] == order
