"""Runs as pictures: attainment by tier, and the tail of first-token times. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from loadtest.sim.run import OURS, Run

_TIERS: Final = (
    ("premium_feasible", "premium (feasible)"),
    ("standard", "standard"),
    ("free", "free"),
)


def plotted(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write NAME-attainment.png and NAME-tails.png per trial into `folder`; return the paths.

    Raises OSError.
    """
    paths = []
    for name in dict.fromkeys(run.trial for run in runs):
        mine = [run for run in runs if run.trial == name]
        for kind, draw in (("attainment", _attainment), ("tails", _tails)):
            figure = plt.figure(figsize=(9, 5), layout="constrained")
            draw(mine, figure.add_subplot())
            path = folder / f"{name}-{kind}.png"
            figure.savefig(path, dpi=120, metadata={"Software": None})
            plt.close(figure)
            paths.append(path)
    return paths


def _attainment(runs: Sequence[Run], axes: Axes) -> None:
    """Bars by policy and tier: the mean over seeds, with the range."""
    policies = list(dict.fromkeys(run.policy for run in runs))
    width = 0.8 / len(_TIERS)
    for index, (field, title) in enumerate(_TIERS):
        means, below, above = [], [], []
        for policy in policies:
            values = [getattr(run.figures, field) * 100 for run in runs if run.policy == policy]
            known = [value for value in values if isfinite(value)] or [nan]
            means.append(fmean(known))
            below.append(means[-1] - min(known))
            above.append(max(known) - means[-1])
        at = [place + (index - 1) * width for place in range(len(policies))]
        axes.bar(at, means, width, yerr=[below, above], label=title, capsize=2)
    axes.set_xticks(range(len(policies)), policies, rotation=40, ha="right")
    axes.set_ylabel("% within TTFT and TPOT targets")
    axes.set_ylim(0, 105)
    axes.set_title(f"{runs[0].trial}: attainment, mean and range over seeds")
    axes.legend(loc="lower right", ncols=3)


def _tails(runs: Sequence[Run], axes: Axes) -> None:
    """For each policy, which share of short requests waited longer than x for a first token."""
    for policy in dict.fromkeys(run.policy for run in runs):
        times = sorted(
            row.ttft_s * 1000
            for run in runs
            if run.policy == policy
            for row in run.rows
            if row.short and isfinite(row.ttft_s)
        )
        shares = [1 - place / len(times) for place in range(len(times))]
        line = {"linewidth": 2.2} if policy in OURS else {"linewidth": 1.0, "linestyle": "--"}
        axes.plot(times, shares, label=policy, **line)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 1)
    axes.set_xlabel("time to first token, ms")
    axes.set_ylabel("share of answered short requests that waited longer")
    axes.set_title(f"{runs[0].trial}: tails of short requests, all seeds together")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
