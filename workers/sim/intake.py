"""From what a request asks for to what the engine is given: lengths, limits, prefix blocks.

Prompt tokens are estimated from bytes by a fixed ratio, output lengths drawn from a seeded
lognormal distribution within the limits, or exactly the limit where ignore_eos is set.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field
from random import Random
from time import time
from typing import Final

from workers.engine_model import EngineProfile, EngineRequest, EngineSettings
from workers.sim.answers import Sequence
from workers.sim.asks import Api, Ask, BadAsk, generate_error, rule_broken

BYTES_PER_TOKEN: Final = 4
_RING_OFFSETS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What kind of worker to simulate."""

    profile: EngineProfile
    engine: EngineSettings = field(default_factory=EngineSettings)
    model: str = "sim-8b"
    context_length: int = 131_072
    sglang_version: str = "0.5.23"
    sglang_health: bool = False  # /health has SGLang's empty body instead of the load report
    api_key: str | None = None
    time_scale: float = 1.0  # 2: the engine runs twice as fast as the clock
    output_median_tokens: int = 129
    output_sigma: float = 1.0  # of the lognormal distribution of answer lengths
    seed: int = 0


class Intake:
    """Makes the sequences of one worker's answers."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._random = Random(options.seed)

    def sequences(self, ask: Ask, live: Container[str]) -> list[Sequence]:
        """Return the sequences that `ask` wants; `live` are ids in use. Raises BadAsk."""
        count = len(ask.prompts) * ask.samples
        rids = ask.rids
        if len(rids) != count:
            prefix = "resp_" if ask.api is Api.RESPONSES else ""
            stem = rids[0] if rids else f"{prefix}{self._random.getrandbits(128):032x}"
            rids = (stem,) if count == 1 else tuple(f"{stem}-{index}" for index in range(count))
        for rid in rids:
            if rid in live:
                raise _rule(ask, f"Duplicate request ID detected: {rid}")
        received_at = time()
        return [
            Sequence(
                request=self._request(rid, ask, ask.prompts[index // ask.samples]),
                ask=ask,
                index=index,
                offset=self._random.randrange(_RING_OFFSETS),
                created=int(received_at),
                received_at=received_at,
                time_scale=self._options.time_scale,
            )
            for index, rid in enumerate(rids)
        ]

    def _request(self, rid: str, ask: Ask, prompt: bytes) -> EngineRequest:
        prompt_tokens = max(1, ask.extra_tokens + count_tokens(prompt))
        limit = self._checked_limit(ask, prompt_tokens)
        return EngineRequest(
            id=rid,
            prompt_tokens=prompt_tokens,
            output_tokens=self._drawn_output(ask, limit),
            max_new_tokens=limit,
            priority=ask.priority,
            ignore_eos=ask.ignore_eos,
            blocks=_blocks(prompt, self._options.engine.prefix_block_tokens * BYTES_PER_TOKEN),
        )

    def _checked_limit(self, ask: Ask, prompt_tokens: int) -> int:
        """Return the output limit within the context. Raises BadAsk where SGLang refuses."""
        context = min(self._options.context_length, self._options.profile.kv_total_tokens - 2)
        if ask.api in (Api.EMBEDDINGS, Api.RERANK):
            limit = 0
        elif ask.max_tokens is None:
            limit = context - prompt_tokens - 1
        else:
            limit = ask.max_tokens
        if ask.api in (Api.CHAT, Api.MESSAGES) and limit > context:
            raise rule_broken(
                f"max_completion_tokens is too large: {limit}."
                f"This model supports at most {context} completion tokens."
            )
        if prompt_tokens >= context:
            raise _rule(
                ask,
                f"The input ({prompt_tokens} tokens) is longer than the model's context length "
                f"({context} tokens).",
            )
        if prompt_tokens + limit > context:
            raise _rule(
                ask,
                "Requested token count exceeds the model's maximum context length of "
                f"{context} tokens. You requested a total of {prompt_tokens + limit} tokens: "
                f"{prompt_tokens} tokens from the input messages and {limit} tokens for the "
                "completion. Please reduce the number of tokens in the input messages or the "
                "completion to fit within the limit.",
            )
        return limit

    def _drawn_output(self, ask: Ask, limit: int) -> int:
        if ask.ignore_eos:
            return limit
        median = math.log(self._options.output_median_tokens)
        drawn = int(self._random.lognormvariate(median, self._options.output_sigma))
        return min(limit, max(1, ask.min_tokens, drawn))


def _rule(ask: Ask, message: str) -> BadAsk:
    if ask.api is Api.GENERATE:
        return generate_error(message, streamed=ask.stream)
    return rule_broken(message)


def count_tokens(text: bytes) -> int:
    """Return the tokens of `text` by the fixed ratio."""
    return math.ceil(len(text) / BYTES_PER_TOKEN)


def _blocks(prompt: bytes, size: int) -> tuple[int, ...]:
    """Return chained hashes of the whole blocks of `size` bytes; they hold within one process."""
    blocks: list[int] = []
    chained = 0
    for start in range(0, len(prompt) - size + 1, size):
        chained = hash((chained, prompt[start : start + size]))
        blocks.append(chained)
    return tuple(blocks)
