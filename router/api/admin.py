"""Workers come, change and go: /workers, and the older forms that sglang-router's users know.

A worker is registered as a `WorkerSpec`; `model_id` is read as its one model. Fields that
sglang-router knows and that mean nothing here are named in the answer's `ignored`; any other
unknown field is a mistake and refused. A worker is named by its id or by its URL.

A registration with `ttl_s` is an agent's. One of a worker that an operator removed is refused as
gone; an operator's own registration brings the worker back.
"""

from __future__ import annotations

import math
from typing import Any, Final
from urllib.parse import quote

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from router.api.auth import Access
from router.api.http import Json, Resources, read_object
from router.api.services import Services
from router.api.views import stats_json, worker_json
from router.config import faults_of
from router.contract import WorkerSpec, normalized_url
from router.core.snapshot import WorkerView
from router.core.types import WorkerState
from router.errors import Reason, Refused
from router.runtime.loops import is_own_address

# Fields of sglang-router's worker that say nothing to this router.
_IGNORED: Final = frozenset((
    "bootstrap_port", "chat_template", "connection_mode", "connection_type", "disable_health_check",
    "dp_aware", "health_check_interval_secs", "health_check_timeout_secs",
    "health_failure_threshold", "health_success_threshold", "max_connection_attempts",
    "reasoning_parser", "runtime", "runtime_type", "tokenizer_path", "tool_parser",
))  # fmt: skip
_DEADLINE_S_MAX: Final = 86_400.0


