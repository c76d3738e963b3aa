"""How much faster than real time the engine model runs: `python -m loadtest.engine_speed`.

Eight busy H100-8B workers at 95 requests/s (about 85 % load), chat-like lengths, round robin, in
virtual time, against CPU seconds of one core. Only the engines and an event heap are measured.
"""

from __future__ import annotations

import argparse
import heapq
from math import log
from random import Random
from time import process_time

from workers.engine import Engine
from workers.engine_model import Admission, EngineProfile, EngineRequest, EventKind
from workers.profiles import load_profiles


def simulate(
    profile: EngineProfile, *, workers: int, requests_per_s: float, seconds: float, seed: int
) -> tuple[int, int]:
    """Serve seeded arrivals for `seconds` of virtual time; return requests and decode steps."""
    random = Random(seed)
    engines = [Engine(profile) for _ in range(workers)]
    events: list[tuple[float, int, float]] = []  # at, engine, what it was scheduled for
    now, number, finished = 0.0, 0, 0
    arrival = random.expovariate(requests_per_s)
    while now < seconds:
        while events and events[0][0] <= arrival:
            at, index, _ = heapq.heappop(events)
            engine = engines[index]
            if at == engine.next_event_at():
                ended = engine.advance(at)
                finished += sum(event.kind is EventKind.FINISHED for event in ended)
                heapq.heappush(events, (engine.next_event_at(), index, at))
        now, number = arrival, number + 1
        engine = engines[number % workers]
        output = min(2_000, max(1, int(random.lognormvariate(log(129), 1.0))))
        request = EngineRequest(
            id=str(number),
            prompt_tokens=min(16_000, max(1, int(random.lognormvariate(log(1_020), 0.6)))),
            output_tokens=output,
            max_new_tokens=1_024 if output <= 1_024 else 4_096,
        )
        assert engine.submit(request, now=now) is Admission.ACCEPTED
        heapq.heappush(events, (engine.next_event_at(), number % workers, now))
        arrival += random.expovariate(requests_per_s)
    return finished, sum(int(engine.figures().decode_moments[0]) for engine in engines)


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=95.0, help="requests/s, all workers together")
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual time")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    profile = load_profiles()["h100-8b"]
    began = process_time()
    finished, steps = simulate(
        profile,
        workers=args.workers,
        requests_per_s=args.rate,
        seconds=args.seconds,
        seed=args.seed,
    )
    took = process_time() - began
    print(
        f"{args.workers} workers, {args.seconds:.0f} s of virtual time in {took:.2f} s of CPU: "
        f"{args.seconds / took:.0f} x real time ({finished} requests, {steps} decode steps)"
    )


if __name__ == "__main__":
    main()
