"""What it costs to ask 1,000 workers for their load once a second."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.request import ProxyHandler, build_opener

from loadtest.bench.procfs import cpu_between, cpu_snapshot
from loadtest.bench.scale.figures import Figure, Size
from loadtest.bench.scale.subjects import laneway
from loadtest.bench.stand import RoundFailed, Stand, standing

WORKERS: Final = 1_000
LIMIT_RATIO: Final = 0.06
_SETTINGS: Final = "probe: {{interval_s: 1}}"
_JOIN_S: Final = 60.0
# Until all that is asked of a worker now and then was asked twice, as in the long run.
_SETTLE_S: Final = 70.0
_DIRECT = build_opener(ProxyHandler({}))


def probes(size: Size) -> Iterator[Figure]:
    """CPU of a router without load, for workers with an agent and for bare SGLang servers."""
    for build in size.builds:
        for kind, flags in (("agent", ["--reports"]), ("SGLang", [])):
            yield from _polled(build, kind, flags, size)


def _polled(build: str, kind: str, flags: list[str], size: Size) -> Iterator[Figure]:
    workers = WORKERS // 10 if size.quick else WORKERS
    seconds = 2.0 if size.quick else 5.0 * size.rounds
    subject = laneway(build, _SETTINGS, agents=kind == "agent")
    with standing(subject, workers=workers, worker_flags=flags) as stand:
        _await_all(stand, workers)
        time.sleep(1.0 if size.quick else _SETTLE_S)
        ratio, poll_us = _measured(stand, seconds)
    yield Figure(
        name=f"{workers:,} workers polled at 1 Hz, {kind}",
        build=build,
        unit="% of a core",
        value=100 * ratio,
        value_max=100 * LIMIT_RATIO * workers / WORKERS,
    )
    yield Figure(name=f"a poll, {kind}", build=build, unit="us", value=poll_us)


def _measured(stand: Stand, seconds: float) -> tuple[float, float]:
    """Share of a core, and microseconds for each poll that arrived at the workers."""
    polls, before = _polls(stand), cpu_snapshot(stand.router.pid)
    began = time.monotonic()
    time.sleep(seconds)
    used_us = cpu_between(before, cpu_snapshot(stand.router.pid)).cpu_us
    elapsed_s = time.monotonic() - began
    stand.require_alive()
    return used_us / elapsed_s / 1e6, used_us / max(1, _polls(stand) - polls)


def _polls(stand: Stand) -> int:
    """Load answers of all workers so far, told from a sample of them."""
    urls = stand.worker_urls[:: max(1, len(stand.worker_urls) // 20)]
    counted = sum(int(_json(f"{url}/_bench/stats")["polls"]) for url in urls)
    return counted * len(stand.worker_urls) // len(urls)


def _await_all(stand: Stand, workers: int) -> None:
    deadline = time.monotonic() + _JOIN_S
    while (healthy := _json(f"{stand.url}/readyz")["healthy_workers"]) < workers:
        if time.monotonic() > deadline:
            raise RoundFailed(f"{healthy} of {workers} workers joined within {_JOIN_S:.0f} s")
        time.sleep(0.5)


def _json(url: str) -> Any:
    with _DIRECT.open(url, timeout=10) as answer:
        return json.loads(answer.read())
