"""What a request aims at: its cost, the target for its first token, and when that is out of reach.

Prefill is what is left of the prompt for a worker that has of it cached what the best one has. A
request whose prefill alone takes most of its class's target cannot meet it; it gets the target of
the next class in which it can, so that it is neither given up at once nor chased for ever.
"""

from __future__ import annotations

from math import inf
from typing import Final

from router.config import TTL_MORE_S, Config
from router.core.cost import ModelCost
from router.core.rates import Rates
from router.core.types import Priority, RequestSpec, Ticket

_TOKENS_PER_COST: Final = 1_000
_URGENT: Final = Priority.P0


class Aims:
    """Cost, target, patience and relegation of tickets, under one configuration."""

    def __init__(self, config: Config) -> None:
        self._feasible_ratio = config.slo.feasible_ratio
        self._usual_share = config.lanes.output_quantile
        self._late_ratio = config.queue.relegate_ratio or inf
        self._targets_s = [c.ttft_target_s for c in config.classes.by_priority]
        self._waits_s_max = config.waits_s_max
        self._ttl_targets = config.ttl_targets

    def patience_s(self, spec: RequestSpec) -> float:
        """The longest wait of a request: that of its class, or of its client if that is shorter."""
        wait_s = self._waits_s_max[spec.priority]
        return wait_s if spec.wait_s_max is None else min(wait_s, spec.wait_s_max)

    def cost(self, prompt_tokens: int, output_tokens: int) -> float:
        """Cost units: (prompt + 2 * output tokens) / 1000.

        A decoded token costs an engine more than a prefilled one (docs/policy.md, cost units).
        """
        return (prompt_tokens + 2 * output_tokens) / _TOKENS_PER_COST

    def aim(
        self, ticket: Ticket, rates: Rates | None, costs: ModelCost, *, cached_tokens: int
    ) -> None:
        """Fill in what flow control goes by; `rates` are those of a worker that may serve it.

        So many tokens of its prompt, less than all, are expected to be cached where it will go.
        max_tokens says what a client allows, not what it will get: what is longer than its model's
        answers usually are does not count beforehand.
        """
        spec = ticket.spec
        output_tokens = min(ticket.output_tokens, costs.usual_tokens(self._usual_share))
        ticket.cost = self.cost(ticket.prompt_tokens, output_tokens * spec.samples)
        prompt = ticket.prompt_tokens
        alone_s = 0.0 if rates is None else rates.prefill_time_s(prompt, 0)
        own_s = target_s = self._targets_s[spec.priority]
        if alone_s > self._feasible_ratio * own_s:
            target_s = self._possible_s(spec.priority, alone_s)
        ticket.prefill_whole_s, ticket.ttft_target_whole_s = alone_s, target_s
        if cached_tokens and rates is not None:
            alone_s = rates.prefill_time_s(prompt - cached_tokens, cached_tokens)
            if target_s != own_s:
                target_s = self._possible_s(spec.priority, alone_s)
        ticket.prefill_s, ticket.ttft_target_s = alone_s, target_s
        ticket.rank = 0 if spec.priority is _URGENT else 1
        spare_s = max(0.0, self._late_ratio * target_s - alone_s)
        ticket.late_at = ticket.arrived_at + spare_s
        ticket.ttl_s = inf
        if rates is not None:  # without a worker it waits for one, and not behind others
            ttl_targets = self._ttl_targets[spec.priority]
            ticket.ttl_s = max(spare_s, ttl_targets * ticket.ttft_target_whole_s + TTL_MORE_S)

    def _possible_s(self, priority: int, alone_s: float) -> float:
        """The target of the nearest class that leaves time for the prefill; else the longest."""
        targets_s = self._targets_s[priority:]
        possible = [s for s in targets_s if alone_s <= self._feasible_ratio * s]
        return min(possible, default=max(targets_s))
