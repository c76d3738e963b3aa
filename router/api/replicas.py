"""GET /replicas: the routers that share the workers, who leads, and who fills what first."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.auth import Access
from router.api.http import Json, Resources
from router.api.services import Services
from router.contract import WorkerId
from router.core.replicas import ClusterView, Replica, Standing


class Replicas:
    """The handler."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self, resources: Resources) -> list[Route]:
        """The route."""
        return [resources.route("/replicas", Access.ADMIN, GET=self.list)]

    async def list(self, request: Request) -> Response:  # noqa: ARG002
        """What this router knows of all of them, itself included."""
        view = self._services.registry.view()
        owned = self._services.driver.dispatcher.peering.owned
        return Json(replicas_json(view, owned=sorted(owned)))


def replicas_json(view: ClusterView, *, owned: list[WorkerId]) -> dict[str, Any]:
    """`view` as clients see it; `owned` are the workers that this router fills first."""
    body: dict[str, Any] = {
        "standing": view.standing.value,
        "name": view.name,
        "leader": view.leader or None,
        "term": view.term,
        "heard_age_s": None if view.age_s is None else round(view.age_s, 3),
        "why_away": view.why_away or None,
        "registered_workers": view.workers,
        "changes_to_tell": view.untold,
        "owned_workers": owned,
        "replicas": [_replica_json(replica, view) for replica in view.replicas],
    }
    versions = {replica.config_version for replica in view.replicas}
    # While Redis is away nobody knows what the others run.
    body["config_agrees"] = None if view.standing is Standing.AWAY else len(versions) == 1
    return body


def _replica_json(replica: Replica, view: ClusterView) -> dict[str, Any]:
    return {
        "name": replica.name,
        "self": replica.name == view.name,
        "leads": replica.name == view.leader,
        "address": replica.address,
        "version": replica.version,
        "config_version": replica.config_version or None,
        "started_at": replica.started_at,
        "draining": replica.draining,
        "workers": replica.workers,
        "owns": replica.owns,
        "running": replica.running,
        "streams_by_worker": {worker_id: load.streams for worker_id, load in replica.loads.items()},
    }
