"""A worker as the router sees it: what it is, what it was given, and what its reports add.

The router's own account leads: a request is charged at dispatch, long before any report could show
it. A ticket points to the worker that it is charged to and is given back through that pointer
exactly once; a worker that left and came back is another object, so late news never reach it.
A decision reads this account as it is; what is costlier to compute and moves slowly is derived from
it a few dozen times per second (`refresh`), and at once after a report or a mark.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappush
from math import inf
from typing import Final

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core import unseen
from router.core.breaker import Breaker, BreakerState
from router.core.correction import Foreign, Mark
from router.core.derived import NO_LIMIT, NOT_PACED, refresh
from router.core.effects import BreakerMoved, Effect, Probe
from router.core.headroom import grows_unseen
from router.core.pacing import Pace, PaceSettings
from router.core.peers import NO_LOAD, Peers
from router.core.rates import Rates
from router.core.types import Failure, Outcome, Priority, Ticket, Usage, WorkerState

# What a worker said of itself: models, KV tokens, requests at once, bytes per KV token.
Described = tuple[tuple[str, ...], int | None, int | None, float | None]
NOT_DESCRIBED: Final[Described] = ((), None, None, None)
# Marks reach back as far as a load answer may be old; more often than this they differ too little.
_MARK_GAP_S: Final = 0.05
_MARKS_MAX: Final = 64
# A pause that a worker asks for is believed up to here.
_PAUSE_S_MAX: Final = 600.0
_TTFT_WEIGHT: Final = 0.1
# Derived figures are at most this old: short beside a prefill, long beside a decision. While no
# prompt waits they change slowly, and in a large fleet deriving them is most of a decision's cost.
_REFRESH_S: Final = 0.02
# The share that a worker gets at once when it (re)joins; it grows to 1 over slow_start_s.
_SHARE_MIN: Final = 0.1
# Members of enums are found slowly; these are read for each request.
_SUCCESS: Final = Outcome.SUCCESS
_FAILED: Final = Outcome.FAILED
_CLOSED: Final = BreakerState.CLOSED
_HALF_OPEN: Final = BreakerState.HALF_OPEN
# Plain requests that ended are kept in heaps up to as many as run, and this many more.
_ENDED_MAX: Final = 16


@dataclass(slots=True, eq=False)
class Worker:
    """The record of one worker. Only `fleet` and this class write to it."""

    spec: WorkerSpec
    id: WorkerId
    bit: int  # in the prefix index
    config: Config
    breaker: Breaker
    effects: list[Effect] = field(default_factory=list)  # the core's
    rates: Rates = field(default_factory=Rates)
    pace: Pace = field(default_factory=Pace)
    # Of the settings, what is read often, as plain attributes: a model's are found slowly.
    pacing: PaceSettings = field(init=False)
    stale_after_s: float = field(init=False)
    report_weight: float = field(init=False)
    state: WorkerState = WorkerState.JOINING
    why: str = "registered"
    # What it is.
    models: tuple[str, ...] = ()
    kv_total_tokens: int | None = None
    kv_bytes_per_token: float | None = None  # over all its GPUs
    kv_usable_tokens: float | None = None  # may be in use and reserved; known if the total is
    concurrency_max: int = 1
    cost: float = 1.0
    ttl_s: float | None = None  # without an answered poll
    part: float = 1.0  # of its load that one engine has; less than 1 for a router of several
    is_router: bool = False
    described: Described = NOT_DESCRIBED
    # Own account: sums over the tickets that point here.
    streams: int = 0
    turn: int = 0  # of round robin, the last one
    waiting: int = 0  # of these, the ones whose prompt waits for prefill
    # By class: pacing keeps the time per token of those that run here.
    by_class: list[int] = field(default_factory=lambda: [0] * len(Priority))
    came_at: list[float] = field(default_factory=lambda: [-inf] * len(Priority))  # the last one
    telling: int = 0  # streams past their first token; plain answers tell nothing of their pace
    pend_tokens: int = 0  # uncached prompt tokens of the waiting
    kv_reserved_tokens: int = 0  # promised, what is held included
    kv_held_tokens: int = 0
    kv_held_tokens_max: int = 0  # all that is reserved of a plain answer, which grows unseen
    requests: int = 0
    failures: int = 0
    ttft_mean_s: float | None = None
    progress_at: float = 0.0  # when the oldest waiting prompt came to its turn
    # Plain requests by the moment when their prompt is taken for prefilled; a heap, and the middle
    # one tells equal moments apart. Those that ended are dropped at its head, or all at once.
    silent: list[unseen.Entry] = field(default_factory=list)
    # Behind that, by the step at which they come near to what is reserved for them.
    growing: list[unseen.Entry] = field(default_factory=list)
    plain: int = 0  # plain requests with an answer to come
    steps: float = 0.0  # decode steps while there were some, as predicted
    stepped_at: float = 0.0  # as of then
    steps_per_s: float = 0.0
    answer_ratio: float = 1.0  # tokens of plain answers that ended over those steps
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MARKS_MAX))
    marked_at: float = -inf  # the last of them, or later where it still held
    peers: Peers = field(default_factory=Peers)  # other routers that use it
    # Reports.
    foreign: Foreign = field(default_factory=Foreign)
    report: LoadReport | None = None
    reported_at: float = -inf
    why_unknown: str | None = None  # what was wrong with the last poll; None: it was good
    fresh_until: float = -inf  # reported figures count until then
    known_until: float = -inf  # the same, but never while its KV figures are unknown
    # Health and marks that take it out for a while.
    answered: bool = False  # a poll, since it was registered
    alive_at: float = -inf  # when it last answered one, or joined
    probe_failures: int = 0
    probed_at: float = -inf
    probing: bool = False
    paused_until: float = 0.0
    overloaded_until: float = 0.0
    out_until: float = 0.0  # the latest of all such marks
    failing: bool = False  # its breaker has opened and not closed since, and that was said
    warm_at: float = -inf  # slow start ends
    # Derived by refresh().
    valid_until: float = -inf
    streams_max: int = 0  # own streams may reach this, as pacing lets them; 0 while it is left out
    # Where there are three figures, they are by `Ticket.rank`: P0, others in time, late ones. Of a
    # tuple whose length it knows, the compiler copies all to read one.
    permits: tuple[int, ...] = (0, 0, 0)  # `streams_max`, or 0 while its pace forbids it
    kv_admitted_tokens: float = 0.0  # own reservations may reach this
    pend_admitted_tokens: tuple[float, ...] = NO_LIMIT  # prompts, the new one included
    pend_foreign: bool = False  # others' prompts wait in it
    paced_until: tuple[float, ...] = NOT_PACED  # its streams need the time until then
    tpot_target_s: float = 0.0  # that pacing keeps
    pace_timer: bool = False  # the dispatcher will look when that is over
    unknown: bool = True
    factor: float = 1.0  # of the score and all its parts: its cost, and more in slow start
    score: float = 0.0  # the part that neither the request nor the prefill before it changes
    score_foreign: float = 0.0  # the part of that which only reports can tell
    score_per_s: float = 0.0  # of waiting without progress; 0 while nothing waits
    score_per_token: float = 0.0  # of prompts to prefill
    score_per_pair: float = 0.0  # attention, of prompt^2 - hit^2

    probe: Probe = field(init=False)  # the effect, the same for each poll

    def __post_init__(self) -> None:
        self.probe = Probe(self.id)
        self._take_over(self.config)
        self.tpot_target_s = min(self.pacing.tpot_targets_s)

    def configure(self, config: Config) -> None:
        """Take over new settings."""
        self._take_over(config)
        self.breaker.settings = config.breaker
        self.foreign.settled = ()  # reports may count for more

    def _take_over(self, config: Config) -> None:
        self.config, self.pacing = config, PaceSettings(config)
        self.stale_after_s = config.probe.stale_after_s
        self.report_weight = config.policy.report_weight

    # Own account.

    def charge(self, ticket: Ticket, *, now: float) -> None:
        """Count `ticket` in, at dispatch."""
        assert ticket.worker is None, "charged twice"
        if now - self.marked_at > _MARK_GAP_S:
            self.mark(now)
        spec, hit = ticket.spec, ticket.hit_tokens
        streams, waiting = self.streams, self.waiting
        ticket.worker = self
        ticket.worker_id = self.id
        ticket.pending = True
        if not waiting:
            self.progress_at = now
            self.score_per_s = self.factor
            self.valid_until = min(self.valid_until, now + _REFRESH_S)
        uncached = ticket.prompt_tokens - hit
        prefill_s = self.rates.sent(uncached, hit)
        if spec.stream:
            self.kv_held_tokens_max += ticket.prompt_tokens + ticket.output_seen_tokens
        else:
            self.kv_held_tokens_max += ticket.kv_tokens
            if ticket.output_tokens > 1:  # as `grows_unseen` has it
                self._await_unseen(ticket, prefill_s, now)
        pacing = self.pacing
        credit_s = self.pace.charge(prefill_s, debt_s_max=pacing.debt_s_max)
        if credit_s <= pacing.credit_kept_late_s and streams - waiting > pacing.streams_free:
            self.valid_until = -inf
        self.requests += 1
        if not self.requests % _ENDED_MAX:
            self._drop_ended()
        self.streams = streams + 1
        priority = spec.priority
        self.by_class[priority] += 1
        self.came_at[priority] = now
        if pacing.tpot_targets_s[priority] < self.tpot_target_s:
            self.valid_until = -inf  # there was time for more prefill than there is now
        self.waiting = waiting + 1
        self.pend_tokens += uncached
        self.kv_reserved_tokens += ticket.kv_tokens
        if self.peers.sharers > 1:
            self.valid_until = -inf
        if self.breaker.state is not _CLOSED:
            self.breaker.on_dispatch(ticket, now=now)
            self.settle_marks()

    def prefilled(self, ticket: Ticket, *, now: float) -> None:
        """The worker took the prompt of `ticket` in; the next in its queue has its turn."""
        if ticket.pending:
            hit = ticket.hit_tokens
            self.pace.prefilled(self.rates.prefill_time_s(ticket.prompt_tokens - hit, hit))
            if ticket.spec.stream:
                if not self.telling:
                    self.pace.began(1, now)
                self.telling += 1
            self._unpend(ticket)
            self.kv_held_tokens += ticket.prompt_tokens + ticket.output_seen_tokens
            self.progress_at = max(self.progress_at, now)

    def first_token(self, ticket: Ticket, *, now: float) -> None:
        """A stream began to answer: its prompt is prefilled, and it took this long."""
        assert ticket.dispatched_at is not None
        elapsed_s = now - ticket.dispatched_at
        uncached = ticket.prompt_tokens - ticket.hit_tokens
        self.rates.learn_bound(uncached=uncached, elapsed_s=elapsed_s)
        if ticket.spec.stream:
            mean = self.ttft_mean_s
            gap = 0.0 if mean is None else _TTFT_WEIGHT * (elapsed_s - mean)
            self.ttft_mean_s = elapsed_s if mean is None else mean + gap
            if ticket.pending and self.waiting == 1 and self.progress_at == ticket.dispatched_at:
                self.rates.learn_first_token(uncached=uncached, elapsed_s=elapsed_s)
        self.prefilled(ticket, now=now)

    def grow(self, ticket: Ticket, *, output_seen_tokens: int, kv_tokens: int, now: float) -> None:
        """A stream has put out more; its reservation is now `kv_tokens`."""
        more = output_seen_tokens - ticket.output_seen_tokens
        reserved_more = kv_tokens - ticket.kv_tokens
        ticket.output_seen_tokens = output_seen_tokens
        if reserved_more:
            self.kv_reserved_tokens += reserved_more
            ticket.kv_tokens = kv_tokens
        self.kv_held_tokens_max += more if ticket.spec.stream else reserved_more
        if not ticket.pending:
            self.kv_held_tokens += more
        self.pace.saw(more / ticket.spec.samples, self.telling, now=now)

    def reserve_more(self, ticket: Ticket, tokens: int) -> None:
        """Reserve so many KV tokens more for a plain answer, of which nothing is seen."""
        self.kv_reserved_tokens += tokens
        self.kv_held_tokens_max += tokens
        ticket.kv_tokens += tokens
        ticket.kv_grown_tokens += tokens

    def release(self, ticket: Ticket) -> None:
        """Count `ticket` out: the only way back, taken once."""
        assert ticket.worker is self, "given back twice"
        ticket.worker = None
        spec, held_tokens = ticket.spec, ticket.prompt_tokens + ticket.output_seen_tokens
        if ticket.pending:
            self._unpend(ticket)
        else:
            self.kv_held_tokens -= held_tokens
            if spec.stream:
                self.telling -= 1
                if not self.telling:
                    self.pace.ended()
        self.streams -= 1
        self.by_class[spec.priority] -= 1
        self.kv_reserved_tokens -= ticket.kv_tokens
        self.kv_held_tokens_max -= held_tokens if spec.stream else ticket.kv_tokens
        if not spec.stream and ticket.output_tokens > 1:
            self.plain -= 1
            ticket.kv_tokens -= ticket.kv_grown_tokens  # another attempt begins anew
            ticket.kv_grown_tokens, ticket.began_step = 0, None
        if self.foreign.kv_scale < 1:
            self.valid_until = -inf  # what it shared may not be counted as free any longer
        assert self.streams >= 0
        assert self.kv_reserved_tokens >= 0

    def _await_unseen(self, ticket: Ticket, prefill_s: float, now: float) -> None:
        """Predict when the prompt of a plain request is prefilled: its answer grows from then."""
        if not self.plain:
            self.stepped_at = now
        self.plain += 1
        number = ticket.charge_number = self.requests
        heappush(self.silent, (now + self.wait_s(now) + prefill_s, number, ticket))

    def _drop_ended(self) -> None:
        """Forget the plain requests that ended, if they are more than those that run."""
        most = 2 * self.streams
        if len(self.silent) > most or len(self.growing) > most:
            self.silent, self.growing = self._living(self.silent), self._living(self.growing)

    def _living(self, heap: list[unseen.Entry]) -> list[unseen.Entry]:
        """`heap` without those that ended."""
        living = [entry for entry in heap if not unseen.is_over(self, entry)]
        heapify(living)
        return living

    def _unpend(self, ticket: Ticket) -> None:
        ticket.pending = False
        self.waiting -= 1
        self.pend_tokens -= ticket.prompt_tokens - ticket.hit_tokens
        if not self.waiting:
            self.score_per_s = 0.0

    # Reports and marks.

    def mark(self, now: float) -> None:
        """Remember the own account of this moment, for reports that will show it."""
        self.marked_at = now
        peers, marks = self.peers.load, self.marks
        if not self.streams and peers is NO_LOAD and marks:
            last = marks[-1]
            if not (last.streams or last.kv_held_tokens_max):
                return  # nothing was there, and nothing is
        streams = self.streams + peers.streams
        held = self.kv_held_tokens + peers.kv_held_tokens
        held_max = self.kv_held_tokens_max + peers.kv_held_tokens_max
        marks.append(Mark(now, streams, self.waiting, self.pend_tokens, held, held_max))

    def learn(self, report: LoadReport, *, now: float) -> None:
        """Correct the picture by a report that arrived at `now`."""
        self.report, self.reported_at, self.why_unknown = report, now, None
        taken_at = now - (report.age_s or 0.0)
        fresh_until = self.fresh_until = taken_at + self.stale_after_s
        kv_known = self.kv_total_tokens is not None and report.kv_used_tokens is not None
        self.known_until = fresh_until if kv_known else -inf
        if self.probing and self.probed_at < taken_at:
            taken_at = self.probed_at
        mark = self._mark_at(taken_at)
        if fresh_until > now:
            self.foreign.learn(
                report,
                mark,
                weight=self.report_weight,
                kv_total_tokens=self.kv_total_tokens,
            )
            self.rates.learn_report(report)
            self.peers.told(self.streams, self.kv_reserved_tokens)
        over = False
        if queued := report.queued_requests:
            # Others' requests wait for a place there: one of ours would wait behind them.
            full = (report.running_requests or 0) >= self.concurrency_max
            over = full and queued > mark.waiting
            over = over or queued * self.part > self.config.headroom.queued_requests_max
        if over or self.overloaded_until:
            self.overloaded_until = fresh_until if over else 0.0
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

    def finished(
        self, ticket: Ticket, outcome: Outcome, *, now: float, usage: Usage | None = None
    ) -> None:
        """An attempt ended as `outcome`; what the client did says nothing of the worker."""
        breaker = self.breaker
        before = breaker.out_until
        if outcome is _SUCCESS:
            breaker.on_success(ticket, now=now)
            if usage is not None and self.known_until <= now and grows_unseen(ticket):
                unseen.learn(self, ticket, usage.output_tokens, now=now)
        elif outcome is _FAILED:
            self.failures += 1
            breaker.on_failure(ticket, now=now)
        else:
            breaker.on_nothing_learnt(ticket, now=now)
        if breaker.out_until != before:
            self.settle_marks()

    def settle_marks(self) -> None:
        """Bring `out_until` up to date after any mark moved."""
        self.out_until = max(self.breaker.out_until, self.paused_until, self.overloaded_until)
        self.valid_until = -inf
        if self.failing is (self.breaker.state is _CLOSED):
            self.failing = not self.failing
            self.effects.append(BreakerMoved(self.id, self.failing))

    @property
    def away_until(self) -> float:
        """Until when it fails or asked for a pause; an overload is no more than being full.

        While a trial runs that is not known: it may end well at any moment.
        """
        out_until = inf if self.breaker.state is _HALF_OPEN else self.breaker.out_until
        return max(out_until, self.paused_until)

    def _mark_at(self, at: float) -> Mark:
        for mark in reversed(self.marks):
            if mark.at <= at:
                return mark
        return self.marks[0] if self.marks else Mark(at, 0, 0, 0, 0, 0)

    # Figures for decisions.

    def may_take(self, ticket: Ticket, now: float) -> bool:
        """Whether nothing but its prefill keeps it from taking `ticket`."""
        others = 0 if self.peers.none else int(self.others_streams)
        return (
            self.out_until <= now
            and self.streams + others < self.concurrency_max
            and self.kv_reserved_tokens + ticket.kv_tokens <= self.kv_admitted_tokens
            and self.id not in ticket.tried
        )

    def is_open(self, now: float, rank: int = 0) -> bool:
        """Whether it may take any request of `rank` at all at `now`; by default the most urgent."""
        if self.valid_until <= now:
            self.refresh(now)
        return (
            self.streams < self.permits[rank] and self.kv_reserved_tokens < self.kv_admitted_tokens
        )

    def refresh(self, now: float) -> bool:
        """Bring the derived figures up to date; they hold until `valid_until` or a change.

        Returns True, so that `valid_until > now or refresh(now)` reads as a condition.
        """
        return refresh(self, now)

    @property
    def kv_load_tokens(self) -> float:
        """KV tokens in use and reserved, by whomever."""
        # Never below zero: what is shared is part of what is held, and that of what is reserved.
        foreign, peers = self.foreign, self.peers.load
        shared = (1.0 - foreign.kv_scale) * (self.kv_held_tokens + peers.kv_held_tokens)
        return self.kv_reserved_tokens + peers.kv_reserved_tokens - shared + foreign.kv_tokens

    @property
    def others_streams(self) -> float:
        """Requests at once that are not this router's."""
        return self.foreign.streams + self.peers.load.streams

    def ttft_s(self, ticket: Ticket, hit_tokens: int, *, now: float) -> float:
        """Predicted seconds to the first token of `ticket`, were it sent now."""
        own_s = self.rates.prefill_time_s(ticket.prompt_tokens - hit_tokens, hit_tokens)
        return self.wait_s(now) + own_s

    def wait_s(self, now: float) -> float:
        """Predicted seconds until the prompts that wait now are prefilled."""
        pending = self.pend_tokens + self.foreign.pend_tokens
        stalled_s = now - self.progress_at if self.waiting else 0.0
        return stalled_s + self.rates.prefill_s * pending * self.part

    def share(self, now: float) -> float:
        """Share of its full load that a worker in slow start gets, 0.1 to 1."""
        if now >= self.warm_at:
            return 1.0
        length_s = self.config.policy.slow_start_s
        if not length_s:
            return 1.0
        return max(_SHARE_MIN, 1.0 - (self.warm_at - now) / length_s)
