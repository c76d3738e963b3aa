"""What the simulator can play, in words, from the tables by which it plays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import Final

from loadtest.sim.baselines import BASELINES
from loadtest.sim.batch import seeds_in
from loadtest.sim.run import OURS, POLICIES
from loadtest.sim.trials import SUITE, TRIALS

_WIDTH: Final = 79
_RUN_CPU_S: Final = 2.5  # of the interpreted build, by the mean over the suite and all policies


def listing(table_seeds: str) -> str:
    """Scenarios, policies, an example, and how long the table takes that plays these seeds."""
    runs = len(SUITE) * len(POLICIES) * len(seeds_in(table_seeds))
    minutes = runs * _RUN_CPU_S / 60
    return "\n".join((
        f"Scenarios, each some two minutes of a cluster ({SUITE[0]} to {SUITE[-1]} are `all`):",
        *_entries((name, trial.about) for name, trial in TRIALS.items()),
        "",
        "Policies of ours:",
        *_entries(OURS.items()),
        "Baselines, which send each request at once (docs/policy.md, Measured):",
        *wrap(", ".join(BASELINES), _WIDTH, initial_indent="  ", subsequent_indent="  "),
        "",
        "For example a burst, ours beside a baseline:",
        "  laneway sim S2 --policy laneway --policy lmetric --seeds 1-5",
        "",
        f"A run takes seconds of CPU. --table is {runs} of them: some {minutes:.0f} minutes "
        "of CPU,\nshared by all CPUs, and a third of that with the compiled build.",
    ))  # fmt: skip


def _entries(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    rows = list(rows)
    indent = 4 + max(len(name) for name, _ in rows)
    for name, about in rows:
        first = f"  {name}".ljust(indent)
        yield from wrap(about, _WIDTH, initial_indent=first, subsequent_indent=" " * indent)
