"""Routes that a worker answers: about one worker, about all of them, or about one request.

GET routes go to a healthy worker with their target byte for byte as the client wrote it. Answers
of /server_info lose every field that could be a secret: SGLang shows its own keys there. An abort
goes to the worker that runs the request; it is never sent when its id is the beginning of another
live one, because SGLang's scheduler aborts by prefix. For the same reason an id that nobody here
knows must be as long as those that SGLang makes, unless the caller may end others' requests: "a"
would end a sixteenth of all. What remains is a request whose longer id arrives while the abort of
its beginning is on its way.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.auth import Access, refuse_page
from router.api.http import Json, Resources, read_body, read_object
from router.api.services import Services
from router.api.views import is_healthy, why_none_serves
from router.core.snapshot import WorkerView
from router.core.types import Ticket, TicketState, WorkerState
from router.errors import BUSY, REASON_HEADER, RETRY_AFTER_DEFAULT_S, Reason, Refused
from router.runtime.delivery import is_failure, reason_of
from router.runtime.heads import Headers
from router.runtime.loops import VIA_HEADER
from router.runtime.side_calls import Answer, UpstreamFailed

_log = logging.getLogger(__name__)

_ABORT: Final = b"/abort_request"
_DOTS: Final = frozenset((b".", b".."))
_DEADLINE_S: Final = 10.0
_ATTEMPTS_MAX: Final = 3
_AT_ONCE_MAX: Final = 64
_OWN_RID_CHARS: Final = 32  # SGLang's own ids are UUIDs in hexadecimal
_ANSWER_BYTES_MAX: Final = 8 * 2**20
# SGLang's server_info has api_key, admin_api_key and both again in launch_command.
_SECRET: Final = re.compile(
    r"key|secret|passw|credential|(auth|access|hf|bearer)_?token$|launch_command|argv|environ",
    re.IGNORECASE,
)
# Headers of a client that a worker may want to see here.
_ASKED: Final = frozenset((b"accept", b"accept-language", b"content-type", VIA_HEADER))
# Headers of a worker's answer that describe its body; the rest is the router's to say.
_PASSED: Final = frozenset((b"content-type", b"content-language", b"etag", b"last-modified"))


class PassThrough:
    """Handlers that ask workers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self, resources: Resources) -> list[Route]:
        """The routes."""
        route = resources.route
        info = ("/get_server_info", "/server_info")
        plain = ("/get_model_info", "/model_info", "/health_generate")
        return [
            *(route(path, Access.USER, GET=self.server_info) for path in info),
            *(route(path, Access.USER, GET=self.any_worker) for path in plain),
            route(
                "/flush_cache",
                Access.ADMIN_OLD_FORM,
                GET=self.flush_cache,
                POST=self.flush_cache,
            ),
            route("/abort_request", Access.USER, POST=self.abort),
            # Ids are text of the worker's making and may hold an encoded slash.
            route("/v1/responses/{id:path}/cancel", Access.USER, POST=self.responses),
            route("/v1/responses/{id:path}/input_items", Access.USER, GET=self.responses),
            route(
                "/v1/responses/{id:path}", Access.USER, GET=self.responses, DELETE=self.responses
            ),
        ]

    async def any_worker(self, request: Request) -> Response:
        """Ask healthy workers in turn; the first answer is it."""
        return passed_on(await self._first(request, self._live()))

    async def server_info(self, request: Request) -> Response:
        """The same, without what could be a secret."""
        answer = await self._first(request, self._live())
        try:
            document = orjson.loads(answer.body)
        except ValueError as exc:
            raise Refused(Reason.UPSTREAM_PROTOCOL, "the worker's answer is not JSON") from exc
        return Json(
            without_secrets(document), status_code=answer.status, headers=_retry_after(answer)
        )

    async def responses(self, request: Request) -> Response:
        """A stored response lives on the worker that made it: ask all until one knows it."""
        return passed_on(await self._knowing(request, self._present()))

    async def flush_cache(self, request: Request) -> Response:
        """Ask every worker: 200 when all did, 206 when some did."""
        views = self._present()
        if not views:
            raise self._no_workers()
        done: list[str] = []
        failed: list[dict[str, str]] = []
        answers = await self._all(request, views, "POST", _target(request))
        for view, answer in zip(views, answers, strict=True):
            if isinstance(answer, Answer) and answer.status == 200:
                done.append(view.id)
            elif isinstance(answer, Answer):
                text = answer.body[:200].decode(errors="replace")
                failed.append({"worker": view.id, "error": f"{answer.status}: {text}"})
            else:
                failed.append({"worker": view.id, "error": answer.message})
        status = 200 if not failed else 206 if done else 502
        message = f"{len(done)} of {len(views)} workers flushed their cache"
        body = {"message": message, "successful": done, "failed": failed}
        return Json(body, status_code=status)

    async def abort(self, request: Request) -> Response:
        """End one request by its exact rid or, for admins, all. 200 as SGLang, whatever it did."""
        document = await read_object(request)
        rid, everything = document.get("rid", ""), document.get("abort_all", False)
        if not isinstance(rid, str) or not isinstance(everything, bool):
            raise Refused(Reason.BAD_REQUEST, "rid is a string, abort_all true or false")
        tenant: str | None = getattr(request.state, "tenant", None)  # None: an admin
        if everything:
            if not self._trusts(tenant):
                raise Refused(Reason.FORBIDDEN, "abort_all needs an admin key")
            if tenant is not None:
                refuse_page(request.scope["headers"])
            await self._abort_at(request, {"abort_all": True})
        elif rid:
            await self._abort_one(request, rid, tenant)
        return Response(status_code=200)

    async def _abort_one(self, request: Request, rid: str, tenant: str | None) -> None:
        """The request may have come by another way than this router: then all workers are asked."""
        tickets = self._services.driver.tickets()
        starting = [ticket for ticket in tickets if (ticket.spec.rid or "").startswith(rid)]
        if not starting and (self._trusts(tenant) or len(rid) >= _OWN_RID_CHARS):
            await self._abort_at(request, {"rid": rid})
        for ticket in starting:
            if ticket.spec.rid == rid and (self._trusts(tenant) or tenant == ticket.spec.tenant):
                await self._abort_ticket(request, ticket, alone=len(starting) == 1)

    def _trusts(self, tenant: str | None) -> bool:
        """Whether the caller may end others' requests: an admin, or anybody where nobody is told
        from others."""
        return tenant is None or not self._services.authenticator.needs_keys

    async def _abort_ticket(self, request: Request, ticket: Ticket, *, alone: bool) -> None:
        """Let the worker end it, so that the client gets a proper last event, or cut it here."""
        views = [view for view in self._present() if view.id == ticket.worker_id]
        if alone and views and ticket.state is not TicketState.QUEUED:
            body = orjson.dumps({"rid": ticket.spec.rid})
            (answer,) = await self._all(request, views, "POST", _ABORT, body=body)
            if isinstance(answer, Answer) and answer.status == 200:
                return
        self._services.driver.abort(ticket)

    async def _abort_at(self, request: Request, body: dict[str, Any]) -> None:
        views = self._present()
        answers = await self._all(request, views, "POST", _ABORT, body=orjson.dumps(body))
        for view, answer in zip(views, answers, strict=True):
            if isinstance(answer, UpstreamFailed):
                _log.warning("abort at %s: %s", view.id, answer.message)

    async def _first(self, request: Request, views: Sequence[WorkerView]) -> Answer:
        """Ask workers in turn until one does not fail; else the last answer, or the failure."""
        ask = await self._asker(request, views)
        answer: Answer | UpstreamFailed | None = None
        for view in views[:_ATTEMPTS_MAX]:
            answer = await ask(view)
            if isinstance(answer, Answer) and answer.status < 500:
                return answer
        return _answered(answer)

    async def _knowing(self, request: Request, views: Sequence[WorkerView]) -> Answer:
        """Ask workers at once until one says yes; else what says most: no, a failure, not found."""
        ask = await self._asker(request, views)
        gate = asyncio.Semaphore(_AT_ONCE_MAX)

        async def ask_in_turn(view: WorkerView) -> Answer | UpstreamFailed:
            async with gate:
                return await ask(view)

        tasks = [asyncio.ensure_future(ask_in_turn(view)) for view in views]
        answers: list[Answer | UpstreamFailed] = []
        try:
            for task in asyncio.as_completed(tasks):
                answers.append(answer := await task)
                if isinstance(answer, Answer) and answer.status < 400:
                    return answer
        finally:
            for left in tasks:
                left.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return _answered(min(answers, key=_doubt))

    async def _asker(
        self, request: Request, views: Sequence[WorkerView]
    ) -> Callable[[WorkerView], Awaitable[Answer | UpstreamFailed]]:
        """What passes `request` on to a worker, all within one deadline."""
        if not views:
            raise self._no_workers()
        body = await read_body(request)
        headers = [item for item in request.scope["headers"] if item[0] in _ASKED]
        now = asyncio.get_running_loop().time
        until = now() + _DEADLINE_S

        def ask(view: WorkerView) -> Awaitable[Answer | UpstreamFailed]:
            return self._ask(
                view,
                request.method,
                _target(request),
                headers=headers,
                body=body,
                deadline_s=max(0.001, until - now()),
            )

        return ask

    async def _all(
        self,
        request: Request,
        views: Sequence[WorkerView],
        method: str,
        target: bytes,
        *,
        body: bytes = b"",
    ) -> list[Answer | UpstreamFailed]:
        """Ask all of them at once, in the name of `request`."""
        headers = [item for item in request.scope["headers"] if item[0] == VIA_HEADER]
        headers += [(b"content-type", b"application/json")] if body else []
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._ask(view, method, target, headers=headers, body=body))
                for view in views
            ]
        return [task.result() for task in tasks]

    async def _ask(
        self,
        view: WorkerView,
        method: str,
        target: bytes,
        *,
        headers: Headers,
        body: bytes,
        deadline_s: float = _DEADLINE_S,
    ) -> Answer | UpstreamFailed:
        pool = self._services.upstreams.get(view.id)
        if pool is None:
            return UpstreamFailed(Reason.UPSTREAM_UNREACHABLE, "the worker was removed")
        try:
            return await pool.request(
                method,
                target,
                headers=headers,
                body=body,
                deadline_s=deadline_s,
                body_bytes_max=_ANSWER_BYTES_MAX,
            )
        except UpstreamFailed as exc:
            return exc

    def _no_workers(self) -> Refused:
        why = why_none_serves(self._services.snapshot())
        return Refused(Reason.NO_WORKERS, why, retry_after_s=1.0)

    def _present(self) -> list[WorkerView]:
        """Workers that may have something running or cached."""
        views = self._services.snapshot().workers
        return [view for view in views if view.state is not WorkerState.EJECTED]

    def _live(self) -> list[WorkerView]:
        """Healthy workers, the least busy first."""
        views = filter(is_healthy, self._services.snapshot().workers)
        return sorted(views, key=lambda view: view.streams)


