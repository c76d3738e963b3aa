"""Requests with prompts of 100,000 tokens: what each byte of a body costs, beside nginx."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Final

from loadtest.bench.rounds import measured_load
from loadtest.bench.scale.figures import Figure, Size
from loadtest.bench.scale.subjects import laneway, nginx
from loadtest.bench.stand import RoundFailed, standing
from loadtest.bench.subjects import Subject

BODY_BYTES: Final = 400_000
REQUESTS_PER_S: Final = 200
_REQUESTS: Final = 1_000
_CONNECTIONS: Final = 8


def bodies(size: Size) -> Iterator[Figure]:
    """CPU of large requests, one after the other on a few connections."""
    requests = _REQUESTS // 10 if size.quick else _REQUESTS
    subjects = [nginx(), *map(laneway, size.builds)]
    seen: list[list[float]] = [[] for _ in subjects]
    for _ in range(1 if size.quick else size.rounds):
        for each, subject in zip(seen, subjects, strict=True):
            each.append(_request_us(subject, requests))
    theirs_us, *ours_us = map(statistics.median, seen)
    kb = BODY_BYTES / 1_000
    for build, us in zip(size.builds, ours_us, strict=True):
        yield Figure(
            name=f"a kB of bodies of {kb:.0f} kB",
            build=build,
            unit="us",
            value=us / kb,
            beside=theirs_us / kb,
            ratio_max=3.0,
        )
        yield Figure(
            name=f"{REQUESTS_PER_S} such requests a second",
            build=build,
            unit="% of a core",
            value=us * REQUESTS_PER_S / 1e4,
            beside=theirs_us * REQUESTS_PER_S / 1e4,
        )


def _request_us(subject: Subject, requests: int) -> float:
    with standing(subject) as stand:
        time.sleep(1.0)
        arguments = ["--requests", str(requests), "--connections", str(_CONNECTIONS)]
        arguments += ["--body-bytes", str(BODY_BYTES)]
        measured_load(stand, [*arguments, "--limit-s", "2"])
        cost = measured_load(stand, [*arguments, "--limit-s", "60"])
        if cost.load.bad or cost.load.altered:
            raise RoundFailed(f"{subject.name}: bad answers: {cost.load.samples}")
        return cost.router_us
