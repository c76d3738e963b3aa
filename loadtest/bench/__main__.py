"""The command line of the benchmark: `scripts/bench overhead|scale|report|profile|peers`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import resource
import signal
import sys
from datetime import datetime
from pathlib import Path

from loadtest.bench.peers import Unavailable
from loadtest.bench.plots import plotted
from loadtest.bench.procfs import NoAccounting, calibration_us, require_accounting
from loadtest.bench.profiling import NoProfiler, profile, profile_text, profiler
from loadtest.bench.report import faulty, line_json, read_lines, report, summary
from loadtest.bench.results import Absent, Line, Run
from loadtest.bench.rounds import QUICK, Options, measured_round
from loadtest.bench.scale.figures import Size, figure_line, table
from loadtest.bench.scale.parts import PARTS, UnknownPart, measured
from loadtest.bench.scale.subjects import BUILDS
from loadtest.bench.stand import RoundFailed
from loadtest.bench.subjects import (
    INTERPRETED,
    ROOT,
    Maker,
    Subject,
    UnknownSubject,
    chosen,
    commit,
    subject_makers,
    this_python,
)

OUT = ROOT / "bench-out"
_FAILURES = (UnknownPart, UnknownSubject, NoAccounting, NoProfiler, RoundFailed, Unavailable)


def main() -> int:
    """Run a subcommand; return the exit status."""
    # A terminated benchmark still stops what it started: SystemExit runs every `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = _parser().parse_args()
    try:
        return int(args.run(args))
    except _FAILURES as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 2


def overhead(args: argparse.Namespace) -> int:
    """Measure the chosen subjects in turn; 1 if a round failed or an answer was wrong."""
    require_accounting()
    _allow_many_files()
    options = _options(args)
    makers = _chosen(args)
    path = args.out or OUT / f"overhead-{datetime.now().astimezone():%Y%m%d-%H%M%S}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, _run(options))
    subjects = []
    for name, maker in makers.items():
        try:
            subjects.append(maker())
        except Unavailable as exc:
            _append(path, Absent(name=name, reason=str(exc)))
            print(f"{name}: MISSING: {exc}", flush=True)
    for number in range(1, args.rounds + 1):
        for subject in subjects:
            result = measured_round(subject, options, number=number)
            _append(path, result)
            print(summary(result), flush=True)
    lines = read_lines(path)
    text = report(lines)
    path.with_suffix(".md").write_text(text)
    plotted(lines, path.with_suffix(".png"))
    print(f"\n{text}\n{path}\n{path.with_suffix('.md')}\n{path.with_suffix('.png')}")
    return 1 if faulty(lines) else 0


def scale(args: argparse.Namespace) -> int:
    """Measure the chosen parts, beside nginx where it can do the same; 1 if a limit is exceeded."""
    require_accounting()
    _allow_many_files()
    path = args.out or OUT / f"scale-{datetime.now().astimezone():%Y%m%d-%H%M%S}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    builds = {build: subject_makers([])[build] for build in BUILDS}
    builds = chosen(builds, only=_names(args.only), skip=[])
    size = Size(rounds=args.rounds, quick=args.quick, builds=tuple(builds))
    before_us = calibration_us()
    rows = []
    for part, figure in measured(args.parts, size):
        rows.append((part, figure))
        print(figure_line(part, figure), flush=True)
    run = _run(Options())
    text = (
        f"{run.date}, commit {run.commit}; {run.machine}; {run.python}. Calibration loop: "
        f"{before_us:.0f} us before, {calibration_us():.0f} after; about 6,000 on a quiet machine."
        f"\n\n{table(rows)}\n"
    )
    path.write_text(text)
    print(f"\n{text}\n{path}")
    return 1 if any(figure.met is False for _, figure in rows) else 0


def report_again(args: argparse.Namespace) -> int:
    """Print the report of earlier runs, and draw it if that is asked for."""
    lines = [line for path in args.files for line in read_lines(path)]
    print(report(lines), end="")
    if args.plot is not None:
        plotted(lines, args.plot)
    return 0


def profile_one(args: argparse.Namespace) -> int:
    """Print where one router's CPU goes under load."""
    profiler()
    makers = list(_chosen(args, default=INTERPRETED).values())
    if len(makers) != 1:
        raise UnknownSubject("profile takes one router")
    samples = profile(
        makers[0](), _options(args), paced=args.phase == "paced", seconds=args.seconds
    )
    print(profile_text(samples, lines=args.lines))
    return 0


