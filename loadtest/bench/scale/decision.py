"""What the choice of a worker costs, by the number of workers.

A driver with its core takes requests in and hears of their end, as the relay would tell it; nothing
is sent. Each worker runs some requests all the time. Blocks are short and the best of many
counts, as a shared machine only ever adds.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from random import Random
from time import process_time_ns
from typing import Final

from loadtest.bench.scale.figures import Figure, Size
from loadtest.bench.scale.subjects import interpreter
from loadtest.bench.stand import RoundFailed, child_environment
from router.config import Config, PolicySettings
from router.contract import LoadReport, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.types import Endpoint, Outcome, Refusal, RequestSpec, Ticket, Usage
from router.errors import Reason
from router.runtime.driver import Driver
from router.runtime.upstream import Upstreams

FLEETS: Final = (8, 64, 256, 1_000)
LIMIT_US: Final = 60.0
_RUNNING_PER_WORKER: Final = 4
_REQUESTS_PER_S: Final = 2.0  # to each worker
_REPORT_S: Final = 0.5
_REPORTS_TO_LEARN: Final = 20  # until the core knows how fast workers read prompts
_PROMPT_TOKENS_PER_S: Final = 10_000
_BLOCK: Final = 25
_USAGE: Final = Usage(prompt_tokens=500, output_tokens=120)


def decision(size: Size) -> Iterator[Figure]:
    """CPU of a request's arrival, first token and end in the driver and the core."""
    blocks = 10 if size.quick else 60 * size.rounds
    for build in size.builds:
        for workers in FLEETS:
            arrival_us, rest_us = _in_build(build, workers, blocks)
            yield Figure(
                name=f"choice among {workers:,} workers",
                build=build,
                unit="us",
                value=arrival_us,
                value_max=LIMIT_US,
            )
            name = f"first token and end, {workers:,} workers"
            yield Figure(name=name, build=build, unit="us", value=rest_us)


def _in_build(build: str, workers: int, blocks: int) -> tuple[float, float]:
    """What `request_us` says in a process that has this build."""
    python, environment = interpreter(build)
    command = [python, "-P", "-m", "loadtest.bench.scale.decision", str(workers), str(blocks)]
    environment = child_environment(environment)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RoundFailed(f"{build}: {run.stderr.strip()[-1500:]}")
    arrival_us, rest_us = map(float, run.stdout.split())
    return arrival_us, rest_us


class _Owner:
    """Stands where an exchange does; its request is sent nowhere."""

    ticket: Ticket
    sent = False

    def dispatch(self) -> None:
        """Note that a worker was chosen."""
        self.sent = True

    def refuse(self, refusal: Refusal) -> None:
        """Leave it unsent."""

    def judged(self, *, again: bool) -> None:
        """No attempt fails."""

    def preempt(self) -> bool:
        """No attempt is under way."""
        return False

    def sweep(self, now: float) -> None:
        """There is no deadline."""

    def cut(self, reason: Reason, message: str) -> None:
        """Leave it unsent."""


async def request_us(workers: int, blocks: int) -> tuple[float, float]:
    """Microseconds of CPU for a request's arrival and for the rest, the best of so many blocks.

    Raises RoundFailed when a request found no worker: that would be another measurement.
    """
    loop = asyncio.get_running_loop()
    policy = PolicySettings.model_validate({"name": "least_work", "slow_start_s": 0})
    config = Config(policy=policy)
    clock = _Clock()
    driver = Driver(
        config,
        Dispatcher(config, rng=Random(1)),
        Upstreams(config.upstream, loop=loop),
        loop=loop,
        clock=clock,
    )
    driver.probe = lambda _worker_id: None
    for number in range(workers):
        spec = WorkerSpec(url=f"http://w{number}:1", models=("m",), kv_total_tokens=400_000)
        driver.on_worker_joined(spec)
    for _ in range(_REPORTS_TO_LEARN):
        clock.now += _REPORT_S
        _report(driver, clock)
    clock.step_s = 1 / _REQUESTS_PER_S / workers
    gc.collect()
    gc.disable()
    try:
        return _best_us(driver, clock, workers, blocks)
    finally:
        gc.enable()
        driver.stop()


class _Clock:
    """Goes on by a step with each request."""

    def __init__(self) -> None:
        self.now = 100.0
        self.step_s = 0.0

    def __call__(self) -> float:
        return self.now


def _best_us(driver: Driver, clock: _Clock, workers: int, blocks: int) -> tuple[float, float]:
    rng = Random(2)
    kept = _RUNNING_PER_WORKER * workers
    running: list[_Owner] = []
    arrival_us = rest_us = float("inf")
    reported_at = clock.now
    for block in range(kept // _BLOCK + 1 + blocks):
        if clock.now > reported_at + _REPORT_S:
            reported_at = clock.now
            _report(driver, clock)
        specs = [_spec(block * _BLOCK + number, rng, workers) for number in range(_BLOCK)]
        began = process_time_ns()
        submit_ns = 0
        for spec in specs:
            owner = _Owner()
            clock.now += clock.step_s
            called = process_time_ns()
            driver.submit(spec, owner)
            submit_ns += process_time_ns() - called
            if not owner.sent:
                raise RoundFailed(f"request {spec.request_id} found no worker")
            driver.first_token(owner.ticket)
            running.append(owner)
        ended, running = running[:-kept], running[-kept:]
        for owner in ended:
            driver.left(owner)
            driver.finished(owner.ticket, Outcome.SUCCESS, None, _USAGE)
        if len(ended) == _BLOCK:
            rest_ns = process_time_ns() - began - submit_ns
            arrival_us = min(arrival_us, submit_ns / _BLOCK / 1e3)
            rest_us = min(rest_us, rest_ns / _BLOCK / 1e3)
    return arrival_us, rest_us


def _report(driver: Driver, clock: _Clock) -> None:
    report = LoadReport(
        kv_used_tokens=0,
        running_requests=0,
        queued_requests=0,
        prefill_tokens_total=int(clock.now * _PROMPT_TOKENS_PER_S),
        prefill_busy_s_total=clock.now,
    )
    for worker_id in driver.dispatcher.worker_ids:
        driver.on_report(worker_id, report)


def _spec(number: int, rng: Random, systems: int) -> RequestSpec:
    """A 2 kB prompt: two blocks of one of the shared system prompts, then two of its own."""
    system = 2 * rng.randrange(systems)
    return RequestSpec(
        request_id=str(number),
        endpoint=Endpoint.CHAT,
        model="m",
        stream=True,
        prompt_bytes=2_048,
        max_tokens=rng.choice((100, 200, 1000)),
        prefix=(system, system + 1, rng.getrandbits(32), rng.getrandbits(32)),
    )


if __name__ == "__main__":
    print(*asyncio.run(request_us(int(sys.argv[1]), int(sys.argv[2]))))
