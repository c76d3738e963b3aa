"""The one state machine: events in, effects out, no I/O and no clock.

Each request is a ticket. It is dispatched at once when a worker has room and nobody of its pool
waits before it, else it waits in its lane's queue, and whatever frees room pumps the queue. A
ticket ends in exactly one `Finish`, and what it was charged is given back through the one pointer
`ticket.worker`, so order and repetition of events cannot unbalance the accounts: an event that
comes too late finds the ticket finished, or charged to nobody, and changes nothing.
"""

from __future__ import annotations

from functools import partial
from math import inf
from random import Random
from typing import Final

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core import refusals
from router.core.adoption import Run, adopted
from router.core.aims import Aims
from router.core.breaker import BreakerState
from router.core.bucket import Verdict
from router.core.classify import Classifier
from router.core.cost import CostModel
from router.core.degrade import Act
from router.core.degrading import Degrading
from router.core.effects import Effect, Finish, Refuse
from router.core.fleet import Fleet
from router.core.homes import Homes
from router.core.peering import Peering
from router.core.pools import ANY_MODEL
from router.core.prefix import PrefixIndex
from router.core.prospects import Prospects
from router.core.queue_view import queue_view
from router.core.reserving import Reserving
from router.core.retries import RetryBudget, pause_s
from router.core.scheduler import Scheduler
from router.core.slo_watch import SloWatch
from router.core.snapshot import Counters, Snapshot, lane_views, record_of, worker_view
from router.core.timers import Timers, earlier
from router.core.types import Failure, Outcome, Refusal, RequestSpec, Ticket, TicketState, Usage
from router.core.waiting import WaitingRoom
from router.core.worker import Worker
from router.errors import Reason

# Members of enums are found slowly; these are read for each request.
_RESERVING: Final = TicketState.RESERVING
_QUEUED: Final = TicketState.QUEUED
_DISPATCHED: Final = TicketState.DISPATCHED
_STREAMING: Final = TicketState.STREAMING
_FINISHED: Final = TicketState.FINISHED
_SUCCESS: Final = Outcome.SUCCESS
_CLOSED: Final = BreakerState.CLOSED
_KEEP, _REFUSE = Act.KEEP, Act.REFUSE


