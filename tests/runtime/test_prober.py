"""What the prober reads of a worker, on real sockets."""

from __future__ import annotations

import asyncio

import pytest

from router.contract import LoadReport, encode_report
from tests.runtime.busy_loop import busy_loop
from tests.runtime.prober_bench import (
    CONFIG,
    GET_LOAD,
    OK,
    RELEASES,
    WORKER,
    Bench,
    bench,
    loads,
    running,
    sglang,
    spec,
)
from tests.runtime.scripted_worker import HANG, Script, Scripted

__all__ = ["bench"]  # a fixture


@pytest.mark.parametrize("release", RELEASES)
async def test_each_release_is_read_where_it_tells_its_load(bench: Bench, release: str) -> None:
    script, path = RELEASES[release]
    async with running(script) as worker:
        bench.prober.watch(spec(worker))
        assert (await bench.poll())[0] == "report"
        worker.asked.clear()
        kind, report = await bench.poll()
        assert kind == "report"
        assert report.running_requests is not None
        asked = [p for p, _ in worker.asked if p not in ("/server_info", "/get_server_info")]
        assert asked == (["/ready", path] if "/ready" in script and path != "/health" else [path])


async def test_sglangs_slow_health_does_not_delay_the_first_report(bench: Bench) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        assert (await bench.poll())[0] == "report"
        assert loop.time() - began_at < CONFIG.probe.timeout_s


async def test_a_worker_is_described_before_its_first_report(bench: Bench) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await bench.poll()
        assert bench.heard.descriptions[0] == (
            WORKER,
            {
                "models": ("m",),
                "kv_total_tokens": None,
                "concurrency_max": None,
                "kv_bytes_per_token": None,
                "priority_order": None,
            },
        )
        await bench.described(models=("m",), kv_total_tokens=9_000, concurrency_max=16)


async def test_a_hanging_server_info_delays_nothing(bench: Bench) -> None:
    async with running(sglang(server_info=HANG)) as worker:
        bench.prober.watch(spec(worker))
        for _ in range(3):
            assert (await bench.poll())[0] == "report"
        await bench.described(models=("m",), kv_total_tokens=None)


@pytest.mark.parametrize(
    "models",
    [
        {"/model_info": Scripted(200, {"model_path": "/m/x", "served_model_name": "x"})},
        {"/get_model_info": Scripted(200, {"model_path": "x"})},
    ],
    ids=str,
)
async def test_older_routes_name_the_model_too(bench: Bench, models: Script) -> None:
    async with running({"/v1/loads": loads(), **models}) as worker:
        bench.prober.watch(spec(worker))
        await bench.poll()
        await bench.described(models=("x",))


async def test_a_frozen_engine_is_alive_with_figures_of_their_true_age(bench: Bench) -> None:
    frozen = loads(timestamp=1_764_430_000.0)
    frozen.body["timestamp"] = "2025-11-29T15:27:40+00:00"
    async with running(sglang(v1__loads=frozen)) as worker:
        bench.prober.watch(spec(worker))
        kind, report = await bench.poll()
        assert kind == "report"
        assert report.age_s == 60.0


@pytest.mark.parametrize(
    "answer",
    [
        Scripted(404),
        Scripted(500, b"boom"),
        Scripted(401, {"error": "Unauthorized"}),
        Scripted(200, {}),
        Scripted(200, b"-1"),
        Scripted(200, b'"NaN"'),
        Scripted(200, b"<html>"),
        loads(-1),
        loads(2**60),
        HANG,
    ],
    ids=lambda a: repr(a.body)[:30] + str(a.status) if a else "hang",
)
async def test_a_broken_load_answer_is_missing_not_failed_nor_idle(
    bench: Bench, answer: Scripted | None
) -> None:
    async with running(sglang(health=OK)) as worker:
        bench.prober.watch(spec(worker))
        await bench.poll()
        worker.script["/v1/loads"] = answer
        for _ in range(4):
            kind, why = await bench.poll()
            assert kind == "missing"
            assert len(why) <= 200
        worker.script["/v1/loads"] = loads(5)
        kinds = [(await bench.poll())[0] for _ in range(4)]
        assert kinds[-1] == "report"


async def test_a_worker_without_any_load_answer_is_alive_and_unknown(bench: Bench) -> None:
    script = sglang()
    del script["/v1/loads"]
    async with running(script) as worker:
        bench.prober.watch(spec(worker))
        assert [(await bench.poll())[0] for _ in range(8)] == ["missing"] * 8
        assert worker.count("/health") <= 4, "its health costs a generation: ask ever less often"
        await bench.described(models=("m",))


async def test_a_worker_that_comes_back_as_another_release_is_read_anew(bench: Bench) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await bench.poll()
        await worker.stop()
        assert (await bench.poll())[0] == "failed"
        other = Scripted(200, {"data": [{"id": "other"}]})
        worker.script = {"/get_load": GET_LOAD, "/v1/models": other}
        await worker.start()
        assert (await bench.poll())[0] == "report"
        await bench.described(models=("other",))


async def test_a_route_that_goes_away_is_looked_for_elsewhere_at_the_next_poll(
    bench: Bench,
) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await bench.poll()
        del worker.script["/v1/loads"]
        worker.script["/get_load"] = GET_LOAD
        assert (await bench.poll())[0] == "missing"
        assert (await bench.poll())[0] == "report"


async def test_a_base_path_precedes_every_target(bench: Bench) -> None:
    script = {"/pool" + path: answer for path, answer in sglang().items()}
    async with running(script) as worker:
        bench.prober.watch(spec(worker, url=worker.url + "/pool"))
        assert (await bench.poll())[0] == "report"
        await bench.described(kv_total_tokens=9_000)


async def test_our_own_answer_is_preferred_however_late_the_loop_is(bench: Bench) -> None:
    """SGLang's answer is there first; ours comes while the loop is busy with a thousand others."""
    report = Scripted(200, encode_report(LoadReport(running_requests=3, queued_requests=0)))
    async with running({"/ready": OK, "/v1/loads": loads(7), "/health": report}) as worker:
        bench.prober.watch(spec(worker))
        with busy_loop(0.06):
            _, first = await bench.poll()
        _, second = await bench.poll()
        assert (first.running_requests, second.running_requests) == (3, 3)


async def test_an_answer_of_the_same_bytes_is_a_report_like_any_other(bench: Bench) -> None:
    async with running({"/ready": OK, "/v1/loads": loads(7)}) as worker:
        bench.prober.watch(spec(worker))
        seen = [(await bench.poll())[1].running_requests for _ in range(3)]
        worker.script["/v1/loads"] = loads(8)
        seen += [(await bench.poll())[1].running_requests for _ in range(2)]
        worker.script["/v1/loads"] = Scripted(200, b"{")
        kind, _ = await bench.poll()
        assert (seen, kind) == ([7, 7, 7, 8, 8], "missing")