def without_secrets(document: Any) -> Any:
    """`document` without the fields, at any depth, whose name says secret."""
    match document:
        case dict():
            return {
                name: without_secrets(value)
                for name, value in document.items()
                if not _SECRET.search(name)
            }
        case list():
            return [without_secrets(item) for item in document]
        case _:
            return document


def passed_on(answer: Answer) -> Response:
    """A worker's answer as the router's own."""
    response = Response(answer.body, status_code=answer.status, headers=_retry_after(answer))
    response.raw_headers += [item for item in answer.headers if item[0] in _PASSED]
    if is_failure(answer.status):
        response.headers[REASON_HEADER] = reason_of(answer.status).value
    return response


def _retry_after(answer: Answer) -> dict[str, str]:
    """When to come back, in an answer that says its worker is busy."""
    if answer.status not in BUSY:
        return {}
    said = [value.decode("latin-1") for name, value in answer.headers if name == b"retry-after"]
    return {"retry-after": said[0] if said else str(RETRY_AFTER_DEFAULT_S)}


def _answered(answer: Answer | UpstreamFailed | None) -> Answer:
    """`answer`, or what says that there is none. Raises Refused."""
    assert answer is not None
    if isinstance(answer, UpstreamFailed):
        raise Refused(answer.reason, f"no worker answered: {answer.message}")
    return answer


def _doubt(answer: Answer | UpstreamFailed) -> int:
    """How little an answer says of a response: a refusal is of one who knows it, 404 of others."""
    if isinstance(answer, UpstreamFailed) or answer.status >= 500:
        return 1
    return 2 if answer.status == 404 else 0


def _target(request: Request) -> bytes:
    """The request target exactly as the client wrote it. Raises Refused if it leads elsewhere."""
    path: bytes = request.scope["raw_path"]
    if _climbs(path):
        raise Refused(Reason.BAD_REQUEST, "this path must have no . or .. between its slashes")
    query: bytes = request.scope["query_string"]
    return path + b"?" + query if query else path


def _climbs(raw_path: bytes) -> bool:
    """Whether a path, however it is encoded, could mean another one to whoever reads it next.

    A worker decodes it once, a proxy before the worker perhaps once more.
    """
    path = raw_path
    while b"%" in path and (decoded := unquote_to_bytes(path)) != path:
        path = decoded
    return b"." in path and not _DOTS.isdisjoint(path.replace(b"\\", b"/").split(b"/"))
