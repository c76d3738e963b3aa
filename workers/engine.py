"""A step model of one SGLang engine: what it runs next, and how long each step takes.

The loop is SGLang's. If a prefill batch can be formed it runs first, and every stream stalls
meanwhile; otherwise all running requests decode one token. Prompts are cut into chunks of the
chunk budget, and the chunks of one prompt run back to back. A request is admitted while its prompt
and a share of everybody's remaining output fit into the KV pool; when that guess was too bold, the
request with the fewest outputs is retracted and starts again later.

Nothing happens between two events, so decoding needs no loop: j undisturbed steps last
`j * step + growth * j * (j - 1) / 2`, and the next finish is the top of a heap on the step counter.
An arrival cuts such a run at the next step boundary. Real time and virtual time drive the same
object: `now` is always seconds of the caller's clock and never runs backwards.

Always true: used plus evictable KV never exceed the pool, and each accepted request ends in exactly
one FINISHED, ABORTED or EVICTED event. The module is pure; of ours it imports `engine_model` only.

Source of the rules: the scheduler of SGLang 0.5.23. Not modelled: priority preemption retried on
every step (here on arrivals and departures only), pages larger than one token, output tokens as
reusable prefix, timings of the overlapped scheduler.
"""

from __future__ import annotations

import heapq
import math
from enum import Enum, auto
from typing import Final

from workers.engine_model import (
    Admission,
    DecodeRun,
    EngineFigures,
    EngineProfile,
    EngineRequest,
    EngineSettings,
    Event,
    EventKind,
    KvPool,
    Moments,
    Outlook,
    PrefillBatch,
    State,
    WaitingQueue,
    added,
)

# The share of remaining output that admission expects running requests to produce: it starts
# high, falls with each decode step, and is estimated anew after a retraction.
RATIO_INIT: Final = 0.7
RATIO_MIN: Final = 0.7 * 0.14
RATIO_DECAY: Final = (RATIO_INIT - RATIO_MIN) / 600
RETRACT_STEPS: Final = 20
_EPSILON_S: Final = 1e-9  # below any step, above the rounding of sums of steps


class _Phase(Enum):
    IDLE = auto()
    PREFILL = auto()
    DECODE = auto()


# Members of enums are found slowly; these are asked for at each step.
_IDLE: Final = _Phase.IDLE
_PREFILL: Final = _Phase.PREFILL
_DECODE: Final = _Phase.DECODE
_WAITING: Final = State.WAITING
_PREFILLED: Final = State.PREFILL
_RUNNING: Final = State.RUNNING
_OVER: Final = State.OVER
_FIRST_TOKEN: Final = EventKind.FIRST_TOKEN
_FINISHED: Final = EventKind.FINISHED
_ACCEPTED: Final = Admission.ACCEPTED


