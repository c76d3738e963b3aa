"""The parts of `scripts/bench scale` by name, and the run through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from loadtest.bench.scale.bodies import bodies
from loadtest.bench.scale.decision import decision
from loadtest.bench.scale.figures import Figure, Size
from loadtest.bench.scale.limits import limits
from loadtest.bench.scale.probes import probes
from loadtest.bench.scale.relays import relays
from loadtest.bench.scale.slow import slow
from loadtest.bench.scale.streams import streams

# A part raises RoundFailed or Unavailable when it can't be measured.
Part = Callable[[Size], Iterable[Figure]]

PARTS: Final[dict[str, Part]] = {
    "decision": decision,
    "relays": relays,
    "probes": probes,
    "streams": streams,
    "slow": slow,
    "bodies": bodies,
    "limits": limits,
}


class UnknownPart(Exception):
    """A name that is no part's."""


def measured(names: list[str], size: Size) -> Iterator[tuple[str, Figure]]:
    """The figures of the named parts, of all if none is named, each when it is known.

    Raises UnknownPart before anything is measured.
    """
    for name in names:
        if name not in PARTS:
            raise UnknownPart(f"no part {name!r}; there are {', '.join(PARTS)}")
    for name in names or PARTS:
        for figure in PARTS[name](size):
            yield name, figure
