"""The wall clock may be stepped at any moment: nothing that waits or runs may notice."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.field.harness import Field, assert_error, router_process
from tests.field.mock_worker import held, silent
from tests.field.wire import eventually

WAIT_S = 2.0
CONFIG = {"queue": {"wait_s_max": WAIT_S}}
# Runs at the start of the router's process: its wall clock is off by what a file says.
_CLOCK = """
import pathlib, time
_real, _file = time.time, pathlib.Path(__file__).with_name("clock")
time.time = lambda: _real() + float(_file.read_text())
time.time_ns = lambda: int(time.time() * 1e9)
"""


class Clock:
    """The wall clock of one router."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_CLOCK)
        self.step(0.0)

    def step(self, seconds: float) -> None:
        """From now on it is off by that much."""
        new = self._file.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._file)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock")


@pytest.fixture
async def stepped(tmp_path: Path, clock: Clock) -> AsyncIterator[Field]:
    """A router whose wall clock the test steps."""
    with router_process(tmp_path / "router", CONFIG, python_path=tmp_path / "clock") as router:
        field = Field(router)
        try:
            yield field
            await field.assert_clean()
        finally:
            await field.stop_workers()


async def test_a_clock_step_neither_trips_nor_freezes_a_wait(stepped: Field, clock: Clock) -> None:
    """TM01."""
    worker, gates = await stepped.worker(concurrency_max=1), [asyncio.Event() for _ in range(2)]
    worker.script.append(held(gates[0]))
    running = await stepped.stream()
    await running.until(b"one ")
    waits = asyncio.ensure_future(stepped.chat())
    await eventually(lambda: is_queued(stepped))
    clock.step(3600.0)
    assert (await stepped.get("/health")).json()["uptime_s"] < 60
    await stepped.polled(worker, polls=4)
    assert not waits.done(), "an hour that did not pass ended the wait"
    gates[0].set()
    assert b"[DONE]" in await running.read()
    assert (await waits).status == 200
    await eventually(lambda: logged_ahead(stepped), what="the step in the log's times")

    worker.script.append(silent(gates[1]))
    blocks = asyncio.ensure_future(stepped.chat())
    await eventually(lambda: len(worker.calls) == 3)
    began_at = time.monotonic()
    refused = asyncio.ensure_future(stepped.chat())
    await eventually(lambda: is_queued(stepped))
    clock.step(-86_400.0)
    assert_error(await refused, 429, 503)
    assert WAIT_S - 0.1 <= time.monotonic() - began_at < WAIT_S + 2, "the wait froze"
    gates[1].set()
    assert (await blocks).status == 200


async def is_queued(field: Field) -> bool:
    return await field.queued() == 1


def logged_ahead(field: Field) -> bool:
    """Whether the last line of the access log is of the hour to come."""
    times = re.findall(r'"time": ?"([^"]+)"', field.router.log())
    if not times:
        return False
    ahead = datetime.fromisoformat(times[-1].replace("Z", "+00:00")) - datetime.now(UTC)
    return ahead.total_seconds() > 3000
