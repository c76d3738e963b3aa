"""The agent beside a real SGLang server: makes it a worker that looks after itself.

It answers GET /health with the whole load report (engine and GPU figures), registers the worker at
one or several routers and keeps it registered, and on SIGTERM has it drained: withdrawn at the
routers first, then waited for until its engine is idle. A second SIGTERM ends the waiting.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Final

import httpx
import uvicorn
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.contract import encode_report
from workers.agent_settings import AgentSettings
from workers.gpu import Gpus, find_gpus
from workers.listening import CannotListen
from workers.local_server import LocalServer
from workers.registration import Registration

_log = logging.getLogger(__name__)

_GPU_INTERVAL_S: Final = 1.0
# After the withdrawal, requests that a router had already sent may take this long to show.
_SETTLE_S: Final = 1.0


class Agent:
    """The agent of one server. `run` serves until `stop` is set, then drains."""

    def __init__(self, settings: AgentSettings, gpus: Gpus) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()  # do not wait for the server to become idle
        self._settings = settings
        self._gpus = gpus
        self._gpu_figures: Mapping[str, Any] = {}
        self._client = httpx.AsyncClient(trust_env=False)
        self._local = LocalServer(settings.server_url, self._client, api_key=settings.spec.api_key)
        self._registrations = [
            Registration(
                url,
                settings.spec,
                self._client,
                admin_key=settings.admin_key,
                settings=settings.registration,
                rng=Random(),
            )
            for url in settings.router_urls
        ]

    async def run(self) -> None:
        """Serve, register, and on `stop` drain. Raises CannotListen when the port is taken."""
        server = _server(self._app())
        with _listener(self._settings.listen_host, self._settings.listen_port) as listener:
            async with self._client, asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(server.serve(sockets=[listener]))
                background = [
                    tasks.create_task(self._local.run(self._settings.poll_interval_s)),
                    tasks.create_task(self._read_gpus()),
                ]
                registering = [tasks.create_task(self._register(r)) for r in self._registrations]
                await self.stop.wait()
                await self._drain(registering)
                for task in background:
                    task.cancel()
                server.should_exit = True
                await serving

    async def _drain(self, registering: Sequence[asyncio.Task[None]]) -> None:
        """Withdraw everywhere, then wait until the server is idle."""
        for task in registering:
            task.cancel()
        await asyncio.gather(*registering, return_exceptions=True)
        grace_s = self._settings.drain_grace_s
        await asyncio.gather(*(r.withdraw(grace_s) for r in self._registrations))
        await self._until_idle()

    async def _register(self, registration: Registration) -> None:
        """Register once the server can serve: routers would only find a closed port before."""
        await self._local.first_ready.wait()
        await registration.run()

    async def _until_idle(self) -> None:
        """Wait until figures taken from now on show an idle engine, or the grace is over."""
        loop = asyncio.get_running_loop()
        idle = loop.create_task(self._local.idle_after(loop.time() + _SETTLE_S))
        hurry = loop.create_task(self.hurry.wait())
        done, others = await asyncio.wait(
            (idle, hurry),
            timeout=self._settings.drain_grace_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in others:
            task.cancel()
        if idle not in done:
            _log.warning("the server may still be busy when its agent ends")

    async def _read_gpus(self) -> None:
        while True:
            self._gpu_figures = await asyncio.to_thread(self._gpus.figures)
            await asyncio.sleep(_GPU_INTERVAL_S)

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
            ]
        )

    async def _health(self, _: Request) -> Response:
        report = self._local.report(self._gpu_figures)
        return Response(
            encode_report(report),
            status_code=200 if self._local.ready else 503,
            media_type="application/json",
        )

    async def _ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._local.ready else 503)

    async def _metrics(self, _: Request) -> Response:
        registry = CollectorRegistry()
        ready = Gauge("laneway_agent_ready", "Whether the server is ready.", registry=registry)
        ready.set(self._local.ready)
        registered = Gauge(
            "laneway_agent_registered",
            "Whether the router knows this worker.",
            ["router"],
            registry=registry,
        )
        for registration in self._registrations:
            registered.labels(registration.router_url).set(registration.registered)
        report = self._local.report(self._gpu_figures)
        for name in ("age_s", *self._gpu_figures):
            value = getattr(report, name)
            if value is not None:
                series = "report_age_seconds" if name == "age_s" else name
                gauge = Gauge(f"laneway_agent_{series}", "As in /health.", registry=registry)
                gauge.set(value)
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


def _listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as exc:
        raise CannotListen(host, port, exc) from exc


async def run_agent(settings: AgentSettings) -> None:
    """Run an agent in this process until SIGTERM or SIGINT, then drain."""
    set_up_log()
    agent = Agent(settings, find_gpus(os.environ))
    with stopping_on_signals(agent):
        await agent.run()


def set_up_log() -> None:
    """Log to standard error, unless the program has set up its own log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request


@contextmanager
def stopping_on_signals(agent: Agent) -> Iterator[None]:
    """The first SIGTERM or SIGINT stops the agent, the next one hurries it."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if agent.stop.is_set():
            agent.hurry.set()
        agent.stop.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the agent: uvicorn would stop before the worker is drained."""
        yield


def _server(app: Starlette) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", workers=1)
    )
