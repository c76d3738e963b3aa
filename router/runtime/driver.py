"""Executes what the core wants, and tells it what happened and when.

The driver owns the dispatcher, its one timer and the clock: every event of the core passes through
here. Effects are executed in order, by plain calls into the exchange that owns a ticket; an
event that arrives while effects are executed only adds to them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, assert_never

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core.adoption import Run
from router.core.bucket import DecidedBy, Verdict
from router.core.dispatcher import Dispatcher
from router.core.effects import (
    BreakerMoved,
    Dispatch,
    Effect,
    Finish,
    LevelChanged,
    Preempt,
    Probe,
    Refuse,
    Reserve,
    Settle,
    SharesJudged,
    WorkerChanged,
)
from router.core.limits import Reservation
from router.core.peers import PeerLine, PeerLoad
from router.core.rate_loop import Step
from router.core.slo import Totals
from router.core.snapshot import Snapshot
from router.core.types import (
    Failure,
    Outcome,
    Priority,
    RequestRecord,
    RequestSpec,
    Ticket,
    TicketState,
    Usage,
    WorkerState,
)
from router.errors import Reason
from router.load_formats import PriorityOrder
from router.runtime.bucket_store import BucketStore
from router.runtime.edge import FAILED, Edge, Running
from router.runtime.upstream import UpstreamPool, Upstreams

_log = logging.getLogger(__name__)

_NEVER: Final = float("inf")
# Members under names of their own: reading one off its class is a slow look-up on every request.
_RESERVING: Final = TicketState.RESERVING
_QUEUED: Final = TicketState.QUEUED
NO_VERDICT: Final = Verdict(False, None, None, False, (), DecidedBy.CLOSED)
_SUCCESS: Final = Outcome.SUCCESS


class Driver(Edge):
    """Runs one dispatcher on one event loop."""

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        upstreams: Upstreams,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, upstreams, loop=loop, clock=clock)
        self.dispatcher = dispatcher
        self.probe: Callable[[WorkerId], None] | None = None  # the prober's, set before `start`
        self.buckets: BucketStore | None = None  # set before `start`; None: no limit is asked
        # Hears of tickets that were granted what they need and wait for a worker.
        self.on_reserved: Callable[[Ticket], None] | None = None
        self.on_record: list[Callable[[RequestRecord], None]] = []
        self.on_worker_changed: list[Callable[[WorkerChanged], None]] = []
        self.on_worker_spec: list[Callable[[WorkerSpec], None]] = []  # joined or updated
        self.on_pool_told: list[Callable[[UpstreamPool], None]] = []  # a worker's word on itself
        self._effects = dispatcher.effects
        self._waits = dispatcher.waits  # for room; any news may change when they are looked at
        self._in_line = dispatcher.reserving.in_line  # each with a deadline of its own
        self._pumping = False
        self._routers: set[WorkerId] = set()  # workers that said that they are one
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER

    def start(self) -> None:
        """Begin to watch time, and let the configured workers join."""
        self._sweep()
        for spec in self.config.workers:
            self.on_worker_joined(spec)

    def stop(self) -> None:
        """Stop watching time and close all connections to workers."""
        if self._timer is not None:
            self._timer.cancel()
        super().stop()

    def tickets(self) -> list[Ticket]:
        """The tickets that are queued or running."""
        return [exchange.ticket for exchange in self.running]

    def abort(self, ticket: Ticket) -> None:
        """End a request by the wish of someone other than its client's connection."""
        for exchange in list(self.running):
            if exchange.ticket is ticket:
                self._cut(exchange, Reason.ABORTED, "aborted by request")

    # Requests.

    def submit(self, spec: RequestSpec, owner: Running) -> None:
        """Take in a request: its `ticket` is set, then `dispatch` or `refuse` follows, perhaps
        before this returns.
        """
        now = self._clock()
        ticket = owner.ticket = self.dispatcher.new_ticket(spec, owner=owner, now=now)
        self.running.add(owner)
        try:
            self.dispatcher.admit(ticket, now=now)
        except Exception:
            self._failed(ticket)
        self.execute(deadlines=False)

    def submit_again(self, spec: RequestSpec, owner: Running, reservation: Reservation) -> None:
        """Take in a request that waited under a driver before this one, which granted it this."""
        now = self._clock()
        ticket = owner.ticket = self.dispatcher.new_ticket(spec, owner=owner, now=now)
        self.running.add(owner)
        try:
            self._keep(ticket, reservation)
            self.dispatcher.admit(ticket, now=now)
        except Exception:
            self._failed(ticket)
        self.execute()

    def adopt(self, spec: RequestSpec, owner: Running, run: Run, *, charged: bool = True) -> None:
        """Take over a request that runs already, sent to its worker by a driver before this one.

        Not `charged`: that worker left, whoever has its id now.
        """
        ticket = owner.ticket = self.dispatcher.adopted_ticket(spec, run, owner=owner)
        self.running.add(owner)
        try:
            if run.reservation is not None:
                self._keep(ticket, run.reservation)
            if charged:
                self.dispatcher.resume(ticket, now=self._clock())
        except Exception:
            self._failed(ticket)

    def give_back(self, spec: RequestSpec, reservation: Reservation) -> None:
        """End what a driver before this one granted to a request that never ran."""
        ask = self.dispatcher.reserving.ask_of(spec, reservation)
        if ask is not None:
            self._limits().adopt(ask)
            self._limits().settle(ask.given_back())

    def _keep(self, ticket: Ticket, reservation: Reservation) -> None:
        """Let a ticket keep what it was granted under a driver before this one."""
        ask = self.dispatcher.reserving.adopt(ticket, reservation)
        if ask is not None:
            self._limits().adopt(ask)

    def first_token(self, ticket: Ticket) -> None:
        """The first byte of an answer came."""
        try:
            self.dispatcher.on_first_token(ticket, now=self._clock())
        except Exception:
            self._failed(ticket, ends=False)
        self.execute(deadlines=False)

    def tokens(self, ticket: Ticket, output_tokens: int) -> None:
        """A stream has put out so many tokens by now. The next event executes what follows."""
        try:
            self.dispatcher.on_tokens(ticket, output_tokens, now=self._clock())
        except Exception:
            self._failed(ticket, ends=False)

    def attempt_failed(self, ticket: Ticket, failure: Failure) -> None:
        """An attempt failed before the client got a byte: its owner hears at once what follows."""
        try:
            again = self.dispatcher.on_attempt_failed(ticket, failure, now=self._clock())
            ticket.owner.judged(again=again)  # type: ignore[attr-defined]
        except Exception:
            self._failed(ticket)
        self.execute()

    def preempted(self, ticket: Ticket) -> None:
        """An owner elsewhere stopped its attempt, as it was asked to."""
        if ticket.heir is not None or ticket.state is not TicketState.DISPATCHED:
            self._preempted(ticket)
            self.execute()
        else:
            ticket.owner.dispatch()  # type: ignore[attr-defined]  # its place was not wanted after all

    def finished(
        self, ticket: Ticket, outcome: Outcome, reason: Reason | None, usage: Usage | None
    ) -> None:
        """A request is over, in whatever state: ended in some way, cut, or left by its client."""
        now = self._clock()
        try:
            self.dispatcher.on_finished(ticket, outcome, now=now, reason=reason, usage=usage)
        except Exception:
            self._failed(ticket, ends=False)
        self.execute(deadlines=outcome is not _SUCCESS)

    def _preempted(self, ticket: Ticket) -> None:
        try:
            self.dispatcher.on_preempted(ticket, now=self._clock())
        except Exception:
            self._failed(ticket)

    def _failed(self, ticket: Ticket, *, ends: bool = True) -> None:
        """A fault came up in an event of a request: it ends that at most, and touches no other.

        Not one in news of an answer that goes on, or that has ended: the core has let go of it.
        """
        _log.exception("an event of a request failed")
        if ends and (owner := ticket.owner) is not None:
            self._cut(owner, Reason.INTERNAL, FAILED)  # type: ignore[arg-type]

    # Workers: for the admin API and the prober.

    def on_worker_joined(self, spec: WorkerSpec) -> None:
        """A worker was registered."""
        self._reach(spec)
        self.dispatcher.on_worker_joined(spec, now=self._clock())
        self.execute()

    def on_worker_updated(self, spec: WorkerSpec) -> None:
        """A worker's registration was changed."""
        self._reach(spec)
        self.dispatcher.on_worker_updated(spec, now=self._clock())
        self.execute()

    def _reach(self, spec: WorkerSpec) -> None:
        """Whoever connects to the worker learns its addresses and keys."""
        self.upstreams.add(spec)
        for observe in self.on_worker_spec:
            observe(spec)

    def on_worker_left(self, worker_id: WorkerId) -> None:
        """A worker was removed."""
        self.dispatcher.on_worker_left(worker_id, now=self._clock())
        self.execute()

    def on_drain(self, worker_id: WorkerId, *, deadline_s: float) -> None:
        """A worker gets no new work and leaves when idle."""
        self.dispatcher.on_drain(worker_id, now=self._clock(), deadline_s=deadline_s)
        self.execute()

    def on_worker_described(
        self,
        worker_id: WorkerId,
        *,
        models: tuple[str, ...],
        kv_total_tokens: int | None,
        concurrency_max: int | None,
        kv_bytes_per_token: float | None = None,
        priority_order: PriorityOrder | None = None,
    ) -> None:
        """A worker said what it is."""
        pool = self.upstreams.get(worker_id)
        if pool is not None:
            pool.set_priority_order(priority_order)
            for observe in self.on_pool_told:
                observe(pool)
        self.dispatcher.on_worker_described(
            worker_id,
            models=models,
            kv_total_tokens=kv_total_tokens,
            concurrency_max=concurrency_max,
            kv_bytes_per_token=kv_bytes_per_token,
            now=self._clock(),
        )
        self.execute()

    def on_report(self, worker_id: WorkerId, report: LoadReport) -> None:
        """A poll was answered with figures."""
        if report.routers or worker_id in self._routers:
            self.on_routers(worker_id, report.routers)
        self.dispatcher.on_report(worker_id, report, now=self._clock())
        if self._effects or self._waits:  # else no timer is wanted, either
            self.execute()

    def on_routers(self, worker_id: WorkerId, routers: tuple[str, ...] | None) -> None:
        """A worker says that it is a router, or said so to a driver before this one, or no more."""
        pool = self.upstreams.get(worker_id)
        if pool is not None:
            pool.set_router(routers[0] if routers else None)
            for observe in self.on_pool_told:
                observe(pool)
        if routers and pool is not None:
            self._routers.add(worker_id)
        else:
            self._routers.discard(worker_id)

    def on_report_missing(self, worker_id: WorkerId, why: str) -> None:
        """A poll was answered without figures."""
        self.dispatcher.on_report_missing(worker_id, why, now=self._clock())
        self.execute()

    def on_probe_failed(self, worker_id: WorkerId, why: str) -> None:
        """A poll was not answered."""
        self.dispatcher.on_probe_failed(worker_id, why, now=self._clock())
        self.execute()

    # Other routers: for the registry.

    def on_peers(
        self,
        names: Collection[str] | None,
        *,
        own: str,
        loads: Mapping[WorkerId, PeerLoad],
        silent: Mapping[WorkerId, PeerLoad],
    ) -> None:
        """Other routers were heard of; `names` None: who they are is as it was."""
        now = self._clock()
        if names is not None:
            self.dispatcher.peering.on_replicas(names, own=own, now=now)
        self.dispatcher.peering.on_loads(loads, silent=silent, now=now)
        self.execute()

    def on_judged(self, judged: Mapping[str, Sequence[Totals]]) -> None:
        """What other routers counted of each class's targets, by name."""
        self.dispatcher.peering.on_judged(judged, now=self._clock())
        self.execute()

    def on_lines(self, lines: Mapping[str, Sequence[PeerLine]]) -> None:
        """What other routers last said of their lines for common limits, by name."""
        self.dispatcher.peering.on_lines(lines, now=self._clock())

    def on_leadership(self, *, leads: bool) -> None:
        """Whether this router runs the slow loop for all."""
        self.dispatcher.peering.on_leadership(leads=leads)

    def on_config(self, config: Config) -> None:
        """The configuration was replaced."""
        self.config = config
        if self.buckets is not None:
            self.buckets.on_config(config)
        self.dispatcher.on_config(config, now=self._clock())
        self.execute()

    def snapshot(self) -> Snapshot:
        """The core as it is now."""
        return self.dispatcher.snapshot(now=self._clock())

    # Effects and time.

    def execute(self, *, deadlines: bool = True) -> None:
        """Execute the effects there are, and those that executing them brings about.

        `deadlines`: whether what happened may want `on_timer` earlier than it was wanted before,
        though nobody waits. Asking is dear; a deadline that is missed so is seen by the next sweep.
        """
        effects = self._effects
        if effects and not self._pumping:
            self._pumping = True
            for effect in effects:  # to which executing them may add
                try:
                    if type(effect) is Dispatch:
                        effect.ticket.owner.dispatch()  # type: ignore[attr-defined]
                    elif type(effect) is Finish:
                        for observe in self.on_record:
                            observe(effect.record)
                    elif type(effect) is Reserve:
                        decided = partial(self._reserved, effect.ticket)
                        self.buckets.reserve(effect.ask, decided)  # type: ignore[union-attr]
                    elif type(effect) is Settle:
                        self.buckets.settle(effect.settlement)  # type: ignore[union-attr]
                    else:
                        self._execute_rare(effect)
                except Exception:
                    # A fault in one must not lose the others.
                    self._effect_failed(effect)
            effects.clear()
            self._pumping = False
        if deadlines or self._waits or self._in_line:
            self._look_at_deadline()

    def _look_at_deadline(self) -> None:
        at = self.dispatcher.next_deadline()
        # A timer that comes too early does no harm and sets the next one; a late one does.
        if at is not None and at < self._timer_at:
            self._arm(at)

    def _execute_rare(self, effect: Effect) -> None:
        if isinstance(effect, Probe):
            self.probe(effect.worker_id)  # type: ignore[misc]
        elif isinstance(effect, Refuse):
            effect.ticket.owner.refuse(effect.refusal)  # type: ignore[attr-defined]
        elif isinstance(effect, WorkerChanged):
            self._worker_changed(effect)
        elif isinstance(effect, Preempt):
            ticket = effect.ticket
            if ticket.owner is not None and ticket.owner.preempt():  # type: ignore[attr-defined]
                self._preempted(ticket)
        elif isinstance(effect, LevelChanged):
            change = effect.change
            _log.warning(
                "degrade level of domain %r is %d, was %d: saturation %.2f",
                effect.domain.strip("\0"), change.new, change.old, change.saturation,
            )  # fmt: skip
        elif isinstance(effect, SharesJudged):
            _shares_judged(effect.step)
        elif isinstance(effect, BreakerMoved):
            self._breaker_moved(effect)
        else:
            assert not isinstance(effect, Dispatch | Finish | Reserve | Settle)
            assert_never(effect)

    def _limits(self) -> BucketStore:
        assert self.buckets is not None, "a store is set before limits are"
        return self.buckets

    def _reserved(self, ticket: Ticket, verdict: Verdict) -> None:
        try:
            self.dispatcher.on_reserved(ticket, verdict, now=self._clock())
        except Exception:  # it would wait for ever: nobody says it twice
            self._failed(ticket)
        if self.on_reserved and ticket.state is _QUEUED and ticket.reservation is not None:
            self.on_reserved(ticket)
        waits = ticket.state is _RESERVING
        if waits or not self._pumping:  # else who decided at once was asked by `execute` itself
            self.execute(deadlines=waits)

    def _effect_failed(self, effect: Effect) -> None:
        _log.exception("an effect failed: %s", type(effect).__name__)
        if isinstance(effect, Dispatch | Reserve) and (owner := effect.ticket.owner) is not None:
            self._cut(owner, Reason.INTERNAL, FAILED)  # type: ignore[arg-type]
        if isinstance(effect, Reserve):  # whatever the store did of it, nobody waits for it now
            self.dispatcher.on_reserved(effect.ticket, NO_VERDICT, now=self._clock())

    def _worker_changed(self, effect: WorkerChanged) -> None:
        new = "gone" if effect.new is None else effect.new.value
        level = logging.WARNING if effect.new is WorkerState.EJECTED else logging.INFO
        _log.log(level, "worker %s is %s: %s", effect.worker_id, new, effect.why)
        for observe in self.on_worker_changed:
            observe(effect)
        if effect.new is None:
            self._routers.discard(effect.worker_id)
            self.upstreams.remove(effect.worker_id)

    def _breaker_moved(self, effect: BreakerMoved) -> None:
        if effect.opened:
            settings = self.config.breaker
            _log.warning(
                "worker %s is failing: its breaker opened after %d failures in a row; a trial "
                "request every %g s",
                effect.worker_id, settings.failures, settings.open_s,
            )  # fmt: skip
        else:
            _log.warning("worker %s works again: its breaker closed", effect.worker_id)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, _NEVER
        self.dispatcher.on_timer(now=self._clock())
        self.execute()

    def _swept(self, now: float) -> None:  # noqa: ARG002
        self.execute()


def _shares_judged(step: Step) -> None:
    if not step.act.moves:
        _log.warning("shares of the classes cannot help (%s): %s", step.act.value, step.why)
        return
    shares = " ".join(
        f"{p.name} {share:.1%}" for p, share in zip(Priority, step.after, strict=True)
    )
    did = "are" if step.applied else "would be"
    _log.info("shares of the classes %s %s (%s): %s", did, shares, step.act.value, step.why)
