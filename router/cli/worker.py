"""`laneway worker`: simulated workers, or the agent beside a real SGLang server.

The two have their own flags: those of the simulated workers are `workers.simulated`'s, handed on
as they are; those of the agent are here.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
from pydantic import SecretStr, ValidationError

from router.cli.common import stop
from router.config import faults_of

_HELP = """\
Usage: laneway worker --simulated N [FLAGS]
       laneway worker --agent-for URL [FLAGS]

  Run N simulated workers, or the agent beside the SGLang server at URL.
  Add --help to either form to see its flags.
"""

agent_app = typer.Typer(add_completion=False, rich_markup_mode=None)


def run_worker(args: list[str]) -> int:
    """Run `laneway worker ARGS`; return the exit status."""
    forms = [name for name in ("--simulated", "--agent-for") if _has(args, name)]
    if len(forms) == 2:
        stop("laneway: --simulated and --agent-for are two different workers", status=2)
    if not forms:
        if "--help" in args:
            typer.echo(_HELP)
            return 0
        stop(f"laneway: which worker?\n{_HELP}", status=2)
    if forms == ["--simulated"]:
        from workers.simulated import main  # noqa: PLC0415 - see the package's docstring

        return main(args, command="laneway worker")
    agent_app(args=args, prog_name="laneway worker", standalone_mode=True)
    return 0


def _has(args: list[str], name: str) -> bool:
    return any(arg == name or arg.startswith(f"{name}=") for arg in args)


@agent_app.command()
def agent(
    *,
    agent_for: Annotated[str, typer.Option(help="Base URL of the SGLang server, from here.")],
    register: Annotated[
        list[str] | None, typer.Option(help="URL of a router to register at; may be repeated.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="LANEWAY_ADMIN_KEY", help="Admin key of the routers.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(help="Where routers reach the server, if not at --agent-for.")
    ] = None,
    listen_host: Annotated[str, typer.Option(help="Where the agent listens.")] = "0.0.0.0",
    listen_port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Port of the agent.")
    ] = None,
    lanes: Annotated[str, typer.Option(help="short, long or both.")] = "both",
    name: Annotated[str | None, typer.Option("--id", help="Its name in the routers.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Model it serves; asked from it if left out.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LANEWAY_WORKER_KEY", help="Key of the SGLang server.")
    ] = None,
    drain_grace_s: Annotated[
        float, typer.Option(min=0, help="At SIGTERM: seconds for running answers to end.")
    ] = 180.0,
) -> None:
    """Report the load of an SGLang server, register it, and drain it at SIGTERM."""
    worker: dict[str, Any] = {"id": name, "models": model or (), "api_key": api_key}
    if lanes != "both":
        worker["lanes"] = [lanes]
    _run_agent(
        server_url=agent_for,
        router_urls=register or (),
        public_url=public_url,
        listen_host=listen_host,
        listen_port=listen_port,
        admin_key=None if admin_key is None else SecretStr(admin_key),
        drain_grace_s=drain_grace_s,
        worker={field: value for field, value in worker.items() if value},
    )


def _run_agent(**what: Any) -> None:
    from workers.agent import run_agent  # noqa: PLC0415 - see the package's docstring
    from workers.agent_settings import agent_settings  # noqa: PLC0415

    try:
        settings = agent_settings(**what)
    except ValidationError as exc:
        stop("laneway: " + "; ".join(faults_of(exc)), status=2)
    except ValueError as exc:
        stop(f"laneway: {exc}", status=2)
    try:
        asyncio.run(run_agent(settings))
    except OSError as exc:
        stop(f"laneway: the agent cannot listen: {exc}", status=1)
