"""KV-aware admission: what a request will hold of a worker's KV pool, and whether it fits.

A worker takes a request only if `in use + reserved + need <= usable_tokens`. The need is the prompt
plus a first part of the output; the reservation grows as the stream runs. Reserving all of
max_tokens would leave most of the pool idle, as few answers use it.
"""

from __future__ import annotations

from typing import Final

from router.core.types import Ticket

# The margin takes at most this share of a pool: one of a few hundred MB must stay of use.
_MARGIN_RATIO_MAX: Final = 0.25


def usable_tokens(
    total_tokens: int, *, ratio_max: float, margin_bytes: float, bytes_per_token: float | None
) -> float:
    """KV tokens of a pool of `total_tokens` that may be in use and reserved, by whomever.

    `ratio_max` of them, and less where that leaves less than `margin_bytes` free; the margin takes
    a quarter of the pool at most, and nothing where `bytes_per_token` is unknown.
    """
    usable = ratio_max * total_tokens
    if bytes_per_token is None:
        return usable
    margin = min(margin_bytes / bytes_per_token, _MARGIN_RATIO_MAX * total_tokens)
    return min(usable, total_tokens - margin)


def need_tokens(prompt_tokens: int, output_tokens: int, samples: int, reserve_tokens: int) -> int:
    """KV tokens that a request is charged with at dispatch. Samples share the prompt."""
    reserved = output_tokens if output_tokens < reserve_tokens else reserve_tokens
    return prompt_tokens + samples * reserved


def grown_tokens(need: int, *, prompt_tokens: int, output_seen_tokens: int) -> int:
    """The reservation of a running request: never less than what it already holds."""
    return max(need, prompt_tokens + output_seen_tokens)


def grows_unseen(ticket: Ticket) -> bool:
    """Whether nothing is seen of its answer, which has more than a token, until it ends."""
    return not ticket.spec.stream and ticket.output_tokens > 1
