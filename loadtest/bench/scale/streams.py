"""Many open streams in one process: memory of each, CPU of each chunk, beside nginx."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from loadtest.bench.procfs import memory
from loadtest.bench.results import LoadResult
from loadtest.bench.rounds import measured_load, peak_memory_mb
from loadtest.bench.scale.figures import Figure, Size
from loadtest.bench.scale.subjects import laneway, nginx
from loadtest.bench.stand import RoundFailed, Stand, standing
from loadtest.bench.subjects import Subject

STREAMS_US: Final = 1_000
STREAMS_OPEN: Final = 10_000
# A stream is two sockets; a process has some other files and idle connections, too.
_OTHER_FILES: Final = 600
_STREAMS_PER_WORKER: Final = 1_000
_LIMITS: Final = "server: {{connections_max: 30000}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    streams: int
    tokens: int
    step_ms: float
    connects_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    chunk_us: float
    stream_kb: float


def streams(size: Size) -> Iterator[Figure]:
    """A thousand busy streams, then as many slow ones as the system lets a process have."""
    busy = _Load(streams=STREAMS_US // (10 if size.quick else 1), tokens=100, step_ms=100)
    for build, ours, theirs in _beside_nginx(busy, size.builds, 1 if size.quick else size.rounds):
        yield Figure(
            name=f"a chunk of {busy.streams:,} streams, gross",
            build=build,
            unit="us",
            value=ours.chunk_us,
            beside=theirs.chunk_us,
            ratio_max=1.44,  # 18 us on a machine on which nginx needs 12.5
        )
        yield _memory(busy, build, ours, theirs)
    most = STREAMS_OPEN // 20 if size.quick else min(STREAMS_OPEN, open_streams_max())
    many = _Load(streams=most, tokens=30, step_ms=1_000, connects_per_s=1_000)
    for build, ours, theirs in _beside_nginx(many, size.builds, 1):
        yield Figure(
            name="open streams in one process",
            build=build,
            unit="",
            value=most,
            value_min=None if size.quick else STREAMS_OPEN,
        )
        yield _memory(many, build, ours, theirs)
        yield Figure(
            name=f"a chunk of {most:,} streams, gross",
            build=build,
            unit="us",
            value=ours.chunk_us,
            beside=theirs.chunk_us,
        )


def _memory(load: _Load, build: str, ours: _Seen, theirs: _Seen) -> Figure:
    return Figure(
        name=f"memory of one of {load.streams:,} streams",
        build=build,
        unit="kB",
        value=ours.stream_kb,
        beside=theirs.stream_kb,
        value_max=30.0,
    )


def open_streams_max() -> int:
    """How many streams the system's limit on open files lets one process have."""
    return (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES) // 2


def _beside_nginx(
    load: _Load, builds: tuple[str, ...], rounds: int
) -> Iterator[tuple[str, _Seen, _Seen]]:
    """Each build and nginx by turns, medians."""
    subjects = [nginx(), *(laneway(build, _LIMITS) for build in builds)]
    rounds_of: list[list[_Seen]] = [[] for _ in subjects]
    for _ in range(rounds):
        for each, subject in zip(rounds_of, subjects, strict=True):
            each.append(_measured(subject, load))
    theirs, *ours = (
        _Seen(
            chunk_us=statistics.median(seen.chunk_us for seen in each),
            stream_kb=statistics.median(seen.stream_kb for seen in each),
        )
        for each in rounds_of
    )
    for build, seen in zip(builds, ours, strict=True):
        yield build, seen, theirs


def _measured(subject: Subject, load: _Load) -> _Seen:
    workers = max(2, load.streams // _STREAMS_PER_WORKER + 1)
    # nginx closes connections that wait for a request as soon as fewer than 1/16 are free.
    connections = int(2.2 * load.streams) + _OTHER_FILES
    with standing(subject, workers=workers, connections=connections) as stand:
        time.sleep(2.0)
        stand.set_decode_step(load.step_ms)
        before_mb = memory(stand.router.pid).pss_mb
        with peak_memory_mb(stand.router.pid) as peaks_mb:
            cost = measured_load(stand, _arguments(load))
        _require_good(stand, cost.load, load)
        return _Seen(
            chunk_us=cost.router_us / (load.tokens + 1),
            stream_kb=(max(peaks_mb) - before_mb) * 1024 / load.streams,
        )


def _arguments(load: _Load) -> list[str]:
    return [
        *("--requests", str(load.streams)),
        *("--connections", str(load.streams)),
        *("--limit-s", "60"),
        "--stream",
        *("--tokens", str(load.tokens)),
        *("--connects-per-s", str(load.connects_per_s)),
    ]


def _require_good(stand: Stand, seen: LoadResult, load: _Load) -> None:
    if seen.bad or seen.altered or seen.ended != load.streams:
        raise RoundFailed(
            f"{stand.subject.name}: of {load.streams} streams {seen.ended} ended, {seen.bad} bad, "
            f"{seen.altered} altered: {seen.samples}"
        )
