"""What is not inference, from a relay to the brain: plain HTTP over a second Unix socket.

The relay says whose request it is, as the brain only sees the relay. It drops what a client may
have said of that, and no client reaches the brain's socket, so the address cannot be forged.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.http import BODY_BYTES_MAX, error_response
from router.config import Config
from router.errors import Reason, Refused
from router.runtime.front import bodies_full

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
# They have connections of their own, so that no crowd of other requests makes the router look dead.
_PROBES: Final = frozenset(("/readyz", "/readiness", "/health", "/metrics"))
_READING: Final = frozenset(("GET", "HEAD"))
_CONNECTIONS_MAX: Final = 64
_PROBE_CONNECTIONS_MAX: Final = 16
_TIMEOUT: Final = httpx.Timeout(connect=2.0, read=120.0, write=60.0, pool=10.0)


class Forwarding:
    """The ASGI application of a relay. `path` is the brain's socket for it.

    A connection to the brain is taken when the body is there, and given back when the answer is:
    how slow a client is costs the others nothing.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self._all = _transport(path, _CONNECTIONS_MAX)
        self._probes = _transport(path, _PROBE_CONNECTIONS_MAX)
        self._extensions = {"timeout": _TIMEOUT.as_dict()}
        self._bodies_bytes = 0
        self.on_config(config)

    def on_config(self, config: Config) -> None:
        """Take over the limits of bodies."""
        server = config.server
        self._body_timeout_s = server.body_timeout_s
        self._body_bytes_max = min(BODY_BYTES_MAX, server.body_bytes_max)  # the brain takes no more
        self._bodies_bytes_max = server.bodies_bytes_max

    async def aclose(self) -> None:
        """Close the connections to the brain."""
        await self._all.aclose()
        await self._probes.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand one request on."""
        if scope["type"] != "http":
            return
        reading = scope["method"] in _READING
        if reading and scope["path"] in _LIVENESS:
            await PlainTextResponse("OK")(scope, receive, send)
            return
        pieces: list[bytes] = []
        try:
            await self._receive(Request(scope, receive), pieces)
            request = self._request(scope, b"".join(pieces))
            transport = self._probes if reading and scope["path"] in _PROBES else self._all
            answer, body = await _asked(transport, request)
        except Refused as refused:
            await error_response(refused)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        finally:
            self._bodies_bytes -= sum(map(len, pieces))
        headers = [item for item in answer.headers.raw if item[0].lower() not in _HOP_BY_HOP]
        status = answer.status_code
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _receive(self, request: Request, pieces: list[bytes]) -> None:
        """Add the body to `pieces`, which are counted. Raises Refused and ClientDisconnect."""
        if not _is_framed(request.scope):
            return
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout_s):
                async for piece in request.stream():
                    pieces.append(piece)
                    size += len(piece)
                    self._bodies_bytes += len(piece)
                    if size > self._body_bytes_max:
                        message = f"the body is larger than {self._body_bytes_max} bytes"
                        raise Refused(Reason.BODY_TOO_LARGE, message)
                    if self._bodies_bytes > self._bodies_bytes_max:
                        raise bodies_full()
        except TimeoutError as exc:
            raise Refused(Reason.BODY_TIMEOUT, "the body did not arrive in time") from exc

    def _request(self, scope: Scope, body: bytes) -> httpx.Request:
        target: bytes = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = [item for item in scope["headers"] if item[0] not in _HOP_BY_HOP]
        headers = [item for item in headers if item[0] != _PEER]
        host = scope["client"][0] if scope["client"] else ""
        headers.append((_PEER, host.encode()))
        return httpx.Request(
            scope["method"],
            "http://localhost/",
            headers=headers,
            content=body if _is_framed(scope) else None,
            extensions={**self._extensions, "target": target},
        )


def _transport(path: Path, connections_max: int) -> httpx.AsyncHTTPTransport:
    limits = httpx.Limits(max_connections=connections_max, max_keepalive_connections=8)
    return httpx.AsyncHTTPTransport(uds=str(path), limits=limits, retries=1)


def _is_framed(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


async def _asked(
    transport: httpx.AsyncHTTPTransport, request: httpx.Request
) -> tuple[httpx.Response, bytes]:
    """The brain's answer with its whole body. Raises Refused."""
    try:
        answer = await transport.handle_async_request(request)
        try:
            return answer, b"".join([piece async for piece in answer.aiter_raw()])
        finally:
            await answer.aclose()
    except httpx.PoolTimeout as exc:
        message = "too many requests wait for the process that decides; try again soon"
        raise Refused(Reason.CONNECTIONS_FULL, message) from exc
    except (httpx.ReadTimeout, httpx.WriteTimeout) as exc:
        message = "the process that decides does not answer; try again soon"
        raise Refused(Reason.RESTARTING, message) from exc
    except httpx.TransportError as exc:
        message = "the process that decides is being restarted; try again soon"
        raise Refused(Reason.RESTARTING, message) from exc


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
