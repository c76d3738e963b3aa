"""The report of a run: Markdown tables of medians, made from the lines of its file alone.

Ratios are ratios of the medians in the same table. What could not be had, what failed and what
was answered wrongly stands below the tables; nothing is left out in silence.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, TypeAdapter

from loadtest.bench.results import (
    Absent,
    LatencyResult,
    Line,
    LoadResult,
    Measured,
    PhaseCost,
    Round,
    Run,
)
from loadtest.bench.subjects import BASELINES

# Of CPU time of the calibration loop; above it the machine was too busy to trust the figures.
CALIBRATION_NOISY_US: Final = 9_000
REMARK_CHARS_MAX: Final = 300
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a round, and how many decimals of it mean something."""

    title: str
    value: Callable[[Measured], float | None]
    decimals: int = 0


_US_REQUEST = Column("us/req", lambda m: m.json.router_us)
_US_CHUNK = Column("us/chunk", lambda m: m.chunk_us, 1)
_US_BURST = Column("us/burst", lambda m: m.burst.router_us)
_US_BIG = Column("big us/req", lambda m: m.big.router_us if m.big else None)
_MB = Column("MB", lambda m: m.memory.pss_mb)

CPU_COLUMNS: Final = (
    _US_REQUEST,
    Column("req/s/core", lambda m: 1e6 / m.json.router_us if m.json.router_us else None),
    _US_CHUNK,
    Column("reads/chunk", lambda m: m.paced.load.reads_per_chunk, 2),
    Column("us/stream", lambda m: m.paced.router_us),
    _US_BURST,
    _US_BIG,
)
OTHER_COLUMNS: Final = (
    Column("+p50", lambda m: m.latency.added_p50_us),
    Column("+p99", lambda m: m.latency.added_p99_us),
    Column("chunk +p50", lambda m: m.chunk_latency.added_p50_us),
    Column("chunk +p99", lambda m: m.chunk_latency.added_p99_us),
    Column("rps", lambda m: m.json.load.requests_per_s),
    Column("MB start", lambda m: m.memory_at_start.pss_mb),
    _MB,
    Column("MB paced", lambda m: m.memory_peak_mb),
    Column("idle %", lambda m: m.idle_ratio * 100, 2),
    Column("start s", lambda m: m.start_s, 1),
)
RATIO_COLUMNS: Final = (_US_REQUEST, _US_CHUNK, _US_BURST, _US_BIG, _MB)

LEGEND: Final = (
    "`us` are microseconds of CPU of the router's whole process tree: per plain completion "
    "(1.5 kB; `big`: 20 kB), per chunk and per stream of the paced streams, per stream sent at "
    "once (`burst`). `+p50`, `+p99`: microseconds added to a plain completion at concurrency 1; "
    "`chunk +p50` to the way of a chunk. `MB`: proportional set size of the tree after the load. "
    "`bad`, `altered`: answers that failed, or that are not byte for byte what the worker sent."
)


def line_json(line: Line) -> str:
    """`line` as one line of a results file."""
    return json.dumps(dataclasses.asdict(line), separators=(",", ":"))


def read_lines(path: Path) -> list[Line]:
    """The lines of a results file."""
    return [_LINE.validate_json(text) for text in path.read_text().splitlines() if text.strip()]


def faulty(lines: Iterable[Line]) -> bool:
    """Whether a round failed or an answer was wrong."""
    rounds = [line for line in lines if isinstance(line, Round)]
    return any(each.measured is None or any(_faults(each.measured)) for each in rounds)