class Engine:
    """One engine: submit and abort requests, advance it, collect what happened."""

    def __init__(self, profile: EngineProfile, settings: EngineSettings | None = None) -> None:
        self.profile = profile
        self.settings = settings or EngineSettings()
        self._kv = KvPool(profile.kv_total_tokens, self.settings.prefix_block_tokens)
        self._events: list[Event] = []
        self._live: dict[str, EngineRequest] = {}
        self._waiting = WaitingQueue(self.settings)
        self._running: dict[str, EngineRequest] = {}
        self._finishes: list[tuple[int, int, EngineRequest]] = []  # heap; stale entries remain
        self._batch: list[tuple[EngineRequest, int]] = []
        self._chunked: EngineRequest | None = None  # prompt with chunks left
        self._leaving: list[EngineRequest] = []  # aborted, gone at the end of the step
        self._full = False  # no admission until a request leaves, as SGLang's batch_is_full
        self._ratio = RATIO_INIT
        self._outlook = Outlook()
        self._context_tokens = 0
        self._phase = _IDLE
        self._now = -math.inf
        self._began_at = 0.0
        self._ends_at = math.inf
        self._steps = 0  # decode steps before this phase
        self._taken = 0  # decode steps of this phase until `now`
        self._planned = 0
        self._run = DecodeRun(0, 1.0, 0.0)
        self._fresh_ratio = False
        self._slow_ratio = 1.0
        self._pause_s = 0.0
        self._paused = False
        self._prefill_tokens = self._cached_tokens = self._generated = self._retractions = 0
        self._prefill_us = 0.0
        self._moments: Moments = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    # -- what a caller does -----------------------------------------------------------------

    def submit(self, request: EngineRequest, *, now: float) -> Admission:
        """Queue `request`. Its output limit is cut to what the KV pool can hold, as SGLang does."""
        if self._phase is not _IDLE or self._ends_at != now:
            self._run_to(now)  # else a burst onto an idle engine is one batch
        assert request.id not in self._live, f"request {request.id} is live"
        room = self.profile.kv_total_tokens - 2 - request.prompt_tokens
        if room < 0:
            return Admission.TOO_LONG
        if not self._queue_has_place(request, now):
            return Admission.QUEUE_FULL
        request.max_new_tokens = min(request.max_new_tokens, room)
        request.output_tokens = min(request.output_tokens, request.max_new_tokens)
        request.blocks = request.blocks[: request.prompt_tokens // self._kv.block_tokens]
        request.submitted_at = now
        self._live[request.id] = request
        self._enqueue(request)
        if self.settings.enable_priority_scheduling:
            self._full = False  # it may preempt
        if not self._full:
            self._wake(now)
        return _ACCEPTED

    def abort(self, request_id: str, *, now: float) -> bool:
        """End a request: at once while queued, else after the running step. False: not live."""
        self._run_to(now)
        request = self._live.get(request_id)
        if request is None:
            return False
        if request.state is _WAITING:
            self._waiting.remove(request)
            self._end(request, EventKind.ABORTED, now)
        elif not request.abort_wanted:
            request.abort_wanted = True
            self._leaving.append(request)
            self._wake(now)
        return True

    def advance(self, now: float) -> list[Event]:
        """Run until `now`; return what happened since the last call, in order."""
        self._run_to(now)
        events, self._events = self._events, []
        return events

    def set_speed(self, *, now: float, slow_ratio: float = 1.0, pause_s: float = 0.0) -> None:
        """From the next step on, steps last `slow_ratio` times as long, and `pause_s` more."""
        assert slow_ratio > 0, slow_ratio
        self._run_to(now)
        self._slow_ratio, self._pause_s = slow_ratio, pause_s
        self._wake(now)

    def set_paused(self, paused: bool, *, now: float) -> None:
        """Start no step after the running one, or go on."""
        self._run_to(now)
        self._paused = paused
        self._wake(now)

    def flush_cache(self, *, now: float) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests are live."""
        self._run_to(now)
        if not self._live:
            self._kv.flush()
        return not self._live

    # -- what a caller sees -----------------------------------------------------------------

    def next_event_at(self) -> float:
        """When something may happen next: end of a prefill batch or a decode run; inf when idle."""
        return self._ends_at

    def next_step_at(self) -> float:
        """When the running step ends: the next moment at which running requests have a token."""
        if self._phase is _DECODE:
            return self._began_at + self._run.duration_s(self._taken + 1)
        return self._ends_at

    def generated_tokens(self, request: EngineRequest) -> int:
        """Output tokens of `request` until the last advance."""
        if request.state is _RUNNING:
            return request.kept_tokens + self._steps + self._taken - request.joined_step
        return request.kept_tokens

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    def figures(self) -> EngineFigures:
        """Return the load as of the last advance or submit."""
        grown = self._taken * len(self._running)
        used = self._kv.used_tokens + grown
        total = self._kv.total_tokens
        started = [self._chunked] if self._chunked else [r for r, _ in self._batch]
        return EngineFigures(
            running_requests=len(self._running) + len(started),
            waiting_requests=len(self._waiting),
            waiting_tokens=sum(r.prompt_tokens for r in self._waiting),
            waiting_uncached_tokens=self._waiting.uncached_tokens
            + sum(r.target_tokens - r.done_tokens for r in started),
            retracted_waiting=sum(r.retractions > 0 for r in self._waiting),
            kv_used_tokens=used,
            kv_evictable_tokens=min(self._kv.evictable_tokens, total - used),
            kv_total_tokens=total,
            new_token_ratio=self._ratio,
            context_tokens=self._context_tokens + grown,
            prefill_tokens_total=self._prefill_tokens,
            cached_tokens_total=self._cached_tokens,
            prefill_busy_us_total=self._prefill_us,
            generated_tokens_total=self._generated + grown,
            retractions_total=self._retractions,
            decode_moments=added(self._moments, self._run.moments(self._taken)),
        )

    # -- time -------------------------------------------------------------------------------

    def _run_to(self, now: float) -> None:
        assert now >= self._now - _EPSILON_S, f"time runs backwards: {now} after {self._now}"
        self._now = now
        while self._ends_at <= now:
            self._end_phase(self._ends_at)
        if self._phase is _DECODE:
            steps = self._run.steps_in(now - self._began_at + _EPSILON_S)
            self._taken = min(int(steps), self._planned)

    def _wake(self, now: float) -> None:
        """Let the loop look again: at once when idle, at the next boundary of a decode run."""
        if self._phase is _IDLE:
            self._ends_at = min(self._ends_at, now)
        elif self._phase is _DECODE:
            steps = max(1, math.ceil(self._run.steps_in(now - self._began_at - _EPSILON_S)))
            if steps < self._planned:
                self._planned = steps
                self._ends_at = self._began_at + self._run.duration_s(steps)

    def _end_phase(self, at: float) -> None:
        if self._phase is _PREFILL:
            self._end_prefill(at)
        elif self._phase is _DECODE:
            self._end_decode(at)
        for request in self._leaving:
            if request.state is not _OVER:
                self._full = False
                self._end(request, EventKind.ABORTED, at)
        self._leaving.clear()
        self._begin_phase(at)

    def _begin_phase(self, at: float) -> None:
        self._began_at = at
        if self._paused:
            self._phase, self._ends_at = _IDLE, math.inf
        elif batch := self._admitted(at):
            chunks = ((request.done_tokens, tokens) for request, tokens in batch)
            duration_s = self.profile.prefill_ms(chunks) / 1000 * self._slow_ratio + self._pause_s
            self._batch = batch
            self._phase, self._ends_at = _PREFILL, at + duration_s
        elif self._running:
            self._begin_decode(at)
        else:
            assert not self._waiting, "an empty engine can always admit"
            self._phase, self._ends_at = _IDLE, math.inf
            self._ratio = RATIO_INIT

    # -- decode -----------------------------------------------------------------------------

    def _begin_decode(self, at: float) -> None:
        self._fresh_ratio = self._kv.free_tokens < len(self._running)
        if self._fresh_ratio:
            self._retract_for_a_step(at)
        batch = len(self._running)
        while self._finishes[0][2].state is not _RUNNING or (
            self._finishes[0][0] != self._finishes[0][2].finish_step
        ):
            heapq.heappop(self._finishes)
        steps = min(self._finishes[0][0] - self._steps, self._kv.free_tokens // batch)
        self._planned = 1 if self._waiting and not self._full else steps
        step_ms = self.profile.decode_ms(batch, self._context_tokens)
        growth_s = self.profile.kv_read_us_per_token * batch / 1e6 * self._slow_ratio
        self._run = DecodeRun(batch, step_ms / 1000 * self._slow_ratio + self._pause_s, growth_s)
        self._phase, self._ends_at = _DECODE, at + self._run.duration_s(self._planned)

    def _end_decode(self, at: float) -> None:
        steps, batch = self._planned, len(self._running)
        self._moments = added(self._moments, self._run.moments(steps))
        self._steps += steps
        self._taken = 0
        self._generated += steps * batch
        self._context_tokens += steps * batch
        self._kv.grow(steps * batch)
        decayed = self._ratio - RATIO_DECAY * (steps - self._fresh_ratio)
        if steps > self._fresh_ratio:
            self._ratio = max(RATIO_MIN, decayed)
        finishes = self._finishes
        while finishes and finishes[0][0] <= self._steps:
            finish_step, _, request = heapq.heappop(finishes)
            if request.state is _RUNNING and request.finish_step == finish_step:
                self._full = False
                self._end(request, _FINISHED, at)

    def _retract_for_a_step(self, at: float) -> None:
        """Take back requests, fewest outputs first, until one more step fits."""
        order = sorted(
            self._running.values(),
            key=lambda r: (self.generated_tokens(r), -r.prompt_tokens),
            reverse=True,
        )
        retracted = [order.pop()]
        self._release(retracted[0])
        while self._kv.free_tokens < len(order):
            retracted.append(order.pop())
            self._release(retracted[-1])
        assert order, "one request alone always fits"
        outputs = sum(self.generated_tokens(r) for r in order)
        budget = sum(r.max_new_tokens for r in order)
        self._ratio = min(1.0, (outputs + RETRACT_STEPS * len(order)) / (budget + 1))
        self._full = False
        self._requeue(retracted, at)

    # -- prefill and admission --------------------------------------------------------------

    def _admitted(self, at: float) -> list[tuple[EngineRequest, int]]:
        """Form the next prefill batch: (request, tokens of this chunk); empty when none can be."""
        if not self._running:
            self._full = False
        if self._chunked is None and (self._full or not self._waiting):
            return []
        promised = self._outlook.expected(self._steps, self._ratio)
        batch = PrefillBatch(self.profile.chunk_tokens, promised)
        if (head := self._chunked) is not None:
            self._chunked = None
            self._take(head, batch)
        preempted: list[EngineRequest] = []
        while self._waiting and batch.budget_tokens > 0:
            request = self._waiting.first
            if len(self._running) + len(batch.chunks) >= self.settings.max_running_requests:
                freed = self._preempt_for(request, batch.promised_tokens, preempted)
                if not freed:
                    self._full = True
                    break
                batch.promised_tokens -= freed
            hit_blocks, short_tokens = self._shortage(request, batch.promised_tokens)
            if short_tokens >= 0:
                assert self._running or batch.chunks, "one request alone always fits"
                self._full = True
                break
            self._start(request, hit_blocks, at)
            self._take(request, batch)
        self._requeue(preempted, at)
        return batch.chunks

    def _take(self, request: EngineRequest, batch: PrefillBatch) -> None:
        tokens = batch.add(request)
        request.private_tokens += tokens
        self._kv.grow(tokens)

    def _shortage(self, request: EngineRequest, promised: float) -> tuple[int, float]:
        """Return its prefix hit in blocks, and the tokens that are missing (negative: it fits)."""
        block_tokens, blocks = self._kv.block_tokens, request.blocks
        target = request.prompt_tokens + request.kept_tokens
        hit = self._kv.match(blocks, (target - 1) // block_tokens)
        # Its own hit is about to be locked, so it is no longer there to be evicted.
        pinned = self._kv.evictable_among(blocks[:hit])
        need = target - hit * block_tokens + request.output_budget
        return hit, need + pinned + promised - self._kv.free_tokens

    def _start(self, request: EngineRequest, hit_blocks: int, at: float) -> None:
        """Take `request` off the queue and lock its prefix hit."""
        self._waiting.remove(request)
        request.state = _PREFILLED
        request.target_tokens = request.prompt_tokens + request.kept_tokens
        request.held_blocks = hit_blocks
        request.done_tokens = hit_blocks * self._kv.block_tokens
        self._kv.lock(request.blocks[:hit_blocks])
        self._cached_tokens += request.done_tokens
        if request.started_at is None:
            request.started_at = at
            request.cached_tokens = request.done_tokens

    def _end_prefill(self, at: float) -> None:
        batch, self._batch = self._batch, []
        self._prefill_us += (at - self._began_at) * 1e6
        for request, tokens in batch:
            request.done_tokens += tokens
            self._prefill_tokens += tokens
            if request.done_tokens < request.target_tokens:
                self._chunked = request
            elif not request.abort_wanted:
                self._join(request, at)

    def _join(self, request: EngineRequest, at: float) -> None:
        """A finished prompt: share its blocks, hand out a token, decode from the next step on."""
        # Blocks that another request added meanwhile are now held twice: drop the private copy.
        shared = request.blocks[request.held_blocks :]
        self._kv.lock(shared)
        request.held_blocks = len(request.blocks)
        request.private_tokens -= len(shared) * self._kv.block_tokens
        self._kv.private_tokens -= len(shared) * self._kv.block_tokens
        if request.output_tokens:
            request.kept_tokens += 1
            self._generated += 1
            if request.first_token_at is None:
                request.first_token_at = at
                self._events.append(Event(_FIRST_TOKEN, request, at))
        if request.kept_tokens >= request.output_tokens:
            self._full = False
            self._end(request, _FINISHED, at)
            return
        request.state = _RUNNING
        request.joined_step = self._steps
        request.finish_step = self._steps + request.output_tokens - request.kept_tokens
        heapq.heappush(self._finishes, (request.finish_step, request.number, request))
        self._running[request.id] = request
        self._outlook.add(request)
        self._context_tokens += request.prompt_tokens + request.kept_tokens

    # -- queue and memory -------------------------------------------------------------------

    def _queue_has_place(self, request: EngineRequest, at: float) -> bool:
        """Whether one more may wait; a worse request is evicted for it where priorities count."""
        if not self._waiting.is_full:
            return True
        worst = self._waiting.pop_worse_than(request)
        if worst is None:
            return False
        self._end(worst, EventKind.EVICTED, at)
        return True

    def _enqueue(self, request: EngineRequest) -> None:
        target = request.prompt_tokens + request.kept_tokens
        hit = self._kv.match(request.blocks, (target - 1) // self._kv.block_tokens)
        self._waiting.add(request, target - hit * self._kv.block_tokens)

    def _requeue(self, retracted: list[EngineRequest], at: float) -> None:
        for request in retracted:
            request.retractions += 1
            self._retractions += 1
            if self._queue_has_place(request, at):
                self._events.append(Event(EventKind.RETRACTED, request, at))
                self._enqueue(request)
            else:
                self._end(request, EventKind.EVICTED, at)

    def _preempt_for(
        self, request: EngineRequest, promised: float, preempted: list[EngineRequest]
    ) -> float:
        """Take back running requests of far lower priority until `request` fits.

        Return the output that was expected of them; 0 when that cannot be done, and then nothing
        is taken back.
        """
        if not self.settings.enable_priority_scheduling:
            return 0.0
        _, short_tokens = self._shortage(request, promised)
        rank_min = request.rank + self.settings.priority_scheduling_preemption_threshold
        victims: list[EngineRequest] = []
        freed = 0.0
        for running in sorted(self._running.values(), key=lambda r: (-r.rank, -r.number)):
            if running.rank <= rank_min:
                break
            victims.append(running)
            freed += self._outlook.expected_of(running, self._steps, self._ratio)
            if freed >= short_tokens:
                break
        if not victims or freed < short_tokens:
            return 0.0
        for victim in victims:
            self._release(victim)
        preempted.extend(victims)
        return freed

    def _release(self, request: EngineRequest) -> None:
        """Give back the KV of a request that runs or is being prefilled."""
        if request.state is _RUNNING:
            request.kept_tokens = self.generated_tokens(request)
            grown = self._steps + self._taken - request.joined_step
            request.private_tokens += grown
            self._context_tokens -= request.prompt_tokens + request.kept_tokens
            del self._running[request.id]
            self._outlook.remove(request)
        elif request is self._chunked:
            self._chunked = None
        self._kv.private_tokens -= request.private_tokens
        self._kv.release(request.blocks[: request.held_blocks])
        request.private_tokens = request.held_blocks = request.done_tokens = 0
        request.state = _WAITING

    def _end(self, request: EngineRequest, kind: EventKind, at: float) -> None:
        if request.state is not _WAITING:
            self._release(request)
        request.state = _OVER
        request.finished_at = at
        del self._live[request.id]
        self._events.append(Event(kind, request, at))
