"""The lane of a request, and its token figures, from what it says and what its model is known for.

`max_tokens` decides. A request that names none gets SGLang's own default for its endpoint,
or, where that is the end of the context, a quantile of its model's recent answers. Endpoints that
generate nothing are short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.cost import ModelCost
from router.core.headroom import need_tokens
from router.core.types import PREFILL_ONLY, Endpoint, RequestSpec

# SGLang's own defaults; chat-like endpoints run to the end of the context.
_OUTPUT_DEFAULT: Final[Mapping[Endpoint, int]] = {
    Endpoint.COMPLETIONS: 16,
    Endpoint.GENERATE: 128,
}
_SHORT, _LONG = Lane.SHORT, Lane.LONG


def limit_tokens(spec: RequestSpec) -> int | None:
    """Output tokens at which the engine ends an answer; None: at the end of the context."""
    return _OUTPUT_DEFAULT.get(spec.endpoint) if spec.max_tokens is None else spec.max_tokens


# What a request is expected to need: its lane, prompt tokens, output tokens per sequence, and KV
# tokens that are reserved at dispatch.
Figures = tuple[Lane, int, int, int]


class Classifier:
    """Lane and tokens of requests, under one configuration."""

    def __init__(self, config: Config) -> None:
        self._short_tokens_max = config.lanes.short_tokens_max
        self._quantile = config.lanes.output_quantile
        self._reserve_tokens = config.headroom.output_reserve_tokens

    def figures(
        self, spec: RequestSpec, cost: ModelCost, *, tokens_max: int | None = None
    ) -> Figures:
        """What `spec` is expected to need of its model, with `tokens_max` if it was cut to that."""
        prompt = int(spec.prompt_bytes * cost.tokens_per_byte) + 1
        output = spec.max_tokens
        if output is None or spec.endpoint in PREFILL_ONLY:
            output = self._unasked_tokens(spec.endpoint, cost)
        if tokens_max is not None:
            output = min(output, tokens_max)
        if cost.context_tokens is not None:
            output = min(output, cost.context_tokens - prompt)
        output = output if output > 0 else 0
        need = need_tokens(prompt, output, spec.samples, self._reserve_tokens)
        lane = _SHORT if output <= self._short_tokens_max else _LONG
        return lane, prompt, output, need

    def _unasked_tokens(self, endpoint: Endpoint, cost: ModelCost) -> int:
        """Output tokens to expect per sequence of a request that does not limit them."""
        if endpoint in PREFILL_ONLY:
            return 0
        default = _OUTPUT_DEFAULT.get(endpoint)
        if default is not None:
            return default
        return cost.usual_tokens(self._quantile)
