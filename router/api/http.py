"""What every route of the router's own HTTP surface shares: access, methods, errors, request ids.

A path is one `Resource`: its access and one handler per method, so that a wrong method is a 405
with the whole Allow list. Every error is JSON in OpenAI's shape with a reason and a request id,
also those that no handler made. All of it is plain ASGI.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import orjson
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.auth import Access, Authenticator
from router.errors import STATUS, Reason, Refused
from router.wire import json_fault

# What opens to the keys of users.
_USERS: Final = (Access.USER, Access.CATALOG)
_FOR_TENANTS: Final = (Access.OPEN, *_USERS)
Handler = Callable[[Request], Awaitable[Response]]

REQUEST_ID: Final = "x-request-id"
BODY_BYTES_MAX: Final = 2**20
BODY_TIMEOUT_S: Final = 30.0
_REQUEST_ID_FORM: Final = re.compile(r"[\x21-\x7e]{1,128}")


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode `content`; bytes are JSON already."""
        return content if isinstance(content, bytes) else orjson.dumps(content)


def error_response(refused: Refused, *, headers: dict[str, str] | None = None) -> Json:
    """The response that says `refused`."""
    named = {**refused.headers(), **(headers or {})}
    return Json(refused.body(), status_code=refused.status, headers=named)


class Resources:
    """Builds routes whose handlers run only for callers who may."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self.for_tenants: list[Route] = []  # that have nothing to do with operating the router

    def route(self, path: str, access: Access, **handlers: Handler) -> Route:
        """One path; `handlers` by upper-case method. GET answers HEAD too."""

        async def endpoint(request: Request) -> Response:
            headers = request.scope["headers"]
            closed = access is Access.METRICS and not self._authenticator.metrics_open
            if closed or access in (Access.ADMIN, Access.ADMIN_OLD_FORM):
                host = request.client.host if request.client else None
                self._authenticator.admit_admin(headers, client_host=host, access=access)
            elif access in _USERS and not self._authenticator.is_admin(headers):
                host = request.client.host if request.client else None
                trusted = self._authenticator.trusts(host)
                try:
                    request.state.tenant = self._authenticator.tenant(headers, trusted=trusted)
                except Refused:  # a router above asks for itself, and then for nobody
                    if not (trusted and access is Access.CATALOG):
                        raise
            method = "GET" if request.method == "HEAD" else request.method
            return await handlers[method](request)

        made = Route(path, endpoint, methods=list(handlers))
        if access in _FOR_TENANTS:
            self.for_tenants.append(made)
        return made


async def read_body(request: Request) -> bytes:
    """The body of a request that is not inference. Raises Refused for one too large or slow."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > BODY_BYTES_MAX:
                    raise Refused(
                        Reason.BODY_TOO_LARGE, f"the body is larger than {BODY_BYTES_MAX} bytes"
                    )
                chunks.append(chunk)
    except TimeoutError as exc:
        raise Refused(Reason.BODY_TIMEOUT, "the body did not arrive in time") from exc
    except ClientDisconnect as exc:
        # Nobody reads the answer; it only ends the handler without a stack trace in the log.
        raise Refused(Reason.BAD_REQUEST, "the connection ended inside the body") from exc
    return b"".join(chunks)


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object of an admin request. Raises Refused when it is something else."""
    body = await read_body(request)
    try:
        document = orjson.loads(body)
    except ValueError as exc:
        raise Refused(Reason.BAD_REQUEST, f"the body is not JSON: {json_fault(body, exc)}") from exc
    if not isinstance(document, dict):
        raise Refused(Reason.BAD_REQUEST, "the body must be a JSON object")
    return document


async def on_refused(request: Request, exc: Exception) -> Response:  # noqa: ARG001
    """Answer a refusal that a handler raised."""
    assert isinstance(exc, Refused)
    return error_response(exc)


async def on_http_exception(request: Request, exc: Exception) -> Response:
    """Answer what Starlette itself refuses: unknown paths and wrong methods."""
    assert isinstance(exc, HTTPException)
    if exc.status_code == STATUS[Reason.METHOD_NOT_ALLOWED]:
        message = f"{request.method} is not possible here"
        refused = Refused(Reason.METHOD_NOT_ALLOWED, message)
        return error_response(refused, headers=dict(exc.headers or {}))
    if exc.status_code == STATUS[Reason.NOT_FOUND]:
        return error_response(Refused(Reason.NOT_FOUND, "there is nothing at this path"))
    return error_response(Refused(Reason.BAD_REQUEST, str(exc.detail)))


async def on_fault(request: Request, exc: Exception) -> Response:  # noqa: ARG001
    """Answer a fault of ours. The server logs the trace; the client learns nothing of it."""
    return error_response(Refused(Reason.INTERNAL, "the router failed; its log has more"))


class RequestIdMiddleware:
    """Every answer carries the request's id, the caller's own or a new one."""

    def __init__(self, app: ASGIApp, *, headers: Sequence[str], new_id: Callable[[], str]) -> None:
        self._app = app
        self._headers = [name.lower().encode("latin-1") for name in headers]
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._given(scope["headers"]) or self._new_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)

    def _given(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        for wanted in self._headers:
            for name, value in headers:
                if name == wanted:
                    text = value.decode("latin-1").strip()
                    if _REQUEST_ID_FORM.fullmatch(text):
                        return text
        return None
