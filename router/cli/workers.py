"""`laneway workers`: see and change the workers of a running router through its admin API."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.cli.admin_api import DEFAULT_ROUTER, AdminKey, RouterUrl, call, stop_as_strange
from router.cli.common import lanes_or_stop, say, stop
from router.contract import word_for_lanes

workers_app = typer.Typer(
    help="See and change the workers of a running router.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="WORKER", help="Id or URL.")]


@workers_app.command("list")
def list_workers(
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All that the router says of them, as JSON.")
    ] = False,
) -> None:
    """List the workers with their live figures."""
    document = call("GET", router, "/workers", admin_key)
    if as_json:
        say(json.dumps(document, indent=2))
        return
    try:
        rows = [_row(worker) for worker in document["workers"]]
        total, healthy = document["total"], document["stats"]["healthy"]
    except (KeyError, TypeError):
        stop_as_strange(router)
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "state", "lanes", "models"):
        table.add_column(heading, overflow="fold")
    for heading in ("running", "queued", "KV", "failures"):
        table.add_column(heading, justify="right")
    for *row, _ in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    console.print(table)
    noun = "worker" if total == 1 else "workers"
    console.print(f"{total} {noun}, {healthy} healthy", markup=False)
    for worker_id, *_, why in rows:
        if why:
            say(f"{worker_id}: {why}")


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    kv_ratio = worker["kv_used_ratio"]
    return (
        worker["id"],
        _state(worker),
        word_for_lanes(worker["lanes"]),
        ", ".join(worker["models"]) or "?",
        str(worker["load"]),
        "?" if worker["queued_requests"] is None else str(worker["queued_requests"]),
        "?" if kv_ratio is None else f"{kv_ratio:.0%}",
        str(worker["failures"]),
        worker["why_unknown"] or "",
    )


def _state(worker: dict[str, Any]) -> str:
    """The state in the router's words, and what keeps requests away although it is active."""
    state, breaker, out_s = worker["state"], worker["breaker"], worker["out_s"]
    if breaker != "closed":
        return f"{state}, breaker {breaker.replace('_', '-')}"
    return f"{state}, left out for {out_s:.0f} s" if out_s else str(state)


@workers_app.command()
def add(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="Base URL of the SGLang server.")],
    lanes: Annotated[str, typer.Option(help="short, long or both.")] = "both",
    name: Annotated[
        str | None, typer.Option("--id", help="Its name; host:port if left out.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="LANEWAY_WORKER_API_KEY", help="Sent to the worker with requests."),
    ] = None,
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
) -> None:
    """Add a worker; it gets requests after its first good report."""
    body: dict[str, Any] = {"url": url}
    if lanes != "both":
        body["lanes"] = lanes_or_stop(lanes)
    if name is not None:
        body["id"] = name
    if api_key is not None:
        body["api_key"] = api_key
    answer = call("POST", router, "/workers", admin_key, body=body)
    say(f"{answer['id']} is accepted; `laneway workers list` shows when it is ready")
    _say_if_untold(answer, router, admin_key)


@workers_app.command()
def update(
    *,
    worker: Name,
    lanes: Annotated[str | None, typer.Option(help="short, long or both.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Model it serves; may be repeated.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher ones are filled first.")] = None,
    cost: Annotated[float | None, typer.Option(help="2 makes it look twice as busy.")] = None,
    concurrency_max: Annotated[int | None, typer.Option(help="Requests at once.")] = None,
    kv_total_tokens: Annotated[int | None, typer.Option(help="KV pool in tokens.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TEXT", help="Free text; the new ones replace the old."),
    ] = None,
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
) -> None:
    """Change what is given of a worker; the rest stays. Its requests go on."""
    changes = {
        "lanes": None if lanes is None else lanes_or_stop(lanes),
        "models": model or None,
        "priority": priority,
        "cost": cost,
        "concurrency_max": concurrency_max,
        "kv_total_tokens": kv_total_tokens,
        "labels": dict(text.partition("=")[::2] for text in label) if label else None,
    }
    body = {name: value for name, value in changes.items() if value is not None}
    if not body:
        stop("laneway: name what to change; --help lists it", status=2)
    call("PATCH", router, f"/workers/{quote(worker, safe='')}", admin_key, body=body)
    say(f"{worker} is changed")


def _say_if_untold(answer: dict[str, Any], router: str, admin_key: str | None) -> None:
    """Say it when other routers are to hear of a change later."""
    if answer.get("shared") is not False:
        return
    if call("GET", router, "/replicas", admin_key).get("standing") == "away":
        say("at this router only: Redis is away; the others are told when it is back")


@workers_app.command()
def drain(
    worker: Name,
    deadline_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds for its running answers to end; left out: the router's "
            "server.shutdown_grace_s, 180 unless set.",
        ),
    ] = None,
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
) -> None:
    """Give a worker no more requests; it is gone when its running answers have ended."""
    query = "" if deadline_s is None else f"?deadline_s={deadline_s:g}"
    answer = call("DELETE", router, f"/workers/{quote(worker, safe='')}{query}", admin_key)
    say(f"{worker} takes no more requests; it goes when its running answers have ended")
    _say_if_untold(answer, router, admin_key)


@workers_app.command()
def remove(worker: Name, router: RouterUrl = DEFAULT_ROUTER, admin_key: AdminKey = None) -> None:
    """Take a worker out at once; answers that are running on it still end."""
    path = f"/workers/{quote(worker, safe='')}?deadline_s=0"
    answer = call("DELETE", router, path, admin_key)
    say(f"{worker} is gone")
    _say_if_untold(answer, router, admin_key)
