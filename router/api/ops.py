"""What operators and clients ask of the router itself: health, metrics, models, loads, state."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from router.api.auth import Access
from router.api.cluster_report import cluster_report
from router.api.http import Json, Resources
from router.api.services import Services
from router.api.views import (
    aggregate_json,
    can_serve,
    load_json,
    shadow_json,
    state_json,
    why_none_serves,
)
from router.contract import encode_report
from router.core.claims import allowed
from router.core.refusals import model_not_found
from router.errors import RETRY_AFTER_DEFAULT_S, Reason, Refused
from router.release import BUILD
from router.runtime.loops import VIA_HEADER

_OWNER: Final = "sglang"  # as SGLang's own model list says
_DRAINING: Final = "draining"
_NO_WORKERS: Final = "no_workers"


class Ops:
    """Handlers that the router answers from its own memory."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self, resources: Resources) -> list[Route]:
        """The routes."""
        route = resources.route
        return [
            route("/livez", Access.OPEN, GET=self.live),
            route("/liveness", Access.OPEN, GET=self.live),
            route("/readyz", Access.OPEN, GET=self.ready),
            route("/readiness", Access.OPEN, GET=self.ready),
            route("/health", Access.OPEN, GET=self.health),
            route("/metrics", Access.METRICS, GET=self.metrics),
            route("/admin/state", Access.ADMIN, GET=self.state),
            route("/shadow", Access.ADMIN, GET=self.shadow),
            route("/v1/models", Access.CATALOG, GET=self.models),
            route("/v1/models/{model:path}", Access.CATALOG, GET=self.model),
            route("/v1/loads", Access.USER, GET=self.loads),
            route("/get_loads", Access.USER, GET=self.old_loads),
        ]

    async def live(self, request: Request) -> Response:  # noqa: ARG002
        """The process answers: that is all it says."""
        return PlainTextResponse("OK")

    async def ready(self, request: Request) -> Response:  # noqa: ARG002
        """Whether a balancer in front should send requests here."""
        snapshot = self._services.snapshot()
        healthy = sum(map(can_serve, snapshot.workers))
        status = self._status(healthy)
        body: dict[str, Any] = {
            "status": "ready" if status == "ok" else status,
            "healthy_workers": healthy,
            "total_workers": len(snapshot.workers),
        }
        if status == "ok":
            return Json(body)
        if status == _NO_WORKERS:
            body["why"] = why_none_serves(snapshot)
        return Json(body, status_code=503, headers={"retry-after": str(RETRY_AFTER_DEFAULT_S)})

    async def health(self, request: Request) -> Response:
        """The router in one object; with the load report that a router in front can read."""
        snapshot = self._services.snapshot()
        healthy = sum(map(can_serve, snapshot.workers))
        status = self._status(healthy)
        cluster = self._services.registry.view()
        others = [replica for replica in cluster.replicas if replica.name != cluster.name]
        report = cluster_report(
            snapshot,
            self._services.driver.tickets(),
            router_id=self._services.upstreams.router_id.decode(),
            asked_by=_asked_by(request),
            ready=status != _DRAINING,
            now=asyncio.get_running_loop().time(),
            waiting_elsewhere=sum(r.queued for r in others),
        )
        lifecycle = self._services.lifecycle
        body = {
            "status": status,
            "version": lifecycle.version,
            "build": BUILD,
            "uptime_s": round(lifecycle.uptime_s, 1),
            "healthy_workers": healthy,
            "total_workers": len(snapshot.workers),
            "queued": {lane.value: view.queued for lane, view in snapshot.lanes.items()},
            **orjson.loads(encode_report(report)),
        }
        return Json(body)

    def _status(self, healthy: int) -> str:
        if self._services.lifecycle.draining:
            return _DRAINING
        return "ok" if healthy else _NO_WORKERS

    async def metrics(self, request: Request) -> Response:
        """All series, in the format that the scraper prefers."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = encode(self._services.metrics.registry)
        return Response(body, headers={"content-type": content_type})

    async def state(self, request: Request) -> Response:  # noqa: ARG002
        """Everything the policy knows."""
        return Json(state_json(self._services.snapshot()))

    async def shadow(self, request: Request) -> Response:  # noqa: ARG002
        """How far the shadow policy agrees with the live one."""
        return Json(shadow_json(self._services.snapshot().shadow))

    async def models(self, request: Request) -> Response:
        """The union of the workers' models, with their aliases, as far as the caller may ask."""
        data = [self._model(name) for name in self._names(request)]
        return Json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """One model."""
        name = request.path_params["model"]
        if name not in self._names(request):
            refusal = model_not_found(name)
            raise Refused(refusal.reason, refusal.message, param=refusal.param)
        return Json(self._model(name))

    def _names(self, request: Request) -> dict[str, None]:
        """Names that the caller may ask for, in a fixed order."""
        served = self._services.driver.dispatcher.models()
        names = dict.fromkeys(sorted(served))
        for model, settings in self._services.config.models.items():
            if model in served:
                names.update(dict.fromkeys(settings.aliases))
        config = self._services.config
        tenant = config.tenants.get(getattr(request.state, "tenant", ""))  # an admin has none
        open_to = None if tenant is None else allowed(tenant, config.models)
        return names if open_to is None else {name: None for name in names if name in open_to}

    def _model(self, name: str) -> dict[str, Any]:
        settings = self._services.config.models
        root = name
        for model, known in settings.items():
            if name in known.aliases:
                root = model
        context = settings[root].context_tokens if root in settings else None
        return {
            "id": name,
            "object": "model",
            "created": int(self._services.lifecycle.started_at),
            "owned_by": _OWNER,
            "root": root,
            "parent": None,
            "max_model_len": context,
        }

    async def loads(self, request: Request) -> Response:
        """All workers' loads as SGLang words them, from the last polls, and their sums.

        Not for a router in front, to which this one would look like an engine.
        """
        if _asked_by(request):
            raise Refused(Reason.NOT_FOUND, "a router in front reads GET /health")
        snapshot = self._services.snapshot()
        body = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": self._services.lifecycle.version,
            "aggregate": aggregate_json(snapshot),
            "loads": [load_json(view) for view in snapshot.workers],
        }
        return Json(body)

    async def old_loads(self, request: Request) -> Response:  # noqa: ARG002
        """GET /get_loads, as sglang-router answers it."""
        views = self._services.snapshot().workers
        workers = [
            {
                "worker": view.spec.url,
                "worker_type": view.spec.worker_type,
                "load": view.streams,
            }
            for view in views
        ]
        return Json({"workers": workers, "total_workers": len(workers)})


def _asked_by(request: Request) -> bytes:
    """The ids of the routers by which a request came; empty: by none."""
    return b",".join(value for name, value in request.scope["headers"] if name == VIA_HEADER)
