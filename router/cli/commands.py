"""The top commands: serve, worker, check-config, demo."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from router.cli.common import overrides_of, read_sources, say, set_path, spread, stop, stop_faulty
from router.cli.config import config_app
from router.cli.keys import keys_app
from router.cli.replicas import replicas_app
from router.cli.sim import sim
from router.cli.tenants import tenants_app
from router.cli.worker import run_worker
from router.cli.workers import workers_app
from router.config_source import ConfigSource
from router.release import BUILD, VERSION

app = typer.Typer(
    name="laneway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(config_app, name="config")
app.add_typer(workers_app, name="workers")
app.add_typer(replicas_app, name="replicas")
app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.command(add_help_option=False)(sim)  # it has its own

ConfigPath = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; see configs/laneway.yaml.")
]

Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Any setting, as queue.depth_max=500."),
]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process."""
    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["serve"]:
        words = spread(words)
    elif words[:1] == ["worker"] and "--" in words:
        words.insert(words.index("--"), "--")  # the parser takes one away
    app(args=words, prog_name="laneway")


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"laneway {VERSION} ({BUILD})")
        raise typer.Exit


@app.callback()
def laneway(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and end."
        ),
    ] = False,
) -> None:
    """QoS router in front of SGLang workers."""


@app.command()
def serve(
    *,
    config: ConfigPath = None,
    worker_urls: Annotated[
        list[str] | None, typer.Option(help="URLs of workers, several after one flag.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="How a worker is chosen.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; may be repeated.")
    ] = None,
    admin_key: Annotated[
        list[str] | None, typer.Option(help="Key for admin routes; may be repeated.")
    ] = None,
    relays: Annotated[
        int | None, typer.Option(help="Processes that hold connections; 0: one does everything.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error.")] = None,
    access_log: Annotated[
        bool | None, typer.Option(help="One line per request on standard output.")
    ] = None,
    setting: Setting = None,
) -> None:
    """Route requests to the workers of the configuration and of --worker-urls."""
    flags = {
        ("policy", "name"): policy,
        ("server", "host"): host,
        ("server", "port"): port,
        ("relays", "count"): relays,
        ("server", "log_level"): log_level,
        ("server", "access_log"): access_log,
        ("auth", "api_keys"): api_key or None,
        ("auth", "admin_keys"): admin_key or None,
    }
    overrides = overrides_of(flags)
    for text in setting or ():
        set_path(overrides, text)
    source = ConfigSource(path=config, overrides=overrides, worker_urls=tuple(worker_urls or ()))
    loaded = read_sources(source)
    from router.app import CannotServe, run  # noqa: PLC0415 - see the package's docstring

    try:
        run(loaded.config, loaded)
    except CannotServe as exc:
        stop(f"laneway: {exc}", status=exc.exit_status)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def worker(context: typer.Context) -> None:
    """Run an SGLang server as a worker, the agent beside one, or simulated workers."""
    raise typer.Exit(run_worker(context.args))


@app.command("check-config")
def check_config(
    path: Annotated[Path | None, typer.Argument(metavar="FILE")] = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Print every setting at its default, as YAML.")
    ] = False,
    setting: Setting = None,
) -> None:
    """Read a configuration as `serve` would and say what it means, or list every fault."""
    from router.cli.meaning import meaning  # noqa: PLC0415 - see the package's docstring
    from router.config_reference import reference_yaml  # noqa: PLC0415

    if defaults:
        sys.stdout.write(reference_yaml())
        return
    overrides: dict[str, Any] = {}
    for text in setting or ():
        set_path(overrides, text)
    if path is None and not overrides:
        stop("laneway: name a FILE, or ask for --defaults", status=2)
    from router.app import faults, warnings  # noqa: PLC0415

    config = read_sources(ConfigSource(path=path, overrides=overrides)).config
    if found := list(faults(config)):
        stop_faulty(found)
    said = [f"warning     {text}" for text in warnings(config)]
    say("\n".join([*meaning(config), *said]))


@app.command()
def demo(
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Send load for so long, then end; else at Ctrl-C.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65_535, help="Of its router.")] = None,
) -> None:
    """Show a router and six simulated workers in two lanes under a mixed load."""
    import asyncio  # noqa: PLC0415

    from router.demo import demo as run_demo  # noqa: PLC0415

    raise typer.Exit(asyncio.run(run_demo(seconds=seconds, port=port)))
