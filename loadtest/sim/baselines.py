"""What others do: routers that choose a worker at once and hold nothing back.

Each choice is a function of what such a router knows: its own counts, a poll once a second, the
prompt blocks it sent where. `jsq_oracle` alone looks into the engines, to show what perfect
information about the present is worth without holding requests back. The rules of `cache_aware`
and `lmetric` follow their published descriptions; they are not the shipped programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Final

from loadtest.sim.cluster import Cluster, Job, Polled, PollFault
from loadtest.trace import BLOCK_TOKENS
from router.contract import LoadReport
from workers.engine_model import EngineProfile

POLL_INTERVAL_S: Final = 1.0
RETRIES_MAX: Final = 2
PREFIX_BLOCKS_MAX: Final = 20_000  # remembered per worker


@dataclass(slots=True, eq=False)
class Seen:
    """What a baseline knows of one worker."""

    index: int
    in_flight: int = 0
    pending_tokens: int = 0  # uncached prompt tokens sent, no first token yet
    streaming: int = 0
    kv_tokens: int = 0
    kv_total_tokens: int = 1
    report: LoadReport | None = None
    latency_s: float = 0.0  # moving mean of time to first token
    alive: bool = True
    blocks: dict[int, None] = field(default_factory=dict)
    sent_tokens: int = 0  # total, as a prefix tree's size

    def hit_tokens(self, job: Job) -> int:
        """Prompt tokens whose blocks were sent here before."""
        count = 0
        for block in job.item.prefix_blocks:
            if block not in self.blocks:
                break
            count += 1
        return min(count * BLOCK_TOKENS, job.item.prompt_tokens)

    def remember(self, job: Job) -> None:
        """Note the blocks of a prompt that was sent here."""
        for block in job.item.prefix_blocks:
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > PREFIX_BLOCKS_MAX:
            del self.blocks[next(iter(self.blocks))]


Choose = Callable[["BaselineRouter", Job, list[Seen]], Seen]


class BaselineRouter:
    """Sends each request the moment it comes to the worker that `choose` names."""

    def __init__(self, choose: Choose, *, seed: str) -> None:
        self.rng = Random(f"{seed}/baseline")
        self.turn = 0
        self.cluster: Cluster
        self.seen: list[Seen] = []
        self._choose = choose

    def start(self, cluster: Cluster) -> None:
        """Learn of the workers and begin to poll them."""
        self.cluster = cluster
        self.seen = [
            Seen(server.index, kv_total_tokens=server.profile.kv_total_tokens)
            for server in cluster.servers
        ]
        for seen in self.seen:
            cluster.at(self.rng.random() * POLL_INTERVAL_S, lambda _, s=seen: self._poll(s))  # type: ignore[misc]

    def arrive(self, job: Job) -> None:
        """Choose and send."""
        job.handle = []
        self._send(job)

    def first_token(self, job: Job) -> None:
        """Prefill is done: the request now streams."""
        seen, uncached = job.handle[-1]
        seen.pending_tokens -= uncached
        seen.streaming += 1
        seen.latency_s += 0.1 * (job.ttft_s - seen.latency_s)

    def ended(self, job: Job) -> None:
        """Count the request out."""
        seen, _ = job.handle[-1]
        seen.in_flight -= 1
        seen.streaming -= 1
        seen.kv_tokens -= _kv(job)

    def failed(self, job: Job, *, began: bool) -> None:
        """Try another worker while nothing was sent, and leave the dead one out."""
        seen, uncached = job.handle[-1]
        seen.in_flight -= 1
        seen.kv_tokens -= _kv(job)
        seen.alive = seen.alive and self.cluster.servers[seen.index].alive
        if began:
            seen.streaming -= 1
            self.cluster.lose(job, "stream cut")
        else:
            seen.pending_tokens -= uncached
            if len(job.handle) <= RETRIES_MAX:
                self._send(job)
            else:
                self.cluster.lose(job, "no worker")

    def progress(self) -> None:
        """Baselines do not watch streams."""

    def _send(self, job: Job) -> None:
        tried = {seen.index for seen, _ in job.handle}
        able = [s for s in self.seen if s.alive and s.index not in tried]
        seen = self._choose(self, job, able or self.seen)
        uncached = job.item.prompt_tokens - seen.hit_tokens(job)
        job.handle.append((seen, uncached))
        seen.in_flight += 1
        seen.pending_tokens += uncached
        seen.kv_tokens += _kv(job)
        seen.sent_tokens += uncached
        seen.remember(job)
        self.cluster.send(job, seen.index)

    def _poll(self, seen: Seen) -> None:
        def answered(polled: Polled, _: float) -> None:
            seen.alive = polled is not PollFault.DEAD
            seen.report = None if isinstance(polled, PollFault) else polled

        self.cluster.poll(seen.index, answered)
        self.cluster.at(self.cluster.now + POLL_INTERVAL_S, lambda _: self._poll(seen))


def _kv(job: Job) -> int:
    return job.item.prompt_tokens + min(job.item.max_tokens, 256)


def round_robin(router: BaselineRouter, _job: Job, able: list[Seen]) -> Seen:
    """Each in turn."""
    router.turn += 1
    return able[router.turn % len(able)]


def random(router: BaselineRouter, _job: Job, able: list[Seen]) -> Seen:
    """Any."""
    return router.rng.choice(able)


def least_in_flight(router: BaselineRouter, _job: Job, able: list[Seen]) -> Seen:
    """Fewest requests under way."""
    return min(able, key=lambda s: (s.in_flight, router.rng.random()))


def power_of_two(router: BaselineRouter, _job: Job, able: list[Seen]) -> Seen:
    """The less busy of two at random."""
    two = router.rng.sample(able, min(2, len(able)))
    return min(two, key=lambda s: s.in_flight)


def polled_score(_router: BaselineRouter, _job: Job, able: list[Seen]) -> Seen:
    """The weighted score over figures as they were polled."""

    def score(seen: Seen) -> float:
        report = seen.report
        free = 1.0 - _kv_used_ratio(report) if report else 0.5
        queue = (report.queued_requests or 0) / 16 if report else 0.5
        return 0.5 * free + 0.3 * (1 - min(1.0, queue)) + 0.2 * (1 - min(1.0, seen.latency_s))

    return max(able, key=lambda s: (score(s), -s.index))


def _kv_used_ratio(report: LoadReport) -> float:
    return (report.kv_used_tokens or 0) / (report.kv_total_tokens or 1)


def cache_aware(_router: BaselineRouter, job: Job, able: list[Seen]) -> Seen:
    """sglang-router's documented rule: prefix match unless loads are out of balance."""
    loads = [s.in_flight for s in able]
    if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
        return min(able, key=lambda s: s.in_flight)
    best = max(able, key=lambda s: s.hit_tokens(job))
    if best.hit_tokens(job) > 0.3 * job.item.prompt_tokens:
        return best
    return min(able, key=lambda s: s.sent_tokens)


