"""The engine's rules once more, naively: one loop turn per step, everything recounted each time.

It shares the formulas of `EngineProfile` with the engine under test and nothing else. No prefix
cache and no priorities.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine_model import EngineProfile


@dataclass(eq=False)
class Job:
    name: str
    arrives_at: float
    prompt: int
    output: int
    max_new: int
    made: int = 0  # output tokens
    kv: int = 0
    target: int = 0

    @property
    def left(self) -> int:
        return min(self.max_new - self.made, 4096)


@dataclass
class ReferenceEngine:
    profile: EngineProfile
    max_running: int
    events: list[tuple[str, str, float]] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    chunked: Job | None = None
    full: bool = False
    ratio: float = 0.7
    peak_kv: int = 0

    def run(self, jobs: list[Job]) -> None:
        """Serve `jobs` (sorted by arrival) to the end."""
        arrivals, now = list(jobs), 0.0
        while arrivals or self.waiting or self.running or self.chunked:
            if not (self.waiting or self.running or self.chunked):
                now = max(now, arrivals[0].arrives_at)
                self.ratio = 0.7
            while arrivals and arrivals[0].arrives_at <= now:
                self.waiting.append(arrivals.pop(0))
            batch = self._batch()
            now = self._prefill(batch, now) if batch else self._decode(now)

    def _used(self) -> int:
        live = [*self.running, *self.waiting, *([self.chunked] if self.chunked else [])]
        return sum(job.kv for job in live)

    def _batch(self) -> list[tuple[Job, int]]:
        if not self.running:
            self.full = False
        if self.chunked is None and (self.full or not self.waiting):
            return []
        batch: list[tuple[Job, int]] = []
        budget = self.profile.chunk_tokens
        used = self._used()
        promised = sum(job.left for job in self.running) * self.ratio
        if self.chunked is not None:
            tokens = min(budget, self.chunked.target - self.chunked.kv)
            batch.append((self.chunked, tokens))
            budget, used = budget - tokens, used + tokens
            if self.chunked.kv + tokens == self.chunked.target:
                promised += self.chunked.left
        while self.waiting and budget > 0:
            job = self.waiting[0]
            job.target = job.prompt + job.made
            if len(self.running) + len(batch) >= self.max_running:
                self.full = True
                break
            if job.target + job.left >= self.profile.kv_total_tokens - used - promised:
                self.full = True
                break
            self.waiting.pop(0)
            tokens = min(budget, job.target)
            batch.append((job, tokens))
            budget, used = budget - tokens, used + tokens
            if tokens == job.target:
                promised += job.left
        return batch

    def _prefill(self, batch: list[tuple[Job, int]], now: float) -> float:
        now += self.profile.prefill_ms([(job.kv, tokens) for job, tokens in batch]) / 1000
        self.chunked = None
        for job, tokens in batch:
            job.kv += tokens
            if job.kv < job.target:
                self.chunked = job
                continue
            if job.made == 0:
                self.events.append(("FIRST_TOKEN", job.name, now))
            job.made += 1
            self.running.append(job)
        self._finish(now)
        return now

    def _decode(self, now: float) -> float:
        if self.profile.kv_total_tokens - self._used() < len(self.running):
            self._retract(now)
        else:
            self.ratio = max(0.7 * 0.14, self.ratio - (0.7 - 0.7 * 0.14) / 600)
        context = sum(job.prompt + job.made for job in self.running)
        now += self.profile.decode_ms(len(self.running), context) / 1000
        for job in self.running:
            job.made += 1
            job.kv += 1
        self.peak_kv = max(self.peak_kv, self._used())
        self._finish(now)
        return now

    def _retract(self, now: float) -> None:
        order = sorted(self.running, key=lambda j: (j.made, -j.prompt), reverse=True)
        first = True
        while first or self.profile.kv_total_tokens - self._used() < len(order):
            first = False
            job = order.pop()
            job.kv = 0
            self.running.remove(job)
            self.waiting.append(job)
            self.events.append(("RETRACTED", job.name, now))
        made = sum(job.made for job in order)
        self.ratio = min(1.0, (made + 20 * len(order)) / (sum(j.max_new for j in order) + 1))
        self.full = False

    def _finish(self, now: float) -> None:
        for job in [job for job in self.running if job.made >= job.output]:
            self.running.remove(job)
            self.events.append(("FINISHED", job.name, now))
            self.full = False