def report(lines: Sequence[Line]) -> str:
    """The whole report in Markdown."""
    rows = rounds_by_name(lines)
    rounds = [line for line in lines if isinstance(line, Round)]
    parts = [
        *(_circumstances(line) for line in lines if isinstance(line, Run)),
        _calibration(rounds),
        "### Cost: CPU of the process tree",
        _table(_cpu_header(), [_cpu_row(name, each) for name, each in rows.items()]),
        "### Latency, memory, correctness",
        _table(_other_header(), [_other_row(name, each) for name, each in rows.items()]),
        *(_ratios(rows, baseline) for baseline in BASELINES),
        LEGEND,
        _remarks(lines),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def rounds_by_name(lines: Sequence[Line]) -> dict[str, list[Round]]:
    """The rounds that were measured, by subject in the order of its first."""
    rows: dict[str, list[Round]] = {}
    for line in lines:
        if isinstance(line, Round) and line.measured is not None:
            rows.setdefault(line.name, []).append(line)
    return rows


def summary(each: Round) -> str:
    """One line about one round, for the terminal."""
    measured = each.measured
    if measured is None:
        return f"{each.name}: FAILED: {each.error}"
    figures = [
        f"{column.title} {_cell(column.value(measured), column.decimals)}"
        for column in (*CPU_COLUMNS, *OTHER_COLUMNS)
    ]
    bad, altered = _faults(measured)
    calibration = "/".join(f"{value:.0f}" for value in each.calibration_us)
    return f"{each.name}: {', '.join(figures)}, bad {bad}, altered {altered}, calib {calibration}"


def _measured(rounds: list[Round]) -> list[Measured]:
    return [each.measured for each in rounds if each.measured is not None]


def _median(rounds: list[Round], column: Column) -> float | None:
    values = [column.value(measured) for measured in _measured(rounds)]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _cpu_header() -> list[str]:
    titles = [column.title for column in CPU_COLUMNS]
    return ["router", "version", "rounds", titles[0], "spread", *titles[1:]]


def _cpu_row(name: str, rounds: list[Round]) -> list[str]:
    costs = [measured.json.router_us for measured in _measured(rounds)]
    first, *others = [_cell(_median(rounds, c), c.decimals) for c in CPU_COLUMNS]
    spread = f"{min(costs):.0f}-{max(costs):.0f}"
    versions = ", ".join(dict.fromkeys(each.version for each in rounds))
    return [name, versions, str(len(rounds)), first, spread, *others]


def _other_header() -> list[str]:
    return ["router", *(column.title for column in OTHER_COLUMNS), "bad", "altered"]


def _other_row(name: str, rounds: list[Round]) -> list[str]:
    faults = [_faults(measured) for measured in _measured(rounds)]
    totals = [str(sum(each)) for each in zip(*faults, strict=True)]
    return [name, *(_cell(_median(rounds, c), c.decimals) for c in OTHER_COLUMNS), *totals]


def _ratios(rows: dict[str, list[Round]], baseline: str) -> str:
    if baseline not in rows or len(rows) < 2:
        return ""
    base = {column.title: _median(rows[baseline], column) for column in RATIO_COLUMNS}

    def ratio(rounds: list[Round], column: Column) -> float | None:
        value, unit = _median(rounds, column), base[column.title]
        return value / unit if value is not None and unit else None

    header = ["router", *(column.title for column in RATIO_COLUMNS)]
    cells = [
        [name, *(_cell(ratio(rounds, column), 2) for column in RATIO_COLUMNS)]
        for name, rounds in rows.items()
    ]
    return f"### Times {baseline}\n\n{_table(header, cells)}"


def _circumstances(run: Run) -> str:
    options = ", ".join(f"{name} {value:g}" for name, value in run.options.items())
    return f"{run.date}, commit {run.commit}; {run.machine}; {run.python}; {options}."


def _calibration(rounds: list[Round]) -> str:
    values = [value for each in rounds for value in each.calibration_us]
    if not values:
        return "No round was run."
    text = (
        f"Calibration loop: {statistics.median(values):.0f} us "
        f"({min(values):.0f}-{max(values):.0f}); about 6,000 on a quiet machine."
    )
    noisy = statistics.median(values) > CALIBRATION_NOISY_US
    return text + (" The machine was busy: repeat this run." if noisy else "")


def _remarks(lines: Sequence[Line]) -> str:
    remarks = []
    for line in lines:
        match line:
            case Absent(name=name, reason=reason):
                remarks.append(f"- **{name}: missing.** {reason}")
            case Round(name=name, number=number, measured=None, error=error):
                said = " ".join((error or "").split())
                remarks.append(f"- **{name}: round {number} failed.** {said[-REMARK_CHARS_MAX:]}")
            case Round(name=name, number=number, measured=Measured() as measured):
                remarks.extend(f"- {name}, round {number}: {r}" for r in _oddities(measured))
            case _:
                continue
    return "\n".join(remarks)


def _oddities(measured: Measured) -> list[str]:
    found = []
    ended = sum(phase.threads_ended for phase in _phases(measured))
    if ended:
        found.append(f"{ended} threads ended under load, their CPU is missing from the figures")
    if measured.warm_up_faults:
        found.append(f"{measured.warm_up_faults} faulty answers while warming up")
    found.extend(sample for load in _loads(measured) for sample in load.samples[:1])
    return found


def _faults(measured: Measured) -> tuple[int, int]:
    """Bad and altered answers of all phases."""
    results: list[LoadResult | LatencyResult] = [
        *_loads(measured),
        measured.latency,
        measured.chunk_latency,
    ]
    return sum(r.bad for r in results), sum(r.altered for r in results)


def _phases(measured: Measured) -> list[PhaseCost]:
    phases = (measured.json, measured.burst, measured.paced, measured.big)
    return [phase for phase in phases if phase is not None]


def _loads(measured: Measured) -> list[LoadResult]:
    return [phase.load for phase in _phases(measured)]


def _cell(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:.{decimals}f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---:" if title not in ("router", "version") else "---" for title in header]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))
