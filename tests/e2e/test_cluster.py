"""Two router processes, two simulated workers and one Valkey: what is done at one holds at both."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from tests import redis_servers
from tests.e2e.router_process import RouterProcess, client_of, router_process
from tests.redis_servers import BINARIES, Server
from workers.profiles import load_profiles
from workers.sim.intake import WorkerOptions
from workers.sim.server import SimulatedServer

TTL_S = 1.0
OPTIONS = WorkerOptions(profile=load_profiles()["h100-8b"], time_scale=10.0)


class Router:
    """A router process and a client of it."""

    def __init__(self, process: RouterProcess, client: httpx.AsyncClient) -> None:
        self.process = process
        self.client = client

    async def workers(self) -> dict[str, str]:
        listed = (await self.client.get("/workers")).json()["workers"]
        return {each["id"]: each["status"] for each in listed}

    async def has(self, *names: str) -> bool:
        return set(await self.workers()) == set(names)

    async def replicas(self) -> dict[str, Any]:
        return (await self.client.get("/replicas")).json()  # type: ignore[no-any-return]

    async def stands(self, standing: str, count: int) -> bool:
        body = await self.replicas()
        return body["standing"] == standing and len(body["replicas"]) == count


@asynccontextmanager
async def router(server: Server, *more: str) -> AsyncIterator[Router]:
    async with (
        router_process(
            *more,
            "--set", "redis.mode=single", "--set", f"redis.urls=[{server.url}]",
            "--set", f"cluster.ttl_s={TTL_S}", "--set", "probe.interval_s=0.1",
            "--set", "server.drain_delay_s=0",
        ) as process,
        client_of(process) as client,
    ):  # fmt: skip
        yield Router(process, client)


@pytest.fixture
def valkey() -> Any:
    with redis_servers.single() as server:
        yield server


@pytest.fixture
async def workers() -> AsyncIterator[list[SimulatedServer]]:
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(2):
            server = SimulatedServer(OPTIONS)
            await server.start()
            stack.push_async_callback(server.stop)
            found.append(server)
        yield found


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> float:
    """Wait until it holds; returns the seconds that it took."""
    began = time.monotonic()
    while not await holds():
        assert time.monotonic() - began < within_s, "waited in vain"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def chat(at: Router, headers: dict[str, str] | None = None) -> int:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = await at.client.post("/v1/chat/completions", json=body, headers=headers)
    return answer.status_code


async def test_a_router_that_starts_knows_the_others_workers_before_it_serves(
    valkey: Server, workers: list[SimulatedServer]
) -> None:
    async with router(valkey) as first:
        await first.client.post("/workers", json={"url": workers[0].url})
        async with router(valkey) as second:
            assert await chat(second) == 200
    async with router(valkey) as third:  # alone, after all have gone
        assert await chat(third) == 200


async def test_two_routers_act_as_one(valkey: Server, workers: list[SimulatedServer]) -> None:
    names = [worker.url.removeprefix("http://") for worker in workers]
    async with router(valkey) as b:
        async with router(valkey) as a:
            await until(lambda: a.stands("together", 2))
            for worker in workers:
                answer = await a.client.post("/workers", json={"url": worker.url})
                assert (answer.status_code, answer.json()["shared"]) == (202, True)
            assert await until(lambda: b.has(*names)) < 1.0
            again = await b.client.post("/workers", json={"url": workers[0].url})
            assert again.status_code == 409
            await until(lambda: _all(b, "Ready"))
            assert [await chat(a), await chat(b)] == [200, 200]
            bodies = [await a.replicas(), await b.replicas()]
            assert bodies[0]["leader"] == bodies[1]["leader"]
            assert bodies[0]["config_agrees"]

            # Taken out at one, it takes no more requests at either, and is gone when idle.
            await b.client.patch(f"/workers/{names[0]}", json={"cost": 3})
            await until(lambda: _cost(a, names[0], 3.0))
            await b.client.delete(f"/workers/{names[0]}")
            assert await until(lambda: a.has(names[1])) < 2.0
            back = await a.client.post("/workers", json={"url": workers[0].url})
            assert back.status_code == 202
            await until(lambda: b.has(*names))
            await until(lambda: _all(b, "Ready"))

            a.process.signal(signal.SIGKILL)
            await a.process.exit_status()
        # The other one goes on alone, with all workers and the lead.
        assert await until(lambda: b.stands("together", 1)) < TTL_S + 2
        await until(lambda: _leads(b))
        assert sorted((await b.replicas())["owned_workers"]) == sorted(names)
        assert await chat(b) == 200
        b.process.signal(signal.SIGTERM)
        await b.process.exit_status()
    async with router(valkey) as c:
        await until(lambda: c.has(*names))
        await until(lambda: _all(c, "Ready"))
        assert await chat(c) == 200


async def test_redis_may_die_and_come_back_empty(
    valkey: Server, workers: list[SimulatedServer]
) -> None:
    names = [worker.url.removeprefix("http://") for worker in workers]
    async with router(valkey) as a, router(valkey) as b:
        await until(lambda: b.stands("together", 2))
        await a.client.post("/workers", json={"url": workers[0].url})
        await until(lambda: b.has(names[0]))
        await until(lambda: _all(b, "Ready"))
        valkey.kill()
        await until(lambda: a.stands("away", 2))
        assert (await a.replicas())["config_agrees"] is None
        metrics = (await a.client.get("/metrics")).text
        assert 'laneway_cluster_standing{standing="away"} 1.0' in metrics
        assert await chat(b) == 200
        answer = await a.client.post("/workers", json={"url": workers[1].url})
        assert (answer.status_code, answer.json()["shared"]) == (202, False)
        assert await a.has(*names)
        assert await b.has(names[0])
        valkey.start()
        assert await until(lambda: b.has(*names)) < 5.0
        for each in (a, b):
            await until(lambda each=each: each.stands("together", 2), 5.0)  # type: ignore[misc]
        assert a.process.log.count("the registry is away") == 1


async def test_a_limit_holds_for_both_together(
    valkey: Server, workers: list[SimulatedServer]
) -> None:
    limit = (
        "--set", "limits.tenant.requests_per_minute=1", "--set", "limits.tenant.requests_burst=4",
        "--set", "limits.wait_s_max=0", "--worker-urls", workers[0].url,
    )  # fmt: skip
    async with router(valkey, *limit) as a, router(valkey, *limit) as b:
        for each in (a, b):
            await until(lambda each=each: _all(each, "Ready"))  # type: ignore[misc]
        answers = await asyncio.gather(*(chat(each) for each in (a, b) * 5))
        assert sorted(answers) == [200] * 4 + [429] * 6

        async def used(at: Router) -> list[int]:
            body = (await at.client.get("/tenants/anonymous/usage?minutes=5")).json()
            total = body["since_start"]
            return [total["requests"], total["refused"], body["recent"]["requests"]]

        for each in (a, b):
            await until(lambda each=each: _is(used(each), [10, 6, 10]))  # type: ignore[misc]


async def test_with_leases_most_requests_ask_nobody(
    valkey: Server, workers: list[SimulatedServer]
) -> None:
    limit = (
        "--set", "limits.tenant.requests_per_minute=60000", "--set", "limits.batch_s=2",
        "--set", "limits.tenant.concurrency=1000", "--worker-urls", workers[0].url,
    )  # fmt: skip
    async with router(valkey, *limit) as a, router(valkey, *limit) as b:
        for each in (a, b):
            await until(lambda each=each: _all(each, "Ready"))  # type: ignore[misc]
        for each in (a, b) * 30:
            assert await chat(each) == 200
        metrics = (await a.client.get("/metrics")).text
        series = 'laneway_limit_decisions_total{by="lease",scope="none",verdict="granted"} '
        by_lease = float(metrics.partition(series)[2].partition("\n")[0])
        assert by_lease >= 15
        tenant = {"requests_per_minute": 1, "requests_burst": 1}
        changed = await a.client.patch("/config", json={"limits": {"tenant": tenant}})
        assert changed.status_code == 200
        for each in (a, b):  # whatever they hold of the limit as it was
            await until(lambda each=each: _is(chat(each), 429))  # type: ignore[misc]
        for each in (a, b):
            each.process.signal(signal.SIGTERM)
            assert await each.process.exit_status() == 0
    with valkey.admin() as admin:
        assert admin.zcard("{laneway}:tenant:anonymous:concurrency") == 0, "all came back"


async def test_tenants_that_always_want_more_share_a_limit_of_all_alike(
    valkey: Server, workers: list[SimulatedServer]
) -> None:
    names, served = ("t0", "t1", "t2", "t3"), Counter[str]()
    flags = (
        "limits.cluster.cost_per_s=40", "limits.wait_s_max=30", "limits.cost.request_units=1",
        "limits.cost.prompt_token_units=0", "limits.cost.output_token_units=0",
        "auth.trusted_proxies=[127.0.0.1]", *(f"tenants.{name}.weight=1" for name in names),
    )  # fmt: skip
    more = [word for flag in flags for word in ("--set", flag)]
    more += ["--worker-urls", workers[0].url]
    async with router(valkey, *more) as a, router(valkey, *more) as b:

        async def insist(at: Router, name: str) -> None:
            while served.total() < 160:
                assert await chat(at, {"x-laneway-tenant": name}) == 200
                served[name] += 1

        for each in (a, b):
            await until(lambda each=each: _all(each, "Ready"))  # type: ignore[misc]
        await asyncio.gather(
            *(insist(at, name) for at in (a, b) for name in names for _ in range(2))
        )
    jain = served.total() ** 2 / (len(names) * sum(n * n for n in served.values()))
    assert jain >= 0.98, served


@pytest.mark.parametrize("binary", BINARIES)
async def test_the_documented_user_may_do_all_that_routers_do(
    binary: str, workers: list[SimulatedServer]
) -> None:
    more = (
        "--set", "redis.user=laneway", "--set", "redis.password=PASSWORD",
        "--set", "limits.tenant.requests_per_minute=600", "--set", "limits.tenant.concurrency=9",
    )  # fmt: skip
    with redis_servers.single(binary=binary) as server, server.admin() as admin:
        admin.execute_command("ACL SETUSER", *redis_servers.documented_user())
        async with router(server, *more) as a, router(server, *more) as b:
            await until(lambda: b.stands("together", 2))
            spec = {"url": workers[0].url, "ttl_s": 60}
            added = await a.client.post("/workers", json=spec)
            assert added.json()["shared"]
            await until(lambda: _all(b, "Ready"))
            assert await chat(b) == 200
            await b.client.patch("/config", json={"queue": {"depth_max": 7}})
            await until(lambda: _depth(a, 7))
            worker_id = added.json()["worker_id"]
            removed = await a.client.delete(f"/workers/{worker_id}?deadline_s=0")
            assert removed.json()["shared"]
            await until(b.has)
            await until(lambda: _is(_used(a), [1, 2]))
            for each in (a, b):
                each.process.signal(signal.SIGTERM)
                assert await each.process.exit_status() == 0
        assert server.refusals() == []


async def _depth(at: Router, depth: int) -> bool:
    body = (await at.client.get("/config")).json()
    return bool(body["config"]["queue"]["depth_max"] == depth)


async def _used(at: Router) -> list[int]:
    body = (await at.client.get("/tenants/anonymous/usage")).json()
    return [body["since_start"]["requests"], body["covers"]["routers"]]


async def test_without_redis_a_router_says_that_it_stands_alone(
    workers: list[SimulatedServer],
) -> None:
    async with (
        router_process("--worker-urls", workers[0].url) as process,
        client_of(process) as client,
    ):
        body = (await client.get("/replicas")).json()
    assert body["standing"] == "alone"
    assert [each["self"] for each in body["replicas"]] == [True]
    assert body["replicas"][0]["address"] == process.url


async def _all(at: Router, status: str) -> bool:
    found = await at.workers()
    return bool(found) and set(found.values()) == {status}


async def _cost(at: Router, name: str, cost: float) -> bool:
    body = (await at.client.get(f"/workers/{name}")).json()
    return bool(body.get("cost") == cost)


async def _leads(at: Router) -> bool:
    body = await at.replicas()
    return bool(body["leader"] == body["name"])


async def _is(found: Awaitable[object], wanted: object) -> bool:
    return await found == wanted