def lmetric(router: BaselineRouter, job: Job, able: list[Seen]) -> Seen:
    """New prefill tokens times batch size."""

    def score(seen: Seen) -> float:
        new = seen.pending_tokens + job.item.prompt_tokens - seen.hit_tokens(job)
        return new * (seen.in_flight + 1)

    return min(able, key=lambda s: (score(s), router.rng.random()))


def static_lanes(router: BaselineRouter, job: Job, able: list[Seen]) -> Seen:
    """max_tokens over 256 to the last five eighths of the workers, the others to the rest."""
    cut = len(router.seen) - round(len(router.seen) * 5 / 8)
    long = job.item.max_tokens > 256
    pool = [s for s in able if (s.index >= cut) == long] or able
    return min(pool, key=lambda s: (s.in_flight, router.rng.random()))


def least_work(router: BaselineRouter, job: Job, able: list[Seen]) -> Seen:
    """Predicted seconds from live counts, by the cost of each worker's own profile."""

    def score(seen: Seen) -> float:
        return _work_ms(
            router.cluster.servers[seen.index].profile,
            job.item.prompt_tokens,
            hit_tokens=seen.hit_tokens(job),
            pending_tokens=seen.pending_tokens,
            streams=seen.streaming,
            context_tokens=seen.kv_tokens,
            kv_tokens=seen.kv_tokens,
        )

    return min(able, key=lambda s: (score(s), router.rng.random()))


def jsq_oracle(router: BaselineRouter, job: Job, able: list[Seen]) -> Seen:
    """The same seconds, from the engines' exact state."""

    def score(seen: Seen) -> float:
        server = router.cluster.servers[seen.index]
        figures = server.engine.figures()
        return _work_ms(
            server.profile,
            job.item.prompt_tokens,
            hit_tokens=seen.hit_tokens(job),
            pending_tokens=figures.waiting_uncached_tokens,
            streams=figures.running_requests,
            context_tokens=figures.context_tokens,
            kv_tokens=figures.kv_used_tokens,
        )

    return min(able, key=lambda s: (score(s), router.rng.random()))


def _work_ms(
    profile: EngineProfile,
    prompt_tokens: int,
    *,
    hit_tokens: int,
    pending_tokens: int,
    streams: int,
    context_tokens: int,
    kv_tokens: int,
) -> float:
    """Milliseconds until the prompt is prefilled, two decode steps and the price of full memory."""
    new = prompt_tokens - hit_tokens
    kv = min(0.999, max(0.0, kv_tokens / profile.kv_total_tokens))
    attend = profile.attention_ms_per_mtoken2 * new * (hit_tokens + new / 2) / 1e6
    prefill = _prefill_ms_per_token(profile) * (pending_tokens + new) + attend
    return prefill + 2 * profile.decode_ms(streams + 1, context_tokens) + 50 * kv / (1 - kv)


@cache
def _prefill_ms_per_token(profile: EngineProfile) -> float:
    return profile.linear_ms(8192) / 8192


BASELINES: Final[Mapping[str, Choose]] = {
    "round_robin": round_robin,
    "random": random,
    "least_in_flight": least_in_flight,
    "power_of_two": power_of_two,
    "polled_score": polled_score,
    "cache_aware": cache_aware,
    "lmetric": lmetric,
    "static_lanes": static_lanes,
    "least_work": least_work,
    "jsq_oracle": jsq_oracle,
}
