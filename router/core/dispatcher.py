"""The one state machine: events in, effects out, no I/O and no clock.

Each request is a ticket. It is dispatched at once when a worker has room and nobody of its pool
waits before it, else it waits in its lane's queue, and whatever frees room pumps the queue. A
ticket ends in exactly one `Finish`, and what it was charged is given back through the one pointer
`ticket.worker`, so order and repetition of events cannot unbalance the accounts.
"""

from __future__ import annotations

from random import Random

from router.config import Config
from router.contract import Lane, LoadReport, WorkerId, WorkerSpec
from router.core.classify import classified
from router.core.cost import CostModel
from router.core.effects import Dispatch, Effect, Finish, Refuse
from router.core.fleet import ANY_MODEL, Fleet, Pool, Signal
from router.core.headroom import grown_tokens
from router.core.queue import HoldQueue
from router.core.retries import RetryBudget, pause_s
from router.core.score import pick
from router.core.snapshot import Counters, LaneView, Snapshot, WorkerView
from router.core.timers import Timers
from router.core.types import (
    Failure,
    Outcome,
    Priority,
    Refusal,
    RequestRecord,
    RequestSpec,
    Ticket,
    TicketState,
    Usage,
    WorkerState,
)
from router.core.worker import Worker
from router.errors import Reason


