"""Simulated workers on free ports of the loopback, stopped when the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from workers.engine_model import EngineSettings
from workers.profiles import load_profiles
from workers.sim.faults import Faults, with_changes
from workers.sim.intake import WorkerOptions
from workers.sim.server import SimulatedServer

StartWorker = Callable[..., Awaitable[SimulatedServer]]

# Ten times as fast as an H100: answers of tests take milliseconds.
OPTIONS = WorkerOptions(profile=load_profiles()["h100-8b"], time_scale=10.0)


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    servers: list[SimulatedServer] = []

    async def start(
        *,
        engine: dict[str, Any] | None = None,
        faults: dict[str, Any] | None = None,
        **changes: Any,
    ) -> SimulatedServer:
        options = replace(OPTIONS, **changes)
        if engine:
            options = replace(options, engine=EngineSettings(**engine))
        server = SimulatedServer(options, faults=with_changes(Faults(), faults or {}))
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def worker(start_worker: StartWorker) -> SimulatedServer:
    return await start_worker()


@pytest.fixture
async def http(worker: SimulatedServer) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(worker) as client:
        yield client


def client_of(server: SimulatedServer, **kwargs: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=10.0, trust_env=False, **kwargs)


async def until(client: httpx.AsyncClient, reached: Any) -> None:
    """Poll the load until `reached(load)`; each poll is a round trip, and the test has a limit."""
    async with asyncio.timeout(10):
        while True:
            rank = (await client.get("/v1/loads?include=core")).json()["loads"][0]
            load = {
                "running": rank["num_running_reqs"],
                "waiting": rank["num_waiting_reqs"],
                "used": rank["num_used_tokens"],
            }
            if reached(load):
                return
