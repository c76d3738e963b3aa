"""Agents with a real router process and SGLang-shaped workers: the whole way of a registration."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.e2e.router_process import router_process
from tests.workers.conftest import StartWorker
from tests.workers.test_agent import QUICK, free_port
from workers.agent import Agent
from workers.agent_settings import AgentSettings, agent_settings
from workers.gpu import NoGpus

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def settings(server_url: str, router_url: str, **worker: Any) -> AgentSettings:
    made = agent_settings(
        server_url=server_url,
        router_urls=[router_url],
        listen_host="127.0.0.1",
        listen_port=free_port(),
        drain_grace_s=10,
        worker=worker,
    )
    return AgentSettings(
        server_url=made.server_url,
        spec=made.spec,
        router_urls=made.router_urls,
        listen_host=made.listen_host,
        listen_port=made.listen_port,
        poll_interval_s=0.05,
        drain_grace_s=made.drain_grace_s,
        registration=QUICK,
    )


@asynccontextmanager
async def running_agent(with_settings: AgentSettings) -> AsyncIterator[Agent]:
    agent = Agent(with_settings, NoGpus())
    task = asyncio.get_running_loop().create_task(agent.run())
    try:
        yield agent
    finally:
        agent.hurry.set()
        agent.stop.set()
        await task


async def workers_of(
    client: httpx.AsyncClient, true: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """What GET /workers shows once `true` holds; each question is a round trip."""
    async with asyncio.timeout(20):
        while True:
            try:
                shown: list[dict[str, Any]] = (await client.get("/workers")).json()["workers"]
            except httpx.TransportError:
                shown = []
            if true(shown):
                return shown
            await asyncio.sleep(0.02)


def active(workers: list[dict[str, Any]]) -> bool:
    return bool(workers) and workers[0]["state"] == "active"


async def test_a_worker_comes_and_goes_by_its_agent(start_worker: StartWorker) -> None:
    server = await start_worker(sglang_health=True, model="tiny")
    async with (
        router_process() as router,
        httpx.AsyncClient(base_url=router.url, trust_env=False) as client,
        running_agent(settings(server.url, router.url, lanes=["short"])) as agent,
    ):
        (worker,) = await workers_of(client, active)
        assert worker["url"] == server.url
        assert worker["models"] == ["tiny"]
        await router.logged(f"its load comes from {worker['health_url']}/health")
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        agent.stop.set()
        await workers_of(client, lambda workers: not workers)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503


async def test_agents_come_back_to_a_router_that_was_restarted(start_worker: StartWorker) -> None:
    server = await start_worker(sglang_health=True, model="tiny")
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
        running_agent(settings(server.url, url)),
    ):
        async with router_process("--port", port) as router:
            await workers_of(client, active)
            router.signal(signal.SIGKILL)
            await router.exit_status()
        async with router_process("--port", port):
            await workers_of(client, active)


async def test_a_worker_whose_server_dies_is_ejected_and_returns_with_it(
    start_worker: StartWorker,
) -> None:
    server = await start_worker(sglang_health=True, model="tiny", faults={})
    async with (
        router_process("--set", "probe.interval_s=0.1") as router,
        httpx.AsyncClient(base_url=router.url, trust_env=False) as client,
        running_agent(settings(server.url, router.url)),
    ):
        await workers_of(client, active)
        server.kill()
        await workers_of(client, lambda workers: workers[0]["state"] == "ejected")
        await server.start()
        await workers_of(client, active)


async def test_a_worker_that_an_operator_removed_returns_by_the_operator_only(
    start_worker: StartWorker,
) -> None:
    server = await start_worker(sglang_health=True, model="tiny")
    async with (
        router_process() as router,
        httpx.AsyncClient(base_url=router.url, trust_env=False) as client,
        running_agent(settings(server.url, router.url, lanes=["short"])) as agent,
    ):
        (worker,) = await workers_of(client, active)
        assert worker["ttl_s"] == QUICK.ttl_s
        await client.delete(f"/workers/{worker['id']}?deadline_s=0")
        (registration,) = agent._registrations
        async with asyncio.timeout(5):
            while not registration.removed:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)
        assert (await client.get("/workers")).json()["total"] == 0
        await client.post("/workers", json={"url": server.url})
        await workers_of(
            client, lambda workers: active(workers) and workers[0]["lanes"] == ["short"]
        )
