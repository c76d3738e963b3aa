"""The figures of a run as one picture: a panel of bars for each cost. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from loadtest.bench.report import RATIO_COLUMNS, Column, rounds_by_name
from loadtest.bench.results import Line, Round, Run
from loadtest.bench.subjects import OURS

_UNITS: Final = {
    "us/req": "CPU us per request of 1.5 kB",
    "us/chunk": "CPU us per streamed chunk",
    "us/burst": "CPU us per burst of 64 chunks",
    "big us/req": "CPU us per request of 20 kB",
    "MB": "MB after the load",
}


def plotted(lines: Sequence[Line], path: Path) -> None:
    """Write medians over rounds with their range to `path`; its format goes by its ending."""
    rows = rounds_by_name(lines)
    figure = plt.figure(figsize=(11, 2 + 0.42 * len(rows) * 3), layout="constrained")
    panels = figure.subplots(3, 2).flatten()
    for axes, column in zip(panels, RATIO_COLUMNS, strict=False):
        _bars(rows, column, axes)
    _legend(rows, panels[len(RATIO_COLUMNS)])
    for axes in panels[len(RATIO_COLUMNS) + 1 :]:
        axes.set_axis_off()
    runs = [line for line in lines if isinstance(line, Run)]
    dates = ", ".join(dict.fromkeys(f"{run.date}, commit {run.commit}" for run in runs))
    machines = "; ".join(dict.fromkeys(run.machine for run in runs))
    figure.suptitle(f"{dates}\n{machines}", fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(rows: dict[str, list[Round]], column: Column, axes: Axes) -> None:
    names = list(rows)
    for place, name in enumerate(names):
        found = [column.value(each.measured) for each in rows[name] if each.measured]
        values = [value for value in found if value is not None]
        if not values:
            continue
        median = statistics.median(values)
        spread = [[median - min(values)], [max(values) - median]]
        colour = "tab:blue" if name.startswith(OURS) else "tab:gray"
        axes.barh(place, median, xerr=spread, color=colour, capsize=2)
        axes.text(median, place, f"  {median:.{column.decimals}f}", va="bottom", fontsize="x-small")
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.12)  # room for the figures
    axes.set_title(_UNITS[column.title], fontsize="medium")


def _legend(rows: dict[str, list[Round]], axes: Axes) -> None:
    """Say which versions were measured, and how."""
    versions = [
        f"{name}: {', '.join(dict.fromkeys(each.version for each in rounds))}, {len(rounds)} rounds"
        for name, rounds in rows.items()
    ]
    text = "\n".join([*versions, "", "Bars are medians, lines the range of the rounds."])
    axes.set_axis_off()
    axes.text(0, 0.95, text, va="top", fontsize="small", wrap=True)