class Dispatcher:
    """Decides when and where each request runs. All times are the driver's monotonic seconds."""

    def __init__(self, config: Config, *, rng: Random, router_id: str = "") -> None:
        self._config = config
        self._rng = rng
        self.effects = self._effects = list[Effect]()  # a driver empties it as it executes them
        self._timers = Timers()
        self._prefixes = PrefixIndex(config.prefix.worker_blocks_max)
        self._fleet = Fleet(
            config, rng=rng, timers=self._timers, effects=self._effects, prefixes=self._prefixes
        )
        self._pools = self._fleet.pools
        self._followed = self._pools.version
        self._classifier, self._aims = Classifier(config), Aims(config)
        self._costs = CostModel(config.models)
        self._room = WaitingRoom(config, rng=rng)
        self.waits = self._waits = self._room.flow.waits  # who waits, by number
        self._scheduler = Scheduler(
            config,
            rng=rng,
            pools=self._pools,
            prefixes=self._prefixes,
            room=self._room,
            timers=self._timers,
            effects=self._effects,
        )
        flow, effects = self._room.flow, self._effects
        cached = self._scheduler.cached_tokens
        self._homes = Homes(config, self._pools, self._costs, flow, cached_tokens=cached)
        self._degrading = Degrading(
            config,
            pools=self._pools,
            homes=self._homes,
            flow=flow,
            timers=self._timers,
            effects=effects,
        )
        self.router_id = router_id  # reservations' ids begin with it
        self.reserving = self._new_reserving(config, router_id)
        self._prospects = Prospects(config, self._pools, self._homes)
        self._preempting = self._scheduler.preempting
        self._slo = SloWatch(config, flow=flow, timers=self._timers, effects=effects)
        lines = self.reserving.lines
        self.peering = Peering(self._fleet, self._slo, self._scheduler, lines, self._follow)
        self._budget = RetryBudget(config.retry)
        self._requests = self._retries = self._finished = 0

    def _new_reserving(self, config: Config, router_id: str) -> Reserving:
        return Reserving(
            config,
            router_id=router_id,
            costs=self._costs,
            degrading=self._degrading,
            timers=self._timers,
            effects=self._effects,
            enter=self._enter,
            refuse=self._refuse,
        )

    # Membership and health. News of a worker that is not a member is late, and dropped.

    def on_worker_joined(self, spec: WorkerSpec, *, now: float) -> None:
        """A worker was registered. Registering an id twice is the caller's bug."""
        self._fleet.join(spec, now=now)
        self._follow(now)

    def on_worker_updated(self, spec: WorkerSpec, *, now: float) -> None:
        """A worker's registration was changed; its URL never is."""
        self._fleet.update(spec)
        self._follow(now)

    def on_worker_described(
        self,
        worker_id: WorkerId,
        *,
        models: tuple[str, ...],
        kv_total_tokens: int | None,
        concurrency_max: int | None,
        now: float,
        kv_bytes_per_token: float | None = None,
    ) -> None:
        """A worker said what it serves and how large it is; its spec's own values win."""
        described = (models, kv_total_tokens, concurrency_max, kv_bytes_per_token)
        self._fleet.describe(worker_id, described)
        self._follow(now)

    def on_report(self, worker_id: WorkerId, report: LoadReport, *, now: float) -> None:
        """A poll was answered with figures."""
        worker = self._fleet.on_report(worker_id, report, now=now)
        if self._waits or self._followed != self._pools.version:
            self._follow(now, worker)

    def on_report_missing(self, worker_id: WorkerId, why: str, *, now: float) -> None:
        """A worker is alive, but its load answer is missing or malformed: figures only age."""
        self._follow(now, self._fleet.on_report_missing(worker_id, why, now=now))

    def on_probe_failed(self, worker_id: WorkerId, why: str, *, now: float) -> None:
        """A poll was not answered; too many in a row eject the worker."""
        self._follow(now, self._fleet.on_probe_failed(worker_id, why, now=now))

    def on_drain(self, worker_id: WorkerId, *, now: float, deadline_s: float) -> None:
        """Give a worker no new work; it is gone when idle, at the latest after `deadline_s`."""
        self._fleet.drain(worker_id, now=now, deadline_s=deadline_s)
        self._follow(now)

    def on_worker_left(self, worker_id: WorkerId, *, now: float) -> None:
        """Forget a worker at once; what runs on it is finished by its relay."""
        self._fleet.remove(worker_id)
        self._follow(now)

    # Requests.

    def on_request(self, spec: RequestSpec, *, owner: object, now: float) -> Ticket:
        """A request came. The effects may hold its dispatch or its refusal already."""
        ticket = self.new_ticket(spec, owner=owner, now=now)
        self.admit(ticket, now=now)
        return ticket

    def new_ticket(self, spec: RequestSpec, *, owner: object, now: float) -> Ticket:
        """The first half of `on_request`: a ticket that holds nothing and stands nowhere yet."""
        key = self._pools.model_key(spec.model)
        lane, prompt, output, need = self._classifier.figures(spec, costs := self._costs.of(key))
        pool = self._pools.get(ANY_MODEL if key is None else key, lane)
        patient_until = now + self._aims.patience_s(spec)
        number = self._requests + 1
        ticket = Ticket(spec, number, lane, prompt, output, need, now, patient_until, pool, owner)
        cached = self._scheduler.cached_tokens(ticket) if spec.prefix else 0
        self._aims.aim(ticket, pool.rates, costs, cached_tokens=cached)
        self._requests = number
        return ticket

    def admit(self, ticket: Ticket, *, now: float) -> None:
        """The second half: send it, hold it or refuse it."""
        self._scheduler.came(ticket, now)
        if (refusal := self._prospects.at_arrival(ticket, now)) is not None:
            self._refuse(ticket, refusal, now)
        elif not (self.reserving.active and self.reserving.begin(ticket, now)):
            self._admit(ticket, now)

    def adopted_ticket(self, spec: RequestSpec, run: Run, *, owner: object) -> Ticket:
        """The ticket of a request that a core before this one sent; `resume` follows."""
        self._requests += 1
        parts = self._pools, self._classifier, self._costs
        return adopted(spec, run, *parts, number=self._requests, owner=owner)

    def resume(self, ticket: Ticket, *, now: float) -> None:
        """Charge the worker on which an adopted ticket runs, if that is here."""
        assert ticket.worker_id is not None
        self._scheduler.resume(ticket, self._fleet.workers.get(ticket.worker_id), now)

    def on_reserved(self, ticket: Ticket, verdict: Verdict, *, now: float) -> None:
        """The store of the limits answered a `Reserve`; said once for each."""
        self.reserving.decided(ticket, verdict, now)

    def on_first_token(self, ticket: Ticket, *, now: float) -> None:
        """The first byte of the ticket's answer came from its worker."""
        if ticket.state is _DISPATCHED and ticket.worker is not None:
            ticket.state = _STREAMING
            ticket.first_token_at = now
            ticket.worker.first_token(ticket, now=now)
            # Less prefill ahead may let another lane's request in.
            self._scheduler.pump(now, ticket.worker)

    def on_tokens(self, ticket: Ticket, output_tokens: int, *, now: float) -> None:
        """So much a running stream has put out, all samples together; fewer correct the last."""
        worker = ticket.worker
        if worker is None or output_tokens == ticket.output_seen_tokens:
            return
        held = ticket.prompt_tokens + output_tokens
        kv_tokens = held if held > ticket.kv_tokens else ticket.kv_tokens
        worker.grow(ticket, output_seen_tokens=output_tokens, kv_tokens=kv_tokens, now=now)
        breaker, began_at = worker.breaker, ticket.first_token_at or now
        if breaker.state is not _CLOSED and breaker.has_passed(ticket, began_at, now):
            worker.finished(ticket, _SUCCESS, now=now)
            self._scheduler.pump(now, worker)

    def on_attempt_failed(self, ticket: Ticket, failure: Failure, *, now: float) -> bool:
        """An attempt failed before the client got a byte.

        True: a Dispatch or Refuse of the ticket follows. False: it is over.
        """
        worker = ticket.worker
        if worker is None:
            return False
        worker.attempt_failed(ticket, failure, now=now)
        self._room.flow.settle(ticket, 0.0)  # an attempt that brought nothing costs its tenant none
        ticket.failure = failure
        ticket.tried += (worker.id,)
        if not (self._prospects.may_retry(ticket, failure, now) and self._budget.take()):
            self._finish(ticket, Outcome.FAILED, now, reason=failure.reason)
            return False
        self._retries += 1
        ticket.state = _QUEUED
        failed = len(ticket.tried) - len(ticket.spec.avoid)
        pause = pause_s(self._config.retry, failed_attempts=failed, rng=self._rng)
        ticket.not_before_at = now + pause
        self._timers.call_at(ticket.not_before_at, partial(self._retry, ticket))
        self._scheduler.release(ticket)
        ticket.first_token_at = None
        ticket.output_seen_tokens = 0
        self._has_room(worker, now)
        return True

    def on_preempted(self, ticket: Ticket, *, now: float) -> None:
        """The attempt of a ticket was stopped, as `Preempt` asked; it waits again, with its age.

        Unless its answer began or ended meanwhile: then it keeps its place.
        """
        worker, heir = ticket.worker, ticket.heir
        if ticket.state is not _DISPATCHED or worker is None or heir is None:
            return
        worker.finished(ticket, Outcome.ABORTED, now=now)  # which says nothing of the worker
        self._room.flow.settle(ticket, 0.0)
        self._preempting.gave_way(ticket, now)
        self._room.flow.push(ticket, now=now)
        self._scheduler.release(ticket)
        self._has_room(worker, now, heir=heir)

    def on_finished(
        self,
        ticket: Ticket,
        outcome: Outcome,
        *,
        now: float,
        reason: Reason | None = None,
        usage: Usage | None = None,
    ) -> None:
        """A request is over, in whatever state; said again, it changes nothing.

        Ended in some way after its dispatch, left by its client, or cut for a `reason`.
        """
        if ticket.state is _FINISHED:
            return
        try:
            if ticket.worker is not None:
                ticket.worker.finished(ticket, outcome, now=now, usage=usage)
            if outcome is _SUCCESS:
                self._budget.on_success()
                self._costs.learn(ticket, usage)
        finally:
            self._finish(ticket, outcome, now, reason=reason, usage=usage)

    # Time and configuration.

    def next_deadline(self) -> float | None:
        """When `on_timer` is wanted; None: never, as things stand."""
        return earlier(self._room.flow.next_deadline(), self._timers.next_at)

    def on_timer(self, *, now: float) -> None:
        """Do what is due."""
        self._timers.run_due(now)
        self._follow(now)
        while (ticket := self._room.expired(now, self._prospects.all_away)) is not None:
            refusal = self._prospects.at_deadline(ticket, now) or refusals.queue_timeout(
                now - ticket.arrived_at, self._room.retry_after_s(ticket, now)
            )
            self._refuse(ticket, refusal, now)
        # Reports that went stale may have closed workers that are open now.
        self._scheduler.pump(now)

    def take_effects(self) -> list[Effect]:
        """Hand out the effects since the last call, in order."""
        effects, self._effects[:] = self._effects[:], []
        return effects

    def on_config(self, config: Config, *, now: float) -> None:
        """The configuration was replaced. Tickets that wait keep the patience they came with."""
        self._config, self._classifier, self._aims = config, Classifier(config), Aims(config)
        parts = (self._fleet, self._homes, self._scheduler, self._degrading, self.reserving)
        for part in (*parts, self._prospects, self._room, self._slo):
            part.configure(config)
        self._costs.configure(config.models)
        self._prefixes.resize(config.prefix.worker_blocks_max)
        self._budget.configure(config.retry)
        self.reserving.reconsider(now)
        self._follow(now)

    def models(self) -> dict[str, list[WorkerId]]:
        """Every model with its workers that are not ejected."""
        return self._pools.models()

    @property
    def queued(self) -> int:
        """Requests that wait here."""
        return len(self._room)

    @property
    def worker_ids(self) -> list[WorkerId]:
        """Every registered worker, in order of joining."""
        return list(self._fleet.workers)

    def snapshot(self, *, now: float) -> Snapshot:
        """The whole core, frozen."""
        queue = queue_view(self._room.flow, self._pools.live, self._scheduler.elephants, now)
        return Snapshot(
            at=now,
            workers=tuple(worker_view(worker, now) for worker in self._fleet.workers.values()),
            lanes=lane_views(self._room, self._scheduler.running, queue, now),
            counters=Counters(
                requests=self._requests,
                dispatches=self._scheduler.dispatches,
                retries=self._retries,
                spills=self._scheduler.spills,
                finished=self._finished,
                preemptions=self._preempting.count,
            ),
            retry_budget=self._budget.tokens,
            queue=queue,
            slo=self._slo.view(),
            degrade=self._degrading.view(),
            limits=self.reserving.view(),
            shadow=None if (shadow := self._scheduler.shadow) is None else shadow.view(),
        )

    # Coming in and holding.

    def _enter(self, ticket: Ticket, now: float) -> None:
        """Let a ticket in whose limits had to be asked first; workers may have gone meanwhile."""
        refusal = self._prospects.hopeless(ticket, now)
        if refusal is not None:
            self._refuse(ticket, refusal, now)
        else:
            self._admit(ticket, now)

    def _admit(self, ticket: Ticket, now: float) -> None:
        if self._waits:
            if not self._degraded(ticket, now):
                self._hold(ticket, now)
                self._scheduler.pump(now)
        elif not self._scheduler.place(ticket, now) and not self._degraded(ticket, now):
            self._hold(ticket, now)
        if self._preempting.enabled and ticket.state is _QUEUED:
            self._preempting.came(ticket, self._pools.fresh(ticket.pool), now)

    def _hold(self, ticket: Ticket, now: float) -> None:
        if self._room.full(ticket.lane) and self._scheduler.sent_at_once(ticket, now):
            return
        # The full queue first: under a flood this is what most see, and it must cost little.
        if self._room.full(ticket.lane):
            loser = self._room.flow.victim(ticket, now=now) or ticket
            wait_s = self._room.retry_after_s(loser, now)
            self._room.flow.evict(loser, now=now)
            self._refuse(loser, refusals.queue_full(wait_s), now)
            if loser is ticket:
                return
        refusal = self._prospects.out_of_order(ticket, now)
        if refusal is not None:
            self._refuse(ticket, refusal, now)
        else:
            self._room.hold(ticket, now, self._prospects.all_away)
            self._degrading.watch(now)

    def _degraded(self, ticket: Ticket, now: float) -> bool:
        """Under overload, change or refuse a ticket that finds no room; True: nothing is left."""
        if not self._degrading.concerns(ticket):
            return False
        fits = self._scheduler.fits(ticket, now) or self._degrading.waits_in_time(ticket, now)
        act = self._degrading.act_on(ticket, fits=fits)
        if act is _REFUSE:
            self._refuse(ticket, refusals.shed(self._room.retry_after_s(ticket, now)), now)
            return True
        return act is not _KEEP and not self._room and self._scheduler.place(ticket, now)

    def _follow(self, now: float, worker: Worker | None = None) -> None:
        """After news: when membership moved, nobody waits for what cannot come; room is used."""
        if self._followed == self._pools.version:
            if worker is not None:
                self._scheduler.pump(now, worker)
            return
        self._followed = self._pools.version
        for pool in self._room.flow.pools:
            self._pools.fresh(pool)
        self._room.flow.regroup(self._pools.domains, now=now)
        self._costs.serve(self._pools.served())
        self._scheduler.serve(self._pools.domains)
        for ticket in self._room.tickets():
            if ticket.state is not _QUEUED:
                continue  # the end of one before it gave it room
            if (refusal := self._prospects.hopeless(ticket, now)) is not None:
                self._refuse(ticket, refusal, now)
        self._scheduler.pump(now)

    # Refusing.

    def _refuse(self, ticket: Ticket, refusal: Refusal, now: float) -> None:
        self._effects.append(Refuse(ticket, refusal))
        outcome = Outcome.FAILED if ticket.attempts else Outcome.REFUSED
        self._finish(ticket, outcome, now, reason=refusal.reason)

    # Trying again.

    def _retry(self, ticket: Ticket, now: float) -> None:
        """A retry's pause is over. Its client may have left meanwhile."""
        if ticket.state is not _QUEUED:
            return
        if (refusal := self._prospects.hopeless(ticket, now)) is not None:
            self._refuse(ticket, refusal, now)
        elif not self._scheduler.place(ticket, now):
            self._hold(ticket, now)

    # Ending.

    def _finish(
        self,
        ticket: Ticket,
        outcome: Outcome,
        now: float,
        *,
        reason: Reason | None = None,
        usage: Usage | None = None,
    ) -> None:
        assert ticket.state is not _FINISHED, "finished twice"
        before, ticket.state = ticket.state, _FINISHED
        self._finished += 1
        record = record_of(ticket, outcome, reason, usage, now)
        self._effects.append(Finish(record))
        # What it holds first: whatever fails behind this, nothing of it stays charged.
        worker = self._scheduler.release(ticket)
        waited = before is _QUEUED and self._room.flow.remove(ticket, now=now)
        if ticket.reservation is not None:
            self.reserving.ended(ticket, record, now)
        if before is _RESERVING:
            self.reserving.left(ticket, now)
        self._slo.count(record, self._scheduler.uncached_s(ticket, record), now)
        if ticket.bill is not None:
            cost = self._aims.cost(record.prompt_tokens, record.output_tokens)
            self._room.flow.settle(ticket, cost)
        if waited:
            self._scheduler.pump(now)  # it may have been a large one that smaller ones stood behind
        if worker is not None:
            self._has_room(worker, now)

    def _has_room(self, worker: Worker, now: float, heir: Ticket | None = None) -> None:
        """Let others use what `worker` got back, an heir before all."""
        if heir is not None and heir.state is _QUEUED and heir.not_before_at <= now:
            self._scheduler.place(heir, now)
        if now < worker.out_until < inf:
            self._timers.call_at(worker.out_until, partial(self._scheduler.pump, worker=worker))
        if not worker.streams:
            self._fleet.idle(worker)
        if self._waits or self._followed != self._pools.version:
            self._follow(now, worker)
