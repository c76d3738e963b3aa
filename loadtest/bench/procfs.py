"""What a process and all that it started have used, read from Linux's /proc.

CPU is the run time in /proc/PID/task/TID/schedstat: nanoseconds, user and kernel, with the
loopback's soft interrupts charged to the sender. Figures are kept by thread, so a thread that
ends between two snapshots takes its time with it; `CpuUse.threads_ended` tells how many did.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.results import Memory

PROC = Path("/proc")

CpuSnapshot = dict[tuple[int, int], int]


class NoAccounting(Exception):
    """This system does not tell what a process used."""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """What a process tree used between two snapshots."""

    cpu_us: float
    threads_ended: int


def require_accounting() -> None:
    """Raise NoAccounting where the kernel keeps no run times: all figures would be zero."""
    try:
        run_ns = int((PROC / "self/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError) as exc:
        raise NoAccounting(f"no run times in /proc/self/schedstat: {exc}") from exc
    if run_ns <= 0:
        raise NoAccounting("the kernel keeps no run times in /proc/self/schedstat")


def tree(root_pid: int) -> list[int]:
    """`root_pid` and every process that descends from it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The command's name may hold spaces and brackets; the parent comes after it.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, to_visit = [], [root_pid]
    while to_visit:
        pid = to_visit.pop()
        found.append(pid)
        to_visit.extend(children.get(pid, ()))
    return found


def cpu_snapshot(root_pid: int) -> CpuSnapshot:
    """CPU nanoseconds by (process, thread) for the tree under `root_pid`."""
    snapshot: CpuSnapshot = {}
    for pid in tree(root_pid):
        for thread_id in _threads(pid):
            try:
                text = (PROC / f"{pid}/task/{thread_id}/schedstat").read_text()
            except OSError:
                continue  # it has ended
            snapshot[pid, thread_id] = int(text.split()[0])
    return snapshot


def cpu_between(before: CpuSnapshot, after: CpuSnapshot) -> CpuUse:
    """What was used between two snapshots of one tree; what is new started from zero."""
    used_ns = sum(after_ns - before.get(key, 0) for key, after_ns in after.items())
    return CpuUse(used_ns / 1000, len(before.keys() - after.keys()))


def name_of(pid: int) -> str:
    """What a process calls itself; empty when it has ended."""
    try:
        return (PROC / f"{pid}/comm").read_text().strip()
    except OSError:
        return ""


def cpu_by_process(before: CpuSnapshot, after: CpuSnapshot) -> dict[int, float]:
    """Microseconds that each process of a tree used between two snapshots."""
    used: dict[int, float] = {}
    for key, after_ns in after.items():
        used[key[0]] = used.get(key[0], 0.0) + (after_ns - before.get(key, 0)) / 1000
    return used


def memory(root_pid: int) -> Memory:
    """Proportional set size, processes and threads of the tree under `root_pid`."""
    pss_kb = processes = threads = 0
    for pid in tree(root_pid):
        try:
            rollup = (PROC / f"{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it has ended
        pss_kb += sum(int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Pss:")
        threads += len(_threads(pid))
        processes += 1
    return Memory(pss_mb=round(pss_kb / 1024, 1), processes=processes, threads=threads)


def calibration_us() -> float:
    """CPU microseconds of a fixed piece of Python: how slow the machine is just now."""
    took_us = []
    for _ in range(3):
        start_ns = time.process_time_ns()
        value = 0
        for step in range(200_000):
            value = (value * 31 + step) & 0xFFFF
        took_us.append((time.process_time_ns() - start_ns) / 1000)
    return round(statistics.median(took_us))


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in (PROC / f"{pid}/task").iterdir()]
    except OSError:
        return []  # it has ended
