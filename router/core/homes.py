"""The home of a ticket: the pool, the lane and the figures that follow from its model.

Workers say what they serve only after they were registered. A ticket that came before goes to the
pool of its model as soon as one is known, with its age and its place.
"""

from __future__ import annotations

from collections.abc import Callable

from router.config import Config
from router.core import refusals
from router.core.aims import Aims
from router.core.classify import Classifier
from router.core.cost import CostModel
from router.core.flow import FlowQueue
from router.core.pools import ANY_MODEL, UNLISTED, Pool, Pools
from router.core.types import Refusal, Ticket


class Homes:
    """Moves tickets whose model is another, or is known by now."""

    def __init__(
        self,
        config: Config,
        pools: Pools,
        costs: CostModel,
        flow: FlowQueue,
        *,
        cached_tokens: Callable[[Ticket], int],
    ) -> None:
        self._pools = pools
        self._costs = costs
        self._flow = flow
        self._cached_tokens = cached_tokens
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings, for those who move from now on."""
        self._classifier = Classifier(config)
        self._aims = Aims(config)

    def follow(self, ticket: Ticket, now: float) -> Refusal | None:
        """Let a ticket that waits, here or elsewhere, go by what workers say of themselves now."""
        pool = self._pools.fresh(ticket.pool)
        key: str | None = pool.model
        if ticket.spec.model and key in (ANY_MODEL, UNLISTED):
            key = self._pools.model_key(ticket.spec.model)
        if key is None:
            return refusals.model_not_found(ticket.spec.model)
        rates_are_news = pool.rates is not None and not ticket.prefill_whole_s
        if key != pool.model or rates_are_news:
            waits = self._flow.take_out(ticket, now=now)
            cut = None if ticket.degraded is None else ticket.degraded.max_tokens
            self.move(ticket, key, tokens_max=cut)
            if waits:
                self._flow.put_back(ticket, now=now)
        return None

    def move(self, ticket: Ticket, model_key: str, *, tokens_max: int | None) -> None:
        """Make a ticket, which stands in no queue, one of a model, cut to `tokens_max`."""
        costs = self._costs.of(model_key)
        lane, prompt_tokens, output_tokens, kv_tokens = self._classifier.figures(
            ticket.spec, costs, tokens_max=tokens_max
        )
        pool = self._pools.get(model_key, lane)
        if not could_take(pool, kv_tokens):
            pool = self._pools.get(model_key, ticket.lane)  # nobody serves the new lane
        ticket.pool, ticket.lane = pool, pool.lane
        ticket.prompt_tokens = prompt_tokens
        ticket.output_tokens = output_tokens
        ticket.kv_tokens = kv_tokens
        self._aims.aim(ticket, pool.rates, costs, cached_tokens=self._cached_tokens(ticket))


def could_take(pool: Pool, kv_tokens: int) -> bool:
    """Whether some live worker of `pool` could hold a request of this size, at least when idle."""
    return bool(pool.members) and (pool.kv_need_max is None or kv_tokens <= pool.kv_need_max)
