"""A router without a listener for tests: the real core, driver, pools and surface, over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from router.api.auth import Authenticator
from router.api.services import Lifecycle, Services
from router.api.surface import surface
from router.config import Config
from router.config_source import Loaded
from router.contract import LoadReport, WorkerId
from router.core.dispatcher import Dispatcher
from router.core.types import Endpoint, Refusal, RequestSpec, Ticket
from router.errors import Reason
from router.metrics import Metrics
from router.records import Records
from router.runtime.driver import Driver
from router.runtime.live_config import LiveConfig
from router.runtime.registry import Registry
from router.runtime.upstream import Upstreams
from router.usage import UsageTable
from tests.runtime.scripted_worker import Scripted, ScriptedWorker

INFERENCE_PATHS = ("/v1/chat/completions", "/generate")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One router and its client; `probed` are the polls that the core asked for."""

    services: Services
    client: httpx.AsyncClient
    app: Any
    probed: list[WorkerId]

    @property
    def driver(self) -> Driver:
        return self.services.driver

    async def add(self, url: str, **fields: Any) -> WorkerId:
        """Register a worker and let it be alive."""
        answer = await self.client.post("/workers", json={"url": url, **fields})
        assert answer.status_code == 202, answer.text
        worker_id = WorkerId(answer.json()["id"])
        self.driver.on_report(worker_id, LoadReport())
        return worker_id

    async def listed(self) -> list[dict[str, Any]]:
        """The workers of GET /workers."""
        workers: list[dict[str, Any]] = (await self.client.get("/workers")).json()["workers"]
        return workers


class Exchange:
    """A client's request that runs, or waits, until it is cut."""

    ticket: Ticket

    def __init__(
        self,
        router: Cluster,
        rid: str | None = None,
        *,
        tenant: str = "anonymous",
        wait_s_max: float | None = None,
    ) -> None:
        self.cuts: list[Reason] = []
        spec = RequestSpec(
            request_id="r", endpoint=Endpoint.GENERATE, rid=rid, tenant=tenant,
            wait_s_max=wait_s_max,
        )  # fmt: skip
        router.driver.submit(spec, self)

    def dispatch(self) -> None:
        """Take note of a worker."""

    def refuse(self, refusal: Refusal) -> None:
        """Fail the test: nothing is refused here."""
        raise AssertionError(refusal)

    def judged(self, *, again: bool) -> None:
        """Fail the test: no attempt fails here."""
        raise AssertionError(again)

    def preempt(self) -> bool:
        """Never give way."""
        return False

    def sweep(self, now: float) -> None:
        """Look at no deadline."""

    def cut(self, reason: Reason, message: str) -> None:
        """Take note of the cut."""
        self.cuts.append(reason)


@asynccontextmanager
async def cluster(
    *,
    client_host: str = "127.0.0.1",
    router_id: str = "",
    shared_usage: Any = None,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Build a router with these settings and stop it at the end."""
    config = Config(**settings)
    loop = asyncio.get_running_loop()
    upstreams = Upstreams(config.upstream, loop=loop, router_id=router_id.encode())
    driver = Driver(config, Dispatcher(config, rng=Random(1)), upstreams, loop=loop)
    live = LiveConfig(Loaded.of(config))
    probed: list[WorkerId] = []
    driver.probe = probed.append
    driver.start()
    records = Records()
    driver.on_record.append(records.add)
    services = Services(
        live=live,
        driver=driver,
        upstreams=upstreams,
        metrics=Metrics(
            records, version="0", snapshot=driver.snapshot, log_lines_dropped=lambda: 0
        ),
        lifecycle=Lifecycle(version="0", started_at=0.0),
        authenticator=Authenticator(config.auth, config.tenants),
        registry=Registry(
            driver, config.cluster, store=None, name="r", version="0", started_at=0.0
        ),
        usage=UsageTable(
            records,
            known=lambda: driver.config.tenant_names,
            limits=lambda: driver.dispatcher.reserving.limits,
        ),
        shared_usage=shared_usage,
    )
    live.on_config += [services.authenticator.on_config, driver.on_config]
    ids = iter(range(1_000_000))
    app = surface(services, inference_paths=INFERENCE_PATHS, new_id=lambda: f"made-{next(ids)}")
    transport = httpx.ASGITransport(app, client=(client_host, 50_000), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield Cluster(services=services, client=client, app=app, probed=probed)
    driver.stop()


@asynccontextmanager
async def worker(**script: Scripted | None) -> AsyncIterator[ScriptedWorker]:
    """A worker that answers `script`; in its names two underscores are a slash."""
    paths = {"/" + name.replace("__", "/"): answer for name, answer in script.items()}
    running = await ScriptedWorker(paths).start()
    try:
        yield running
    finally:
        await running.stop()
