"""What a request costs in the policy core: CPU microseconds per life of a request, by fleet size.

One life is everything the relay reports: arrival and choice, first token, two progress reports, the
end. Run it with `python -m loadtest.decision_cost [policy ...]`.
"""

from __future__ import annotations

import sys
from collections import deque
from random import Random
from time import process_time_ns

from router.config import Config, PolicySettings
from router.contract import LoadReport, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.types import Endpoint, Outcome, RequestSpec, Ticket, Usage

FLEETS = (8, 64, 256)
RUNNING_PER_WORKER = 16
LIVES = 3_000
_IDLE = LoadReport(kv_used_tokens=0, running_requests=0, queued_requests=0)
_USAGE = Usage(prompt_tokens=500, output_tokens=120)


def main(policies: list[str]) -> None:
    """Print one line per policy and fleet size."""
    print("policy            workers  us/decision  us/life")
    for name in policies or ["least_work"]:
        for workers in FLEETS:
            decision_us, life_us = min(_measured(name, workers) for _ in range(3))
            print(f"{name:16}  {workers:7}  {decision_us:11.1f}  {life_us:7.1f}")


def _measured(policy: str, workers: int) -> tuple[float, float]:
    config = Config(policy=PolicySettings.model_validate({"name": policy}))
    core = Dispatcher(config, rng=Random(1))
    for number in range(workers):
        spec = WorkerSpec(url=f"http://w{number}:1", models=("m",), kv_total_tokens=400_000)
        core.on_worker_joined(spec, now=0.0)
        core.on_report(spec.worker_id, _IDLE, now=0.0)
    rng = Random(2)
    specs = [_spec(number, rng) for number in range(500)]
    running: deque[Ticket] = deque()
    now = 100.0  # slow start and staleness are over
    decision_ns = life_ns = 0
    for life in range(LIVES + RUNNING_PER_WORKER * workers):
        now += 0.001
        if life % 1000 == 0:
            for worker_id in core.worker_ids:
                core.on_report(worker_id, _IDLE, now=now)
            core.take_effects()
        began = process_time_ns()
        running.append(core.on_request(specs[life % len(specs)], owner=None, now=now))
        core.take_effects()
        decided = process_time_ns()
        if len(running) > RUNNING_PER_WORKER * workers:
            _live(core, running.popleft(), now)
            decision_ns += decided - began
            life_ns += process_time_ns() - began
    return decision_ns / LIVES / 1e3, life_ns / LIVES / 1e3


def _live(core: Dispatcher, ticket: Ticket, now: float) -> None:
    core.on_first_token(ticket, now=now)
    core.on_tokens(ticket, 60, now=now)
    core.on_tokens(ticket, 120, now=now)
    core.on_finished(ticket, Outcome.SUCCESS, now=now, usage=_USAGE)
    core.take_effects()


def _spec(number: int, rng: Random) -> RequestSpec:
    """A 2 kB prompt: two blocks of a system prompt, then its own."""
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
