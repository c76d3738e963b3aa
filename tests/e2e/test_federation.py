"""Routers in front of routers, all real processes: one global router and two regions."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.router_process import RouterProcess, client_of, router_process
from tests.e2e.streaming_worker import StreamingWorker, streaming_worker
from tests.field.mock_worker import MockWorker, held
from tests.workers.conftest import OPTIONS
from workers.sim.server import SimulatedServer

SETTINGS: dict[str, Any] = {
    "probe": {"interval_s": 0.1, "timeout_s": 1.0, "failures_to_eject": 2},
    "policy": {"slow_start_s": 0, "seed": 1},
    "retry": {"budget_ratio": 1.0, "backoff_s": 0.01},
    "live": {"poll_s": 0},
}


class Router:
    """A running router and a client of it."""

    def __init__(self, process: RouterProcess, client: httpx.AsyncClient) -> None:
        self.process = process
        self.client = client

    @property
    def url(self) -> str:
        return self.process.url

    async def health(self) -> dict[str, Any]:
        health: dict[str, Any] = (await self.client.get("/health")).json()
        return health

    async def workers(self) -> dict[str, dict[str, Any]]:
        listed = (await self.client.get("/workers")).json()["workers"]
        return {worker["url"]: worker for worker in listed}

    async def until_workers(self, true: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        async with asyncio.timeout(15):
            while not true(await self.workers()):  # noqa: ASYNC110 - no event there
                await asyncio.sleep(0.02)

    async def chat(
        self, model: str, max_tokens: int = 4, *, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        message = {"role": "user", "content": "hi"}
        body = {"model": model, "messages": [message], "max_tokens": max_tokens}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)


class Cluster:
    """Starts routers, and ends what was started."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._count = 0

    async def router(self, *urls: str, **settings: Any) -> Router:
        self._count += 1
        path = self._folder / f"router{self._count}.yaml"
        workers = [{"url": url} for url in urls]
        path.write_text(yaml.safe_dump({**SETTINGS, "workers": workers, **settings}))
        process = await self._stack.enter_async_context(router_process("--config", str(path)))
        client = await self._stack.enter_async_context(client_of(process))
        router = Router(process, client)
        await router.until_workers(lambda workers: all(map(usable, workers.values())))
        return router

    def at_end(self, stop: Callable[[], Awaitable[None]]) -> None:
        self._stack.push_async_callback(stop)

    async def engine(self) -> SimulatedServer:
        server = SimulatedServer(OPTIONS)
        await server.start()
        self.at_end(server.stop)
        return server

    async def streaming(self) -> StreamingWorker:
        worker = await self._stack.enter_async_context(streaming_worker())
        worker.release.set()
        return worker


def usable(worker: dict[str, Any]) -> bool:
    return bool(worker["is_healthy"] and worker["models_known"])


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(folder, stack)


