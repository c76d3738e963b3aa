"""`laneway worker`: a real SGLang server with its agent, the agent alone, or simulated workers.

The last have their own flags: those of `workers.simulated`, handed on as they are. Those of the
agent are here, also for a server that is started with it.
"""

from __future__ import annotations

import asyncio
from errno import EACCES, EADDRINUSE
from typing import Annotated, Any

import typer
from pydantic import SecretStr, ValidationError

from router.cli.admin_api import checked_key
from router.cli.common import lanes_or_stop, stop
from router.config import faults_of

_HELP = """\
Usage: laneway worker [FLAGS] -- COMMAND...
       laneway worker --agent-for URL [FLAGS]
       laneway worker --simulated N [FLAGS]

  Start an SGLang server by its COMMAND, with the agent beside it; run the
  agent beside the SGLang server at URL; or run N simulated workers.
  Add --help to a form, before its --, to see its flags.
"""

agent_app = typer.Typer(add_completion=False, rich_markup_mode=None)


def run_worker(args: list[str]) -> int:
    """Run `laneway worker ARGS`; return the exit status."""
    split = args.index("--") if "--" in args else len(args)
    flags, command = args[:split], args[split + 1 :]
    simulated, beside = _has(flags, "--simulated"), _has(flags, "--agent-for")
    if simulated and (beside or split < len(args)):
        stop("laneway: simulated workers and a real one are two different things", status=2)
    if split < len(args) and not command:
        stop("laneway: which command starts the server? It comes after --", status=2)
    if simulated:
        from workers.simulated import main  # noqa: PLC0415 - see the package's docstring

        wants_help = "--help" in flags  # also where the number is left out
        return main(["--help"] if wants_help else args, command="laneway worker")
    if beside or command:
        return int(agent_app(args=args, prog_name="laneway worker", standalone_mode=True) or 0)
    if "--help" not in flags:
        stop(f"laneway: which worker?\n{_HELP}", status=2)
    typer.echo(_HELP)
    return 0


def _has(args: list[str], name: str) -> bool:
    return any(arg == name or arg.startswith(f"{name}=") for arg in args)


@agent_app.command()
def agent(
    *,
    command: Annotated[
        list[str] | None, typer.Argument(help="Starts the SGLang server; comes after --.")
    ] = None,
    agent_for: Annotated[
        str | None,
        typer.Option(help="Base URL of the SGLang server, from here; else as COMMAND says."),
    ] = None,
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
        str | None, typer.Option(envvar="LANEWAY_WORKER_API_KEY", help="Key of the SGLang server.")
    ] = None,
    drain_grace_s: Annotated[
        float, typer.Option(min=0, help="At SIGTERM: seconds for running answers to end.")
    ] = 180.0,
) -> None:
    """Report the load of an SGLang server, register it, and drain it at SIGTERM."""
    worker: dict[str, Any] = {"id": name, "models": model or (), "api_key": api_key}
    if lanes != "both":
        worker["lanes"] = lanes_or_stop(lanes)
    status = _run(
        tuple(command or ()),
        server_url=agent_for,
        router_urls=register or (),
        public_url=public_url,
        listen_host=listen_host,
        listen_port=listen_port,
        admin_key=None if admin_key is None else SecretStr(checked_key(admin_key)),
        drain_grace_s=drain_grace_s,
        worker={field: value for field, value in worker.items() if value},
    )
    raise typer.Exit(status)


def _run(command: tuple[str, ...], *, server_url: str | None, **what: Any) -> int:
    """Run the agent, with a server that `command` starts if there is one; return the status."""
    from workers.agent import run_agent  # noqa: PLC0415 - see the package's docstring
    from workers.agent_settings import agent_settings  # noqa: PLC0415
    from workers.launch import LaunchSettings, run_worker, served_url  # noqa: PLC0415
    from workers.listening import CannotListen  # noqa: PLC0415

    try:
        settings = agent_settings(server_url=server_url or served_url(command), **what)
    except ValidationError as exc:
        stop("laneway: " + "; ".join(faults_of(exc)), status=2)
    except ValueError as exc:
        stop(f"laneway: {exc}", status=2)
    try:
        if command:
            return asyncio.run(run_worker(LaunchSettings(command=command, agent=settings)))
        asyncio.run(run_agent(settings))
    except CannotListen as exc:
        flag = "--listen-port" if exc.errno in (EADDRINUSE, EACCES) else "--listen-host"
        stop(f"laneway: the agent {exc}; choose another with {flag}", status=1)
    except OSError as exc:
        stop(f"laneway: the worker cannot start: {exc}", status=1)
    return 0
