"""The lane of a request, and its token figures, from what it says and what its model is known for.

`max_tokens` decides (A9); a request that names none is judged by a quantile of its model's recent
answers. Endpoints that generate nothing are short.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.config import Config
from router.contract import Lane
from router.core.cost import ModelCost, output_tokens, prompt_tokens
from router.core.headroom import need_tokens
from router.core.types import RequestSpec


@dataclass(slots=True)
class Figures:
    """What a request is expected to need, in tokens."""

    lane: Lane
    prompt_tokens: int
    output_tokens: int  # per sequence
    kv_tokens: int  # reserved at dispatch


def classified(spec: RequestSpec, cost: ModelCost, config: Config) -> Figures:
    """Return lane and expected tokens of `spec`."""
    prompt = prompt_tokens(spec, cost)
    output = output_tokens(spec, cost, quantile=config.lanes.output_quantile)
    need = need_tokens(
        prompt_tokens=prompt,
        output_tokens=output,
        samples=spec.samples,
        reserve_tokens=config.headroom.output_reserve_tokens,
    )
    lane = Lane.SHORT if output <= config.lanes.short_tokens_max else Lane.LONG
    return Figures(lane, prompt, output, need)
