"""When a request is sent: at once, or when the pump finds that its turn and a worker's room came.

Whatever frees room calls `pump`: an end, a first token, a report, a worker's prefill credit that is
back. It goes through the waiting tickets in the order of flow control and sends those that fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from random import Random
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.effects import Dispatch, Effect
from router.core.elephants import Elephants
from router.core.headroom import grown_tokens
from router.core.placement import Placement
from router.core.pools import Pool, Pools
from router.core.preempting import Preempting
from router.core.prefix import PrefixIndex
from router.core.shadow import Shadow
from router.core.timers import Timers
from router.core.types import Priority, Run, Ticket, TicketState
from router.core.waiting import Round, WaitingRoom
from router.core.worker import Worker

_DISPATCHED: Final = TicketState.DISPATCHED
_STREAMING: Final = TicketState.STREAMING


class Scheduler:
    """Sends tickets to workers. Times are the driver's monotonic seconds."""

    def __init__(
        self,
        config: Config,
        *,
        rng: Random,
        pools: Pools,
        prefixes: PrefixIndex,
        room: WaitingRoom,
        timers: Timers,
        effects: list[Effect],
    ) -> None:
        self._pools = pools
        self._room = room
        self._waits = room.flow.waits
        self._timers = timers
        self._effects = effects
        self.elephants = Elephants(config)
        self._placement = Placement(config, rng=rng, prefixes=prefixes, elephants=self.elephants)
        self.preempting = Preempting(config, effects)
        self.shadow = Shadow(config.policy) if config.policy.shadow else None
        self.running = dict.fromkeys(Lane, 0)
        self.dispatches = self.spills = 0

    def configure(self, config: Config) -> None:
        """Take over new settings."""
        self._placement.configure(config)
        self.elephants.configure(config)
        self.preempting.configure(config)
        if self.shadow is None or self.shadow.settings != config.policy:
            self.shadow = Shadow(config.policy) if config.policy.shadow else None

    def serve(self, models: Iterable[str]) -> None:
        """Exactly these models are served now."""
        self.elephants.serve(models)

    def came(self, ticket: Ticket, now: float) -> None:
        """A request came, whatever becomes of it."""
        self.elephants.came(ticket, now)

    def fits(self, ticket: Ticket, now: float) -> bool:
        """Whether a worker has room for `ticket`, whoever else waits for it."""
        pool = self._pools.fresh(ticket.pool)
        return self._placement.choose(ticket, pool, now=now) is not None

    def place(self, ticket: Ticket, now: float) -> bool:
        """Send `ticket` if a worker has room for it."""
        worker = self._placement.choose(ticket, self._pools.fresh(ticket.pool), now=now)
        if worker is None:
            return False
        if self.shadow is not None:
            hits = self._placement.hits(ticket)
            self.shadow.look(ticket, worker, ticket.pool, hits, now=now)
        if self._waits:
            self._room.flow.serve(ticket, now=now)
        ticket.state = _DISPATCHED
        ticket.dispatched_at = now
        ticket.attempts += 1
        worker.charge(ticket, now=now)
        if worker.valid_until <= now:  # its credit is used up
            worker.refresh(now)
            self._await_pace(worker, now)
        self._placement.sent(ticket, worker)
        self.running[ticket.lane] += 1
        self._room.dispatched(ticket.lane, now)
        self.dispatches += 1
        self.spills += ticket.spilled
        if self.preempting.enabled:
            self.preempting.sent(ticket)
        self._effects.append(Dispatch(ticket))
        return True

    def resume(self, ticket: Ticket, run: Run, worker: Worker | None, now: float) -> Ticket:
        """Go on with what runs on `worker` already; None: that is gone, and nobody is charged."""
        ticket.state = _DISPATCHED if run.first_token_at is None else _STREAMING
        ticket.worker_id, ticket.attempts = run.worker_id, run.attempts
        ticket.dispatched_at, ticket.first_token_at = run.dispatched_at, run.first_token_at
        if worker is None:
            ticket.output_seen_tokens = run.output_tokens
            return ticket
        worker.charge(ticket, now=now)
        self._placement.sent(ticket, worker)
        self.running[ticket.lane] += 1
        if run.first_token_at is not None:
            worker.prefilled(ticket, now=now)
            kv_tokens = grown_tokens(
                ticket.kv_tokens,
                prompt_tokens=ticket.prompt_tokens,
                output_seen_tokens=run.output_tokens,
            )
            worker.grow(ticket, output_seen_tokens=run.output_tokens, kv_tokens=kv_tokens, now=now)
        return ticket

    def pump(self, now: float, worker: Worker | None = None) -> None:
        """Send what waits and has room now, in the order of flow control.

        With `worker`, only for its pools, and only if that one takes requests.
        """
        if not self._waits or (worker is not None and not worker.is_open(now)):
            return
        flow = self._room.flow
        pools = [
            pool
            for pool in flow.pools
            if (worker is None or worker.id in self._pools.fresh(pool).members)
            and self._is_open(pool, now)
        ]
        for group in flow.groups(pools):
            turn = Round(flow, group)
            while (ticket := turn.next(now)) is not None:
                if self._shut_for(ticket, now):
                    turn.pools.remove(ticket.pool)
                elif self.place(ticket, now):
                    turn.served()
                    turn.pools[:] = [pool for pool in turn.pools if self._is_open(pool, now)]
                else:
                    turn.passed(ticket)
            turn.end()

    def _shut_for(self, ticket: Ticket, now: float) -> bool:
        """Whether its pool takes neither `ticket` nor anything that is to be offered after it.

        Nothing is less paced than P0; a class that is owed its turn may be offered before it.
        """
        if self._is_open(ticket.pool, now, ticket.rank):
            return False
        waiting = self._room.flow.waiting
        return ticket.rank == 0 or not any(waiting(lane, Priority.P0) for lane in Lane)

    def _is_open(self, pool: Pool, now: float, rank: int = 0) -> bool:
        members = self._pools.fresh(pool).members.values()
        return any(worker.is_open(now, rank) for worker in members)

    def _await_pace(self, worker: Worker, now: float) -> None:
        """Look again when the worker's prefill credit is back."""
        back_at = min((at for at in worker.paced_until if at > now), default=None)
        if back_at is not None and not worker.pace_timer:
            worker.pace_timer = True
            self._timers.call_at(back_at, partial(self._paced, worker))

    def _paced(self, worker: Worker, now: float) -> None:
        worker.pace_timer = False
        if worker.is_open(now):
            self.pump(now, worker)
        self._await_pace(worker, now)
