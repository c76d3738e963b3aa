"""Tenants: who they are, what they may have, what they used (GET /tenants and below), and changes.

A change is a patch of the configuration like any other (`PATCH /config`): validated whole, in force
from the next request on, remembered in the history. Keys are shown as the beginnings of digests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.auth import Access
from router.api.configuration import attempted, author_of, dry_run_of, lasts_until
from router.api.http import Json, Resources, read_object
from router.api.services import Services
from router.api.views import rounded
from router.config import Config
from router.core.limits import tenant_limits
from router.errors import Reason, Refused
from router.quota_settings import OwnTenantLimits
from router.runtime.redis_errors import RedisAway, RedisRefused
from router.tenant_settings import ANONYMOUS, TenantSettings, digest_of, name_of
from router.usage import WINDOW_MINUTES, Amounts, TenantUsage

_DIGEST_CHARS: Final = 15


class TenantAdmin:
    """Handlers of the tenants' routes."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self, resources: Resources) -> list[Route]:
        """The routes."""
        route = resources.route
        return [
            route("/tenants", Access.ADMIN, GET=self.list),
            route("/tenants/{name}/usage", Access.ADMIN, GET=self.usage),
            route(
                "/tenants/{name}",
                Access.ADMIN,
                GET=self.show,
                PUT=self.replace,
                PATCH=self.change,
                DELETE=self.delete,
            ),
        ]

    async def list(self, request: Request) -> Response:  # noqa: ARG002
        """GET /tenants: every tenant that the configuration knows, with what it used."""
        config = self._services.config
        tenants = [
            {**_tenant_json(config, name), "used": _amounts_json(self._used(name).total)}
            for name in sorted(config.tenant_names)
        ]
        return Json({"tenants": tenants, "total": len(tenants)})

    async def show(self, request: Request) -> Response:
        """GET /tenants/{name}."""
        return Json(_tenant_json(self._services.config, self._name(request)))

    async def usage(self, request: Request) -> Response:
        """GET /tenants/{name}/usage: since the start, and in the last `minutes` (60 at most).

        Of all routers together, or with `scope=router` of this one.
        """
        name, minutes = self._name(request), _minutes(request)
        others, missing = await self._others(name, _is_of_cluster(request))
        used = TenantUsage()
        for each in (self._used(name), *others.values()):
            used.merge(each)
        body = {
            "tenant": name,
            "covers": self._covers(others, missing),
            "since_start": {
                **_amounts_json(used.total),
                "outcomes": {outcome.value: count for outcome, count in used.outcomes.items()},
                "refusals": {reason.value: count for reason, count in used.refusals.items()},
            },
            "recent": {
                "minutes": minutes,
                **_amounts_json(used.recent(time.monotonic(), minutes)),
            },
        }
        return Json(body)

    async def _others(
        self, tenant: str, asked: bool
    ) -> tuple[Mapping[str, TenantUsage], Mapping[str, str]]:
        """What a tenant used at the other routers, and of which that is not known, and why."""
        view, shared = self._services.registry.view(), self._services.shared_usage
        names = [replica.name for replica in view.replicas if replica.name != view.name]
        if not asked or shared is None:
            return {}, dict.fromkeys(names, "it was not asked for")
        try:
            told = await shared.of(tenant, names)
        except (RedisAway, RedisRefused) as exc:
            return {}, dict.fromkeys(names, str(exc))
        found, missing = {}, {}
        for name in names:
            used = told.get(name, "it has told nothing yet")
            if isinstance(used, TenantUsage):
                found[name] = used
            else:
                missing[name] = used
        return found, missing

    def _covers(
        self, others: Mapping[str, TenantUsage], missing: Mapping[str, str]
    ) -> dict[str, Any]:
        """Whose requests are counted, of which that live, and since when each counts."""
        view = self._services.registry.view()
        started = {replica.name: replica.started_at for replica in view.replicas}
        started[view.name] = self._services.lifecycle.started_at
        return {
            "router": view.name,
            "routers": len(view.replicas),
            "since": {name: _moment(started.get(name)) for name in (view.name, *others)},
            "missing": missing,
        }

    async def replace(self, request: Request) -> Response:
        """PUT /tenants/{name}: what is not given has its default; the tenant may be new."""
        given = await read_object(request)
        patch: dict[str, Any] = dict.fromkeys(TenantSettings.model_fields)
        limits = given.get("limits")
        if isinstance(limits, Mapping):
            given["limits"] = {**dict.fromkeys(OwnTenantLimits.model_fields), **limits}
        return await self._patch(request, {**patch, **given})

    async def change(self, request: Request) -> Response:
        """PATCH /tenants/{name}: a merge patch; null brings a default back."""
        given = await read_object(request)
        self._configured(request)
        return await self._patch(request, given)

    async def delete(self, request: Request) -> Response:
        """DELETE /tenants/{name}: its keys open nothing from the next request on."""
        self._configured(request)
        return await self._patch(request, None)

    async def _patch(self, request: Request, patch: Mapping[str, Any] | None) -> Response:
        live, name = self._services.live, request.path_params["name"]
        author, dry_run = author_of(self._services, request), dry_run_of(request)
        whole = {"tenants": {name: patch}}
        proposal = await attempted(live.patch_aside(whole, author, dry_run=dry_run))
        tenant = None
        if patch is not None:
            tenant = _tenant_json(proposal.config, name)
        return Json({
            "tenant": tenant,
            "dry_run": dry_run,
            "version": live.version.as_json(),
            "lasts_until": lasts_until(live),
            "warnings": list(proposal.warnings),
        })  # fmt: skip

    def _name(self, request: Request) -> str:
        name: str = request.path_params["name"]
        if name not in self._services.config.tenant_names:
            raise Refused(Reason.NOT_FOUND, f"no tenant is named {name!r:.150}")
        return name

    def _configured(self, request: Request) -> None:
        name = request.path_params["name"]
        if name not in self._services.config.tenants:
            raise Refused(Reason.NOT_FOUND, f"no tenant {name!r:.150} is configured")

    def _used(self, name: str) -> TenantUsage:
        return self._services.usage.of(name) or TenantUsage()


