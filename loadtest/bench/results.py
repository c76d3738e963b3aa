"""What a benchmark run writes down: one JSON object per line, as plain values.

A file starts with a `Run`, followed by a `Round` for each subject and turn, or an `Absent` for a
subject that could not be had. Times are microseconds (`_us`) unless the name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """A distribution in microseconds."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What the client saw while it sent load."""

    started: int
    ended: int
    bad: int  # failed, or not the shape of an answer
    altered: int  # whole answers, other bytes than the worker sent
    wall_s: float
    requests_per_s: float
    reads: int
    reconnects: int
    latency_us: Percentiles | None
    first_byte_us: Percentiles | None
    chunks: int
    chunks_per_s: float
    reads_per_chunk: float | None
    chunk_way_us: Percentiles | None
    samples: list[str]  # of the first faulty answers


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult:
    """The same requests, direct and routed by turns."""

    bad: int
    altered: int
    count: int
    direct_us: Percentiles | None
    router_us: Percentiles | None
    added_p50_us: float | None
    added_p90_us: float | None
    added_p99_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """A load phase and the CPU that each side spent on it, in microseconds per answer."""

    load: LoadResult
    router_us: float  # the whole process tree
    worker_us: float
    client_us: float
    threads_ended: int  # threads of the router that took their figures with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Proportional set size of a process tree, in MiB."""

    pss_mb: float
    processes: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One subject, one round."""

    start_s: float
    warm_up_faults: int  # bad and altered answers before the first phase
    json: PhaseCost
    burst: PhaseCost
    paced: PhaseCost
    big: PhaseCost | None
    latency: LatencyResult
    chunk_latency: LatencyResult
    chunk_us: float  # CPU of a paced stream less that of a request, by its chunks and its head
    memory_at_start: Memory
    memory_peak_mb: float  # during the paced streams
    memory: Memory  # after the load
    idle_ratio: float  # of one core


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The circumstances of a run."""

    kind: Literal["run"] = "run"
    date: str
    commit: str
    machine: str
    python: str
    options: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One subject measured once, or the reason why that failed."""

    kind: Literal["round"] = "round"
    name: str
    version: str
    number: int
    calibration_us: tuple[float, float]  # CPU time of a fixed loop, before and after
    measured: Measured | None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """A subject that could not be had, and why."""

    kind: Literal["absent"] = "absent"
    name: str
    reason: str


Line = Run | Round | Absent
