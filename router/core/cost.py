"""What is known of each model's tokens: prompt bytes per token, and how long its answers are.

Configuration gives first guesses, settled usage corrects them. Only models that workers serve have
an entry, as a name in a request is client text; all others share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, log2
from typing import Final

from router.core.types import PREFILL_ONLY, Ticket, Usage
from router.model_settings import ModelSettings

# Smaller prompts are mostly chat template, which bytes do not show.
_LEARNT_BYTES_MIN: Final = 256
_RATIO_WEIGHT: Final = 0.05
_RATIO_MIN, _RATIO_MAX = 0.25, 64.0

_BUCKETS: Final = 96  # up to 2**24 tokens


class OutputLengths:
    """A model's recent output lengths: a histogram over powers of the fourth root of two.

    Old counts fade by half whenever `_FADE_AT` are full, so it follows a change within a few
    thousand answers; a quantile errs by at most 19 %, upwards.
    """

    _FADE_AT = 2_000
    _KNOWN_AT = 20  # fewer tell nothing of a tail

    def __init__(self) -> None:
        self._counts = [0.0] * _BUCKETS
        self._total = 0.0
        self._quantiles: dict[float, _Place] = {}

    def add(self, tokens: int) -> None:
        """Count one answer of `tokens`."""
        bucket = _BUCKET_OF[tokens] if 0 <= tokens < _BUCKETS_KNOWN else _bucket(tokens)
        self._counts[bucket] += 1
        self._total += 1
        for place in self._quantiles.values():
            if bucket < place.bucket:
                place.below += 1
        if self._total >= self._FADE_AT:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
            self._quantiles = {}

    def quantile(self, share: float) -> int | None:
        """The length that `share` of the answers do not exceed; None while too few are known."""
        if self._total < self._KNOWN_AT:
            return None
        place = self._quantiles.get(share)
        if place is None:
            place = self._quantiles[share] = _Place()
        return place.tokens(self._counts, share * self._total)


class _Place:
    """The bucket of a quantile, and how many answers are below it: one more moves it little."""

    __slots__ = ("below", "bucket")

    def __init__(self) -> None:
        self.bucket = 0
        self.below = 0.0

    def tokens(self, counts: list[float], rank: float) -> int:
        """The upper edge of the first bucket that `rank` answers do not exceed, going there."""
        bucket, below = self.bucket, self.below
        while bucket > 0 and below >= rank:
            bucket -= 1
            below -= counts[bucket]
        while below + counts[bucket] < rank and bucket < _BUCKETS - 1:
            below += counts[bucket]
            bucket += 1
        self.bucket, self.below = bucket, below
        return _EDGES[bucket]


def _bucket(tokens: int) -> int:
    """The first bucket whose upper edge, 2**(bucket/4), is not below `tokens`."""
    return min(_BUCKETS - 1, ceil(4 * log2(max(1, tokens)) - 1e-9))


_EDGES: Final = [int(2 ** (bucket / 4) + 1e-6) for bucket in range(_BUCKETS)]
_BUCKETS_KNOWN: Final = 4_096
_BUCKET_OF: Final = [_bucket(tokens) for tokens in range(_BUCKETS_KNOWN)]


class ModelCost:
    """What is known of one model's tokens."""

    __slots__ = ("context_tokens", "output_tokens_default", "outputs", "tokens_per_byte")

    def __init__(self, settings: ModelSettings) -> None:
        self.outputs = OutputLengths()
        self.tokens_per_byte = 1 / settings.bytes_per_token
        self.configure(settings)

    def configure(self, settings: ModelSettings) -> None:
        """Take over settings; what was learnt stays."""
        self.context_tokens = settings.context_tokens
        self.output_tokens_default = settings.output_tokens_default

    def usual_tokens(self, share: float) -> int:
        """The length of answer that `share` of them do not exceed, as far as is known."""
        return self.outputs.quantile(share) or self.output_tokens_default

    def learn_prompt(self, *, prompt_bytes: int, prompt_tokens: int) -> None:
        """Correct the ratio by a settled request.

        Tokens per byte are averaged, not bytes per token: estimates multiply by the former.
        """
        if prompt_bytes >= _LEARNT_BYTES_MIN and prompt_tokens > 0:
            ratio = prompt_bytes / prompt_tokens
            if not _RATIO_MIN <= ratio <= _RATIO_MAX:
                ratio = _RATIO_MIN if ratio < _RATIO_MIN else _RATIO_MAX
            self.tokens_per_byte += _RATIO_WEIGHT * (1 / ratio - self.tokens_per_byte)


class CostModel:
    """Entries for all served models, and one for everything else."""

    def __init__(self, settings: Mapping[str, ModelSettings]) -> None:
        self._settings = _by_any_name(settings)
        self._others = ModelCost(ModelSettings())
        self._models: dict[str, ModelCost] = {}

    def __len__(self) -> int:
        return len(self._models)

    def serve(self, models: Iterable[str]) -> None:
        """Keep entries for exactly these models; what was learnt of the kept ones stays."""
        self._models = {
            name: self._models.get(name) or ModelCost(self._settings.get(name, ModelSettings()))
            for name in models
        }

    def configure(self, settings: Mapping[str, ModelSettings]) -> None:
        """Take over new settings; ratios and histories that were learnt stay."""
        self._settings = _by_any_name(settings)
        for name, entry in self._models.items():
            entry.configure(self._settings.get(name, ModelSettings()))

    def of(self, model: str | None) -> ModelCost:
        """The entry of `model`; models that nobody serves share one."""
        return self._others if model is None else self._models.get(model, self._others)

    def learn(self, ticket: Ticket, usage: Usage | None) -> None:
        """Correct the estimates by what a request that ended well used; None: what was seen of it.

        How long its answers are was not its model's choice if it was degraded.
        """
        spec, entry = ticket.spec, self._models.get(ticket.pool.model, self._others)
        if usage is None:
            usage = Usage(output_tokens=ticket.output_seen_tokens or None)
        prompt, output = usage.prompt_tokens, usage.output_tokens
        if prompt is not None:
            entry.learn_prompt(prompt_bytes=spec.prompt_bytes, prompt_tokens=prompt)
        chosen = ticket.degraded is None and spec.endpoint not in PREFILL_ONLY
        if output is not None and chosen:
            entry.outputs.add(output // (spec.samples or 1))


def _by_any_name(settings: Mapping[str, ModelSettings]) -> dict[str, ModelSettings]:
    return {name: one for model, one in settings.items() for name in (model, *one.aliases)}
