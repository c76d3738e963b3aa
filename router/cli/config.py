"""`laneway config`: see and change the configuration of a running router through its admin API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from router.cli.admin_api import DEFAULT_ROUTER, AdminKey, RouterUrl, call, stop_as_strange
from router.cli.common import say, set_path, stop
from router.yaml_text import BadYaml, read_yaml

config_app = typer.Typer(
    help="See and change the configuration of a running router.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")]


@config_app.command()
def show(
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of the answer, as JSON.")] = False,
) -> None:
    """Show what is in force, as YAML without secrets; above it what differs from the file."""
    document = call("GET", router, "/config", admin_key)
    if as_json:
        say(json.dumps(document, indent=2))
        return
    try:
        for line in _state(document):
            say(f"# {line}")
        say(yaml.safe_dump(document["config"], sort_keys=False, allow_unicode=True).rstrip())
    except (KeyError, TypeError):
        stop_as_strange(router)


@config_app.command()
def history(router: RouterUrl = DEFAULT_ROUTER, admin_key: AdminKey = None) -> None:
    """List the versions that can be brought back: when, by whom, and what changed."""
    document = call("GET", router, "/config/history", admin_key)
    try:
        for version in document["versions"]:
            say(_version(version))
            for change in version["changes"]:
                say(f"  {_change(change)}")
    except (KeyError, TypeError):
        stop_as_strange(router)


@config_app.command()
def patch(
    *,
    file: Annotated[
        Path | None, typer.Argument(help="YAML or JSON with the settings that change.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="A setting; null: its default again."),
    ] = None,
    dry_run: DryRun = False,
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
) -> None:
    """Change settings until the file changes them, or the router ends."""
    body = {} if file is None else _read(file)
    for text in setting or ():
        set_path(body, text)
    if not body:
        stop("laneway: name a FILE with settings, or --set PATH=VALUE", status=2)
    query = "?dry_run=true" if dry_run else ""
    _say_done(router, call("PATCH", router, f"/config{query}", admin_key, body=body))


@config_app.command()
def rollback(
    *,
    version: Annotated[
        int, typer.Argument(metavar="VERSION", help="Its number in `laneway config history`.")
    ],
    dry_run: DryRun = False,
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
) -> None:
    """Bring back the settings of an earlier version."""
    query, body = "?dry_run=true" if dry_run else "", {"version": version}
    _say_done(router, call("POST", router, f"/config/rollback{query}", admin_key, body=body))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as exc:
        stop(f"laneway: {path}: {exc.strerror or exc}", status=2)
    except (UnicodeDecodeError, BadYaml) as exc:
        stop(f"laneway: {path}: {exc}", status=2)
    if not isinstance(document, dict):
        stop(f"laneway: {path}: the top level is a mapping of section names", status=2)
    return document


def _say_done(router: str, answer: dict[str, Any]) -> None:
    try:
        for change in answer["changes"]:
            say(_change(change))
        for text in answer["warnings"]:
            say(f"warning: {text}")
        if more := answer["changes_total"] - len(answer["changes"]):
            say(f"and {more} more")
        if not answer["changes"]:
            say("nothing changes")
        elif answer["dry_run"]:
            say("a dry run: nothing is changed")
        else:
            say(f"in force as {_version(answer['version'])}")
    except (KeyError, TypeError):
        stop_as_strange(router)


def _state(document: dict[str, Any]) -> list[str]:
    lines = [_version(document["version"])]
    if document["overlay"]:
        lines.append(f"patched: {json.dumps(document['overlay'])}")
    lines += [f"needs a restart: {_change(change)}" for change in document["needs_restart"]]
    lines += [f"warning: {text}" for text in document["warnings"]]
    lines += [f"the file is refused: {fault}" for fault in document["file"]["faults"]]
    return lines


def _version(version: dict[str, Any]) -> str:
    return f"version {version['number']} ({version['digest']}) {version['at']} {version['who']}"


def _change(change: dict[str, Any]) -> str:
    sides = (json.dumps(change[side]) if side in change else "nothing" for side in ("old", "new"))
    return f"{change['path']}: {' -> '.join(sides)}"
