"""`laneway sim`: try policies in virtual time.

The simulator is in the package `loadtest`, which drives the router's own core; it is imported when
the command runs, as all heavy parts are.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from pydantic import ValidationError

from router.cli.common import say, set_path, stop
from router.config import faults_of

if TYPE_CHECKING:
    from loadtest.sim.batch import Errand
    from loadtest.sim.run import Run

_SEEDS: Final = "1-5"
_TABLE_SEEDS: Final = "21-25"  # not used for tuning


def _show_help(context: typer.Context, wanted: bool) -> None:
    """Show the flags, and what may be played."""
    if not wanted:
        return
    try:
        from loadtest.sim.listing import listing  # noqa: PLC0415 - see the module's docstring
    except ModuleNotFoundError as exc:
        stop(f"laneway: the simulator is not installed here (no module {exc.name})", status=1)
    say(f"{context.get_help()}\n\n{listing(_TABLE_SEEDS)}")
    raise typer.Exit


_Help = Annotated[
    bool, typer.Option("--help", is_eager=True, callback=_show_help, help="Show this and end.")
]


def sim(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", help="One of those below, or all.")
    ] = None,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="One of those below; may be repeated. Left out: laneway."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help=f"As 1-5 or 1,4,8-9; {_SEEDS}, with --table {_TABLE_SEEDS}.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Cluster size; the load follows in proportion."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="A setting of ours, pacing.enabled=false."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every run with its digest.")] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Ours beside all baselines, as Markdown.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Put the table into FILE, between its marks."),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write PNGs of attainment and tails.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one per CPU.")] = None,
    _help: _Help = False,
) -> None:
    """Play SCENARIO against policies in virtual time, the same for equal seeds."""
    if scenario is None and not table:
        stop("laneway: which SCENARIO? --help lists them; or ask for --table", status=2)
    overrides: dict[str, Any] = {}
    for text in setting or ():
        set_path(overrides, text)
    if seeds is None:
        seeds = _TABLE_SEEDS if table else _SEEDS
    asked = _errands(scenario, policy, seeds, workers=workers, table=table, settings=overrides)
    _check_places(write, plots)
    runs = _done(asked, jobs=jobs or os.cpu_count() or 1)
    if plots is not None:
        _draw(runs, plots)
    _report(runs, as_json=as_json, write=write, seeds=seeds)


def _errands(
    scenario: str | None,
    policies: list[str] | None,
    seeds: str,
    *,
    workers: int | None,
    table: bool,
    settings: dict[str, Any],
) -> list[Errand]:
    """What is asked for, or the end of the command with status 2."""
    try:
        from loadtest.sim.batch import (  # noqa: PLC0415 - see the module's docstring
            ALL,
            BadRequest,
            errands,
            policies_named,
            seeds_in,
            trials_named,
        )
        from loadtest.sim.run import LANEWAY, POLICIES, config_of  # noqa: PLC0415
        from loadtest.sim.trials import BadTrial  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        stop(f"laneway: the simulator is not installed here (no module {exc.name})", status=1)
    try:
        trials = trials_named(scenario or ALL, workers=workers)
        names = policies_named(policies or (POLICIES if table else (LANEWAY,)))
        config_of(LANEWAY, settings)
        return errands(trials, names, seeds_in(seeds), settings)
    except (BadRequest, BadTrial) as exc:
        stop(f"laneway: {exc}", status=2)
    except ValidationError as exc:
        faults = "\n".join(f"  {fault}" for fault in faults_of(exc))
        stop(f"laneway: the configuration cannot be used:\n{faults}", status=2)


def _plots() -> ModuleType:
    try:
        from loadtest.sim import plots  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        stop(f"laneway: --plots needs {exc.name}: pip install 'laneway[sim]'", status=1)
    return plots


def _check_places(write: Path | None, plots: Path | None) -> None:
    """End the command, before hours of runs, where their outcome could not be kept."""
    from loadtest.sim import tables  # noqa: PLC0415

    try:
        if write is not None:
            tables.around(write)
        if plots is not None:
            _plots()
            plots.mkdir(parents=True, exist_ok=True)
    except (tables.NoPlace, OSError) as exc:
        stop(f"laneway: {exc}", status=2)


def _done(asked: Sequence[Errand], *, jobs: int) -> list[Run]:
    from loadtest.sim.batch import done  # noqa: PLC0415

    count, began_at = 0, time.monotonic()

    def note(run: Run) -> None:
        nonlocal count
        count += 1
        if sys.stderr.isatty():
            left_s = (time.monotonic() - began_at) / count * (len(asked) - count)
            line = f"{count}/{len(asked)} {run.trial} {run.policy} seed {run.seed}"
            line += f", some {left_s / 60:.0f} min left" if left_s > 60 else ""
            print(f"\r{line:<60}", end="\n" if count == len(asked) else "", file=sys.stderr)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its processes end with it
    return list(done(asked, jobs=min(jobs, len(asked)), on_done=note))


def _draw(runs: Sequence[Run], folder: Path) -> None:
    try:
        for path in _plots().plotted(runs, folder):
            print(path, file=sys.stderr)
    except OSError as exc:
        stop(f"laneway: {exc}", status=1)


def _report(runs: Sequence[Run], *, as_json: bool, write: Path | None, seeds: str) -> None:
    from loadtest.sim import tables  # noqa: PLC0415

    if write is not None:
        head = f"Seeds {seeds}; mean ± half the range over seeds.\n\n"
        try:
            tables.written(write, head + tables.markdown(runs))
        except (tables.NoPlace, OSError) as exc:
            stop(f"laneway: {exc}", status=1)
    if as_json:
        sys.stdout.write(json.dumps([tables.as_json(run) for run in runs], indent=1) + "\n")
    elif write is None:
        say(tables.markdown(runs).rstrip())
