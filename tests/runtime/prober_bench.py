"""A prober, what it is heard to say, and scripted workers of every release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.config import Config, ProbeSettings
from router.contract import LoadReport, WorkerId, WorkerSpec, encode_report
from router.runtime.prober import Prober
from router.runtime.upstream import Upstreams
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
