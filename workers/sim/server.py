"""Simulated workers as servers: listen, die, come back, drain, register at a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Final, Literal

import httpx
from pydantic import SecretStr

from router.contract import BOTH_LANES, Lane, WorkerSpec
from workers.listening import CannotListen
from workers.registration import Registration, RegistrationSettings
from workers.sim.faults import Faults
from workers.sim.http_server import KEEP_ALIVE_S, Connection
from workers.sim.intake import WorkerOptions
from workers.sim.routes import Routes
from workers.sim.worker import SimulatedWorker

_BACKLOG: Final = 2048
_DRAIN_GRACE_S: Final = 180.0  # for running answers, as the agent gives


class SimulatedServer:
    """One simulated worker on one port. `port` 0 takes a free one."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: Faults | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.host = host
        self.port = port
        self._options = options
        self._faults = faults or Faults()
        self.keep_alive_s = keep_alive_s
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._restarting: asyncio.Task[None] | None = None
        self.worker = SimulatedWorker(options)

    @property
    def url(self) -> str:
        """Where it can be reached from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return self.url_at(f"[{host}]" if ":" in host else host)

    def url_at(self, host: str) -> str:
        """Its URL under one of this machine's addresses."""
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises CannotListen when the port is taken."""
        self.worker = SimulatedWorker(self._options)
        self.worker.set_faults(self._faults)
        routes = Routes(self.worker, self.kill)

        def connection() -> Connection:
            return Connection(routes, self._connections, keep_alive_s=self.keep_alive_s)

        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                connection, self.host, self.port, backlog=_BACKLOG
            )
        except OSError as exc:
            raise CannotListen(self.host, self.port, exc) from exc
        self.port = self._listener.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """Die as by SIGKILL: the port closes, connections are reset, nothing is remembered."""
        restart_after_s = self.worker.faults.restart_after_s
        self._close_listener()
        self.worker.close()
        for connection in list(self._connections):
            connection.reset()
        if restart_after_s is not None:
            # The one that died of a request would die again: it comes back without that fault.
            self._faults = replace(self._faults, kill_after_requests=None)
            self._restarting = asyncio.create_task(self._restart(restart_after_s))

    async def _restart(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self.start()

    async def restarted(self) -> None:
        """Wait until it is back after a kill, if it comes back."""
        if self._restarting is not None:
            await self._restarting

    async def drain(self) -> None:
        """As SGLang on SIGTERM: say "not ready", serve on, return when no request is left."""
        self.worker.draining = True
        await self.worker.idle.wait()

    async def stop(self) -> None:
        """Close everything at once."""
        if self._restarting is not None:
            self._restarting.cancel()
        self._close_listener()
        self.worker.close()
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)  # let the transports close before the loop may

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddress:
    """Where workers register: `url` of a router, with its admin key if it has one."""

    url: str
    admin_key: SecretStr | None = None


async def run_simulated(
    options: WorkerOptions,
    *,
    ports: Sequence[int],
    host: str = "127.0.0.1",
    lanes: Sequence[frozenset[Lane]] = (),
    faults: Faults | None = None,
    register: Sequence[RouterAddress] = (),
    public_host: str | None = None,
    stop: asyncio.Event | None = None,
    stop_now: asyncio.Event | None = None,
    on_started: Callable[[list[SimulatedServer]], None] | None = None,
) -> None:
    """Serve one simulated worker per port until `stop` is set, then drain.

    Each gets its own seed and registers at all routers of `register`, under `public_host` if it
    listens on all interfaces; `lanes` go to the workers in turn. `stop_now` ends the drain. Raises
    CannotListen when a port is taken.
    """
    stop, stop_now = stop or asyncio.Event(), stop_now or asyncio.Event()
    servers = [
        SimulatedServer(
            replace(options, seed=options.seed + 2 * index), host=host, port=port, faults=faults
        )
        for index, port in enumerate(ports)
    ]
    try:
        for server in servers:
            await server.start()
        if on_started is not None:
            on_started(servers)
        async with httpx.AsyncClient(trust_env=False) as client:
            specs = _specs(servers, lanes, options.api_key, public_host)
            registrations = [
                _registration(spec, router, client, seed)
                for seed, (spec, router) in enumerate(product(specs, register))
            ]
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one.run()) for one in registrations]
                await stop.wait()
                for task in running:
                    task.cancel()
            for server in servers:
                server.worker.draining = True
            await asyncio.gather(*(one.withdraw(_DRAIN_GRACE_S) for one in registrations))
        await _drained(servers, stop_now)
    finally:
        for server in servers:
            await server.stop()


def _specs(
    servers: Sequence[SimulatedServer],
    lanes: Sequence[frozenset[Lane]],
    api_key: str | None,
    public_host: str | None,
) -> list[WorkerSpec]:
    key = None if api_key is None else SecretStr(api_key)
    turns = lanes or (BOTH_LANES,)
    return [
        WorkerSpec(
            url=server.url if public_host is None else server.url_at(public_host),
            lanes=turns[index % len(turns)],
            api_key=key,
        )
        for index, server in enumerate(servers)
    ]


def _registration(
    spec: WorkerSpec, router: RouterAddress, client: httpx.AsyncClient, seed: int
) -> Registration:
    return Registration(
        router.url.rstrip("/"),
        spec,
        client,
        admin_key=router.admin_key,
        settings=RegistrationSettings(),
        rng=Random(seed),
    )


async def _drained(servers: Sequence[SimulatedServer], stop_now: asyncio.Event) -> None:
    """Return when no worker has a request left, or when `stop_now` is set."""

    async def all_idle() -> Literal[True]:
        for server in servers:
            await server.worker.idle.wait()
        return True

    tasks = [asyncio.create_task(all_idle()), asyncio.create_task(stop_now.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
