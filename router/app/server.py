"""uvicorn's server with this router's way of stopping.

The first SIGTERM or SIGINT makes the router not ready at once; it goes on accepting for
`drain_delay_s`, so that whatever balances in front can notice, then closes the listener and lets
running answers end for up to `shutdown_grace_s`. Who had connected by then, and asks at once, is
still answered. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import select
import signal
import socket
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Final, cast

import uvicorn

from router.api.services import Lifecycle, ServingPhase
from router.runtime.edge import Edge
from router.runtime.server import InferenceProtocol

_log = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Whoever has connected when the listener is to close: accepting them may take this long, and once
# it is closed, so may their first requests.
_NEWCOMERS_S: Final = 0.2


class Server(uvicorn.Server):
    """Serves one driver's clients until a signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        driver: Edge,
        lifecycle: Lifecycle,
    ) -> None:
        super().__init__(config)
        self._driver = driver
        self._lifecycle = lifecycle
        self._serving: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals in the loop; unlike uvicorn's own, do not raise them again at the end."""
        loop = asyncio.get_running_loop()
        self._serving = asyncio.current_task()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Begin to stop; called again, stop at once."""
        if self._lifecycle.phase is ServingPhase.DRAINING:
            _log.warning("told to stop again: ending at once")
            assert self._serving is not None
            self._serving.cancel()
            return
        self._lifecycle.phase = ServingPhase.DRAINING
        self._driver.draining = True  # answers from now on announce the end of their connection
        delay_s = self._driver.config.server.drain_delay_s
        _log.info("told to stop: not ready from now, accepting for another %g s", delay_s)
        asyncio.get_running_loop().call_later(delay_s, self._close)

    def _close(self) -> None:
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Keep the date in the answers of the ASGI app right until the end is told; unlike
        uvicorn's own, wake up once a second and not ten times.
        """
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener, let running answers end, then close what is left."""
        await _accepted(sockets or ())
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        connections = cast("set[InferenceProtocol]", self.server_state.connections)
        for connection in list(connections):
            if not connection.expects_request:
                connection.shutdown()
        _log.info("listener closed; waiting for %d running answers", len(self._driver.running))
        await asyncio.sleep(_NEWCOMERS_S)
        for connection in list(connections):
            connection.shutdown()
        await self._driver.drained(self._driver.config.server.shutdown_grace_s)
        await super().shutdown(sockets)


async def _accepted(listeners: Iterable[socket.socket]) -> None:
    """Return when nobody who has connected waits to be accepted, at the latest after a moment.

    Whoever still waits when a listener closes is reset by the system.
    """
    waiting = select.poll()
    for listener in listeners:
        waiting.register(listener, select.POLLIN)
    with suppress(TimeoutError):
        async with asyncio.timeout(_NEWCOMERS_S):
            while waiting.poll(0):  # noqa: ASYNC110 - the loop accepts one in each turn
                await asyncio.sleep(0)
