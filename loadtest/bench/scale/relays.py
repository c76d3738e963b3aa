"""What several processes gain: requests by the CPU of the busiest one, with relays and without.

With enough cores the busiest process is what bounds the throughput of a router, so its CPU for each
request is compared, not time: that needs no cores for itself. Both routers run in turn, before the
same workers; the medians of all rounds count.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from loadtest.bench.procfs import cpu_by_process, cpu_snapshot, name_of
from loadtest.bench.results import LoadResult
from loadtest.bench.rounds import Options, paced_load, plain_load, run_client
from loadtest.bench.scale.figures import Figure, Size
from loadtest.bench.stand import RoundFailed, Stand, standing
from loadtest.bench.subjects import Subject, subject_makers

RELAYS: Final = 2
GAIN_MIN: Final = 1.6
_LOADS: Final = {"plain": plain_load, "streamed": paced_load}
_BRAIN: Final = "laneway-brain"
# So many connections that the kernel spreads them evenly, more or less, and so few that the fake
# workers keep up: what waits in the router is another load, and most of that is the brain's.
_OPTIONS: Final = Options(requests=20_000, connections=64, paced_streams=1_000)
_QUICK: Final = Options(requests=1_000, connections=64, paced_streams=200, tokens=16)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds for each request."""

    busiest: float
    all: float
    brain: float  # 0 where there is none


def relays(size: Size) -> Iterator[Figure]:
    """CPU of one process that does everything, and of the busiest of a brain and its relays."""
    for build in size.builds:
        yield from _of(build, size)


def _of(build: str, size: Size) -> Iterator[Figure]:
    one = subject_makers([])[build]()
    several = replace(one, name=f"{build}, {RELAYS} relays", command=(*one.command, *_FLAGS))
    costs: dict[tuple[str, str], list[Cost]] = {}
    for _ in range(1 if size.quick else size.rounds):
        for subject in (one, several):
            for load, cost in _costs(subject, _QUICK if size.quick else _OPTIONS):
                costs.setdefault((subject.name, load), []).append(cost)
    for load in _LOADS:
        alone = _median(costs[one.name, load])
        shared = _median(costs[several.name, load])
        costs_us = {
            "one process": alone.busiest,
            f"busiest of {RELAYS} relays and a brain": shared.busiest,
            "the brain": shared.brain,
            "all of them": shared.all,
        }
        for name, us in costs_us.items():
            yield Figure(name=f"{name}, {load}", build=build, unit="us/request", value=us)
        yield Figure(
            name=f"throughput gained, {load}",
            build=build,
            unit="x",
            value=alone.busiest / shared.busiest,
            value_min=GAIN_MIN if load == "plain" else None,
        )


_FLAGS: Final = ("--relays", str(RELAYS))


def _costs(subject: Subject, options: Options) -> Iterator[tuple[str, Cost]]:
    with standing(subject) as stand:
        for name, arguments in _LOADS.items():
            stand.set_decode_step(options.step_ms if name == "streamed" else 0)
            _phase(stand, arguments(replace(options, requests=500, paced_streams=64)))
            yield name, _phase(stand, arguments(options))


def _phase(stand: Stand, arguments: list[str]) -> Cost:
    before = cpu_snapshot(stand.router.pid)
    load = run_client("load", [stand.url], arguments, LoadResult)
    used_us = cpu_by_process(before, cpu_snapshot(stand.router.pid))
    stand.require_alive()
    if load.bad or load.altered or not load.ended:
        raise RoundFailed(f"{load.bad + load.altered} faulty answers of {load.ended}")
    each = {pid: cpu_us / load.ended for pid, cpu_us in used_us.items()}
    brain = sum(cost for pid, cost in each.items() if name_of(pid) == _BRAIN)
    return Cost(max(each.values()), sum(each.values()), brain)


def _median(costs: list[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.busiest for cost in costs),
        statistics.median(cost.all for cost in costs),
        statistics.median(cost.brain for cost in costs),
    )
