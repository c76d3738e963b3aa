"""The prober against scripted workers on real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.config import Config, ProbeSettings
from router.contract import LoadReport, WorkerId, WorkerSpec, encode_report
from router.runtime.prober import Prober
from router.runtime.upstream import Upstreams
from tests.runtime.busy_loop import busy_loop
from tests.runtime.scripted_worker import HANG, Script, Scripted, ScriptedWorker

CONFIG = Config(probe=ProbeSettings(timeout_s=0.5, concurrency_max=2))
WORKER = WorkerId("w")
OK = Scripted(200)


@dataclass
class Heard:
    """The events, in order."""

    events: list[tuple[str, WorkerId, Any]] = field(default_factory=list)
    descriptions: list[tuple[WorkerId, dict[str, Any]]] = field(default_factory=list)
    on_next_event: Callable[[], None] | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def on_report(self, worker_id: WorkerId, report: LoadReport) -> None:
        self._add("report", worker_id, report)

    def on_report_missing(self, worker_id: WorkerId, why: str) -> None:
        self._add("missing", worker_id, why)

    def on_probe_failed(self, worker_id: WorkerId, why: str) -> None:
        self._add("failed", worker_id, why)

    def on_worker_described(self, worker_id: WorkerId, **what: Any) -> None:
        self.descriptions.append((worker_id, what))
        self._news.set()

    def _add(self, kind: str, worker_id: WorkerId, what: Any) -> None:
        self.events.append((kind, worker_id, what))
        self._news.set()
        if (react := self.on_next_event) is not None:
            self.on_next_event = None
            react()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not true():
                self._news.clear()
                await self._news.wait()


@dataclass
class Bench:
    prober: Prober
    heard: Heard

    async def poll(self, worker_id: WorkerId = WORKER) -> tuple[str, Any]:
        """Probe, and return the event that came of it."""
        before = len(self.heard.events)
        self.prober.probe(worker_id)
        await self.heard.until(lambda: len(self.heard.events) > before)
        kind, who, what = self.heard.events[before]
        assert who == worker_id
        return kind, what

    async def described(self, **what: Any) -> None:
        """Wait for a description that holds `what`."""
        await self.heard.until(
            lambda: any(what.items() <= seen.items() for _, seen in self.heard.descriptions)
        )


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    heard = Heard()
    upstreams = Upstreams(CONFIG.upstream, loop=asyncio.get_running_loop())
    prober = Prober(CONFIG, upstreams, heard)
    try:
        yield Bench(prober, heard)
    finally:
        await prober.aclose()
        upstreams.close()


@asynccontextmanager
async def running(script: Script) -> AsyncIterator[ScriptedWorker]:
    worker = await ScriptedWorker(script).start()
    try:
        yield worker
    finally:
        await worker.stop()


def spec(worker: ScriptedWorker, **changes: Any) -> WorkerSpec:
    return WorkerSpec.model_validate({"url": worker.url, "id": WORKER, **changes})


def loads(running_requests: int = 1, **changes: Any) -> Scripted:
    entry = {"num_running_reqs": running_requests, "num_waiting_reqs": 0, **changes}
    return Scripted(200, {"version": "0.5.9", "loads": [entry]})


def own(running_requests: int = 1, **changes: Any) -> Scripted:
    report = LoadReport(running_requests=running_requests, **changes)
    return Scripted(200, encode_report(report))


MODELS = Scripted(200, {"object": "list", "data": [{"id": "m", "max_model_len": 2048}]})
INFO = Scripted(
    200, {"max_total_num_tokens": 9_000, "max_running_requests": 16, "api_key": "sk-secret"}
)


def sglang(**changes: Scripted | None) -> Script:
    """A new SGLang: its own /health takes longer than anybody waits."""
    return {
        "/ready": OK,
        "/health": HANG,
        "/v1/loads": loads(),
        "/v1/models": MODELS,
        "/server_info": INFO,
        **{"/" + name.replace("__", "/"): answer for name, answer in changes.items()},
    }


GET_LOAD = Scripted(200, [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 50}])
METRICS = Scripted(200, b'sglang:num_running_reqs{model_name="m"} 2.0\n')
RELEASES: dict[str, tuple[Script, str]] = {
    "0.5.23": (sglang(), "/v1/loads"),
    "0.5.9": ({"/health": HANG, "/v1/loads": loads()}, "/v1/loads"),
    "0.5.5": ({"/health": HANG, "/get_load": GET_LOAD, "/get_server_info": INFO}, "/get_load"),
    "metrics only": ({"/health": HANG, "/metrics": METRICS}, "/metrics"),
    "health is a flag": ({"/ready": OK, "/health": OK, "/v1/loads": loads()}, "/v1/loads"),
    "loads broken": (sglang(v1__loads=Scripted(500, b"x"), get_load=GET_LOAD), "/get_load"),
    "ours": ({"/health": own(), "/ready": OK, "/v1/loads": loads()}, "/health"),
    "ours only": ({"/health": own()}, "/health"),
}


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
        began_at = asyncio.get_running_loop().time()
        assert (await bench.poll())[0] == "missing"
        took_s = asyncio.get_running_loop().time() - began_at
        assert took_s < CONFIG.probe.timeout_s, "there is time left to ask the worker"
        kind, report = await bench.poll()
        assert (kind, report.running_requests) == ("report", 1)
        agent.script["/health"] = own(8)
        if way == "refused":
            await agent.start()
        last = [(await bench.poll())[1] for _ in range(6)][-1]
        assert last.running_requests == 8, "the agent is used again when it is back"


async def test_a_slow_host_never_delays_the_others(bench: Bench) -> None:
    """Twice as many hanging hosts as there may be polls at once, and one good one."""
    async with running({"/ready": HANG}) as slow, running(sglang()) as good:
        hanging = [WorkerId(f"slow{n}") for n in range(4)]
        for worker_id in hanging:
            bench.prober.watch(spec(slow, id=worker_id))
        bench.prober.watch(spec(good))
        for _ in range(2):
            before = len(bench.heard.events)
            for worker_id in hanging:
                bench.prober.probe(worker_id)
            bench.prober.probe(WORKER)
            await bench.heard.until(lambda: len(bench.heard.events) >= before + 5)  # noqa: B023
            assert bench.heard.events[before][:2] == ("report", WORKER)
            assert {kind for kind, who, _ in bench.heard.events if who in hanging} == {"failed"}


async def test_two_polls_of_one_worker_never_overlap(bench: Bench) -> None:
    async with running(sglang(ready=HANG)) as worker:
        bench.prober.watch(spec(worker))
        for _ in range(5):
            bench.prober.probe(WORKER)
        await bench.heard.until(lambda: bool(bench.heard.events))
        assert worker.count("/ready") == 1
        assert (await bench.poll())[0] == "failed", "the next one is not held back"


async def test_a_worker_can_be_polled_again_from_within_the_event_of_its_last_poll(
    bench: Bench,
) -> None:
    """The core does so when an ejected worker answers."""
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        bench.heard.on_next_event = lambda: bench.prober.probe(WORKER)
        bench.prober.probe(WORKER)
        await bench.heard.until(lambda: len(bench.heard.events) == 2)


async def test_nothing_is_heard_of_a_worker_that_was_forgotten(bench: Bench) -> None:
    async with running(sglang()) as other, running(sglang(ready=HANG)) as worker:
        bench.prober.watch(spec(worker))
        bench.prober.probe(WORKER)
        bench.prober.watch(spec(other, id="other"))
        await bench.poll(WorkerId("other"))
        bench.prober.forget(WORKER)
        bench.prober.probe(WORKER)
        await bench.prober.aclose()
        assert all(who != WORKER for _, who, _ in bench.heard.events)


async def test_a_base_path_precedes_every_target(bench: Bench) -> None:
    script = {"/pool" + path: answer for path, answer in sglang().items()}
    async with running(script) as worker:
        bench.prober.watch(spec(worker, url=worker.url + "/pool"))
        assert (await bench.poll())[0] == "report"
        await bench.described(kv_total_tokens=9_000)


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
