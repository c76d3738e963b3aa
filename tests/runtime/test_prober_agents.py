"""Keys that polls carry, and workers for which an agent speaks."""

from __future__ import annotations

import pytest

from tests.runtime.prober_bench import (
    CONFIG,
    METRICS,
    Bench,
    bench,
    own,
    running,
    sglang,
    spec,
)
from tests.runtime.scripted_worker import HANG, Scripted

__all__ = ["bench"]  # a fixture


async def test_the_workers_key_is_sent_on_every_request(bench: Bench) -> None:
    async with running({"/health": own()}) as agent, running(sglang()) as worker:
        bench.prober.watch(spec(worker, api_key="w-key", health_url=agent.url))
        await bench.poll()
        await bench.described(kv_total_tokens=9_000)
        await agent.stop()
        for _ in range(3):
            await bench.poll()
        assert {"/ready", "/v1/loads", "/v1/models", "/server_info"} <= {p for p, _ in worker.asked}
        for _, headers in agent.asked + worker.asked:
            assert headers["authorization"] == "Bearer w-key"


async def test_a_worker_that_wants_another_key_has_failed(bench: Bench) -> None:
    """Its /ready, /health and /metrics are open, but it would answer every request with 401."""
    refused = Scripted(401, {"error": "Unauthorized"})
    script = sglang(v1__loads=refused, v1__models=refused, metrics=METRICS)
    async with running(script) as worker:
        bench.prober.watch(spec(worker, api_key="wrong"))
        for _ in range(3):
            kind, why = await bench.poll()
            assert kind == "failed"
            assert "api_key" in why
        assert worker.count("/health") == 0, "its health costs a generation"
        worker.script.update(sglang())
        assert (await bench.poll())[0] == "report"


async def test_no_key_is_sent_where_the_worker_has_none(bench: Bench) -> None:
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        await bench.poll()
        assert all("authorization" not in headers for _, headers in worker.asked)


async def test_a_report_comes_from_the_agent_with_one_request(bench: Bench) -> None:
    async with running({"/health": own(7, ready=True)}) as agent, running(sglang()) as worker:
        bench.prober.watch(spec(worker, health_url=agent.url))
        await bench.poll()
        assert worker.count("/ready") == 1, "the worker's own port is tried at first"
        assert worker.count("/health") == 0
        worker.asked.clear()
        agent.asked.clear()
        kind, report = await bench.poll()
        assert (kind, report.running_requests) == ("report", 7)
        assert [p for p, _ in agent.asked] == ["/health"]
        assert worker.count("/ready") + worker.count("/v1/loads") == 0


async def test_a_worker_whose_port_is_closed_fails_although_its_agent_praises_it(
    bench: Bench,
) -> None:
    async with running({"/health": own(0, ready=True)}) as agent:
        async with running({}) as worker:
            gone = spec(worker, health_url=agent.url)
        bench.prober.watch(gone)
        assert (await bench.poll())[0] == "failed"


@pytest.mark.parametrize(
    "answer", [Scripted(503), own(0, ready=False)], ids=["503", "ready: false"]
)
async def test_an_agent_can_say_that_its_worker_is_not_ready(
    bench: Bench, answer: Scripted
) -> None:
    async with running({"/health": answer}) as agent, running(sglang()) as worker:
        bench.prober.watch(spec(worker, health_url=agent.url))
        assert (await bench.poll())[0] == "failed"


@pytest.mark.parametrize("way", ["refused", "hang", "500", "404", "garbage"])
async def test_a_lost_agent_does_not_fail_its_worker_which_is_asked_instead(
    bench: Bench, way: str
) -> None:
    async with running({"/health": own(7)}) as agent, running(sglang()) as worker:
        bench.prober.watch(spec(worker, health_url=agent.url))
        assert (await bench.poll())[1].running_requests == 7
        if way == "refused":
            await agent.stop()
        else:
            broken = {"hang": HANG, "500": Scripted(500), "garbage": Scripted(200, b"{}")}
            agent.script["/health"] = broken.get(way, Scripted(404))
        kind, why = await bench.poll()
        assert kind == "missing"
        if way == "hang":
            waited_s = float(why.split()[-2])
            assert waited_s <= CONFIG.probe.timeout_s / 2, "there is time left to ask the worker"
        kind, report = await bench.poll()
        assert (kind, report.running_requests) == ("report", 1)
        agent.script["/health"] = own(8)
        if way == "refused":
            await agent.start()
        last = [(await bench.poll())[1] for _ in range(6)][-1]
        assert last.running_requests == 8, "the agent is used again when it is back"
