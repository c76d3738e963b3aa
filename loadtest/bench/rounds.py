"""One subject, one round: the phases of load, in their order, and what each cost."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import TypeAdapter

from loadtest.bench.features import KEYS
from loadtest.bench.procfs import calibration_us, cpu_between, cpu_snapshot, memory
from loadtest.bench.results import LatencyResult, LoadResult, Measured, PhaseCost, Round
from loadtest.bench.stand import RoundFailed, Stand, child_environment, standing
from loadtest.bench.subjects import ROOT, Subject

CLIENT_TIMEOUT_S: Final = 240
# Between two looks at the router's memory while streams run.
MEMORY_PERIOD_S: Final = 0.7
# Decode step of the workers while the way of each chunk is timed.
CHUNK_LATENCY_STEP_MS: Final = 5.0
CHUNK_LATENCY_STREAMS: Final = 6

_SHOWN: Final = ("--keys", *KEYS)

_Result = TypeVar("_Result", LoadResult, LatencyResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The size of a round. A phase starts no request after `limit_s` (paced: twice that)."""

    requests: int = 20_000
    connections: int = 32
    burst_streams: int = 2_000
    paced_streams: int = 384
    stream_connections: int = 64
    tokens: int = 64
    step_ms: float = 10.0
    latency_requests: int = 600
    limit_s: float = 4.0
    idle_s: float = 1.5
    settle_s: float = 1.0
    big_bytes: int = 20_000  # request bodies of the `big` phase; 0 leaves it out


# A round that shows that everything runs; its figures are too noisy to keep.
QUICK: Final = Options(
    requests=3_000,
    burst_streams=300,
    paced_streams=128,
    latency_requests=100,
    limit_s=1.5,
    idle_s=0.5,
    settle_s=0.5,
)


def measured_round(subject: Subject, options: Options, *, number: int) -> Round:
    """Measure `subject` once; a failure is a result too."""
    before_us = calibration_us()
    measured, error = None, None
    try:
        with standing(subject) as stand:
            measured = _measured(stand, options)
    except RoundFailed as exc:
        error = str(exc)
    return Round(
        name=subject.name,
        version=subject.version,
        number=number,
        calibration_us=(before_us, calibration_us()),
        measured=measured,
        error=error,
    )


def plain_load(options: Options) -> list[str]:
    """Client arguments of the `json` phase."""
    return _arguments(options.requests, options.connections, options.limit_s)


def paced_load(options: Options) -> list[str]:
    """Client arguments of the `paced` phase."""
    size = _arguments(options.paced_streams, options.stream_connections, options.limit_s * 2)
    return [*size, "--stream", "--tokens", str(options.tokens)]


def run_client(mode: str, urls: list[str], arguments: list[str], kind: type[_Result]) -> _Result:
    """Run the client in its own process and return what it saw."""
    command = [sys.executable, "-m", "loadtest.bench.client", mode, *urls, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
            env=child_environment({"PYTHONPATH": str(ROOT)}),
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired as exc:
        raise RoundFailed(f"the client did not end in {exc.timeout:.0f} s") from exc
    if done.returncode:
        raise RoundFailed(f"the client failed: {done.stderr.decode(errors='replace')[-1500:]}")
    return TypeAdapter(kind).validate_json(done.stdout)


def _measured(stand: Stand, options: Options) -> Measured:
    time.sleep(options.settle_s)
    memory_at_start = memory(stand.router.pid)
    warm_up_faults = _warm_up(stand, options)
    json = measured_load(stand, plain_load(options))
    burst = measured_load(
        stand,
        [*_arguments(options.burst_streams, options.connections, options.limit_s), "--stream"],
    )
    stand.set_decode_step(options.step_ms)
    with peak_memory_mb(stand.router.pid) as peaks_mb:
        paced = measured_load(stand, paced_load(options))
    stand.set_decode_step(0)
    urls = [stand.direct_url, stand.url]
    size = ["--requests", str(options.latency_requests), *_SHOWN]
    latency = run_client("latency", urls, size, LatencyResult)
    stand.set_decode_step(CHUNK_LATENCY_STEP_MS)
    size = ["--requests", str(CHUNK_LATENCY_STREAMS), "--stream", *_SHOWN]
    chunk_latency = run_client("latency", urls, size, LatencyResult)
    memory_after = memory(stand.router.pid)
    idle_ratio = _idle_ratio(stand, options.idle_s)
    stand.set_decode_step(0)
    return Measured(
        start_s=stand.start_s,
        warm_up_faults=warm_up_faults,
        json=json,
        burst=burst,
        paced=paced,
        big=measured_load(stand, _big_load(options)) if options.big_bytes else None,
        latency=latency,
        chunk_latency=chunk_latency,
        chunk_us=round((paced.router_us - json.router_us) / (options.tokens + 1), 2),
        memory_at_start=memory_at_start,
        memory_peak_mb=max(peaks_mb),
        memory=memory_after,
        idle_ratio=idle_ratio,
    )


def _warm_up(stand: Stand, options: Options) -> int:
    """Open connections and fill caches; return the number of faulty answers."""
    stand.set_decode_step(0)
    plain = _arguments(500, options.connections, options.limit_s)
    streams = _arguments(64, options.stream_connections, options.limit_s)
    loads = [
        measured_load(stand, arguments).load
        for arguments in (plain, [*streams, "--stream", "--tokens", "16"])
    ]
    return sum(load.bad + load.altered for load in loads)


def _big_load(options: Options) -> list[str]:
    size = _arguments(options.requests // 4, options.connections, options.limit_s)
    return [*size, "--body-bytes", str(options.big_bytes)]


def _arguments(requests: int, connections: int, limit_s: float) -> list[str]:
    return [
        *("--requests", str(requests)),
        *("--connections", str(connections)),
        *("--limit-s", str(limit_s)),
        *_SHOWN,
    ]


def measured_load(stand: Stand, arguments: list[str]) -> PhaseCost:
    """Run the load client with `arguments`; what it saw, and what each side spent on it."""
    router_before = cpu_snapshot(stand.router.pid)
    workers_before = cpu_snapshot(stand.workers.pid)
    client_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    load = run_client("load", [stand.url], arguments, LoadResult)
    client_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    router = cpu_between(router_before, cpu_snapshot(stand.router.pid))
    workers = cpu_between(workers_before, cpu_snapshot(stand.workers.pid))
    stand.require_alive()
    answers = max(1, load.ended)
    client_s = (client_after.ru_utime + client_after.ru_stime) - (
        client_before.ru_utime + client_before.ru_stime
    )
    return PhaseCost(
        load=load,
        router_us=round(router.cpu_us / answers, 1),
        worker_us=round(workers.cpu_us / answers, 1),
        client_us=round(client_s * 1e6 / answers, 1),
        threads_ended=router.threads_ended,
    )


def _idle_ratio(stand: Stand, idle_s: float) -> float:
    before = cpu_snapshot(stand.router.pid)
    time.sleep(idle_s)
    used = cpu_between(before, cpu_snapshot(stand.router.pid))
    return round(used.cpu_us / (idle_s * 1e6), 5)


@contextmanager
def peak_memory_mb(pid: int) -> Iterator[list[float]]:
    """Look at the tree's memory again and again; the list holds every figure seen."""
    over = threading.Event()
    seen_mb: list[float] = [memory(pid).pss_mb]

    def watch() -> None:
        while not over.wait(MEMORY_PERIOD_S):
            seen_mb.append(memory(pid).pss_mb)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen_mb
    finally:
        over.set()
        watcher.join()
