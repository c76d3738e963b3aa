"""`laneway workers`: see and change the workers of a running router through its admin API."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.cli.common import say, stop

workers_app = typer.Typer(
    help="See and change the workers of a running router.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RouterUrl = Annotated[
    str, typer.Option("--router", envvar="LANEWAY_ROUTER", help="Base URL of the router.")
]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", envvar="LANEWAY_ADMIN_KEY", help="Its admin key.")
]
Name = Annotated[str, typer.Argument(metavar="WORKER", help="Id or URL.")]
DEFAULT_ROUTER = "http://127.0.0.1:30000"
TIMEOUT_S = 10.0


@workers_app.command("list")
def list_workers(router: RouterUrl = DEFAULT_ROUTER, admin_key: AdminKey = None) -> None:
    """List the workers with their live figures."""
    document = _call("GET", router, "/workers", admin_key)
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "status", "lanes", "models"):
        table.add_column(heading, overflow="fold")
    for heading in ("running", "queued", "KV", "failures"):
        table.add_column(heading, justify="right")
    for worker in document["workers"]:
        table.add_row(*map(Text, _row(worker)))
    console = Console(highlight=False)
    console.print(table)
    stats = document["stats"]
    console.print(f"{document['total']} workers, {stats['healthy']} healthy", markup=False)


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    kv_ratio = worker["kv_used_ratio"]
    return (
        worker["id"],
        worker["status"],
        "+".join(worker["lanes"]),
        ", ".join(worker["models"]) or "?",
        str(worker["load"]),
        "?" if worker["queued_requests"] is None else str(worker["queued_requests"]),
        "?" if kv_ratio is None else f"{kv_ratio:.0%}",
        str(worker["failures"]),
    )


@workers_app.command()
def add(
    *,
    url: Annotated[str, typer.Argument(help="Base URL of the SGLang server.")],
    lanes: Annotated[str, typer.Option(help="short, long or both.")] = "both",
    name: Annotated[
        str | None, typer.Option("--id", help="Its name; host:port if left out.")
    ] = None,
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
) -> None:
    """Add a worker; it gets requests after its first good report."""
    body: dict[str, Any] = {"url": url}
    if lanes != "both":
        body["lanes"] = [lanes]
    if name is not None:
        body["id"] = name
    answer = _call("POST", router, "/workers", admin_key, body=body)
    say(f"{answer['id']} is accepted; `laneway workers list` shows when it is ready")


@workers_app.command()
def drain(
    worker: Name,
    deadline_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds for its running answers to end.")
    ] = None,
    router: RouterUrl = DEFAULT_ROUTER,
    admin_key: AdminKey = None,
) -> None:
    """Give a worker no more requests; it is gone when its running answers have ended."""
    query = "" if deadline_s is None else f"?deadline_s={deadline_s:g}"
    _call("DELETE", router, f"/workers/{quote(worker, safe='')}{query}", admin_key)
    say(f"{worker} takes no more requests; it goes when its running answers have ended")


@workers_app.command()
def remove(worker: Name, router: RouterUrl = DEFAULT_ROUTER, admin_key: AdminKey = None) -> None:
    """Take a worker out at once; answers that are running on it still end."""
    _call("DELETE", router, f"/workers/{quote(worker, safe='')}?deadline_s=0", admin_key)
    say(f"{worker} is gone")


def _call(
    method: str, router: str, path: str, admin_key: str | None, *, body: Any = None
) -> dict[str, Any]:
    headers = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
    try:
        answer = httpx.request(
            method, router.rstrip("/") + path, headers=headers, json=body, timeout=TIMEOUT_S,
            trust_env=False,
        )  # fmt: skip
        document = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        stop(f"laneway: no router answers at {router}: {exc or type(exc).__name__}", status=1)
    except ValueError:
        stop(f"laneway: {router} answers, but not as a Laneway router does", status=1)
    if answer.is_error:
        error = document.get("error") if isinstance(document, dict) else None
        detail = error["message"] if isinstance(error, dict) else answer.text[:200]
        stop(f"laneway: {answer.status_code}: {detail}", status=1)
    if not isinstance(document, dict):
        stop(f"laneway: {router} answers, but not as a Laneway router does", status=1)
    return document
