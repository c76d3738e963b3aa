"""The locust load test, run headless as people run it: against scripted workers and the product."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.arrivals import work
from loadtest.scenarios import SCENARIOS
from tests.field.harness import ROOT, router_process
from tests.field.mock_worker import DONE, SSE, Call, MockWorker, good, held, plain, status
from tests.field.wire import Answer, eventually

FIRST_S, LAST_S = 0.3, 0.2


@pytest.fixture
async def worker() -> AsyncIterator[MockWorker]:
    worker = MockWorker()
    await worker.start()
    yield worker
    await worker.stop()


class Rows:
    """The statistics that a run has left, by name; `output` has the failures and the log."""

    def __init__(self, document: list[dict[str, Any]], exit_status: int, output: str) -> None:
        self.exit_status = exit_status
        self.output = output
        self._rows = {row["name"]: row for row in document}

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._rows[name]

    def sum(self, figure: str, ending: str) -> int:
        """The sum of a figure over the rows whose names end so."""
        return sum(int(row[figure]) for name, row in self._rows.items() if name.endswith(ending))


async def load_test(folder: Path, url: str, *flags: str, run_time: str = "3s") -> Rows:
    """Run locust headless against `url` and return what it reports."""
    command = [
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest/locustfile.py")),
        *("--headless", "-u", "1", "--host", url, "--run-time", run_time, "--only-summary"),
        *("--json-file", str(folder / "stats"), "--csv", str(folder / "stats"), *flags),
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(60):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    stats = folder / "stats.json"
    assert stats.exists(), output.decode()
    failures = (folder / "stats_failures.csv").read_text()
    return Rows(json.loads(stats.read_text()), process.returncode, failures + output.decode())


async def test_the_first_token_is_measured_at_the_first_token(
    worker: MockWorker, tmp_path: Path
) -> None:
    async def slow(call: Call) -> None:
        call.head()  # the head comes at once, and proves nothing
        call.event("", delta={"role": "assistant", "content": ""})
        await asyncio.sleep(FIRST_S)
        call.event("one ")
        await asyncio.sleep(LAST_S)
        call.event("two", finish_reason="stop")
        call.chunk(DONE)
        call.end()

    worker.answer = slow
    rows = await load_test(tmp_path, worker.url, "--scenario", "mixed", "--rate", "20")
    assert rows.exit_status == 0, rows.output
    for lane in ("short", "long"):
        first, end = rows[f"{lane} first token"], rows[f"{lane} end"]
        assert first["num_requests"] == end["num_requests"] > 0
        assert first["num_failures"] == end["num_failures"] == 0
        assert first["min_response_time"] >= FIRST_S * 1000
        assert end["min_response_time"] >= (FIRST_S + LAST_S) * 1000
        assert rows[f"{lane} inter token"]["max_response_time"] >= LAST_S * 900
    assert (tmp_path / "stats_stats.csv").read_text().count("first token") == 2


async def test_slow_answers_do_not_slow_the_arrivals(worker: MockWorker, tmp_path: Path) -> None:
    gate = asyncio.Event()
    worker.answer = held(gate)
    flags = ("--scenario", "short", "--rate", "30", "--seed", "7", "--stop-timeout", "10")
    running = asyncio.ensure_future(load_test(tmp_path, worker.url, *flags))
    due = [item.at_s for item, _ in zip(work(flows(30), seed="7/0/0"), range(200), strict=False)]
    wanted = sum(at_s < 2 for at_s in due)
    await eventually(lambda: worker.calls, within_s=30)
    await eventually(lambda: worker.running >= wanted, within_s=10, what="arrivals go on")
    gate.set()
    rows = await running
    assert rows.sum("num_requests", " end") == len(worker.calls) >= wanted
    assert rows.sum("num_failures", " end") == 0


def flows(rate_per_s: float) -> Any:
    return SCENARIOS["short"].at_rate(rate_per_s).flows


async def test_whatever_a_user_would_not_accept_is_a_failure(
    worker: MockWorker, tmp_path: Path
) -> None:
    async def error_event(call: Call) -> None:
        call.head()
        call.event("one ")
        call.chunk(b'data: {"error":{"message":"x","code":"upstream_error"}}\n\n')
        call.end()

    async def cut(call: Call) -> None:
        call.head()
        call.event("one ")
        await asyncio.sleep(0.01)  # or the reset overtakes the chunk
        call.reset()

    async def no_end(call: Call) -> None:
        call.head(headers=SSE)
        call.event("one ")
        call.end()

    async def no_stream(call: Call) -> None:
        plain(call, 200, {"choices": []})

    faults = (error_event, cut, no_end, no_stream, status(503), status(429))
    worker.script.extend(faults)
    worker.answer = good
    rows = await load_test(tmp_path, worker.url, "--scenario", "short", "--rate", "20")
    assert rows.exit_status == 1
    assert rows["short end"]["num_failures"] == len(faults)
    # Where a token had come before the fault, the first token itself is good.
    assert rows["short first token"]["num_failures"] == 3
    for text in ("upstream_error", "no [DONE]", "content type", "503", "429"):
        assert text in rows.output, rows.output
    assert len(worker.calls) == rows["short end"]["num_requests"] > len(faults)


async def test_the_key_and_the_model_are_sent(worker: MockWorker, tmp_path: Path) -> None:
    worker.api_key = "tenant-key"
    worker.models = ["the-model"]
    rows = await load_test(
        *(tmp_path, worker.url, "--api-key", "tenant-key", "--rate", "10", "--scenario", "short"),
        run_time="2s",
    )
    assert rows.exit_status == 0, rows.output
    assert {call.json()["model"] for call in worker.calls} == {"the-model"}
    assert "tenant-key" not in rows.output


async def test_the_product_serves_a_mixed_load_without_a_failure(tmp_path: Path) -> None:
    """A router and simulated workers in both lanes, as processes; the load comes by the URL."""
    with router_process(tmp_path / "router", {"queue": {"wait_s_max": 30}}) as router:
        url = f"http://127.0.0.1:{router.port}"
        workers = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers.simulated", "--simulated", "2", "--port", "0"),
            *("--lanes", "short", "long", "--register", url, "--time-scale", "10"),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await eventually(lambda: has_healthy(router.port, 2), within_s=20)
            rows = await load_test(tmp_path, url, "--rate", "10", run_time="5s")
        finally:
            workers.terminate()
            await workers.wait()
        assert rows.exit_status == 0, rows.output
        for name in ("short first token", "short end", "long first token", "long end"):
            assert rows[name]["num_requests"] > 0
            assert rows[name]["num_failures"] == 0
        assert "Traceback" not in router.log()


async def has_healthy(port: int, count: int) -> bool:
    answer = await Answer.request(port, "GET", "/readyz")
    await (await answer.head()).read()
    return bool(answer.json()["healthy_workers"] == count)
