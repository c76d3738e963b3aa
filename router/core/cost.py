"""What a request will cost in tokens, known before it runs only by estimate.

Prompt tokens are bytes of text divided by the model's ratio; output is what the client allows, or
SGLang's own default for the endpoint, or what this model's answers usually need. Settled usage
corrects both. Only models that workers serve have a history: a name in a request is client text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, log2

from router.config import ModelSettings
from router.core.types import Endpoint, RequestSpec, Usage

# SGLang's own defaults where a request names no limit; chat-like endpoints run to the context end.
_OUTPUT_DEFAULT: Mapping[Endpoint, int] = {Endpoint.COMPLETIONS: 16, Endpoint.GENERATE: 128}
# Smaller prompts are mostly chat template, which bytes do not show.
_LEARNT_BYTES_MIN = 256
_RATIO_WEIGHT = 0.05
_RATIO_MIN, _RATIO_MAX = 0.25, 64.0


class OutputLengths:
    """A model's recent output lengths: a histogram over powers of the fourth root of two.

    Old counts fade by half whenever `_FADE_AT` are full, so it follows a change within a few
    thousand answers; a quantile errs by at most 19 %, upwards.
    """

    _FADE_AT = 2_000
    _KNOWN_AT = 20  # fewer tell nothing of a tail

    def __init__(self) -> None:
        self._counts = [0.0] * 96  # up to 2**24
        self._total = 0.0
        self._quantiles: dict[float, int | None] = {}

    def add(self, tokens: int) -> None:
        """Count one answer of `tokens`."""
        self._counts[min(95, ceil(4 * log2(max(1, tokens)) - 1e-9))] += 1
        self._total += 1
        self._quantiles.clear()
        if self._total >= self._FADE_AT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def quantile(self, share: float) -> int | None:
        """The length that `share` of the answers do not exceed; None while too few are known."""
        if self._total < self._KNOWN_AT:
            return None
        if share not in self._quantiles:
            self._quantiles[share] = self._computed(share)
        return self._quantiles[share]

    def _computed(self, share: float) -> int:
        seen = 0.0
        for step, count in enumerate(self._counts):
            seen += count
            if seen >= share * self._total:
                return int(2 ** (step / 4))
        return int(2 ** (len(self._counts) / 4))


class ModelCost:
    """What is known of one model's tokens."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.outputs = OutputLengths()
        self._tokens_per_byte = 1 / settings.bytes_per_token

    @property
    def bytes_per_token(self) -> float:
        """Prompt bytes per token, now."""
        return 1 / self._tokens_per_byte

    def learn_prompt(self, *, prompt_bytes: int, prompt_tokens: int) -> None:
        """Correct the ratio by a settled request; the mean of tokens per byte is what unbiases."""
        if prompt_bytes >= _LEARNT_BYTES_MIN and prompt_tokens > 0:
            ratio = min(_RATIO_MAX, max(_RATIO_MIN, prompt_bytes / prompt_tokens))
            self._tokens_per_byte += _RATIO_WEIGHT * (1 / ratio - self._tokens_per_byte)


class CostModel:
    """Token estimates for all served models, and one entry for everything else."""

    def __init__(self, settings: Mapping[str, ModelSettings]) -> None:
        self._settings = settings
        self._others = ModelCost(ModelSettings())
        self._models: dict[str, ModelCost] = {}

    def serve(self, models: Iterable[str]) -> None:
        """Keep entries for exactly these models; what was learnt of the kept ones stays."""
        self._models = {
            name: self._models.get(name) or ModelCost(self._settings.get(name, ModelSettings()))
            for name in models
        }

    def of(self, model: str | None) -> ModelCost:
        """The entry of `model`; models that nobody serves share one."""
        return self._models.get(model, self._others) if model is not None else self._others

    def configure(self, settings: Mapping[str, ModelSettings]) -> None:
        """Take over new settings; ratios and histories that were learnt stay."""
        self._settings = settings
        for name, entry in self._models.items():
            entry.settings = settings.get(name, ModelSettings())

    def learn(self, spec: RequestSpec, model: str, usage: Usage) -> None:
        """Correct the estimates by what a request that ended well really used."""
        entry = self.of(model)
        if usage.prompt_tokens is not None:
            entry.learn_prompt(prompt_bytes=spec.prompt_bytes, prompt_tokens=usage.prompt_tokens)
        if usage.output_tokens is not None and spec.endpoint.generates:
            entry.outputs.add(usage.output_tokens // max(1, spec.samples))


def prompt_tokens(spec: RequestSpec, cost: ModelCost) -> int:
    """Estimated prompt tokens of a request, at least 1."""
    return int(spec.prompt_bytes / cost.bytes_per_token) + 1


def output_tokens(spec: RequestSpec, cost: ModelCost, *, quantile: float) -> int:
    """Output tokens to expect per sequence; 0 for endpoints that only prefill."""
    if not spec.endpoint.generates:
        return 0
    if spec.max_tokens is not None:
        return max(0, spec.max_tokens)
    default = _OUTPUT_DEFAULT.get(spec.endpoint)
    if default is not None:
        return default
    return cost.outputs.quantile(quantile) or cost.settings.output_tokens_default