def _tenant_json(config: Config, name: str) -> dict[str, Any]:
    settings = config.tenants.get(name, TenantSettings())
    limits = tenant_limits(config.tenants, name, config.limits.tenant)
    shown = settings.model_dump(exclude={"keys", "limits"})
    return {
        "name": name,
        "configured": name in config.tenants,
        "keys": [key[:_DIGEST_CHARS] for key in settings.keys],
        "told_by": list(_told_by(config, name)),
        **shown,
        "limits": limits.model_dump(exclude={"inherit"}),
    }


def _told_by(config: Config, name: str) -> Iterator[str]:
    """By what requests are known as this tenant's; by nothing: it can have none."""
    auth, settings = config.auth, config.tenants.get(name)
    plain = {name_of(digest_of(key.get_secret_value())) for key in auth.api_keys}
    if name in plain or (settings is not None and settings.keys):
        yield "key"
    if settings is not None and auth.trusted_proxies:
        yield "proxy"
    if name == ANONYMOUS and (auth.allow_anonymous or not config.has_user_keys):
        yield "no_key"


def _amounts_json(amounts: Amounts) -> dict[str, Any]:
    return {**asdict(amounts), "cost_units": rounded(amounts.cost_units)}


def _moment(at: float | None) -> str | None:
    """Of the wall clock, as people read it."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _is_of_cluster(request: Request) -> bool:
    scope = request.query_params.get("scope", "cluster")
    if scope not in ("cluster", "router"):
        raise Refused(Reason.BAD_REQUEST, "scope is cluster or router", param="scope")
    return scope == "cluster"


def _minutes(request: Request) -> int:
    text = request.query_params.get("minutes", str(WINDOW_MINUTES))
    short = len(text) <= len(str(WINDOW_MINUTES))  # before it is a number of any length
    if not (short and text.isdecimal() and 1 <= int(text) <= WINDOW_MINUTES):
        raise Refused(
            Reason.BAD_REQUEST, f"minutes is a number from 1 to {WINDOW_MINUTES}", param="minutes"
        )
    return int(text)