def install_peers(args: argparse.Namespace) -> int:
    """Make the environments of the chosen peers; 1 if one cannot be had."""
    missing = 0
    for name, maker in _chosen(args).items():
        try:
            made: Subject = maker()
            print(f"{name}: {made.version}")
        except Unavailable as exc:
            missing += 1
            print(f"{name}: MISSING: {exc}")
    return 1 if missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("--only", default="", help="names or patterns, by commas: 'laneway,nginx'")
    which.add_argument("--skip", default="", help="the same, left out")
    which.add_argument(
        "--command",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another router, with {port} {b1} {b2} in its command; repeatable",
    )

    size = argparse.ArgumentParser(add_help=False)
    size.add_argument("--quick", action="store_true", help="small rounds, to see that all runs")
    for field in dataclasses.fields(Options):
        flag = f"--{field.name.replace('_', '-')}"
        size.add_argument(
            flag, type=type(field.default), help=f"default {field.default:g}", metavar="N"
        )

    run = commands.add_parser("overhead", parents=[which, size], help="CPU, memory, latency")
    run.add_argument("--rounds", type=int, default=3, help="default 3; medians are reported")
    run.add_argument("--out", type=Path, help="append to this file instead of a new one")
    run.set_defaults(run=overhead)

    many = commands.add_parser("scale", help="many workers, many streams, large bodies")
    many.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; else all")
    many.add_argument("--quick", action="store_true", help="small, to see that all runs")
    many.add_argument("--only", default="", help=f"of our builds {', '.join(BUILDS)}; else both")
    many.add_argument("--rounds", type=int, default=3, help="default 3; medians are reported")
    many.add_argument("--out", type=Path, help="write the table to this file")
    many.set_defaults(run=scale)

    again = commands.add_parser("report", help="the report of earlier runs")
    again.add_argument("files", type=Path, nargs="+")
    again.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg, .pdf")
    again.set_defaults(run=report_again)

    spy = commands.add_parser("profile", parents=[which, size], help="where the CPU goes (py-spy)")
    spy.add_argument("--phase", choices=("json", "paced"), default="json")
    spy.add_argument("--seconds", type=int, default=10)
    spy.add_argument("--lines", type=int, default=30, help="frames to print")
    spy.set_defaults(run=profile_one)

    peers = commands.add_parser("peers", parents=[which], help="install the peers, run nothing")
    peers.set_defaults(run=install_peers)
    return parser


def _chosen(args: argparse.Namespace, *, default: str = "") -> dict[str, Maker]:
    only = _names(args.only)
    given = [text.partition("=")[0].strip() for text in args.command]
    if only or default:
        # A router given by its command is wanted without being named again.
        only = [*only, *given] or [default]
    return chosen(subject_makers(args.command), only=only, skip=_names(args.skip))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _options(args: argparse.Namespace) -> Options:
    base = QUICK if args.quick else Options()
    names = [field.name for field in dataclasses.fields(Options)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return dataclasses.replace(base, **given)


def _run(options: Options) -> Run:
    return Run(
        date=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        commit=commit(),
        machine=f"{os.cpu_count()} cores {_processor()}, Linux {platform.release()}",
        python=this_python(),
        options=dataclasses.asdict(options),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _append(path: Path, line: Line) -> None:
    with path.open("a") as file:
        file.write(line_json(line) + "\n")


def _allow_many_files() -> None:
    """A thousand streams are two thousand sockets in the router."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
