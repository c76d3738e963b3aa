"""SGLang's /v1/loads, as its JSON has it: what is read of it, and which figure of ours that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from router.contract import Count, Moments, Number, Ratio

RANKS_MAX: Final = 4096

Moment = Number | str  # seconds since 1970, or ISO 8601


class RankLoad(msgspec.Struct):
    """One data-parallel rank."""

    timestamp: Moment | None = None
    num_running_reqs: Count | None = None
    num_waiting_reqs: Count | None = None
    num_waiting_uncached_tokens: Count | None = None
    max_running_requests: Count | None = None
    num_used_tokens: Count | None = None
    max_total_num_tokens: Count | None = None
    gen_throughput: Number | None = None
    cache_hit_rate: Ratio | None = None
    total_prefill_uncached_tokens: Count | None = None
    total_prefill_busy_us: Number | None = None
    decode_moments: Moments | None = None


class Loads(msgspec.Struct):
    """The answer."""

    loads: Annotated[list[RankLoad], msgspec.Meta(min_length=1, max_length=RANKS_MAX)]
    timestamp: Moment | None = None


decode_loads: Final = msgspec.json.Decoder(Loads).decode

# By the names of a rank.
FIGURES: Final[Mapping[str, str]] = {
    "num_running_reqs": "running_requests",
    "num_waiting_reqs": "queued_requests",
    "num_waiting_uncached_tokens": "queued_uncached_tokens",
    "max_running_requests": "max_running_requests",
    "num_used_tokens": "kv_used_tokens",
    "max_total_num_tokens": "kv_total_tokens",
    "gen_throughput": "generation_tokens_per_s",
    "cache_hit_rate": "cache_hit_ratio",
    "total_prefill_uncached_tokens": "prefill_tokens_total",
    "total_prefill_busy_us": "prefill_busy_s_total",
    "decode_moments": "decode_moments",
}
