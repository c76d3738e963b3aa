"""The brain: the process that decides for all relays, and knows all there is to know."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final

import uvloop
from uvicorn.server import ServerState

from router.api.services import ServingPhase
from router.app.build import App, build, settle_memory, uvicorn_config
from router.app.children import Sockets, hear
from router.app.forwarding import TruePeer
from router.app.process import set_up_log
from router.app.together import redis_of
from router.config import Config
from router.config_source import Loaded
from router.metrics_relays import RelayCollector
from router.runtime.brain_link import Hub
from router.runtime.roster import Roster

_log = logging.getLogger(__name__)

# Requests that are not inference have this long to end.
_LAST_REQUESTS_S: Final = 2.0
_ROSTER: Final = "workers"  # beside the sockets


def run_brain(
    config: Config, loaded: Loaded | None, sockets: Sockets, *, router_id: bytes, address: str
) -> None:
    """Decide until told to end. `address` is where others find the router.

    Raises CannotServe when it cannot even begin.
    """
    set_up_log(config.server.log_level, process="brain")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, loaded, sockets, router_id, address))


async def _serve(
    config: Config, loaded: Loaded | None, sockets: Sockets, router_id: bytes, address: str
) -> None:
    async with redis_of(config.redis) as redis:
        app = build(config, loaded, redis=redis, router_id=router_id)
        app.registry.address = address
        assert app.driver.buckets is not None
        await app.driver.buckets.start()
        await _decide(app, sockets)
    _log.info("stopped")


async def _decide(app: App, sockets: Sockets) -> None:
    loop, config = asyncio.get_running_loop(), app.config
    ended = asyncio.Event()

    def drain() -> None:
        app.services.lifecycle.phase = ServingPhase.DRAINING

    hear(drain, ended.set, again=app.watch.read_again)
    hub = Hub(
        app.driver,
        loop=loop,
        on_refused=app.on_refused,
        is_listed=app.listed.__contains__,
        roster=Roster(sockets.link_path.with_name(_ROSTER), loop=loop),
    )
    app.services.metrics.registry.register(RelayCollector(hub.figures))
    app.services.live.on_config.append(hub.on_config)
    await app.start()
    hub.start()
    settle_memory(tls=False)  # that is relays'
    surface = uvicorn_config(config, TruePeer(app.surface), "httptools", plain=True)
    state = ServerState()

    def protocol() -> asyncio.Protocol:
        made = surface.http_protocol_class(  # type: ignore[call-arg]
            config=surface, server_state=state, app_state={}, _loop=loop
        )
        assert isinstance(made, asyncio.Protocol)
        return made

    servers = [
        await loop.create_unix_server(hub.protocol, sock=sockets.link),
        await loop.create_unix_server(protocol, sock=sockets.surface),
    ]
    _log.info("the brain decides as process %d", os.getpid())
    try:
        await ended.wait()
        for server in servers:
            server.close()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_LAST_REQUESTS_S)
    finally:
        hub.close()
        await app.stop()
