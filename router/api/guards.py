"""What no handler sees: requests that go in circles, and the cut at the end of the process.

One plain ASGI middleware around the routes.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.http import error_response
from router.errors import Reason, Refused
from router.runtime.loops import VIA_HEADER, is_own, loop_refused


class Guards:
    """Refuses what must not reach a handler, and ends quietly what is cancelled."""

    def __init__(self, app: ASGIApp, *, router_id: bytes) -> None:
        self._app = app
        self._router_id = router_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (refused := self._refused(scope)) is not None:
            await error_response(refused)(scope, receive, send)
            return
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except asyncio.CancelledError:
            # Only the end of the process cancels a request; its time to end is over. The server
            # would log a cancelled handler with a stack trace, as if it were a fault.
            if not started:
                refused = Refused(Reason.SHUTTING_DOWN, "the router is shutting down")
                await error_response(refused)(scope, receive, send)

    def _refused(self, scope: Scope) -> Refused | None:
        for name, value in scope["headers"]:
            if name == VIA_HEADER and is_own(self._router_id, value):
                return loop_refused()
        return None
