"""What is not inference, from a relay to the brain: plain HTTP over a second Unix socket.

The relay says whose request it is, as the brain only sees the relay. It drops what a client may
have said of that, and no client reaches the brain's socket, so the address cannot be forged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.http import error_response
from router.errors import Reason, Refused

_PEER: Final = b"x-laneway-peer"
_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"expect",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Whether this very process lives; whoever asks would kill it for the brain's absence.
_LIVENESS: Final = frozenset(("/livez", "/liveness"))
_CONNECTIONS_MAX: Final = 64
_TIMEOUT: Final = httpx.Timeout(connect=2.0, read=120.0, write=60.0, pool=10.0)


class Forwarding:
    """The ASGI application of a relay. `path` is the brain's socket for it."""

    def __init__(self, path: Path) -> None:
        limits = httpx.Limits(max_connections=_CONNECTIONS_MAX, max_keepalive_connections=8)
        self._transport = httpx.AsyncHTTPTransport(uds=str(path), limits=limits, retries=1)
        self._extensions = {"timeout": _TIMEOUT.as_dict()}

    async def aclose(self) -> None:
        """Close the connections to the brain."""
        await self._transport.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand one request on."""
        if scope["type"] != "http":
            return
        if scope["path"] in _LIVENESS and scope["method"] in ("GET", "HEAD"):
            await PlainTextResponse("OK")(scope, receive, send)
            return
        try:
            answer = await self._transport.handle_async_request(self._request(scope, receive))
        except httpx.TransportError:
            refused = Refused(
                Reason.RESTARTING, "the process that decides is being restarted; try again soon"
            )
            await error_response(refused)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        try:
            await _pass_on(answer, send)
        finally:
            await answer.aclose()

    def _request(self, scope: Scope, receive: Receive) -> httpx.Request:
        target: bytes = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = [item for item in scope["headers"] if item[0] not in _HOP_BY_HOP]
        headers = [item for item in headers if item[0] != _PEER]
        host = scope["client"][0] if scope["client"] else ""
        headers.append((_PEER, host.encode()))
        framed = {b"content-length", b"transfer-encoding"} & {name for name, _ in scope["headers"]}
        return httpx.Request(
            scope["method"],
            "http://localhost/",
            headers=headers,
            content=_body(scope, receive) if framed else None,
            extensions={**self._extensions, "target": target},
        )


async def _body(scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
    async for piece in Request(scope, receive).stream():
        if piece:
            yield piece


async def _pass_on(answer: httpx.Response, send: Send) -> None:
    headers = [item for item in answer.headers.raw if item[0].lower() not in _HOP_BY_HOP]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    try:
        async for piece in answer.aiter_raw():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except httpx.TransportError:
        return  # the server ends the connection, so that a part does not pass for the whole
    await send({"type": "http.response.body", "body": b""})


class TruePeer:
    """Around the brain's application: the client is who the relay says that it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            named = [value for name, value in scope["headers"] if name == _PEER]
            headers = [item for item in scope["headers"] if item[0] != _PEER]
            client = (named[-1].decode(), 0) if named and named[-1] else None
            scope = {**scope, "headers": headers, "client": client}
        await self._app(scope, receive, send)
