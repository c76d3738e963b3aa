"""What a waiting ticket can hope for: whether any worker could ever take it, or may in time."""

from __future__ import annotations

from math import inf

from router.config import Config
from router.core import refusals
from router.core.breaker import BreakerState
from router.core.homes import Homes
from router.core.pools import ANY_MODEL, Pool, Pools
from router.core.types import Failure, Priority, Refusal, Ticket
from router.core.worker import Worker


class Prospects:
    """Looks at the workers that a ticket may go to."""

    def __init__(self, config: Config, pools: Pools, homes: Homes) -> None:
        self._pools = pools
        self._homes = homes
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings."""
        self._probe_interval_s = config.probe.interval_s
        self._retries_max = config.retry.retries_max

    def at_arrival(self, ticket: Ticket, now: float) -> Refusal | None:
        """The same as `hopeless`; it never goes to a router that it came through."""
        ticket.tried, pool = ticket.spec.avoid, ticket.pool
        if pool.model == ANY_MODEL:  # perhaps as nobody serves what it names
            return self.hopeless(ticket, now)
        return self._unserved(ticket, pool) and self._in_vain(ticket, pool)

    def hopeless(self, ticket: Ticket, now: float) -> Refusal | None:
        """Why waiting could never help `ticket`, as things are now; it may have moved by that."""
        refusal = self._homes.follow(ticket, now)
        return refusal or self._in_vain(ticket, self._pools.fresh(ticket.pool))

    def _in_vain(self, ticket: Ticket, pool: Pool) -> Refusal | None:
        """The same, of a ticket that is at home. A worker that joins may always help."""
        refusal = self._unserved(ticket, pool)
        if refusal is not None and any(w.id not in ticket.tried for w in pool.joining):
            return None
        return refusal

    def at_deadline(self, ticket: Ticket, now: float) -> Refusal | None:
        """Why `ticket` waited in vain, if that is no want of room."""
        pool = self._pools.fresh(ticket.pool)
        return self._unserved(ticket, pool) or self.out_of_order(ticket, now)

    def all_away(self, ticket: Ticket, now: float) -> bool:
        """Whether `ticket` waits for a worker to come back, and not behind others."""
        members = self._pools.fresh(ticket.pool).members.values()
        return all(w.away_until > now for w in members if w.id not in ticket.tried)

    def _unserved(self, ticket: Ticket, pool: Pool) -> Refusal | None:
        """Why no worker that is here could ever take `ticket`, if so."""
        if (ticket.tried or not pool.members) and not self.untried(ticket):
            if ticket.failure is None and not pool.members:
                if not self._pools.has_workers:
                    return refusals.none_registered(self._probe_interval_s)
                return refusals.no_workers(self._probe_interval_s)
            return refusals.nobody_left(ticket.failure)
        limit = pool.kv_need_max
        if limit is not None and ticket.kv_tokens > limit:
            return refusals.too_large(need_tokens=ticket.kv_tokens, limit_tokens=limit)
        return None

    def out_of_order(self, ticket: Ticket, now: float) -> Refusal | None:
        """Why `ticket` should not wait although workers live: all fail, or pause for too long."""
        workers = self.untried(ticket)
        back_at = min((worker.away_until for worker in workers), default=now)
        if back_at <= now:
            return None
        if all(worker.breaker.state is BreakerState.OPEN for worker in workers):
            return refusals.all_failing(back_at - now)
        if ticket.queue_deadline_at < back_at < inf:
            return refusals.workers_pause(back_at - now)
        return None

    def untried(self, ticket: Ticket) -> list[Worker]:
        """The workers of its pool at which `ticket` has not failed, nor came through."""
        members = self._pools.fresh(ticket.pool).members.values()
        return [worker for worker in members if worker.id not in ticket.tried]

    def may_retry(self, ticket: Ticket, failure: Failure, now: float) -> bool:
        """Whether another attempt makes sense after this one, if the budget has one left."""
        if not failure.retryable or ticket.attempts > self._retries_max:
            return False
        if ticket.spec.priority is Priority.P3 or not self.untried(ticket):
            return False
        return self.out_of_order(ticket, now) is None
