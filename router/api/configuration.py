"""The configuration in force: GET and PATCH /config, its history, and the way back.

A PATCH is a JSON merge patch over what is in force. It is validated whole, and taken over whole or
not at all. Patches stay until the file changes the same setting, or until the router ends. Secrets
are never shown.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.auth import Access
from router.api.http import Json, Resources, read_object
from router.api.services import Services
from router.config import BadConfig
from router.config_versions import CHANGES_MAX, FIXED, Change, ConfigVersion, shown, shown_overlay
from router.errors import Reason, Refused
from router.runtime.live_config import Author, LastKey, LiveConfig, NoSuchVersion, Proposal

_FAULTS_MAX: Final = 50
_FLAGS: Final = {"true": True, "1": True, "": True, "false": False, "0": False}


class ConfigAdmin:
    """Handlers of the configuration's routes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._live = services.live

    def routes(self, resources: Resources) -> list[Route]:
        """The routes."""
        route = resources.route
        return [
            route("/config", Access.ADMIN, GET=self.show, PATCH=self.patch),
            route("/config/history", Access.ADMIN, GET=self.history),
            route("/config/rollback", Access.ADMIN, POST=self.rollback),
            route("/config/overlay", Access.ADMIN, DELETE=self.forget_patches),
        ]

    async def show(self, request: Request) -> Response:  # noqa: ARG002
        """GET /config."""
        live, path = self._live, self._live.source.path
        body = {
            "version": live.version.as_json(),
            "config": shown(live.config),
            "overlay": shown_overlay(live.overlay, live.config),
            "file": {
                "path": None if path is None else str(path),
                "faults": list(live.file_faults),
            },
            "needs_restart": _changes_json(live.waiting),
            "warnings": list(live.warnings),
            "fixed": dict(FIXED),
        }
        return Json(body)

    async def history(self, request: Request) -> Response:  # noqa: ARG002
        """GET /config/history: the versions that can be brought back, newest first."""
        return Json({"versions": [_version_json(version) for version in self._live.history]})

    async def patch(self, request: Request) -> Response:
        """PATCH /config."""
        dry_run, author = dry_run_of(request), self._author(request)
        patch = await read_object(request)
        return await self._done(dry_run, self._live.patch_aside(patch, author, dry_run=dry_run))

    async def rollback(self, request: Request) -> Response:
        """POST /config/rollback {"version": N}."""
        dry_run, author = dry_run_of(request), self._author(request)
        document = await read_object(request)
        number = document.get("version")
        if (
            not isinstance(number, int)
            or isinstance(number, bool)
            or document.keys() != {"version"}
        ):
            raise Refused(
                Reason.BAD_REQUEST,
                'wanted is {"version": N}, a number of GET /config/history',
                param="version",
            )
        return await self._done(dry_run, self._live.rollback_aside(number, author, dry_run=dry_run))

    async def forget_patches(self, request: Request) -> Response:
        """DELETE /config/overlay: what file, environment and flags say is in force again."""
        dry_run, author = dry_run_of(request), self._author(request)
        return await self._done(dry_run, self._live.apply_aside(dict, author, dry_run=dry_run))

    def _author(self, request: Request) -> Author:
        return author_of(self._services, request)

    async def _done(self, dry_run: bool, change: Awaitable[Proposal]) -> Response:
        proposal = await attempted(change)
        body = {
            "version": self._live.version.as_json(),
            "dry_run": dry_run,
            "changes": _changes_json(proposal.changes[:CHANGES_MAX]),
            "changes_total": len(proposal.changes),
            "overlay": shown_overlay(proposal.overlay, proposal.config),
            "needs_restart": _changes_json(proposal.waiting),
            "warnings": list(proposal.warnings),
            "lasts_until": lasts_until(self._live),
        }
        return Json(body)


def lasts_until(live: LiveConfig) -> str:
    """How long a patch that is made now holds."""
    until = "the file changes the same setting"
    return until if live.shared else f"{until}, or the router ends"


def author_of(services: Services, request: Request) -> Author:
    """Who changes the configuration by this request."""
    name = services.authenticator.admin_name(request.scope["headers"])
    return Author("api", f"admin {name}")


async def attempted(change: Awaitable[Proposal]) -> Proposal:
    """What came of a change. Raises Refused, with every fault, when it is not possible."""
    try:
        return await change
    except BadConfig as exc:
        more = len(exc.faults) - _FAULTS_MAX
        text = "; ".join(exc.faults[:_FAULTS_MAX]) + (f"; {more} more" if more > 0 else "")
        param = exc.faults[0].split(": ", 1)[0]
        raise Refused(Reason.BAD_REQUEST, text, param=param) from exc
    except LastKey as exc:
        raise Refused(
            Reason.CONFLICT, "that takes the last key away: without any, everybody could call"
        ) from exc
    except NoSuchVersion as exc:
        raise Refused(Reason.NOT_FOUND, f"version {exc} is not in the history") from exc


def _version_json(version: ConfigVersion) -> dict[str, Any]:
    return {
        **version.as_json(),
        "changes": _changes_json(version.changes),
        "changes_total": version.changes_total,
    }


def _changes_json(changes: tuple[Change, ...]) -> list[dict[str, Any]]:
    return [change.as_json() for change in changes]


def dry_run_of(request: Request) -> bool:
    """Whether the query asks only what a change would do. Raises Refused for what it does not know:
    a misspelt dry run is no change.
    """
    for name in request.query_params:
        if name != "dry_run":
            text = f"there is no parameter {name!r:.50}, only dry_run"
            raise Refused(Reason.BAD_REQUEST, text, param=name[:50])
    given = request.query_params.getlist("dry_run")
    flag = _FLAGS.get(given[0].lower()) if len(given) == 1 else None
    if given and flag is None:
        raise Refused(Reason.BAD_REQUEST, "dry_run is true or false", param="dry_run")
    return bool(flag)
