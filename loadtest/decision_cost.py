"""What a request costs in the policy core: CPU microseconds per event, by fleet size.

The events are those that a relay reports: arrival with the choice of a worker, first token,
progress (a few times per second and stream), end. Each figure is the best of many blocks, as a
shared machine only ever adds. Garbage collection is off, as a router's runtime freezes what lives
for ever and collects seldom. Run it with `python -m loadtest.decision_cost [policy ...]`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from random import Random
from time import process_time_ns
from typing import TypeVar

from router.config import Config, PolicySettings
from router.contract import LoadReport, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.types import Endpoint, Outcome, RequestSpec, Ticket, Usage

FLEETS = (8, 64, 256)
BLOCKS = 60
BLOCK = 50
RUNNING_PER_WORKER = 8
_T = TypeVar("_T")
_IDLE = LoadReport(kv_used_tokens=0, running_requests=0, queued_requests=0)
_USAGE = Usage(prompt_tokens=500, output_tokens=120)


def main(policies: list[str]) -> None:
    """Print one line per policy and fleet size."""
    gc.disable()
    print(f"{'policy':16} {'workers':>7} {'arrival':>8} {'first':>6} {'tokens':>6} {'end':>6}  us")
    for name in policies or ["least_work"]:
        for workers in FLEETS:
            figures = "  ".join(f"{us:5.1f}" for us in measured(name, workers))
            print(f"{name:16} {workers:7}    {figures}")
            gc.collect()


def measured(policy: str, workers: int) -> list[float]:
    """Microseconds of arrival, first token, progress and end."""
    core, now = _core(policy, workers), 100.0
    rng = Random(2)
    specs = [_spec(number, rng) for number in range(RUNNING_PER_WORKER * workers + BLOCK)]
    running = [core.on_request(spec, owner=None, now=now) for spec in specs[BLOCK:]]
    best = [float("inf")] * 4
    for block in range(BLOCKS):
        now += 0.05
        for worker_id in core.worker_ids if block % 20 == 0 else ():
            core.on_report(worker_id, _IDLE, now=now)
        core.take_effects()
        ended, running = running[:BLOCK], running[BLOCK:]
        figures = _block(core, specs, ended, running, now)
        best = [min(pair) for pair in zip(best, figures, strict=True)]
    return best


def _block(
    core: Dispatcher,
    specs: list[RequestSpec],
    ended: list[Ticket],
    running: list[Ticket],
    at: float,
) -> list[float]:
    moments = iter([at + number * 1e-4 for number in range(10 * BLOCK)])

    def arrive(spec: RequestSpec) -> None:
        running.append(core.on_request(spec, owner=None, now=next(moments)))
        core.take_effects()

    def first(ticket: Ticket) -> None:
        core.on_first_token(ticket, now=next(moments))

    def tokens(ticket: Ticket) -> None:
        core.on_tokens(ticket, 60, now=next(moments))

    def end(ticket: Ticket) -> None:
        core.on_finished(ticket, Outcome.SUCCESS, now=next(moments), usage=_USAGE)
        core.take_effects()

    return [
        _timed(arrive, specs[:BLOCK]),
        _timed(first, ended),
        _timed(tokens, ended),
        _timed(end, ended),
    ]


def _timed(call: Callable[[_T], None], items: list[_T]) -> float:
    began = process_time_ns()
    for item in items:
        call(item)
    return (process_time_ns() - began) / len(items) / 1e3


def _core(policy: str, workers: int) -> Dispatcher:
    config = Config(policy=PolicySettings.model_validate({"name": policy, "slow_start_s": 0}))
    core = Dispatcher(config, rng=Random(1))
    for number in range(workers):
        spec = WorkerSpec(url=f"http://w{number}:1", models=("m",), kv_total_tokens=400_000)
        core.on_worker_joined(spec, now=99.0)
        core.on_report(spec.worker_id, _IDLE, now=99.0)
    return core


def _spec(number: int, rng: Random) -> RequestSpec:
    """A 2 kB prompt: two blocks of a shared system prompt, then two of its own."""
    own = [rng.getrandbits(32) for _ in range(2)]
    return RequestSpec(
        request_id=str(number),
        endpoint=Endpoint.CHAT,
        model="m",
        stream=True,
        prompt_bytes=2_048,
        max_tokens=rng.choice((100, 200, 1000)),
        prefix=(1, 2, *own),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
