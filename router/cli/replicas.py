"""`laneway replicas`: the routers that share the workers, as one of them sees them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.cli.admin_api import DEFAULT_ROUTER, AdminKey, RouterUrl, call, stop_as_strange
from router.cli.common import say

_WIDTH: Final = 200

replicas_app = typer.Typer(
    help="See the routers that share the workers.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


# Without a second command typer would take "list" for an argument.
@replicas_app.callback()
def replicas() -> None:
    """See the routers that share the workers."""


@replicas_app.command("list")
def list_replicas(
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All that the router says of them, as JSON.")
    ] = False,
) -> None:
    """List the routers, with who leads and which configuration each one runs."""
    document = call("GET", router, "/replicas", admin_key)
    if as_json:
        say(json.dumps(document, indent=2))
        return
    try:
        rows = [_row(each) for each in document["replicas"]]
        summary = _summary(document)
    except (KeyError, TypeError):
        stop_as_strange(router)
    table = Table(box=None, pad_edge=False)
    for heading in ("router", "address", "version", "configuration", "role"):
        table.add_column(heading, no_wrap=True)
    for heading in ("workers", "owns", "running"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    # Not wrapped: lines are for grep, too.
    Console(highlight=False, width=_WIDTH).print(table)
    for line in summary:
        say(line)


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    roles = [name for name in ("leads", "draining") if replica[name]]
    return (
        replica["name"] + (" (asked)" if replica["self"] else ""),
        replica["address"] or "?",
        replica["version"] or "?",
        replica["config_version"] or "?",
        ", ".join(roles),
        str(replica["workers"]),
        str(replica["owns"]),
        str(replica["running"]),
    )


def _summary(document: dict[str, Any]) -> list[str]:
    lines = []
    if document["standing"] == "alone":
        lines.append("it stands alone: no Redis is configured")
    elif document["standing"] == "away":
        lines.append(f"Redis is away ({document['why_away']}): what is listed was known before")
    if document["config_agrees"] is False:
        lines.append("the routers run different configurations")
    if document["changes_to_tell"]:
        lines.append(f"{document['changes_to_tell']} changes are still to be told to the others")
    return lines
