"""A worker as the router sees it: what it is, what it was given, and what its reports add.

The router's own account leads: a request is charged at dispatch, long before any report could show
it. A ticket points to the worker that it is charged to and is given back through that pointer
exactly once; a worker that left and came back is another object, so late news never reach it.
Figures that a decision needs are computed at its first look after a change, not at each change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Final

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core.breaker import Breaker
from router.core.correction import Foreign, Mark
from router.core.headroom import room_tokens
from router.core.pacing import Pace
from router.core.rates import Rates
from router.core.types import Failure, Outcome, Ticket, WorkerState

# The KV cliff of POLICY 2.2: seconds that a request is expected to lose in a pool filled to k.
_CLIFF_S: Final = 0.05
_STEPS_PRICED: Final = 2
# Marks reach back as far as a load answer may be old; more often than this they differ too little.
_MARK_GAP_S: Final = 0.05
_MARKS_MAX: Final = 64
# A pause that a worker asks for is believed up to here.
_PAUSE_S_MAX: Final = 600.0
_TTFT_WEIGHT: Final = 0.1
# Fewer waiting prompt tokens than this are noise of reports, not a prompt.
_PENDING_NOISE: Final = 32
# The share that a worker gets at once when it (re)joins; it grows to 1 over slow_start_s.
_SHARE_MIN: Final = 0.1
_WARM_STEP: Final = 0.02  # slow start is re-read this often, as a share of its length


@dataclass(slots=True, eq=False)
class Worker:
    """The record of one worker. Only `fleet` and this class write to it."""

    spec: WorkerSpec
    id: WorkerId
    slot: int  # its bit in the prefix index
    config: Config
    breaker: Breaker
    rates: Rates = field(default_factory=Rates)
    pace: Pace = field(default_factory=Pace)
    state: WorkerState = WorkerState.JOINING
    why: str = "registered"
    # What it is. `described` is what it said of itself: models, KV tokens, requests at once.
    models: tuple[str, ...] = ()
    kv_total_tokens: int | None = None
    concurrency_max: int = 1
    described: tuple[tuple[str, ...], int | None, int | None] = ((), None, None)
    # Own account: sums over the tickets that point here.
    streams: int = 0
    turn: int = 0  # of round robin, the last one
    waiting: int = 0  # of these, the ones whose prompt waits for prefill
    pend_tokens: int = 0  # uncached prompt tokens of the waiting
    kv_reserved_tokens: int = 0  # promised, what is held included
    kv_held_tokens: int = 0
    kv_held_tokens_max: int = 0
    requests: int = 0
    failures: int = 0
    ttft_mean_s: float | None = None
    progress_at: float = 0.0  # when the oldest waiting prompt came to its turn
    silent: deque[tuple[float, Ticket]] = field(default_factory=deque)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MARKS_MAX))
    # Reports.
    foreign: Foreign = field(default_factory=Foreign)
    report: LoadReport | None = None
    reported_at: float = -inf
    why_unknown: str | None = None  # what was wrong with the load answers since then
    fresh_until: float = -inf  # reported figures count until then
    known_until: float = -inf  # the same, but never while its KV figures are unknown
    # Health and marks that take it out for a while.
    answered: bool = False  # a poll, since it was registered
    probe_failures: int = 0
    probed_at: float = -inf
    probing: bool = False
    paused_until: float = 0.0
    overloaded_until: float = 0.0
    out_until: float = 0.0  # the latest of all such marks; inf while a breaker's trial runs
    warm_at: float = -inf  # slow start ends
    # Derived by refresh(), to be read at once after it.
    valid_until: float = -inf
    room_tokens: float = -1.0  # KV tokens that one more request may need; -1: it takes none
    unknown: bool = True
    ahead_tokens: float = inf  # uncached prompt tokens that may be sent on top of what waits
    paced_until: float = -inf  # no prefill credit before
    pace_timer: bool = False  # the dispatcher will look when it is back
    base_s: float = 0.0  # the part of the score that no request changes
    foreign_s: float = 0.0  # the part of base_s that only reports can tell
    stalls: float = 0.0  # 1 while a prompt waits: then each second is one more of waiting
    prefill_s: float = 0.0
    attention_s: float = 0.0
    factor: float = 1.0  # of the whole score: its cost, and more in slow start

    # Own account.

    def charge(self, ticket: Ticket, *, now: float) -> None:
        """Count `ticket` in, at dispatch."""
        assert ticket.worker is None, "charged twice"
        if not self.marks or now - self.marks[-1].at > _MARK_GAP_S:
            self.mark(now)
        ticket.worker = self
        ticket.worker_id = self.id
        ticket.pending = True
        if not self.waiting:
            self.progress_at = now
        if not ticket.spec.stream and ticket.output_tokens > 1:
            prefilled_at = now + self.ttft_s(ticket, ticket.hit_tokens, now=now)
            self.silent.append((prefilled_at, ticket))
        uncached = ticket.prompt_tokens - ticket.hit_tokens
        self.pace.charge(self.rates.prefill_time_s(uncached, ticket.hit_tokens))
        self.requests += 1
        self.streams += 1
        self.waiting += 1
        self.pend_tokens += ticket.prompt_tokens - ticket.hit_tokens
        self.kv_reserved_tokens += ticket.kv_tokens
        self.kv_held_tokens_max += _held_max(ticket)
        self.valid_until = -inf
        self.breaker.on_dispatch(ticket)
        self.settle_marks()

    def prefilled(self, ticket: Ticket, *, now: float) -> None:
        """The worker took the prompt of `ticket` in; the next in its queue has its turn."""
        if ticket.pending:
            self._unpend(ticket)
            self.progress_at = now

    def first_token(self, ticket: Ticket, *, now: float) -> None:
        """A stream began to answer: its prompt is prefilled, and it took this long."""
        assert ticket.dispatched_at is not None
        elapsed_s = now - ticket.dispatched_at
        if ticket.spec.stream:
            mean = self.ttft_mean_s
            gap = 0.0 if mean is None else _TTFT_WEIGHT * (elapsed_s - mean)
            self.ttft_mean_s = elapsed_s if mean is None else mean + gap
            if ticket.pending and self.waiting == 1 and self.progress_at == ticket.dispatched_at:
                uncached = ticket.prompt_tokens - ticket.hit_tokens
                self.rates.learn_first_token(uncached=uncached, elapsed_s=elapsed_s)
        self.prefilled(ticket, now=now)

    def grow(self, ticket: Ticket, *, output_seen_tokens: int, kv_tokens: int) -> None:
        """A stream has put out more; its reservation is now `kv_tokens`."""
        before = _held_max(ticket)
        more = output_seen_tokens - ticket.output_seen_tokens
        ticket.output_seen_tokens = output_seen_tokens
        self.kv_reserved_tokens += kv_tokens - ticket.kv_tokens
        ticket.kv_tokens = kv_tokens
        self.kv_held_tokens_max += _held_max(ticket) - before
        if not ticket.pending:
            self.kv_held_tokens += more
        self.valid_until = -inf

    def release(self, ticket: Ticket) -> None:
        """Count `ticket` out: the only way back, taken once."""
        assert ticket.worker is self, "given back twice"
        if ticket.pending:
            self._unpend(ticket)
        ticket.worker = None
        self.streams -= 1
        self.kv_reserved_tokens -= ticket.kv_tokens
        self.kv_held_tokens -= ticket.prompt_tokens + ticket.output_seen_tokens
        self.kv_held_tokens_max -= _held_max(ticket)
        self.valid_until = -inf
        assert self.streams >= 0 <= self.kv_reserved_tokens

    def _unpend(self, ticket: Ticket) -> None:
        ticket.pending = False
        self.waiting -= 1
        self.pend_tokens -= ticket.prompt_tokens - ticket.hit_tokens
        self.kv_held_tokens += ticket.prompt_tokens + ticket.output_seen_tokens
        self.valid_until = -inf

    # Reports and marks.

    def mark(self, now: float) -> None:
        """Remember the own account of this moment, for reports that will show it."""
        self.marks.append(
            Mark(
                now,
                self.streams,
                self.waiting,
                self.pend_tokens,
                self.kv_held_tokens,
                self.kv_held_tokens_max,
            )
        )

    def learn(self, report: LoadReport, *, now: float) -> None:
        """Correct the picture by a report that arrived at `now`."""
        self.report, self.reported_at, self.why_unknown = report, now, None
        age_s = report.age_s or 0.0
        taken_at = min(self.probed_at, now - age_s) if self.probing else now - age_s
        self.fresh_until = now - age_s + self.config.probe.stale_after_s
        kv_known = self.kv_total_tokens is not None and report.kv_used_tokens is not None
        self.known_until = self.fresh_until if kv_known else -inf
        if self.fresh_until > now:
            weight = self.config.policy.report_weight
            self.foreign.learn(report, self._mark_at(taken_at), weight=weight)
            self.rates.learn_report(report)
        over = (report.queued_requests or 0) > self.config.headroom.queued_requests_max
        self.overloaded_until = self.fresh_until if over else 0.0
        self.settle_marks()

    def attempt_failed(self, ticket: Ticket, failure: Failure, *, now: float) -> None:
        """An attempt failed before its first byte; a pause that was asked for only gets longer."""
        if failure.blames_worker:
            self.failures += 1
            self.breaker.on_failure(ticket, now=now)
        else:
            self.breaker.on_nothing_learnt(ticket, now=now)
        if failure.retry_after_s is not None:
            pause_s = min(_PAUSE_S_MAX, max(0.0, failure.retry_after_s))
            self.paused_until = max(self.paused_until, now + pause_s)
        self.settle_marks()

    def rejoin(self, *, now: float) -> None:
        """It is active from now on: old marks are gone, and it starts slowly."""
        self.breaker.reset()
        self.paused_until = 0.0
        self.warm_at = now + self.config.policy.slow_start_s
        self.settle_marks()

    def finished(self, ticket: Ticket, outcome: Outcome, *, now: float) -> None:
        """An attempt ended as `outcome`; what the client did says nothing of the worker."""
        if outcome is Outcome.SUCCESS:
            self.breaker.on_success(ticket, now=now)
        elif outcome is Outcome.FAILED:
            self.failures += 1
            self.breaker.on_failure(ticket, now=now)
        else:
            self.breaker.on_nothing_learnt(ticket, now=now)
        self.settle_marks()

    def settle_marks(self) -> None:
        """Bring `out_until` up to date after any mark moved."""
        self.out_until = max(self.breaker.out_until, self.paused_until, self.overloaded_until)
        self.valid_until = -inf

    def _mark_at(self, at: float) -> Mark:
        for mark in reversed(self.marks):
            if mark.at <= at:
                return mark
        return self.marks[0] if self.marks else Mark(at, 0, 0, 0, 0, 0)

    # Figures for decisions.

    def opened(self, now: float) -> bool:
        """Whether it may take any request at all at `now`."""
        if self.valid_until <= now:
            self.refresh(now)
        return self.room_tokens > 0

    def saw(self, more_tokens: int, *, now: float) -> None:
        """Its streams put out `more_tokens`: measures their pace."""
        pacing = self.config.pacing
        tpot_s = pacing.tpot_ratio * min(c.tpot_target_s for c in self.config.classes.by_priority)
        self.pace.saw(more_tokens, self.streams - self.waiting, tpot_s=tpot_s, now=now)

    def refresh(self, now: float) -> None:
        """Bring the derived figures up to date; they hold until `valid_until` or a change."""
        self._lapse(now)
        if self.fresh_until < now and self.foreign.known:
            self.foreign.forget()
        load, total, rates = self.kv_load_tokens, self.kv_total_tokens, self.rates
        room, cliff_s = inf, 0.0
        if total is not None:
            room = room_tokens(
                load_tokens=load,
                total_tokens=total,
                ratio_max=self.config.headroom.kv_ratio_max,
            )
            k = min(0.99, load / total)
            cliff_s = _CLIFF_S * k / (1 - k)
        streaming = self.streams - self.waiting
        self._pace(streaming, load, now)
        takes = (
            self.streams < self.concurrency_max
            and self.out_until <= now
            and self.paced_until <= now
        )
        self.room_tokens = room if takes else -1.0
        self.unknown = self.known_until < now
        self.prefill_s, self.attention_s = rates.prefill_s, rates.attention_s
        self.foreign_s = cliff_s + rates.prefill_s * self.foreign.pend_tokens
        step_s = rates.step_time_s(self.streams + 1 + self.foreign.streams, load)
        self.base_s = self.foreign_s + rates.prefill_s * self.pend_tokens + _STEPS_PRICED * step_s
        self.stalls = 1.0 if self.waiting else 0.0
        self.factor = self.spec.cost / self.share(now)
        self.valid_until = self._next_change(now)

    def _pace(self, streaming: int, load: float, now: float) -> None:
        """Bring prefill credit and the allowance for waiting prompts up to date."""
        pacing = self.config.pacing
        self.ahead_tokens, self.paced_until = inf, -inf
        if not pacing.enabled:
            return
        pending = self.pend_tokens + self.foreign.pend_tokens
        if pending > _PENDING_NOISE:
            self.ahead_tokens = pacing.prefill_ahead_s / self.rates.prefill_s - pending
        held = self.foreign.kv_scale * self.kv_held_tokens + self.foreign.kv_tokens
        step_s = self.rates.step_time_s(streaming + self.foreign.streams, held)
        tpot_s = min(c.tpot_target_s for c in self.config.classes.by_priority)
        open_at = self.pace.open_at(pacing, step_s=step_s, tpot_s=tpot_s, now=now)
        if streaming > pacing.streams_free:
            self.paced_until = open_at

    def _lapse(self, now: float) -> None:
        """Plain answers show no first token: take their prompts for prefilled when predicted."""
        while self.silent and self.silent[0][0] <= now:
            at, ticket = self.silent.popleft()
            if ticket.worker is self:
                self.prefilled(ticket, now=at)

    def _next_change(self, now: float) -> float:
        at = self.silent[0][0] if self.silent else inf
        for moment in (self.out_until, self.fresh_until, self.known_until, self.paced_until):
            if now < moment < at:
                at = moment
        if now < self.warm_at:
            at = min(at, now + self.config.policy.slow_start_s * _WARM_STEP)
        return at

    @property
    def kv_load_tokens(self) -> float:
        """KV tokens in use and reserved, by whomever."""
        foreign = self.foreign
        shared = (1.0 - foreign.kv_scale) * self.kv_held_tokens
        return max(0.0, self.kv_reserved_tokens - shared + foreign.kv_tokens)

    @property
    def kv_free_tokens(self) -> float | None:
        """KV tokens that nobody uses or was promised; None while that is unknown."""
        if self.unknown or self.kv_total_tokens is None:
            return None
        return max(0.0, self.kv_total_tokens - self.kv_load_tokens)

    @property
    def latency_s(self) -> float | None:
        """Mean seconds to the first token: own measurement, else as reported, else unknown."""
        if self.ttft_mean_s is None and self.report is not None:
            return self.report.ttft_mean_s
        return self.ttft_mean_s

    def ttft_s(self, ticket: Ticket, hit_tokens: int, *, now: float) -> float:
        """Predicted seconds to the first token of `ticket`, were it sent now."""
        pending = self.pend_tokens + self.foreign.pend_tokens
        stalled_s = now - self.progress_at if self.waiting else 0.0
        own_s = self.rates.prefill_time_s(ticket.prompt_tokens - hit_tokens, hit_tokens)
        return stalled_s + self.rates.prefill_s * pending + own_s

    def share(self, now: float) -> float:
        """Share of its full load that a worker in slow start gets, 0.1 to 1."""
        if now >= self.warm_at:
            return 1.0
        return max(_SHARE_MIN, 1.0 - (self.warm_at - now) / self.config.policy.slow_start_s)


def _held_max(ticket: Ticket) -> int:
    """KV tokens that `ticket` may hold by now; a plain answer grows unseen."""
    if ticket.spec.stream:
        return ticket.prompt_tokens + ticket.output_seen_tokens
    return ticket.kv_tokens
