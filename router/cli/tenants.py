"""`laneway tenants`: see and change the tenants of a running router through its admin API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.cli.admin_api import DEFAULT_ROUTER, AdminKey, RouterUrl, call, stop_as_strange
from router.cli.common import say, set_path

tenants_app = typer.Typer(
    help="See and change the tenants of a running router.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="All of the answer, as JSON.")]
_TOLD_BY: Final = {
    "key": "with a key of its own",
    "proxy": "under its name from a trusted proxy",
    "no_key": "without a key",
}
Scope = Literal["cluster", "router"]
Name = Annotated[str, typer.Argument(metavar="TENANT")]


@tenants_app.command("list")
def list_tenants(
    router: RouterUrl = DEFAULT_ROUTER, admin_key: AdminKey = None, as_json: AsJson = False
) -> None:
    """List the tenants with what they used since the router's start."""
    document = call("GET", router, "/tenants", admin_key)
    if as_json:
        say(json.dumps(document, indent=2))
        return
    try:
        rows = [_row(tenant) for tenant in document["tenants"]]
    except (KeyError, TypeError):
        stop_as_strange(router)
    table = Table(box=None, pad_edge=False)
    for heading in ("tenant", "tier", "keys"):
        table.add_column(heading, overflow="fold")
    for heading in ("requests", "refused", "output tokens", "cost units"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


@tenants_app.command()
def usage(
    name: Name,
    *,
    minutes: Annotated[int, typer.Option(min=1, max=60, help="How far `recent` looks back.")] = 60,
    scope: Annotated[Scope, typer.Option(help="All routers, or the one that answers.")] = "cluster",
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
) -> None:
    """Show what a tenant used, as JSON."""
    path = f"/tenants/{quote(name, safe='')}/usage?minutes={minutes}&scope={scope}"
    say(json.dumps(call("GET", router, path, admin_key), indent=2))


@tenants_app.command("set")
def set_tenant(
    name: Name,
    setting: Annotated[
        list[str], typer.Argument(metavar="PATH=VALUE...", help="As limits.concurrency=8.")
    ],
    *,
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
) -> None:
    """Change settings of a tenant, which may be new, until its file changes or the router ends.

    Says by what its requests are told from others'.
    """
    patch: dict[str, Any] = {}
    for text in setting:
        set_path(patch, text)
    document = call("PATCH", router, "/config", admin_key, body={"tenants": {name: patch}})
    _say_version(router, document)
    tenant = call("GET", router, f"/tenants/{quote(name, safe='')}", admin_key)
    try:
        say(_whose(name, tenant["told_by"], disabled=tenant["disabled"]))
    except (KeyError, TypeError):
        stop_as_strange(router)


@tenants_app.command()
def remove(name: Name, router: RouterUrl = DEFAULT_ROUTER, admin_key: AdminKey = None) -> None:
    """Remove a tenant: its keys open nothing from the next request on."""
    _say_version(router, call("DELETE", router, f"/tenants/{quote(name, safe='')}", admin_key))


def _say_version(router: str, document: Any) -> None:
    try:
        say(f"in force as version {document['version']['number']}")
    except (KeyError, TypeError):
        stop_as_strange(router)


def _whose(name: str, told_by: list[str], *, disabled: bool) -> str:
    """Which requests are a tenant's, and what is to be done when none are."""
    if not told_by:
        return (
            f"no request is {name}'s yet: it has no key, and auth.trusted_proxies is empty. A key "
            f"and its digest:\n  laneway keys new --tenant {name}\n"
            f"  laneway tenants set {name} \"keys=['sha256:...']\"\n"
            "Once there is any key, requests without one are 401 unless auth.allow_anonymous is "
            "set."
        )
    which = " or ".join(_TOLD_BY[way] for way in told_by)
    return f"requests {which} are {name}'s" + (", and refused: it is disabled" if disabled else "")


def _row(tenant: dict[str, Any]) -> tuple[str, ...]:
    used = tenant["used"]
    state = " (disabled)" if tenant["disabled"] else ""
    return (
        tenant["name"] + state,
        tenant["tier"] or "",
        str(len(tenant["keys"])),
        str(used["requests"]),
        str(used["refused"]),
        str(used["output_tokens"]),
        f"{used['cost_units']:g}",
    )
