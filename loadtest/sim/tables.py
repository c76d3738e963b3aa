"""Runs as Markdown: one table per trial, a row per policy, mean and half range over the seeds.

Seeds differ more than policies do, so ratios are taken within a seed before they are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from math import isfinite, isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from loadtest.sim.baselines import BASELINES
from loadtest.sim.run import LANEWAY, LIMIT, WEIGHTED_LANES, Run
from loadtest.sim.trials import TRIALS

BEGIN: Final = "<!-- measured: begin -->"
END: Final = "<!-- measured: end -->"


class NoPlace(ValueError):
    """A file without the two lines between which a table belongs."""


class _Column(NamedTuple):
    title: str
    value: Callable[[Run], float]
    digits: int = 1
    scale: float = 1.0


_COLUMNS: Final = (
    _Column("goodput /s", lambda run: run.figures.goodput_per_s),
    _Column("feasible premium %", lambda run: run.figures.premium_feasible, scale=100),
    _Column("standard %", lambda run: run.figures.standard, scale=100),
    _Column("free %", lambda run: run.figures.free, scale=100),
    _Column("short P99 ms", lambda run: run.figures.short_ttft_p99_s, 0, 1000),
    _Column("TPOT P99 ms", lambda run: run.figures.tpot_p99_s, 0, 1000),
    _Column("rejected %", lambda run: run.figures.refused, scale=100),
    _Column("victims %", lambda run: run.figures.victims, scale=100),
    _Column("Jain", lambda run: run.figures.jain, 3),
    _Column("hits %", lambda run: run.figures.hit_ratio, scale=100),
    _Column("retractions", lambda run: run.accounts.retractions, 0),
)
_ACCOUNTS: Final = (
    _Column("useful busy %", lambda run: run.accounts.useful_busy_ratio, scale=100),
    _Column("wasted tokens %", lambda run: run.accounts.wasted_tokens_ratio, scale=100),
    _Column("lost", lambda run: run.figures.lost, 0),
    _Column("of them not on dead workers", lambda run: run.accounts.lost_elsewhere, 0),
    _Column("recovery s", lambda run: run.accounts.recovery_s, 2),
    _Column("Retry-After within 2x %", lambda run: run.accounts.retry_after_ratio, scale=100),
    _Column("of refusals", lambda run: run.accounts.retry_after_judged, 0),
)


def as_json(run: Run) -> dict[str, Any]:
    """One run for programs; what has no value is null."""
    return {
        "scenario": run.trial,
        "policy": run.policy,
        "seed": run.seed,
        "figures": _finite(asdict(run.figures)),
        "accounts": _finite(asdict(run.accounts)),
        "digest": run.digest,
        "virtual_s": round(run.seconds, 3),
        "cpu_s": round(run.cpu_s, 3),
    }


def _finite(figures: dict[str, float]) -> dict[str, float | None]:
    return {name: value if isfinite(value) else None for name, value in figures.items()}


def markdown(runs: Sequence[Run]) -> str:
    """All runs, trial by trial, and what ours are worth beside the others."""
    parts = []
    for name in dict.fromkeys(run.trial for run in runs):
        mine = [run for run in runs if run.trial == name]
        about = TRIALS[name].about if name in TRIALS else ""
        parts += [f"**{name}**{about and ': '}{about}", "", _table(mine, _COLUMNS), ""]
        if lines := list(_compared(mine)):
            parts += [*lines, ""]
    ours = [run for run in runs if run.policy == LANEWAY]
    if ours:
        parts += ["**What Laneway's runs cost and kept**", "", _table(ours, _ACCOUNTS), ""]
    return "\n".join(parts)


def _table(runs: Sequence[Run], columns: Sequence[_Column]) -> str:
    by_policy = len({run.policy for run in runs}) > 1 or columns is _COLUMNS
    name_of: Callable[[Run], str] = (lambda r: r.policy) if by_policy else (lambda r: r.trial)
    lines = [
        f"| {'policy' if by_policy else 'scenario'} | "
        + " | ".join(c.title for c in columns)
        + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for name in dict.fromkeys(map(name_of, runs)):
        cells = [_cell([c.value(r) for r in runs if name_of(r) == name], c) for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Iterable[float], column: _Column) -> str:
    known = [value * column.scale for value in values if not isnan(value)]
    if not known:
        return "-"
    digits = column.digits
    half = (max(known) - min(known)) / 2
    spread = f" ±{half:.{digits}f}" if round(half, digits) else ""
    return f"{fmean(known):.{digits}f}{spread}"


def _compared(runs: Sequence[Run]) -> Iterable[str]:
    """Goodput ratios by seed: ours to limit, to the best baseline; weighted_lanes to ours."""
    goodput = {(run.policy, run.seed): run.figures.goodput_per_s for run in runs}
    seeds = sorted({run.seed for run in runs})
    best = {
        seed: max((goodput.get((name, seed), nan), name) for name in BASELINES)
        for seed in seeds
        if all((name, seed) in goodput for name in BASELINES)
    }
    for ours, other, title in (
        (LANEWAY, LIMIT, "laneway / limit"),
        (LANEWAY, "", "laneway / best baseline"),
        (WEIGHTED_LANES, LANEWAY, "weighted_lanes / laneway"),
    ):
        ratios = []
        for seed in seeds:
            below = goodput.get((other, seed)) if other else best.get(seed, (None, ""))[0]
            if (ours, seed) in goodput and below:
                ratios.append(goodput[ours, seed] / below)
        if ratios:
            names = "" if other else f" ({', '.join(sorted({name for _, name in best.values()}))})"
            yield f"- goodput, {title}{names}: {_cell(ratios, _Column('', lambda _: 0.0, 3))}"


def around(path: Path) -> tuple[str, str]:
    """What a file has before the line BEGIN and after the line END.

    Raises NoPlace when it lacks them, OSError when it cannot be read.
    """
    head, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise NoPlace(f"{path} has no lines {BEGIN} and {END}")
    return head, tail


def written(path: Path, text: str) -> None:
    """Put `text` between the two lines BEGIN and END of a file.

    Raises NoPlace when the file lacks them, OSError when it cannot be read or written.
    """
    head, tail = around(path)
    path.write_text(f"{head}{BEGIN}\n{text.strip()}\n{END}{tail}", encoding="utf-8")
