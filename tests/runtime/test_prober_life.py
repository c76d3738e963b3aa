"""Signs of life: what fails a poll, and what the log says of it."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from router.contract import WorkerSpec
from tests.open_files import no_more_files
from tests.runtime.prober_bench import (
    MODELS,
    OK,
    WORKER,
    Bench,
    bench,
    loads,
    own,
    running,
    sglang,
    spec,
)
from tests.runtime.relay.rig import eventually
from tests.runtime.scripted_worker import HANG, Scripted

__all__ = ["bench"]  # a fixture


@pytest.mark.parametrize("ready", [Scripted(503), Scripted(500), HANG], ids=str)
async def test_a_worker_that_is_not_ready_has_failed(bench: Bench, ready: Scripted | None) -> None:
    async with running(sglang(ready=ready)) as worker:
        bench.prober.watch(spec(worker))
        assert (await bench.poll())[0] == "failed"


@pytest.mark.parametrize("answer", [Scripted(503), HANG], ids=str)
async def test_without_a_ready_route_the_load_answer_is_the_sign_of_life(
    bench: Bench, answer: Scripted | None
) -> None:
    async with running({"/v1/loads": loads(), "/v1/models": MODELS}) as worker:
        bench.prober.watch(spec(worker))
        assert (await bench.poll())[0] == "report"
        worker.script["/v1/loads"] = answer
        assert (await bench.poll())[0] == "failed"
        worker.script["/v1/loads"] = Scripted(500)
        assert (await bench.poll())[0] == "missing"


async def test_a_refused_connection_has_failed_and_says_so_shortly(bench: Bench) -> None:
    async with running({}) as worker:
        gone = spec(worker)
    bench.prober.watch(gone)
    kind, why = await bench.poll()
    assert kind == "failed"
    assert 0 < len(why) <= 200


async def test_the_log_has_changes_only_and_no_keys(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "router")
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker, api_key="w-key"))
        await bench.poll()
        await bench.described(kv_total_tokens=9_000)
        lines = len(caplog.records)
        for _ in range(5):
            await bench.poll()
        assert len(caplog.records) == lines
        worker.script["/v1/loads"] = Scripted(500)
        for _ in range(3):
            await bench.poll()
        assert len(caplog.records) == lines + 1
    assert "w-key" not in caplog.text
    assert "sk-secret" not in caplog.text


async def test_a_worker_that_is_this_router_never_joins_and_the_reason_says_so(
    bench: Bench,
) -> None:
    async with running({"/ready": Scripted(508, {})}) as worker:
        bench.prober.watch(spec(worker))
        kind, why = await bench.poll()
        assert (kind, why) == ("failed", "it is this router itself: remove it")


async def test_who_says_it_is_not_ready_is_not_whatever_else_it_answers(bench: Bench) -> None:
    """A router with nothing behind it answers in SGLang's forms, too."""
    script: dict[str, Scripted | None] = {"/health": own(0, ready=False), "/v1/loads": loads(0)}
    async with running(script | {"/v1/models": MODELS}) as worker:
        bench.prober.watch(spec(worker))
        for _ in range(4):
            assert await bench.poll() == ("failed", "GET /health: not ready")
        worker.script["/health"] = own(0, ready=True)
        assert (await bench.poll())[0] == "report"
        worker.script["/health"] = own(0, ready=False)
        for _ in range(4):
            assert (await bench.poll())[0] == "failed"


async def test_a_trouble_is_logged_once_until_the_worker_is_well(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    script = sglang()
    async with running(script) as worker:
        bench.prober.watch(spec(worker))
        for status in (503, 503, 500, 503, 500):
            script["/ready"] = Scripted(status)
            assert (await bench.poll())[0] == "failed"
        assert [record.getMessage() for record in caplog.records] == [
            f"worker {WORKER}: no sign of life: GET /ready: {status}" for status in (503, 500)
        ]
        caplog.clear()
        script["/ready"] = OK
        assert (await bench.poll())[0] == "report"
        script["/ready"] = Scripted(503)
        await bench.poll()
        assert len(caplog.records) == 1


async def test_a_closed_port_and_an_unknown_host_are_said_in_plain_words(bench: Bench) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        bench.prober.watch(WorkerSpec(url=url, id=WORKER))
        assert await bench.poll() == ("failed", "GET /ready: connection refused")
    bench.prober.watch(WorkerSpec(url=f"http://{'x' * 64}.invalid:1", id=WORKER))
    kind, why = await bench.poll()
    assert kind == "failed"
    assert why.startswith("GET /ready: no such host")


async def test_of_a_worker_for_whose_poll_there_is_no_file_nothing_is_said(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        with no_more_files():
            bench.prober.probe(WORKER)
            await eventually(lambda: "not polled: GET /ready: the router has too" in caplog.text)
        assert not bench.heard.events
        await bench.heard.until(lambda: bool(bench.heard.events))  # it is polled again by itself
        assert bench.heard.events[0][0] == "report"


async def test_without_files_a_worker_is_polled_in_one_rhythm_however_often_it_is_asked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()

    def noted(*args: Any) -> asyncio.TimerHandle:
        timers.append(loop.call_later(*args))
        return timers[-1]

    noting = SimpleNamespace(call_later=noted, time=loop.time, create_task=loop.create_task)
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        monkeypatch.setattr(bench.prober, "_loop", noting)
        with no_more_files():
            for expected in (2, 4, 6):  # one is of each poll
                bench.prober.probe(WORKER)
                await eventually(lambda n=expected: len(timers) >= n)  # type: ignore[misc]
        assert len([timer for timer in timers if not timer.cancelled()]) == 1
