"""Any order of events keeps the books: what is charged equals what live tickets hold.

A second, naive account is kept beside the dispatcher, from its effects and from the calls alone.
"""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from router.contract import Lane, LoadReport, WorkerId
from router.core.breaker import BreakerState
from router.core.bucket import DecidedBy
from router.core.dispatcher import Dispatcher
from router.core.effects import Dispatch, Finish, Preempt, Refuse, Reserve, Settle
from router.core.ledger import Ledger
from router.core.snapshot import WorkerView
from router.core.types import Failure, Outcome, Priority, Ticket, TicketState, Usage, WorkerState
from router.errors import STATUS, Reason
from tests.core.builders import LLAMA_8B, config, request_spec, worker_spec

NAMES = ("w1", "w2", "w3", "w4")
LANES = st.sampled_from([["short"], ["long"], ["short", "long"]])
FAILURES = st.builds(
    Failure,
    reason=st.sampled_from([Reason.UPSTREAM_ERROR, Reason.UPSTREAM_OVERLOADED]),
    blames_worker=st.booleans(),
    retryable=st.booleans(),
    retry_after_s=st.none() | st.floats(0, 20),
)
REPORTS = st.builds(
    LoadReport,
    running_requests=st.none() | st.integers(0, 50),
    queued_requests=st.none() | st.integers(0, 100),
    queued_uncached_tokens=st.none() | st.integers(0, 100_000),
    kv_used_tokens=st.none() | st.integers(0, 12_000),
    kv_total_tokens=st.none() | st.just(10_000),
    max_running_requests=st.none() | st.integers(1, 5),
    age_s=st.none() | st.floats(0, 5),
    ready=st.none() | st.booleans(),
)
# Tight enough that most requests meet a limit, and some never fit.
LIMITS: dict[str, Any] = {
    "tenant": {"requests_per_minute": 60, "requests_burst": 3, "cost_per_s": 1, "concurrency": 3},
    "models": {"n": {"concurrency": 1}},
    "lanes": {"short": {"cost_per_s": 1, "cost_burst": 3}},
    "cluster": {"cost_per_s": 4},
    "wait_s_max": 3.0,
}
POLICIES = (
    "least_work",
    "weighted",
    "round_robin",
    "random",
    "least_in_flight",
    "power_of_two",
)


