"""Preemption at work: who runs unseen, and how long a newcomer would wait with and without it.

`preempt` has the rule. What it asks for is predicted here, and where the router cannot know, the
prediction errs against preemption: of a worker's waiting prompts only the one whose turn it is
counts as begun, and what is left of that one does not shorten the wait behind a victim. A victim
gives its place on one worker and the permit of its lane, so that is all that the newcomer may lack:
where others have the place, or its own lane is full, nobody gives way in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.effects import Effect, Preempt
from router.core.pools import Pool
from router.core.preempt import Candidate, Newcomer, done_ratio, victim
from router.core.types import Priority, Ticket, TicketState
from router.core.worker import Worker

_DISPATCHED: Final = TicketState.DISPATCHED
_QUEUED: Final = TicketState.QUEUED
_LEAST_URGENT: Final = Priority.P3
_SWEPT_AT: Final = 256  # remembered tickets beyond which the ended ones are forgotten


class Preempting:
    """Finds victims. Times are the driver's monotonic seconds."""

    def __init__(
        self, config: Config, *, running: Mapping[Lane, int], effects: list[Effect]
    ) -> None:
        self._running = running
        self._effects = effects
        self._sent: dict[int, Ticket] = {}  # dispatched, in that order; may have ended since
        self._swept_at = _SWEPT_AT
        self.count = 0
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings."""
        self._settings = config.preempt
        self._permits = config.lanes.permits
        self._elephant_s = config.pacing.elephant_s if config.pacing.enabled else inf
        self.enabled = config.preempt.enabled
        if not self.enabled:
            self._sent.clear()

    def sent(self, ticket: Ticket) -> None:
        """A ticket was dispatched."""
        self._sent.pop(ticket.number, None)
        self._sent[ticket.number] = ticket
        if len(self._sent) > self._swept_at:
            self._sweep()
            self._swept_at = max(_SWEPT_AT, 2 * len(self._sent))

    def came(self, newcomer: Ticket, pool: Pool, now: float) -> None:
        """A ticket came and found no room: have another give way, where the rule says so."""
        if newcomer.spec.priority is _LEAST_URGENT or newcomer.prefill_s > self._elephant_s:
            return
        workers = [worker for group in pool.groups for worker in group.workers]
        wait_s = min([_wait_s(worker, newcomer, now) for worker in workers], default=inf)
        chosen = victim(
            Newcomer(
                ticket=newcomer,
                target_at=newcomer.arrived_at + newcomer.ttft_target_s,
                prefill_s=newcomer.prefill_s,
                wait_s=wait_s if self._permitted(newcomer.lane) else inf,
            ),
            self._candidates(newcomer, {id(w) for w in workers}, wait_s, now),
            now=now,
            settings=self._settings,
        )
        if chosen is not None:
            chosen.heir = newcomer
            self._effects.append(Preempt(chosen))

    def gave_way(self, ticket: Ticket, now: float) -> None:
        """A victim waits again, as old as it is; the time on its worker was not its patience."""
        assert ticket.dispatched_at is not None
        self.count += 1
        ticket.preempted += 1
        ticket.queue_deadline_at += now - ticket.dispatched_at
        ticket.state = _QUEUED
        ticket.dispatched_at = ticket.heir = None
        ticket.attempts -= 1  # that one was not its worker's failure

    def _permitted(self, lane: Lane, *, without: Ticket | None = None) -> bool:
        """Whether one more request of `lane` may run, were `without` not there."""
        most = self._permits.get(lane)
        back = without is not None and without.lane is lane
        return most is None or self._running[lane] - back < most

    def _candidates(
        self, newcomer: Ticket, workers: set[int], wait_s: float, now: float
    ) -> Iterator[Candidate]:
        """Who could give way, and how long the newcomer would wait then; `wait_s` for a worker."""
        self._sweep()
        oldest: set[int] = set()  # workers of which the first waiting prompt was seen
        for ticket in self._sent.values():
            worker = ticket.worker
            if worker is None or id(worker) not in workers or not ticket.pending:
                continue
            first = id(worker) not in oldest
            oldest.add(id(worker))
            if ticket.spec.priority <= newcomer.spec.priority or ticket.tried:
                continue
            if ticket.heir is not None:
                continue  # it was asked already
            if not self._permitted(newcomer.lane, without=ticket):
                continue
            prefill_s = _prefill_s(worker, ticket)
            assert ticket.dispatched_at is not None
            running_s = now - max(ticket.dispatched_at, worker.progress_at) if first else 0.0
            yield Candidate(
                ticket=ticket,
                prefill_s=prefill_s,
                done_ratio=done_ratio(running_s=running_s, ahead_s=0.0, prefill_s=prefill_s),
                wait_after_s=min(wait_s, _wait_s(worker, newcomer, now, without=ticket)),
                preempted=ticket.preempted,
            )

    def _sweep(self) -> None:
        self._sent = {n: t for n, t in self._sent.items() if t.state is _DISPATCHED}


def _prefill_s(worker: Worker, ticket: Ticket) -> float:
    uncached = ticket.prompt_tokens - ticket.hit_tokens
    return worker.rates.prefill_time_s(uncached, ticket.hit_tokens)


def _wait_s(
    worker: Worker, newcomer: Ticket, now: float, *, without: Ticket | None = None
) -> float:
    """Seconds until `worker` begins with the newcomer's prompt, were `without` not there.

    inf when it has no room at all: then only the end of some stream helps.
    """
    if worker.valid_until <= now:
        worker.refresh(now)
    streams, kv_tokens, pend = worker.streams, worker.kv_reserved_tokens, worker.pend_tokens
    if without is not None:
        streams -= 1
        kv_tokens -= without.kv_tokens
        pend -= without.prompt_tokens - without.hit_tokens
    if (
        worker.id in newcomer.tried
        or streams >= worker.streams_max
        or kv_tokens + newcomer.kv_tokens > worker.kv_admitted_tokens
    ):
        return inf
    ahead_s = worker.rates.prefill_s * (pend + worker.foreign.pend_tokens)
    if without is None and worker.waiting:
        ahead_s -= now - worker.progress_at
    return max(0.0, ahead_s, worker.paced_until[newcomer.rank] - now)
