"""Simulated workers as servers: listen, die, come back, drain, register at a router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal
from urllib.parse import quote

import httpx

from router.contract import Lane
from workers.sim.faults import Faults
from workers.sim.http_server import Connection
from workers.sim.intake import WorkerOptions
from workers.sim.routes import Routes
from workers.sim.worker import SimulatedWorker

_BACKLOG: Final = 2048
_REGISTER_EVERY_S: Final = 1.0
_REGISTER_TIMEOUT_S: Final = 5.0
_log = logging.getLogger(__name__)


class SimulatedServer:
    """One simulated worker on one port. `port` 0 takes a free one."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self._options = options
        self._faults = faults or Faults()
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._restarting: asyncio.Task[None] | None = None
        self.worker = SimulatedWorker(options)

    @property
    def url(self) -> str:
        """Where it can be reached from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        self.worker = SimulatedWorker(self._options)
        self.worker.set_faults(self._faults)
        routes = Routes(self.worker, self.kill)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(routes, self._connections), self.host, self.port, backlog=_BACKLOG
        )
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
class Registration:
    """Where workers announce themselves: `url` of a router, with its admin key if it has one."""

    url: str
    api_key: str | None = None


async def run_simulated(
    options: WorkerOptions,
    *,
    ports: Sequence[int],
    host: str = "127.0.0.1",
    lanes: Sequence[frozenset[Lane]] = (),
    faults: Faults | None = None,
    register: Registration | None = None,
    stop: asyncio.Event | None = None,
    stop_now: asyncio.Event | None = None,
    on_started: Callable[[list[SimulatedServer]], None] | None = None,
) -> None:
    """Serve one simulated worker per port until `stop` is set, then drain.

    Each gets its own seed. `lanes` go to the workers in turn, as labels of their registration;
    `stop_now` ends the drain. Raises OSError when a port is taken.
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
        async with asyncio.TaskGroup() as tasks:
            announcing = tasks.create_task(_announce(servers, lanes, register))
            await stop.wait()
            announcing.cancel()
        await _drain(servers, register, stop_now)
    finally:
        for server in servers:
            await server.stop()


async def _drain(
    servers: Sequence[SimulatedServer], register: Registration | None, stop_now: asyncio.Event
) -> None:
    for server in servers:
        server.worker.draining = True
    if register is not None:
        await _withdraw(servers, register)
    drained = asyncio.create_task(_drained(servers))
    enough = asyncio.create_task(stop_now.wait())
    await asyncio.wait((drained, enough), return_when=asyncio.FIRST_COMPLETED)
    drained.cancel()
    enough.cancel()


async def _drained(servers: Sequence[SimulatedServer]) -> Literal[True]:
    for server in servers:
        await server.worker.idle.wait()
    return True


def _client(register: Registration) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {register.api_key}"} if register.api_key else {}
    return httpx.AsyncClient(
        base_url=register.url, headers=headers, timeout=_REGISTER_TIMEOUT_S, trust_env=False
    )


async def _announce(
    servers: Sequence[SimulatedServer],
    lanes: Sequence[frozenset[Lane]],
    register: Registration | None,
) -> None:
    """Register each worker; try again each second while the router cannot be reached."""
    if register is None:
        return
    async with _client(register) as client:
        for index, server in enumerate(servers):
            spec: dict[str, object] = {"url": server.url}
            if lanes:
                spec["lanes"] = sorted(lanes[index % len(lanes)])
            while True:
                if await _registered(client, spec):
                    break
                await asyncio.sleep(_REGISTER_EVERY_S)


async def _registered(client: httpx.AsyncClient, spec: dict[str, object]) -> bool:
    try:
        answer = await client.post("/workers", json=spec)
    except httpx.TransportError as exc:
        _log.warning("router %s cannot be reached: %s", client.base_url, exc)
        return False
    if answer.is_success or answer.status_code == 409:
        return True
    _log.error("router refused %s: %d %s", spec["url"], answer.status_code, answer.text[:500])
    return answer.status_code < 500  # what it calls wrong stays wrong


async def _withdraw(servers: Sequence[SimulatedServer], register: Registration) -> None:
    async with _client(register) as client:
        for server in servers:
            worker_id = quote(server.url.removeprefix("http://"), safe="")
            try:
                await client.delete(f"/workers/{worker_id}")
            except httpx.TransportError as exc:
                _log.warning("router %s cannot be reached: %s", register.url, exc)