class Books(RuleBasedStateMachine):
    """Random lives of requests and workers."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        spill=st.booleans(),
        seed=st.integers(0, 99),
        levels=st.none()
        | st.sampled_from([(0.01, 10.0, 10.0), (0.01, 0.02, 9.0), (0.01, 0.02, 0.03)]),
        preempts=st.booleans(),
        limits=st.sampled_from([None, "memory", "redis"]),
    )
    def start(
        self,
        *,
        policy: str,
        spill: bool,
        seed: int,
        levels: tuple[float, float, float] | None,
        preempts: bool,
        limits: str | None,
    ) -> None:
        cut, shed_p3, shed_p2 = levels or (1.0, 1.0, 1.0)
        degrade: dict[str, Any] = {"enabled": levels is not None, "rise_s": 0.0, "fall_s": 3.0}
        degrade |= {"cut_above": cut, "shed_p3_above": shed_p3, "shed_p2_above": shed_p2}
        self.now = 0.0
        self.spill = spill
        self.failed_on: dict[int, list[str]] = {}
        self.ledger = Ledger(DecidedBy.MEMORY, now=0.0)
        self.answers_at_once = limits == "memory"
        self.asks: list[Reserve] = []  # that the store has not answered yet
        self.granted: dict[str, int] = {}  # by reservation: how often it was settled
        self.limits = {} if limits is None else {"limits": LIMITS}
        self.core = Dispatcher(
            config(
                **self.limits,
                policy={"name": policy, "slow_start_s": 2.0},
                lanes={"spill": spill},
                queue={"depth_max": 4, "wait_s_max": 5.0},
                breaker={"failures": 1, "open_s": 3.0},
                probe={"failures_to_eject": 2},
                headroom={"concurrency_default": 3},
                prefix={"worker_blocks_max": 4},
                degrade={**degrade, "tokens_cap": 64},
                preempt={"enabled": preempts, "done_ratio_max": 0.9, "cost_ratio_max": 10},
                models={"m": {"fallback": "s", "kv": LLAMA_8B}},
            ),
            rng=Random(seed),
        )
        self.asked_to_stop: list[Ticket] = []
        self.tickets: list[Ticket] = []
        self.finishes: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.owed: dict[int, Ticket] = {}  # tickets to which a Dispatch or Refuse is promised
        # Tickets by the incarnation of their worker: its id and how often that joined.
        self.incarnation: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.home: dict[int, tuple[str, int]] = {}
        # Two active workers from the start, or most runs would only see refusals.
        self.join_or_update("w1", lanes=["short", "long"], models=("m",), total=2_000, cap=3)
        self.join_or_update("w2", lanes=["long"], models=("m", "n"), total=None, cap=2)
        self.alive("w1")
        self.alive("w2")

    def some(self, data: st.DataObject) -> Ticket:
        """A ticket for an event: one that runs, or now and then any, for events that come late."""
        late = data.draw(st.integers(0, 4)) == 0
        return data.draw(st.sampled_from(self.tickets if late else self.live() or self.tickets))

    def take(self) -> None:
        for effect in self.core.take_effects():
            if isinstance(effect, Dispatch):
                ticket = effect.ticket
                assert ticket.worker_id is not None
                assert ticket.worker_id not in self.failed_on.get(ticket.number, [])
                view = self.view(ticket.worker_id)
                assert view is None or view.state is not WorkerState.EJECTED
                self.home[ticket.number] = (
                    ticket.worker_id,
                    self.incarnation[ticket.worker_id],
                )
                self.owed.pop(ticket.number, None)
                self.check_room(ticket.worker_id)
            elif isinstance(effect, Finish):
                name = effect.record.request_id
                self.finishes[name] = self.finishes.get(name, 0) + 1
            elif isinstance(effect, Refuse):
                name = effect.ticket.spec.request_id
                assert name not in self.finishes, "refused after the end"
                self.refused[name] = self.refused.get(name, 0) + 1
                self.owed.pop(effect.ticket.number, None)
                if STATUS[effect.refusal.reason] in (429, 503):
                    assert (effect.refusal.retry_after_s or 0) >= 1
            elif isinstance(effect, Reserve):
                self.asks.append(effect)
            elif isinstance(effect, Settle):
                self.ledger.settle(effect.settlement, self.now)
                self.granted[effect.settlement.reservation_id] += 1
            elif isinstance(effect, Preempt):
                assert effect.ticket not in self.asked_to_stop, "asked twice"
                assert effect.ticket.preempted == 0
                self.asked_to_stop.append(effect.ticket)
        while self.answers_at_once and self.asks:
            self.answer(self.asks[0])

    def answer(self, effect: Reserve) -> None:
        """The store of the limits decides."""
        self.asks.remove(effect)
        verdict = self.ledger.reserve(effect.ask, self.now)
        if verdict.granted:
            assert effect.ask.reservation_id not in self.granted, "reserved twice"
            self.granted[effect.ask.reservation_id] = 0
        self.core.on_reserved(effect.ticket, verdict, now=self.now)
        self.take()

    def view(self, name: str) -> WorkerView | None:
        views = {view.id: view for view in self.core.snapshot(now=self.now).workers}
        return views.get(WorkerId(name))

    def check_room(self, name: str) -> None:
        """A worker that was just given a request is within its limits."""
        worker = self.core._fleet.workers.get(WorkerId(name))
        if worker is not None and worker.kv_usable_tokens is not None:
            assert worker.kv_load_tokens <= worker.kv_usable_tokens + 1e-6
        if worker is not None:
            assert worker.streams <= worker.concurrency_max
            assert worker.breaker.state is not BreakerState.OPEN

    def live(self) -> list[Ticket]:
        running = (TicketState.DISPATCHED, TicketState.STREAMING)
        return [ticket for ticket in self.tickets if ticket.state in running]

    # Workers.

    @rule(
        name=st.sampled_from(NAMES),
        lanes=LANES,
        models=st.sampled_from([("m",), ("m", "n"), ("s",), ()]),
        total=st.none() | st.integers(500, 10_000),
        cap=st.none() | st.integers(1, 4),
        priority=st.integers(0, 1),
    )
    def join_or_update(self, name: str, total: int | None, cap: int | None, **fields: Any) -> None:
        spec = worker_spec(name, kv_total_tokens=total, concurrency_max=cap, **fields)
        if name in self.core.worker_ids:
            self.core.on_worker_updated(spec, now=self.now)
        else:
            self.incarnation[name] += 1
            self.core.on_worker_joined(spec, now=self.now)
        self.take()

    @rule(name=st.sampled_from(NAMES), report=REPORTS)
    def report(self, name: str, report: LoadReport) -> None:
        self.core.on_report(WorkerId(name), report, now=self.now)
        self.take()

    @rule(name=st.sampled_from(NAMES))
    def alive(self, name: str) -> None:
        self.core.on_report_missing(WorkerId(name), "no figures", now=self.now)
        self.take()

    @rule(name=st.sampled_from(NAMES))
    def probe_fails(self, name: str) -> None:
        self.core.on_probe_failed(WorkerId(name), "no answer", now=self.now)
        self.take()

    @rule(name=st.sampled_from(NAMES), deadline_s=st.floats(0.1, 10))
    def drain(self, name: str, deadline_s: float) -> None:
        self.core.on_drain(WorkerId(name), now=self.now, deadline_s=deadline_s)
        self.take()

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.core.on_worker_left(WorkerId(name), now=self.now)
        self.take()

    # Requests.

    @rule(
        prompt_bytes=st.integers(0, 4_000) | st.integers(0, 50_000),
        max_tokens=st.none() | st.integers(0, 2_000),
        model=st.sampled_from(["m", "m", "m", "n", "s", None, "nobody's"]),
        stream=st.booleans(),
        samples=st.integers(1, 3),
        prefix=st.lists(st.integers(0, 5), max_size=4).map(tuple),
        priority=st.sampled_from(Priority),
        structured=st.booleans(),
        tenant=st.sampled_from(["a", "b"]),
    )
    def ask(self, **fields: Any) -> None:
        spec = request_spec(request_id=f"r{len(self.tickets)}", **fields)
        self.tickets.append(self.core.on_request(spec, owner=None, now=self.now))
        self.take()

    @rule(
        count=st.integers(2, 6),
        max_tokens=st.sampled_from([50, 500]),
        priority=st.sampled_from(Priority),
    )
    def ask_at_once(self, count: int, max_tokens: int, priority: Priority) -> None:
        for _ in range(count):
            self.ask(max_tokens=max_tokens, priority=priority)

    @rule(
        count=st.integers(4, 8),
        max_tokens=st.sampled_from([50, 500]),
        stopped_at_once=st.booleans(),
    )
    def ask_urgently_in_a_crowd(self, count: int, max_tokens: int, stopped_at_once: bool) -> None:
        for _ in range(count):
            self.ask(max_tokens=max_tokens, priority=Priority.P3)
        self.ask(max_tokens=max_tokens, priority=Priority.P0)
        if stopped_at_once and self.asked_to_stop:
            self.core.on_preempted(self.asked_to_stop.pop(), now=self.now)
            self.take()

    @precondition(lambda self: self.asked_to_stop)
    @rule(data=st.data(), stopped=st.booleans())
    def stop(self, data: st.DataObject, stopped: bool) -> None:
        """The relay stops an attempt, whatever happened since it was asked to; or it cannot."""
        ticket = data.draw(st.sampled_from(self.asked_to_stop))
        self.asked_to_stop.remove(ticket)
        if stopped:
            before = ticket.state, ticket.worker
            self.core.on_preempted(ticket, now=self.now)
            if before[0] is not TicketState.DISPATCHED:
                assert (ticket.state, ticket.worker) == before
        self.take()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.core.on_first_token(self.some(data), now=self.now)
        self.take()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), tokens=st.integers(0, 3_000))
    def tokens(self, data: st.DataObject, tokens: int) -> None:
        self.core.on_tokens(self.some(data), tokens, now=self.now)
        self.take()

    @precondition(lambda self: self.live())
    @rule(data=st.data(), failure=FAILURES)
    def attempt_fails(self, data: st.DataObject, failure: Failure) -> None:
        ticket = data.draw(st.sampled_from(self.live()))
        self.failed_on.setdefault(ticket.number, []).append(str(ticket.worker_id))
        if self.core.on_attempt_failed(ticket, failure, now=self.now):
            self.owed[ticket.number] = ticket
        else:
            assert ticket.state is TicketState.FINISHED
        self.take()

    @precondition(lambda self: self.tickets)
    @rule(
        data=st.data(),
        outcome=st.sampled_from([Outcome.SUCCESS, Outcome.CLIENT_ERROR, Outcome.FAILED]),
    )
    def end(self, data: st.DataObject, outcome: Outcome) -> None:
        ticket = self.some(data)
        usage = Usage(prompt_tokens=100, output_tokens=20)
        self.core.on_finished(ticket, outcome, now=self.now, usage=usage)
        self.owed.pop(ticket.number, None)
        self.take()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        self.core.on_finished(ticket, Outcome.ABORTED, now=self.now)
        self.owed.pop(ticket.number, None)
        self.take()

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def store_answers(self, data: st.DataObject) -> None:
        self.answer(data.draw(st.sampled_from(self.asks)))

    # Time.

    @rule(gap_s=st.floats(0, 4))
    def time_passes(self, gap_s: float) -> None:
        until = self.now + gap_s
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.core.on_timer(now=self.now)
            self.take()
        # What time alone opens is seen at the next timer, as in life it is within a second.
        self.now = until
        self.core.on_timer(now=self.now)
        self.take()

    @rule(depth_max=st.integers(0, 4), cap=st.integers(1, 3), limited=st.booleans())
    def reload(self, depth_max: int, cap: int, limited: bool) -> None:
        sections = self.limits if limited else {}
        self.core.on_config(
            config(
                **sections, queue={"depth_max": depth_max}, headroom={"concurrency_default": cap}
            ),
            now=self.now,
        )
        self.take()

    # What always holds.

    @invariant()
    def counters_equal_the_sums_over_live_tickets(self) -> None:
        for view in self.core.snapshot(now=self.now).workers:
            home = (str(view.id), self.incarnation[str(view.id)])
            here = [t for t in self.live() if self.home.get(t.number) == home]
            # A worker that moved its URL is a new record under the same id; none does so here.
            assert view.streams == len(here)
            assert view.kv_reserved_tokens == sum(t.kv_tokens for t in here)
            by_class = [sum(t.spec.priority is priority for t in here) for priority in Priority]
            assert self.core._fleet.workers[view.id].by_class == by_class
            pending = [t for t in here if t.pending]
            assert view.waiting == len(pending)
            assert view.pending_tokens == sum(t.prompt_tokens - t.hit_tokens for t in pending)

    @invariant()
    def nobody_ends_twice_and_the_ended_hold_nothing(self) -> None:
        assert all(count == 1 for count in self.finishes.values())
        assert all(count == 1 for count in self.refused.values())
        for ticket in self.tickets:
            assert ticket.preempted <= 1
            over = ticket.state is TicketState.FINISHED
            assert over == (ticket.spec.request_id in self.finishes)
            assert (ticket.worker is not None) == (ticket in self.live())

    @invariant()
    def what_was_granted_is_settled_once_when_its_ticket_is_over(self) -> None:
        assert all(settled <= 1 for settled in self.granted.values())
        held = [t for t in self.tickets if t.reservation is not None]
        assert not any(t.state is TicketState.FINISHED for t in held)
        assert not any(t.state is TicketState.RESERVING for t in held)
        ids = {t.reservation.id for t in held if t.reservation is not None}
        assert ids == {name for name, settled in self.granted.items() if not settled}
        view = self.core.snapshot(now=self.now).limits
        assert view.held == len(held)
        reserving = sum(t.state is TicketState.RESERVING for t in self.tickets)
        assert view.waiting <= reserving

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        """Whoever waits is one that no worker could take; the queue is short enough to try all."""
        if self.spill:
            return  # whether a lane may be left changes by the prefill of others
        flow = self.core._room.flow
        for pool in flow.pools:
            passed: dict[int, None] = {}
            while (head := flow.offer([pool], passed, now=self.now)) is not None:
                fresh = self.core._pools.fresh(pool)
                assert self.core._scheduler._placement.choose(head, fresh, now=self.now) is None
                passed[head.number] = None
            flow.end_round()

    @invariant()
    def those_who_wait_are_in_the_queue_or_in_a_pause(self) -> None:
        snapshot = self.core.snapshot(now=self.now)
        waiting = [t for t in self.tickets if t.state is TicketState.QUEUED]
        queued = sum(view.queued for view in snapshot.lanes.values())
        pausing = [t for t in waiting if t.tried and t.not_before_at > self.now]
        assert queued == len(waiting) - len(pausing)
        for lane in Lane:
            running = [t for t in self.live() if t.lane is lane]
            assert snapshot.lanes[lane].running == len(running)

    def teardown(self) -> None:
        """Whoever still runs ends; then nothing is left, and every promise was kept."""
        if not hasattr(self, "core"):
            return
        for ticket in list(self.live()):
            self.core.on_finished(ticket, Outcome.SUCCESS, now=self.now)
            self.take()
        for _ in range(200):
            while self.asks:
                self.answer(self.asks[0])
            self.time_passes(5.0)  # until the patience of all classes is over
            for ticket in list(self.live()):
                self.core.on_finished(ticket, Outcome.SUCCESS, now=self.now)
                self.take()
        assert not self.owed
        assert len(self.finishes) == len(self.tickets)
        assert all(settled == 1 for settled in self.granted.values())
        assert self.core.snapshot(now=self.now).limits.waiting == 0
        for view in self.core.snapshot(now=self.now).workers:
            assert (view.streams, view.kv_reserved_tokens, view.pending_tokens) == (0, 0, 0)


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestBooks = Books.TestCase
