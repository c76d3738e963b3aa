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
from router.core.placement import Placement
from router.core.pools import Pool, Pools
from router.core.prefix import PrefixIndex
from router.core.timers import Timers
from router.core.types import Ticket, TicketState
from router.core.waiting import Round, WaitingRoom
from router.core.worker import Worker

_DISPATCHED: Final = TicketState.DISPATCHED


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
        self._elephants = Elephants(config)
        self._placement = Placement(config, rng=rng, prefixes=prefixes, elephants=self._elephants)
        self.running = dict.fromkeys(Lane, 0)
        self.dispatches = self.spills = 0

    def configure(self, config: Config) -> None:
        """Take over new settings."""
        self._placement.configure(config)
        self._elephants.configure(config)

    def serve(self, models: Iterable[str]) -> None:
        """Exactly these models are served now."""
        self._elephants.serve(models)

    def came(self, ticket: Ticket, now: float) -> None:
        """A request came, whatever becomes of it."""
        self._elephants.came(ticket, now)

    def place(self, ticket: Ticket, now: float) -> bool:
        """Send `ticket` if a worker has room for it."""
        worker = self._placement.choose(ticket, self._pools.fresh(ticket.pool), now=now)
        if worker is None:
            return False
        if self._waits:
            self._room.flow.serve(ticket)
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
        self._effects.append(Dispatch(ticket))
        return True

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
        turn = Round(flow, pools)
        while (ticket := turn.next(now)) is not None:
            if self.place(ticket, now):
                turn.served()
                turn.pools[:] = [pool for pool in turn.pools if self._is_open(pool, now)]
            else:
                turn.passed(ticket)
        turn.end()

    def _is_open(self, pool: Pool, now: float) -> bool:
        return any(worker.is_open(now) for worker in self._pools.fresh(pool).members.values())

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