async def test_a_global_router_sees_regions_as_workers_and_outlives_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        engines = [await made.engine() for _ in range(3)]
        large = await made.router(engines[0].url, engines[1].url)
        small = await made.router(engines[2].url)
        front = await made.router(large.url, small.url)

        health = await large.health()
        assert (health["format"], health["workers"]) == ("laneway.load/1", 2)
        seen = await front.workers()
        one = next(iter((await small.workers()).values()))
        assert seen[small.url]["models"] == ["sim-8b"]
        assert seen[small.url]["kv_total_tokens"] == one["kv_total_tokens"]
        assert seen[large.url]["kv_total_tokens"] == 2 * one["kv_total_tokens"]
        assert seen[large.url]["concurrency_max"] >= seen[small.url]["concurrency_max"]
        assert (await front.health())["workers"] == 3

        answers = await asyncio.gather(*(front.chat("sim-8b", 300) for _ in range(90)))
        assert {answer.status_code for answer in answers} == {200}
        by_region = [sum(a.headers["x-laneway-worker"] in r.url for a in answers)
                     for r in (large, small)]  # fmt: skip
        assert sum(by_region) == 90
        assert by_region[0] > by_region[1] > 5, "by size: two engines and one"

        large.process.signal(signal.SIGKILL)
        answers = [await front.chat("sim-8b") for _ in range(10)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-laneway-worker"] in small.url for answer in answers} == {True}
        await front.until_workers(lambda workers: workers[large.url]["state"] == "ejected")
        assert (await front.health())["workers"] == 1


async def test_class_tenant_and_id_reach_the_engine_through_both(tmp_path: Path) -> None:
    tenants = {"acme": {"ceiling": "P0"}, "anonymous": {}}
    async with cluster(tmp_path) as made:
        engine = await made.streaming()
        auth = {"trusted_proxies": ["127.0.0.0/8"]}
        engines = [{"url": engine.url, "models": ["m"]}]
        region = await made.router(workers=engines, tenants=tenants, auth=auth)
        front = await made.router(region.url, tenants=tenants, auth=auth)
        headers = {
            "x-laneway-priority": "P0", "x-laneway-tenant": "acme", "x-request-id": "one-id",
        }  # fmt: skip
        answer = await front.chat("m", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "one-id"
        (head,) = engine.heads
        assert b"\r\nx-request-id: one-id\r\n" in head
        assert head.count(b"\r\nx-laneway-via: ") == 2
        assert b"acme" not in head, "an engine is no router"
        assert b"priority" not in head
        text = (await region.client.get("/metrics")).text
        line = next(
            line for line in text.splitlines() if line.startswith("laneway_requests_total{")
        )
        assert 'priority="P0"' in line
        assert line.endswith(" 1.0")
        assert (await front.chat("m")).status_code == 200
        assert (await region.client.get("/metrics")).text.count("laneway_requests_total{") == 2


async def test_a_client_that_leaves_ends_the_work_of_the_engine(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        engine, never = MockWorker(), asyncio.Event()
        await engine.start()
        made.at_end(engine.stop)
        engine.answer = held(never)
        region = await made.router(engine.url)
        front = await made.router(region.url)
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with front.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for piece in answer.aiter_raw():
                assert b"one" in piece
                break
        await asyncio.wait_for(engine.calls[0].gone.wait(), 5)


async def test_a_full_region_gives_way_and_its_429_pauses_nobody(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        held, free = await made.streaming(), await made.streaming()
        held.release.clear()
        lane = {"concurrency_max": 1, "models": ["m"]}
        none = {"depth_max": 0}
        full = await made.router(workers=[{"url": held.url, **lane}], queue=none)
        other = await made.router(workers=[{"url": free.url, **lane}], queue=none)
        # To the front both look free: what fills the first region came by another way.
        regions = [{"url": full.url, "priority": 1}, {"url": other.url}]
        front = await made.router(workers=regions)
        first = asyncio.create_task(full.chat("m"))
        await held.asked.wait()
        answers = [await front.chat("m") for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
        assert len(held.heads) == 1
        alone = await made.router(full.url)
        refused = await alone.chat("m")
        assert refused.status_code == 429
        assert refused.headers["x-laneway-reason"] in ("queue_full", "upstream_overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await alone.workers())[full.url]["breaker"] == "closed"
        held.release.set()
        assert (await first).status_code == 200

        async def served() -> bool:
            return (await alone.chat("m")).status_code == 200

        async with asyncio.timeout(5):
            while not await served():  # noqa: ASYNC110 - no event there
                await asyncio.sleep(0.02)


async def test_regions_that_lend_to_each_other_neither_loop_nor_count_twice(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as made:
        engines = [await made.engine() for _ in range(2)]
        first = await made.router(engines[0].url)
        second = await made.router(engines[1].url, first.url)
        answer = await first.client.post("/workers", json={"url": second.url, "priority": -10})
        assert answer.status_code == 202
        await first.until_workers(lambda workers: usable(workers[second.url]))
        await second.until_workers(lambda workers: usable(workers[first.url]))
        for router, other in ((first, second), (second, first)):
            # Each has its own engine and, behind the other, one: never its own once more.
            shown = await router.workers()
            assert other.url in shown
            assert len({worker["kv_total_tokens"] for worker in shown.values()}) == 1
            assert (await router.health())["workers"] == 2
        answers = await asyncio.gather(*(second.chat("sim-8b") for _ in range(30)))
        assert {answer.status_code for answer in answers} == {200}
        await engines[0].stop()
        answers = [await first.chat("sim-8b") for _ in range(5)]
        assert {answer.status_code for answer in answers} == {200}
        await engines[1].stop()
        await second.until_workers(lambda workers: not workers[engines[1].url]["is_healthy"])
        answer = await first.chat("sim-8b")
        assert answer.status_code in (502, 503, 508)
        for router, other in ((first, second), (second, first)):
            # Each has only the other one left, and so nothing.
            await router.until_workers(lambda workers, url=other.url: not usable(workers[url]))  # type: ignore[misc]
            answer = await router.client.get("/readyz")
            assert answer.status_code == 503
            assert answer.json()["why"].endswith("lead back to this one")
            assert (await router.chat("sim-8b")).status_code == 503
        engine = await made.engine()
        await second.client.post("/workers", json={"url": engine.url})
        await first.until_workers(lambda workers: usable(workers[second.url]))
        assert (await first.chat("sim-8b")).status_code == 200
        assert "Traceback" not in first.process.log + second.process.log


async def test_a_ring_of_routers_is_ready_no_longer_than_one_of_them_has_an_engine(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as made:
        engine = await made.engine()
        home = await made.router(engine.url)
        beside = await made.router(home.url)
        opposite = await made.router(beside.url)
        last = await made.router(opposite.url, home.url)
        ring = [home, beside, opposite, last]
        for router, other in ((home, last), (home, beside), (beside, opposite), (opposite, last)):
            answer = await router.client.post("/workers", json={"url": other.url})
            assert answer.status_code == 202
        for router in (beside, opposite, last):
            await router.until_workers(lambda workers: any(map(usable, workers.values())))
            assert (await router.chat("sim-8b")).status_code == 200
        await engine.stop()
        for router in ring:
            await router.until_workers(lambda workers: not any(map(usable, workers.values())))
        for _ in range(20):  # and it stays so: nobody holds another one up
            answers = [await router.client.get("/readyz") for router in ring]
            assert {answer.status_code for answer in answers} == {503}
            assert not any([(await router.health())["ready"] for router in ring])
        engine = await made.engine()
        await opposite.client.post("/workers", json={"url": engine.url})
        await home.until_workers(lambda workers: any(map(usable, workers.values())))
        assert (await home.chat("sim-8b")).status_code == 200