class Dispatcher:
    """Decides when and where each request runs. All times are the driver's monotonic seconds."""

    def __init__(self, config: Config, *, rng: Random) -> None:
        self._config = config
        self._rng = rng
        self._effects: list[Effect] = []
        self._timers = Timers()
        self._fleet = Fleet(config, rng=rng, timers=self._timers, effects=self._effects)
        self._costs = CostModel(config.models)
        self._queues = {lane: HoldQueue(config.queue.depth_max) for lane in Lane}
        self._budget = RetryBudget(config.retry)
        self._running = dict.fromkeys(Lane, 0)
        self._requests = self._dispatches = self._retries = self._spills = self._finished = 0

    # Membership and health.

    def on_worker_joined(self, spec: WorkerSpec, *, now: float) -> None:
        """A worker was registered."""
        self._fleet.join(spec, now=now)
        self._membership_changed(now)

    def on_worker_updated(self, spec: WorkerSpec, *, now: float) -> None:
        """A worker's registration was changed."""
        worker = self._fleet.workers.get(spec.worker_id)
        if worker is not None:
            self._fleet.update(worker, spec)
            self._membership_changed(now)

    def on_worker_described(
        self,
        worker_id: WorkerId,
        *,
        models: tuple[str, ...],
        kv_total_tokens: int | None,
        concurrency_max: int | None,
        now: float,
    ) -> None:
        """A worker said what it serves and how large it is; its spec's own values win."""
        worker = self._fleet.workers.get(worker_id)
        if worker is not None:
            self._fleet.describe(
                worker,
                models=models,
                kv_total_tokens=kv_total_tokens,
                concurrency_max=concurrency_max,
            )
            self._membership_changed(now)

    def on_report(self, worker_id: WorkerId, report: LoadReport, *, now: float) -> None:
        """A poll was answered with figures."""
        worker = self._fleet.workers.get(worker_id)
        if worker is not None:
            self._fleet.on_alive(worker, report, now=now)
            self._pump(now)

    def on_report_missing(self, worker_id: WorkerId, why: str, *, now: float) -> None:
        """A worker is alive, but its load answer is missing or malformed."""
        worker = self._fleet.workers.get(worker_id)
        if worker is not None:
            self._fleet.on_alive(worker, None, now=now)
            self._pump(now)

    def on_probe_failed(self, worker_id: WorkerId, why: str, *, now: float) -> None:
        """A poll was not answered."""
        worker = self._fleet.workers.get(worker_id)
        if worker is not None:
            self._fleet.on_probe_failed(worker, why)
            self._membership_changed(now)

    def on_drain(self, worker_id: WorkerId, *, now: float, deadline_s: float) -> None:
        """Give a worker no new work; it is gone when idle, at the latest at the deadline."""
        worker = self._fleet.workers.get(worker_id)
        if worker is None:
            return
        self._fleet.signal(worker, Signal.DRAIN, "drained")
        if worker.streams == 0:
            self._fleet.leave(worker, "drained")
        else:
            self._timers.call_at(now + deadline_s, lambda later: self._drain_over(worker, later))
        self._membership_changed(now)

    def on_worker_left(self, worker_id: WorkerId, *, now: float) -> None:
        """Forget a worker at once; what runs on it is finished by its relay."""
        worker = self._fleet.workers.get(worker_id)
        if worker is not None:
            self._fleet.leave(worker, "removed")
            self._membership_changed(now)

    # Requests.

    def on_request(self, spec: RequestSpec, *, owner: object, now: float) -> Ticket:
        """A request came. The effects may hold its dispatch or its refusal already."""
        self._requests += 1
        key = self._fleet.model_key(spec.model)
        figures = classified(spec, self._costs.of(key), self._config)
        pool = self._fleet.pool(ANY_MODEL if key is None else key, figures.lane)
        ticket = Ticket(
            spec=spec,
            number=self._requests,
            lane=figures.lane,
            prompt_tokens=figures.prompt_tokens,
            output_tokens=figures.output_tokens,
            kv_tokens=figures.kv_tokens,
            arrived_at=now,
            queue_deadline_at=now + self._config.queue.wait_s_max,
            pool=pool,
            owner=owner,
        )
        refusal = self._hopeless(ticket, known=key is not None)
        if refusal is not None:
            self._refuse(ticket, refusal, now)
        elif self._queues[ticket.lane].holds(pool) or not self._place(ticket, now):
            self._hold(ticket, now)
        return ticket

    def on_first_token(self, ticket: Ticket, *, now: float) -> None:
        """The first byte of the ticket's answer came from its worker."""
        if ticket.state is TicketState.DISPATCHED and ticket.worker is not None:
            ticket.state = TicketState.STREAMING
            ticket.first_token_at = now
            ticket.worker.prefilled(ticket)

    def on_tokens(self, ticket: Ticket, output_tokens: int, *, now: float) -> None:
        """A running stream has put out `output_tokens` so far, all samples together."""
        if ticket.worker is not None and output_tokens > ticket.output_seen_tokens:
            ticket.output_seen_tokens = output_tokens
            grown = grown_tokens(
                ticket.kv_tokens,
                prompt_tokens=ticket.prompt_tokens,
                output_seen_tokens=output_tokens,
            )
            if grown != ticket.kv_tokens:
                ticket.worker.grow(ticket, grown)

    def on_attempt_failed(self, ticket: Ticket, failure: Failure, *, now: float) -> bool:
        """An attempt failed before the client got a byte. True: a Dispatch or Refuse follows."""
        if ticket.state is TicketState.FINISHED or ticket.worker is None:
            return False
        worker = ticket.worker
        if failure.blames_worker:
            worker.breaker.on_failure(ticket, now=now)
        else:
            worker.breaker.on_nothing_learnt(ticket, now=now)
        if failure.retry_after_s is not None:
            worker.paused_until = max(worker.paused_until, now + failure.retry_after_s)
            self._timers.call_at(worker.paused_until, self._pump)
        ticket.failure = failure
        ticket.tried.append(worker.id)
        if not self._may_retry(ticket, failure):
            self._finish(ticket, Outcome.FAILED, now, reason=failure.reason)
            return False
        self._unload(ticket, now)
        self._retries += 1
        ticket.state = TicketState.QUEUED
        ticket.not_before_at = now + pause_s(
            self._config.retry, failed_attempts=len(ticket.tried), rng=self._rng
        )
        self._timers.call_at(ticket.not_before_at, lambda later: self._retry(ticket, later))
        self._pump(now)
        return True

    def on_finished(
        self,
        ticket: Ticket,
        outcome: Outcome,
        *,
        now: float,
        reason: Reason | None = None,
        usage: Usage | None = None,
    ) -> None:
        """A dispatched request is over."""
        if ticket.state is TicketState.FINISHED:
            return
        if ticket.worker is not None:
            breaker = ticket.worker.breaker
            if outcome is Outcome.SUCCESS:
                breaker.on_success(ticket, now=now)
                self._budget.on_success()
            elif outcome is Outcome.FAILED:
                breaker.on_failure(ticket, now=now)
            else:
                breaker.on_nothing_learnt(ticket, now=now)
        if usage is not None:
            self._costs.learn(ticket.spec, ticket.pool.model, usage)
        self._finish(ticket, outcome, now, reason=reason, usage=usage)

    def on_client_gone(self, ticket: Ticket, *, now: float) -> None:
        """The client left, in whatever state the ticket is."""
        self.on_finished(ticket, Outcome.ABORTED, now=now)

    # Time.

    def next_deadline(self) -> float | None:
        """When `on_timer` is wanted; None: never, as things stand."""
        moments = [queue.next_deadline() for queue in self._queues.values()]
        moments.append(self._timers.next_at)
        return min((at for at in moments if at is not None), default=None)

    def on_timer(self, *, now: float) -> None:
        """Do what is due."""
        self._timers.run_due(now)
        for queue in self._queues.values():
            while (ticket := queue.expired(now)) is not None:
                self._refuse(
                    ticket, self._busy(Reason.QUEUE_TIMEOUT, "no worker had room in time"), now
                )

    def take_effects(self) -> list[Effect]:
        """Hand out the effects since the last call, in order."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    def on_config(self, config: Config, *, now: float) -> None:
        """The configuration was replaced."""
        self._config = self._fleet.config = config
        self._budget.settings = config.retry
        for queue in self._queues.values():
            queue.depth_max = config.queue.depth_max
        self._membership_changed(now)

    # Looking.

    def serves(self, model: str | None) -> bool:
        """Whether some worker may serve `model`."""
        return self._fleet.model_key(model) is not None

    def models(self) -> dict[str, list[WorkerId]]:
        """Every model with its workers that are not ejected."""
        return self._fleet.models

    @property
    def worker_ids(self) -> list[WorkerId]:
        """Every registered worker, in order of joining."""
        return list(self._fleet.workers)

    def snapshot(self, *, now: float) -> Snapshot:
        """The whole core, frozen."""
        return Snapshot(
            at=now,
            workers=tuple(_view(worker, now) for worker in self._fleet.workers.values()),
            lanes={lane: self._lane_view(lane, now) for lane in Lane},
            counters=Counters(
                requests=self._requests,
                dispatches=self._dispatches,
                retries=self._retries,
                spills=self._spills,
                finished=self._finished,
            ),
            retry_budget=self._budget.tokens,
        )

    # Inside.

    def _hopeless(self, ticket: Ticket, *, known: bool) -> Refusal | None:
        if not known:
            return Refusal(reason=Reason.MODEL_NOT_FOUND, message="no worker serves this model")
        pool = ticket.pool
        if not pool.live:
            return self._no_workers()
        if pool.kv_total_max is not None:
            limit = self._config.headroom.kv_ratio_max * pool.kv_total_max
            if ticket.kv_tokens > limit:
                return Refusal(
                    reason=Reason.TOO_LARGE,
                    message=f"needs about {ticket.kv_tokens} tokens of KV memory; "
                    f"the largest worker may hold {int(limit)}",
                )
        return None

    def _no_workers(self) -> Refusal:
        return Refusal(
            reason=Reason.NO_WORKERS,
            message="no live worker serves this model",
            retry_after_s=max(1.0, self._config.probe.interval_s),
        )

    def _busy(self, reason: Reason, message: str) -> Refusal:
        return Refusal(reason=reason, message=message, retry_after_s=1.0)

    def _place(self, ticket: Ticket, now: float) -> bool:
        pool = self._fleet.pool(ticket.pool.model, ticket.lane)
        worker = pick(pool.groups, ticket, rng=self._rng, now=now)
        if worker is None:
            worker = pick(pool.others, ticket, rng=self._rng, now=now)
            ticket.spilled = worker is not None
        if worker is None:
            return False
        worker.charge(ticket)
        worker.breaker.on_dispatch(ticket)
        ticket.state = TicketState.DISPATCHED
        ticket.dispatched_at = now
        ticket.attempts += 1
        self._running[ticket.lane] += 1
        self._dispatches += 1
        self._spills += ticket.spilled
        self._effects.append(Dispatch(ticket))
        return True

    def _hold(self, ticket: Ticket, now: float) -> None:
        queue = self._queues[ticket.lane]
        if queue.full:
            self._refuse(ticket, self._busy(Reason.QUEUE_FULL, "the queue is full"), now)
        else:
            queue.push(ticket)

    def _refuse(self, ticket: Ticket, refusal: Refusal, now: float) -> None:
        self._effects.append(Refuse(ticket, refusal))
        outcome = Outcome.FAILED if ticket.attempts else Outcome.REFUSED
        self._finish(ticket, outcome, now, reason=refusal.reason)

    def _may_retry(self, ticket: Ticket, failure: Failure) -> bool:
        if not failure.retryable or ticket.attempts > self._config.retry.retries_max:
            return False
        if ticket.spec.priority is Priority.P3 or not self._untried(ticket):
            return False
        return self._budget.take()

    def _untried(self, ticket: Ticket) -> bool:
        pool = self._fleet.pool(ticket.pool.model, ticket.lane)
        return any(
            worker.id not in ticket.tried
            for groups in (pool.groups, pool.others)
            for group in groups
            for worker in group
        )

    def _retry(self, ticket: Ticket, now: float) -> None:
        if ticket.state is not TicketState.QUEUED:
            return
        if not self._untried(ticket):
            assert ticket.failure is not None
            self._refuse(
                ticket,
                Refusal(reason=ticket.failure.reason, message="no other worker is left to try"),
                now,
            )
        elif not self._place(ticket, now):
            self._hold(ticket, now)

    def _unload(self, ticket: Ticket, now: float) -> None:
        worker = ticket.worker
        if worker is None:
            return
        worker.release(ticket)
        self._running[ticket.lane] -= 1
        if (
            worker.state is WorkerState.DRAINING
            and worker.streams == 0
            and self._fleet.workers.get(worker.id) is worker
        ):
            self._fleet.leave(worker, "drained")

    def _finish(
        self,
        ticket: Ticket,
        outcome: Outcome,
        now: float,
        *,
        reason: Reason | None = None,
        usage: Usage | None = None,
    ) -> None:
        assert ticket.state is not TicketState.FINISHED
        self._queues[ticket.lane].remove(ticket)
        self._unload(ticket, now)
        ticket.state = TicketState.FINISHED
        self._finished += 1
        self._effects.append(Finish(_record(ticket, outcome, reason, usage, now)))
        self._pump(now)

    def _pump(self, now: float) -> None:
        for queue in self._queues.values():
            pools = queue.pools
            while pools and (ticket := queue.offer(pools)) is not None:
                if self._place(ticket, now):
                    queue.remove(ticket)
                else:
                    pools.remove(ticket.pool)

    def _membership_changed(self, now: float) -> None:
        self._costs.serve(self._fleet.models)
        for queue in self._queues.values():
            for pool in queue.pools:
                if not self._fleet.pool(pool.model, pool.lane).live:
                    for ticket in queue.of_pool(pool):
                        self._refuse(ticket, self._no_workers(), now)
        self._pump(now)

    def _drain_over(self, worker: Worker, now: float) -> None:
        if self._fleet.workers.get(worker.id) is worker:
            self._fleet.leave(worker, "drain deadline")
            self._membership_changed(now)

    def _lane_view(self, lane: Lane, now: float) -> LaneView:
        queue = self._queues[lane]
        oldest = queue.oldest_arrival_at()
        return LaneView(
            lane=lane,
            queued=len(queue),
            depth_max=queue.depth_max,
            oldest_age_s=0.0 if oldest is None else now - oldest,
            running=self._running[lane],
            drain_per_s=0.0,
        )


def _view(worker: Worker, now: float) -> WorkerView:
    return WorkerView(
        id=worker.id,
        spec=worker.spec,
        state=worker.state,
        why=worker.why,
        models=worker.models,
        models_known=worker.models_known,
        streams=worker.streams,
        waiting=worker.waiting,
        pending_tokens=worker.pend_tokens,
        kv_reserved_tokens=worker.kv_reserved_tokens,
        kv_used_tokens=None if worker.report is None else worker.report.kv_used_tokens,
        kv_total_tokens=worker.kv_total_tokens,
        concurrency_max=worker.concurrency_max,
        report=worker.report,
        report_age_s=None if worker.report is None else now - worker.reported_at,
        stale=worker.report is None,
        ttft_mean_s=None,
        breaker=worker.breaker.state,
        out_s=max(0.0, worker.breaker.out_until - now, worker.paused_until - now),
        probe_failures=worker.probe_failures,
        requests=0,
        failures=0,
    )


def _record(
    ticket: Ticket, outcome: Outcome, reason: Reason | None, usage: Usage | None, now: float
) -> RequestRecord:
    spec = ticket.spec
    known = usage is not None and usage.output_tokens is not None
    usage = usage or Usage()
    return RequestRecord(
        request_id=spec.request_id,
        tenant=spec.tenant,
        model=spec.model,
        endpoint=spec.endpoint,
        lane=ticket.lane,
        priority=spec.priority,
        stream=spec.stream,
        worker_id=ticket.worker_id,
        outcome=outcome,
        reason=reason,
        attempts=ticket.attempts,
        spilled=ticket.spilled,
        arrived_at=ticket.arrived_at,
        dispatched_at=ticket.dispatched_at,
        first_token_at=ticket.first_token_at,
        finished_at=now,
        prompt_tokens=(
            ticket.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        ),
        cached_tokens=usage.cached_tokens,
        output_tokens=(
            ticket.output_seen_tokens if usage.output_tokens is None else usage.output_tokens
        ),
        usage_known=known,
    )
