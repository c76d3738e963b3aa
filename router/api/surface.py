"""The ASGI application of everything that is not an inference POST.

From the outside in: request ids, CORS (so that a browser's preflight needs no key), then the
routes, each with its own access. Inference paths are listed only to refuse other methods: their
POSTs never come here, `runtime.server` takes them first, but for odd spellings of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.admin import WorkerAdmin
from router.api.auth import Access
from router.api.configuration import ConfigAdmin
from router.api.guards import Guards
from router.api.http import (
    RequestIdMiddleware,
    Resources,
    on_fault,
    on_http_exception,
    on_refused,
)
from router.api.ops import Ops
from router.api.passthrough import PassThrough
from router.api.qos import Qos
from router.api.replicas import Replicas
from router.api.services import Services
from router.api.tenant_path import TenantPath
from router.api.tenants import TenantAdmin
from router.config import Config
from router.errors import Reason, Refused

# What a page in a browser may read of an answer, beside what it always may.
EXPOSED = (
    "x-request-id",
    "x-laneway-worker",
    "x-laneway-lane",
    "x-laneway-priority",
    "x-laneway-degraded",
    "x-laneway-reason",
    "retry-after",
    *(
        f"x-ratelimit-{name}{suffix}"
        for suffix in ("", "-requests", "-cost")
        for name in ("limit", "remaining", "reset")
    ),
)


class Surface:
    """The application: the routes, and around them what depends on settings."""

    def __init__(self, routes: ASGIApp, config: Config, *, new_id: Callable[[], str]) -> None:
        self._routes = routes
        self._new_id = new_id
        self.on_config(config)

    def on_config(self, config: Config) -> None:
        """Serve by these settings from the next request on."""
        app, settings = self._routes, config.server
        if settings.cors_allowed_origins:
            app = CORSMiddleware(
                app,
                allow_origins=settings.cors_allowed_origins,
                allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
                allow_headers=("*",),
                expose_headers=EXPOSED,
            )
        self._app = RequestIdMiddleware(
            app, headers=settings.request_id_headers, new_id=self._new_id
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        await self._app(scope, receive, send)


def surface(
    services: Services, *, inference_paths: Iterable[str], new_id: Callable[[], str]
) -> Surface:
    """Build the application."""
    resources = Resources(services.authenticator)
    routes: list[Route] = [
        *WorkerAdmin(services).routes(resources),
        *Ops(services).routes(resources),
        *ConfigAdmin(services).routes(resources),
        *Qos(services).routes(resources),
        *Replicas(services).routes(resources),
        *TenantAdmin(services).routes(resources),
        *PassThrough(services).routes(resources),
        *(resources.route(path, Access.OPEN, POST=_misspelt) for path in inference_paths),
    ]
    by_path = TenantPath(resources.for_tenants, services.authenticator)
    starlette = Starlette(
        routes=[*routes, Route("/t/{below:path}", by_path)],
        exception_handlers={
            Refused: on_refused,
            HTTPException: on_http_exception,
            Exception: on_fault,
        },
    )
    starlette.router.redirect_slashes = False  # a path has one spelling
    guarded = Guards(starlette, router_id=services.upstreams.router_id)
    return Surface(guarded, services.config, new_id=new_id)


def cors_headers(config: Config) -> Callable[[bytes], bytes]:
    """Return what gives the CORS header lines of an answer to a page of an origin.

    For answers that are written as bytes; `Surface` answers the same through its middleware.
    """
    allowed = frozenset(origin.encode() for origin in config.server.cors_allowed_origins)
    exposed = b"access-control-expose-headers: %b\r\n" % ", ".join(EXPOSED).encode()
    if b"*" in allowed:
        return lambda origin: b"access-control-allow-origin: *\r\n" + exposed  # noqa: ARG005

    def lines(origin: bytes) -> bytes:
        if origin not in allowed:
            return b"vary: Origin\r\n" if allowed else b""
        return b"access-control-allow-origin: %b\r\nvary: Origin\r\n%b" % (origin, exposed)

    return lines


async def _misspelt(request: Request) -> Response:  # noqa: ARG001 - a handler's signature
    # Starlette finds a path with a line end or a fragment behind it; the relay takes exact ones.
    raise Refused(Reason.NOT_FOUND, "there is nothing at this path")
