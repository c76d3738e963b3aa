"""A relay: a process that holds connections of clients and to workers, and decides nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from router.api.auth import Authenticator
from router.api.services import Lifecycle, ServingPhase
from router.app.build import front_of, settle_memory, uvicorn_config
from router.app.children import hear
from router.app.forwarding import Forwarding
from router.app.process import CannotServe, set_up_log
from router.app.server import Server
from router.config import Config
from router.release import VERSION
from router.runtime.remote_driver import RemoteDriver
from router.runtime.server import protocol_for
from router.runtime.upstream import Upstreams

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Which relay this is, and where its brain listens."""

    number: int
    link_path: Path
    surface_path: Path
    router_id: bytes


class RelayServer(Server):
    """Serves until the supervisor says otherwise."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Drain at the first DRAIN, however many follow; end at once at END."""
        self._serving = asyncio.current_task()
        hear(self._drain, self._end)
        yield

    def _drain(self) -> None:
        if self._lifecycle.phase is not ServingPhase.DRAINING:
            self.stop()

    def _end(self) -> None:
        _log.warning("told to end at once")
        assert self._serving is not None
        self._serving.cancel()


def share_of(config: Config) -> Config:
    """The configuration of one relay: what limits the memory of all is split between them."""
    count, server = max(1, config.relays.count), config.server
    bodies_bytes = max(server.body_bytes_max, server.bodies_bytes_max // count)
    share = server.model_copy(
        update={
            "bodies_bytes_max": bodies_bytes,
            "connections_max": -(-server.connections_max // count),
        }
    )
    return config.model_copy(update={"server": share})


def run_relay(config: Config, listener: socket.socket, place: Place) -> None:
    """Serve until told to end. Raises CannotServe when it cannot even begin."""
    set_up_log(config.server.log_level, process=f"relay-{place.number}")
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(share_of(config), listener, place))
        except asyncio.CancelledError as exc:
            raise CannotServe("ended before all answers did", exit_status=1) from exc


async def _serve(config: Config, listener: socket.socket, place: Place) -> None:
    loop = asyncio.get_running_loop()
    upstreams = Upstreams(config.upstream, loop=loop, router_id=place.router_id)
    driver = RemoteDriver(config, upstreams, place.link_path, number=place.number, loop=loop)
    authenticator = Authenticator(config.auth, config.tenants)
    front = front_of(config, driver, authenticator, driver.refused_at_edge)

    forwarding = Forwarding(place.surface_path, config)

    def take_over(in_force: Config) -> None:
        share = driver.config = share_of(in_force)
        for holder in (upstreams, authenticator, front, forwarding):
            holder.on_config(share)

    driver.on_config.append(take_over)
    server = RelayServer(
        uvicorn_config(config, forwarding, protocol_for(front)),
        driver=driver,
        lifecycle=Lifecycle(version=VERSION, started_at=0.0),
    )
    driver.start()
    await driver.met(within_s=config.relays.brain_wait_s)
    settle_memory(tls=config.server.tls.cert_path is not None)
    _log.info("relay serves as process %d", os.getpid())
    try:
        await server.serve(sockets=[listener])
    finally:
        await driver.aclose()
        await forwarding.aclose()
    _log.info("stopped")
