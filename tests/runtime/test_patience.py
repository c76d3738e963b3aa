"""A deadline counts what the loop had time to look at."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.config import Config
from router.contract import WorkerSpec
from router.runtime.patience import Patience
from router.runtime.upstream import Upstreams
from tests.runtime.busy_loop import busy_loop
from tests.runtime.scripted_worker import Scripted, ScriptedWorker


async def test_what_lasts_too_long_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Patience(0.05):
            await asyncio.Event().wait()
    assert time.monotonic() - began >= 0.05


async def test_what_ends_in_time_is_left_alone() -> None:
    async with Patience(0.01):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)  # nothing of it comes later


async def test_a_flood_does_not_count_against_the_deadline_to_connect() -> None:
    """Each turn of the loop lasts longer than all that the worker is given."""
    config = Config.model_validate({"upstream": {"connect_timeout_s": 0.02}})
    upstreams = Upstreams(config.upstream, loop=asyncio.get_running_loop())
    worker = await ScriptedWorker({"/": Scripted(200, b"here")}).start()
    pool = upstreams.add(WorkerSpec(url=worker.url))
    try:
        with busy_loop(0.03):
            answer = await pool.request("GET", "/", deadline_s=5)
        assert answer.body == b"here"
    finally:
        upstreams.close()
        await worker.stop()
