"""/t/NAME/...: what a tenant may ask, by a trusted proxy that names the tenant in the path.

It is the same as the path behind the name with the tenant's header. `runtime.intake` does this for
inference; admin routes and metrics are not reached in this way, so that a proxy may pass on all
that is below /t/NAME/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote, unquote_to_bytes

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from router.api.auth import Authenticator
from router.errors import STATUS, Reason

_PREFIX: Final = b"t"


class TenantPath:
    """The application below /t/, for proxies that are trusted."""

    def __init__(self, routes: Sequence[Route], authenticator: Authenticator) -> None:
        self._router = Router(routes, redirect_slashes=False)
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        raw: bytes = scope["raw_path"]
        host = scope["client"][0] if scope["client"] else None
        _, *parts = raw.split(b"/", 3)
        trusted = self._authenticator.trusts(host)
        if not trusted or len(parts) < 3 or unquote_to_bytes(parts[0]) != _PREFIX:
            raise HTTPException(STATUS[Reason.NOT_FOUND])
        _, name, below = parts
        headers = list(scope["headers"])
        if name:
            headers.append((self._authenticator.tenant_header, unquote_to_bytes(name)))
        path = b"/" + below
        told = {"headers": headers, "raw_path": path, "path": unquote(path.decode("ascii"))}
        await self._router({**scope, **told}, receive, send)
