"""Very long prompts: how many workers may prefill one at a time.

An engine that prefills a long prompt serves nobody else meanwhile, and its streams must recover
afterwards. So of the n workers of a model at most

    max(1, floor(n - headroom * others / duty))

have an elephant waiting or in prefill at once: `others` is the prefill that all other requests of
their domain bring, whatever model they name, in seconds per second, `duty` the mean share of a
worker's time that pacing leaves for prefill. What is left over belongs to the elephants, and when
nothing else comes, all of it.
An elephant is a request whose uncached prompt takes longer than `pacing.elephant_s` to prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor
from typing import Final

from router.config import Config
from router.core.fading import FadingRate
from router.core.pools import ANY_MODEL, Pool
from router.core.types import Ticket
from router.core.worker import Worker

_MEMORY_S: Final = 20.0  # over which the others' demand is averaged


class Elephants:
    """Tells elephants from other requests, and when one more may start."""

    def __init__(self, config: Config) -> None:
        self._demands: dict[str, FadingRate] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings; the measured demand stays."""
        self._enabled = config.pacing.enabled
        self.least_s = config.pacing.elephant_s  # uncached prefill of an elephant is longer
        self._headroom = config.pacing.elephant_headroom

    def serve(self, domains: Iterable[str]) -> None:
        """Keep demand for exactly these domains."""
        self._demands = {n: self._demands.get(n) or FadingRate(_MEMORY_S) for n in domains}

    def came(self, ticket: Ticket, now: float) -> None:
        """A request came; one that is no elephant counts as the others' demand."""
        if ticket.prefill_s <= self.least_s:
            demand = self._demands.get(ticket.pool.domain)
            if demand is not None:
                demand.add(ticket.prefill_s, now)

    def is_one(self, prefill_s: float) -> bool:
        """Whether a request with this much uncached prefill is an elephant."""
        return self._enabled and prefill_s > self.least_s

    def may_start(self, pool: Pool, now: float) -> bool:
        """Whether one more elephant may be sent to a worker of `pool`."""
        workers = pool.members.values()
        if any(worker.is_router for worker in workers):
            return True  # which lets them wait as its own workers want it
        return self.busy(workers) < self.width(pool, now)

    def busy(self, workers: Iterable[Worker]) -> int:
        """How many of `workers` have so much to prefill that an elephant must be there."""
        return sum(w.pend_tokens * w.rates.prefill_s > self.least_s for w in workers)

    def width(self, pool: Pool, now: float) -> int:
        """How many workers of `pool` may have an elephant of this router's at once: 1 to all.

        Of several routers each sees its part of the demand, and has its part of the workers.
        """
        # Requests that name no model may be sent to the workers of any domain.
        domain, workers = pool.domain, pool.members.values()
        names = self._demands if domain == ANY_MODEL else (domain, ANY_MODEL)
        others = sum([self._demands[n].per_s(now) for n in names if n in self._demands])
        duty = sum(worker.pace.duty for worker in workers) / max(1, len(workers))
        mine = len(workers) / pool.routers
        return max(1, floor(mine - self._headroom * others / max(duty, 0.01)))
