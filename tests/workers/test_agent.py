"""The agent beside an SGLang-shaped server, and a router-shaped recorder, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from router.contract import Lane, LoadReport, WorkerSpec, decode_report
from tests.runtime.scripted_worker import HANG, Scripted, ScriptedWorker
from tests.workers.recorder import Router, running, running_router
from workers.agent import Agent
from workers.agent_settings import AgentSettings, agent_settings
from workers.gpu import NoGpus, NvmlGpus, find_gpus
from workers.registration import RegistrationSettings

QUICK = RegistrationSettings(check_s=0.05, retry_s=0.02, retry_s_max=0.1)
OK = Scripted(200)
GPU_FIGURES = {"gpu_utilization_ratio": 0.5, "gpu_temperature_c": 61}


class FixedGpus(NoGpus):
    def figures(self) -> dict[str, float]:
        return GPU_FIGURES


def loads(running: int = 0, waiting: int = 0) -> Scripted:
    entry = {"num_running_reqs": running, "num_waiting_reqs": waiting, "num_used_tokens": 7}
    return Scripted(200, {"loads": [entry]})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def settings(server: ScriptedWorker, *routers: str, **changes: Any) -> AgentSettings:
    port = free_port()
    spec = {"url": server.url, "health_url": f"http://127.0.0.1:{port}", **changes}
    return AgentSettings(
        server_url=server.url,
        spec=WorkerSpec.model_validate(spec),
        router_urls=routers,
        listen_host="127.0.0.1",
        listen_port=port,
        poll_interval_s=0.02,
        drain_grace_s=10,
        registration=QUICK,
    )


@dataclass
class Running:
    agent: Agent
    task: asyncio.Task[None]
    client: httpx.AsyncClient

    async def get(self, path: str) -> httpx.Response:
        return await self.client.get(path)

    async def report(self, true: Callable[[LoadReport], bool]) -> LoadReport:
        """The first report for which `true` holds."""
        async with asyncio.timeout(5):
            while True:
                try:
                    report = decode_report((await self.get("/health")).content)
                except httpx.TransportError:
                    report = LoadReport()
                if true(report):
                    return report
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_agent(with_settings: AgentSettings) -> AsyncIterator[Running]:
    agent = Agent(with_settings, FixedGpus())
    task = asyncio.get_running_loop().create_task(agent.run())
    base_url = str(with_settings.spec.health_url)
    try:
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
            yield Running(agent, task, client)
    finally:
        agent.hurry.set()
        agent.stop.set()
        await task


async def test_health_is_the_whole_report_with_gpu_figures() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads(3, 1)})
    async with running(server), running_agent(settings(server)) as agent:
        report = await agent.report(
            lambda r: r.running_requests == 3 and r.gpu_temperature_c is not None
        )
        assert report.queued_requests == 1
        assert report.kv_used_tokens == 7
        assert report.gpu_utilization_ratio == 0.5
        assert report.ready is True
        assert report.age_s is not None
        assert report.age_s < 5
        assert (await agent.get("/ready")).status_code == 200


async def test_a_server_that_is_not_ready_is_shown_as_not_ready() -> None:
    server = ScriptedWorker({"/ready": Scripted(503), "/v1/loads": loads(3)})
    async with running(server), running_agent(settings(server)) as agent:
        report = await agent.report(lambda r: r.running_requests == 3)
        assert report.ready is False
        assert (await agent.get("/health")).status_code == 503
        assert (await agent.get("/ready")).status_code == 503


async def test_figures_that_stop_coming_grow_old() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads(3)})
    async with running(server), running_agent(settings(server)) as agent:
        await agent.report(lambda r: r.running_requests == 3)
        server.script["/v1/loads"] = Scripted(500)
        report = await agent.report(lambda r: (r.age_s or 0) > 0.2)
        assert report.running_requests == 3
        assert report.ready is True


@pytest.mark.parametrize(
    "script",
    [
        {"/get_load": Scripted(200, [{"num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 9}])},
        {"/v1/loads": loads(3, 2)},
        {"/metrics": Scripted(200, b"sglang:num_running_reqs 3\nsglang:num_queue_reqs 2\n")},
    ],
    ids=str,
)
async def test_older_servers_without_ready_live_when_they_answer(
    script: dict[str, Scripted | None],
) -> None:
    server = ScriptedWorker(script)
    async with running(server), running_agent(settings(server)) as agent:
        report = await agent.report(lambda r: r.ready is True)
        assert (report.running_requests, report.queued_requests) == (3, 2)
        await server.stop()
        await agent.report(lambda r: r.ready is False)


async def test_the_workers_own_health_is_never_asked() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads(1), "/health": HANG})
    async with running(server), running_agent(settings(server)) as agent:
        await agent.report(lambda r: r.running_requests == 1)
        assert server.count("/health") == 0


async def test_the_worker_is_registered_at_every_router_with_what_it_is() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads()})
    async with running(server), running_router() as one, running_router() as two:
        urls = (one.url, two.url)
        with_settings = settings(server, *urls, lanes=["short"], labels={"zone": "a"})
        async with running_agent(with_settings):
            for router in (one, two):
                await router.until(lambda: server.url in router.known)  # noqa: B023
                leased = with_settings.spec.model_copy(update={"ttl_s": QUICK.ttl_s})
                assert router.known[server.url] == leased


async def test_keys_go_where_they_belong_and_are_never_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads()})
    async with running(server), running_router(admin_key="a-key") as router:
        base = settings(server, router.url, api_key="w-key")
        with_settings = AgentSettings(
            **{n: getattr(base, n) for n in base.__slots__ if n != "admin_key"},
            admin_key=SecretStr("a-key"),
        )
        async with running_agent(with_settings) as agent:
            await router.until(lambda: bool(router.known))
            key = router.known[server.url].api_key
            pages = [await agent.get(path) for path in ("/health", "/ready", "/metrics")]
        assert key is not None
        assert key.get_secret_value() == "w-key"
        assert {h.get("authorization") for _, h in server.asked} == {"Bearer w-key"}
    shown = caplog.text + "".join(page.text + str(page.headers) for page in pages)
    assert "w-key" not in shown
    assert "a-key" not in shown


async def test_registration_waits_until_the_server_can_serve() -> None:
    server = ScriptedWorker({"/ready": Scripted(503)})
    async with (
        running(server),
        running_router() as router,
        running_agent(settings(server, router.url)) as agent,
    ):
        await agent.report(lambda r: r.ready is False)
        assert router.asked == []
        server.script.update({"/ready": OK, "/v1/loads": loads()})
        await router.until(lambda: bool(router.known))


async def test_a_router_that_is_not_there_yet_is_tried_until_it_is() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads()})
    router = Router()
    router.worker.port = free_port()
    async with running(server), running_agent(settings(server, router.url)) as agent:
        await agent.report(lambda r: r.ready is True)
        async with running(router.worker):
            await router.until(lambda: server.url in router.known)


async def test_a_router_that_refuses_is_asked_again_until_it_accepts() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads()})
    async with (
        running(server),
        running_router(refuse=401) as router,
        running_agent(settings(server, router.url)),
    ):
        await router.until(lambda: len(router.asked) >= 3)
        router.refuse = None
        await router.until(lambda: server.url in router.known)


async def test_a_router_that_forgot_the_worker_learns_it_again() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads()})
    async with (
        running(server),
        running_router() as router,
        running_agent(settings(server, router.url)),
    ):
        await router.until(lambda: server.url in router.known)
        router.known.clear()
        await router.until(lambda: server.url in router.known)


async def test_a_worker_that_is_known_already_brings_its_entry_up_to_date() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads()})
    async with running(server), running_router() as router:
        router.known[server.url] = WorkerSpec(url=server.url, id="from-the-configuration")
        async with running_agent(settings(server, router.url, lanes=["long"])):
            await router.until(lambda: router.known[server.url].lanes == {Lane.LONG})
            assert router.known[server.url].ttl_s is None, "what was for ever stays so"


async def test_a_worker_that_an_operator_removed_stays_away_until_it_is_added() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads()})
    async with (
        running(server),
        running_router() as router,
        running_agent(settings(server, router.url, lanes=["long"])) as agent,
    ):
        await router.until(lambda: server.url in router.known)
        router.removed.add(server.url)
        router.known.clear()
        (registration,) = agent.agent._registrations
        await router.until(lambda: registration.removed)
        assert not registration.registered
        assert "operator" in (registration.trouble or "")
        router.asked.clear()
        await router.until(lambda: len(router.asked) >= 5)
        assert {method for method, _ in router.asked} == {"GET"}, "it only looks"
        router.known[server.url] = WorkerSpec(url=server.url)
        await router.until(lambda: router.known[server.url].lanes == {Lane.LONG})
        router.removed.clear()
        router.known.clear()
        await router.until(lambda: server.url in router.known)


async def test_stopping_withdraws_first_and_waits_until_the_server_is_idle() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads(2)})
    async with (
        running(server),
        running_router() as router,
        running_agent(settings(server, router.url)) as agent,
    ):
        await router.until(lambda: server.url in router.known)
        agent.agent.stop.set()
        await router.until(lambda: not router.known)
        assert router.asked[-1][1].endswith("?deadline_s=10&by=agent")
        for _ in range(3):
            assert (await agent.get("/health")).status_code == 200, "it reports to the end"
        assert not agent.task.done()
        server.script["/v1/loads"] = loads(0)
        async with asyncio.timeout(5):
            await agent.task
        assert [method for method, _ in router.asked].count("POST") == 1, "it stays out"


async def test_a_server_that_drains_or_is_gone_does_not_keep_its_agent() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads(2)})
    async with (
        running(server),
        running_router() as router,
        running_agent(settings(server, router.url)) as one,
    ):
        await router.until(lambda: server.url in router.known)
        server.script.update({"/ready": Scripted(503), "/v1/loads": loads(0)})
        one.agent.stop.set()
        async with asyncio.timeout(5):
            await one.task
        async with running_agent(settings(server)) as two:
            await two.report(lambda r: r.ready is False)
            await server.stop()
            two.agent.stop.set()
            async with asyncio.timeout(5):
                await two.task


async def test_a_hurried_agent_does_not_wait_for_the_server() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads(2)})
    async with (
        running(server),
        running_router() as router,
        running_agent(settings(server, router.url)) as agent,
    ):
        await router.until(lambda: server.url in router.known)
        agent.agent.stop.set()
        agent.agent.hurry.set()
        async with asyncio.timeout(5):
            await agent.task
        assert not router.known


async def test_its_metrics_name_each_router() -> None:
    server = ScriptedWorker({"/ready": OK, "/v1/loads": loads()})
    async with (
        running(server),
        running_router() as router,
        running_agent(settings(server, router.url)) as agent,
    ):
        await router.until(lambda: server.url in router.known)
        await agent.report(lambda r: r.gpu_temperature_c is not None)
        text = (await agent.get("/metrics")).text
        assert "laneway_agent_ready 1.0" in text
        assert f'laneway_agent_registered{{router="{router.url}"}}' in text
        assert "laneway_agent_gpu_temperature_c 61.0" in text


def test_settings_fill_in_addresses_that_routers_can_reach() -> None:
    made = agent_settings(
        server_url="http://127.0.0.1:30000",
        router_urls=["http://127.0.0.1:3000"],
        worker={"lanes": ["short"]},
    )
    assert made.spec.url == "http://127.0.0.1:30000"
    assert made.spec.health_url == "http://127.0.0.1:31000"
    assert made.listen_port == 31_000
    assert made.spec.lanes == {Lane.SHORT}


def test_settings_keep_a_public_address() -> None:
    made = agent_settings(
        server_url="http://127.0.0.1:65000",
        router_urls=["http://r:1"],
        public_url="http://[2001:db8::1]:80",
    )
    assert made.spec.url == "http://[2001:db8::1]:80"
    assert made.spec.health_url == "http://[2001:db8::1]:64000"


@pytest.mark.parametrize(
    "fault",
    [
        {"server_url": "nowhere"},
        {"router_urls": ["r:1"]},
        {"public_url": "http://user@h:1"},
        {"worker": {"lanes": ["fast"]}},
        {"router_urls": ["http://no-such-host.invalid:1"]},
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_refused(fault: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "server_url": "http://127.0.0.1:30000",
        "router_urls": ["http://127.0.0.1:1"],
        **fault,
    }
    with pytest.raises(ValueError, match=r"."):
        agent_settings(**given)


class NvmlError(Exception):
    pass


class FakeNvml:
    """The part of pynvml that is used, with two devices."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise NvmlError("no driver")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:  # noqa: N802
        return type("Rates", (), {"gpu": (20, 60)[device]})

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:  # noqa: N802
        if self.broken:
            raise NvmlError("gone")
        return type("Memory", (), {"used": 10, "total": 80})

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:  # noqa: N802
        return (50, 70)[device]


@pytest.mark.parametrize(
    ("visible", "use", "heat"),
    [(None, 0.4, 70), ("0", 0.2, 50), ("GPU-b", 0.6, 70), ("0,1", 0.4, 70)],
)
def test_gpu_figures_are_those_of_the_visible_devices(
    visible: str | None, use: float, heat: float
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    figures = find_gpus(environment, lambda _: FakeNvml()).figures()
    assert figures["gpu_utilization_ratio"] == pytest.approx(use)
    assert figures["gpu_temperature_c"] == heat


def test_without_a_gpu_or_its_library_the_figures_are_unknown() -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    assert find_gpus({}, missing).figures() == {}
    assert find_gpus({}, lambda _: FakeNvml(broken=True)).figures() == {}
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}, lambda _: FakeNvml()).figures() == {}


def test_a_gpu_that_cannot_be_read_is_unknown() -> None:
    assert NvmlGpus(FakeNvml(broken=True), [0]).figures() == {}