class WorkerAdmin:
    """Handlers of the worker routes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._registry = services.registry

    def routes(self, resources: Resources) -> list[Route]:
        """The routes, old forms included."""
        route, old = resources.route, Access.ADMIN_OLD_FORM
        return [
            route("/workers", Access.ADMIN, GET=self.list, POST=self.create),
            route(
                "/workers/{name:path}",
                Access.ADMIN,
                GET=self.show,
                PUT=self.update,
                PATCH=self.update,
                DELETE=self.delete,
            ),
            route("/add_worker", old, GET=self.add_by_url, POST=self.add_by_url),
            route("/remove_worker", old, GET=self.remove_by_url, POST=self.remove_by_url),
            route("/list_workers", Access.ADMIN, GET=self.list_urls, POST=self.list_urls),
        ]

    async def list(self, request: Request) -> Response:  # noqa: ARG002
        """GET /workers."""
        snapshot = self._services.snapshot()
        workers = [worker_json(view) for view in snapshot.workers]
        return Json({"workers": workers, "total": len(workers), "stats": stats_json(snapshot)})

    async def create(self, request: Request) -> Response:
        """POST /workers: 202, and the worker is probed at once."""
        fields = await read_object(request)
        ignored = sorted(_IGNORED & fields.keys())
        spec = spec_of({name: value for name, value in fields.items() if name not in _IGNORED})
        shared = await self._join(spec)
        location = f"/workers/{quote(spec.worker_id, safe='')}"
        body = {
            "status": "accepted",
            "id": spec.worker_id,
            "worker_id": spec.worker_id,
            "url": spec.url,
            "location": location,
            "ignored": ignored,
            "shared": shared,
        }
        return Json(body, status_code=202, headers={"location": location})

    async def show(self, request: Request) -> Response:
        """GET /workers/{id}."""
        return Json(worker_json(self._find(request.path_params["name"])))

    async def update(self, request: Request) -> Response:
        """PUT or PATCH /workers/{id}: the fields that are given change, the others stay."""
        changes = await read_object(request)
        view = self._find(request.path_params["name"])
        if view.state is WorkerState.DRAINING:
            raise Refused(Reason.CONFLICT, f"{view.id} is draining: it takes no changes any more")
        known = view.spec.model_dump(exclude_unset=True)
        fields = {name: value for name, value in changes.items() if name not in _IGNORED}
        spec = spec_of({**known, **_with_models(fields)})
        if spec.worker_id != view.id or spec.url != view.spec.url:
            raise Refused(
                Reason.BAD_REQUEST, "a worker's id and url never change: remove it, add the other"
            )
        await self._registry.change(spec)
        return Json(worker_json(self._find(view.id)))

    async def delete(self, request: Request) -> Response:
        """DELETE /workers/{id}: no new requests; gone when idle or at the deadline.

        With `by=agent` the worker's own agent takes it out, and may bring it back.
        """
        view = self._find(request.path_params["name"])
        query = _query(request)
        deadline_s = self._deadline_s(query.get("deadline_s"))
        barred = query.get("by") != "agent"
        if deadline_s and view.state is WorkerState.DRAINING:
            raise Refused(Reason.CONFLICT, f"{view.id} is draining already")
        shared = await self._registry.remove(view.spec, drain_s=deadline_s, barred=barred)
        if deadline_s == 0:
            body = {"status": "removed", "id": view.id, "worker_id": view.id, "shared": shared}
            return Json(body)
        body = {
            "status": "draining",
            "id": view.id,
            "worker_id": view.id,
            "running": view.streams,
            "deadline_s": deadline_s,
            "shared": shared,
        }
        return Json(body, status_code=202)

    async def add_by_url(self, request: Request) -> Response:
        """POST /add_worker?url=."""
        spec = spec_of(dict(_query(request)))
        await self._join(spec)
        return PlainTextResponse(f"Successfully added worker: {spec.url}")

    async def remove_by_url(self, request: Request) -> Response:
        """POST /remove_worker?url=: drains, as DELETE does."""
        view = self._find(_query(request).get("url", ""))
        deadline_s = self._deadline_s(None)
        if view.state is not WorkerState.DRAINING:
            await self._registry.remove(view.spec, drain_s=deadline_s, barred=True)
        return PlainTextResponse(f"Successfully removed worker: {view.spec.url}")

    async def list_urls(self, request: Request) -> Response:  # noqa: ARG002
        """GET /list_workers."""
        return Json({"urls": [view.spec.url for view in self._services.snapshot().workers]})

    async def _join(self, spec: WorkerSpec) -> bool:
        server = self._services.config.server
        if is_own_address(spec.url, host=server.host, port=server.port):
            raise Refused(Reason.BAD_REQUEST, f"{spec.url} is this router itself", param="url")
        views = self._services.snapshot().workers
        for view in views:
            if spec.worker_id == view.id or spec.url == view.spec.url:
                raise Refused(
                    Reason.CONFLICT, f"{view.id} at {view.spec.url} is registered already"
                )
        return await self._registry.add(spec)

    def _find(self, name: str) -> WorkerView:
        try:
            url = normalized_url(name)
        except ValueError:
            url = None
        for view in self._services.snapshot().workers:
            if view.id == name or (url is not None and view.spec.url == url):
                return view
        raise Refused(Reason.NOT_FOUND, f"no worker is named {name!r:.200}")

    def _deadline_s(self, text: str | None) -> float:
        if text is None:
            return self._services.config.server.shutdown_grace_s
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= _DEADLINE_S_MAX:
            raise Refused(
                Reason.BAD_REQUEST,
                f"deadline_s is a number of seconds from 0 to {_DEADLINE_S_MAX:.0f}",
                param="deadline_s",
            )
        return value


def _query(request: Request) -> dict[str, str]:
    """The parameters behind the path, each given once. Raises Refused."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in query:
            raise Refused(Reason.BAD_REQUEST, f"{name!r:.50} is given twice", param=name[:50])
        query[name] = value
    return query


def spec_of(fields: dict[str, Any]) -> WorkerSpec:
    """The worker that `fields` describe. Raises Refused, naming every faulty field."""
    try:
        return WorkerSpec.model_validate(_with_models(fields))
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]["loc"]
        param = str(first[0]) if first else None
        raise Refused(Reason.BAD_REQUEST, "; ".join(faults_of(exc)), param=param) from exc


def _with_models(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with sglang-router's `model_id` said as `models`."""
    if "model_id" not in fields:
        return fields
    fields = dict(fields)
    model = fields.pop("model_id")
    if model is not None and "models" not in fields:
        fields["models"] = [model]
    return fields
