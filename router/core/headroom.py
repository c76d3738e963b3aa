"""KV-aware admission: what a request will hold of a worker's KV pool, and whether it fits.

A worker takes a request only if `in use + reserved + need <= kv_ratio_max * total`. The need is
the prompt plus a first part of the output; the reservation grows as the stream runs. Reserving all
of max_tokens would leave most of the pool idle, as few answers use it.
"""

from __future__ import annotations

from router.core.types import Ticket


def need_tokens(prompt_tokens: int, output_tokens: int, samples: int, reserve_tokens: int) -> int:
    """KV tokens that a request is charged with at dispatch. Samples share the prompt."""
    reserved = output_tokens if output_tokens < reserve_tokens else reserve_tokens
    return prompt_tokens + samples * reserved


def grown_tokens(need: int, *, prompt_tokens: int, output_seen_tokens: int) -> int:
    """The reservation of a running request: never less than what it already holds."""
    return max(need, prompt_tokens + output_seen_tokens)


def admitted_tokens(*, total_tokens: int, others_tokens: float, ratio_max: float) -> float:
    """KV tokens that own reservations may reach; below zero when others overfill the pool."""
    return ratio_max * total_tokens - others_tokens


def held_tokens_max(ticket: Ticket) -> int:
    """KV tokens that `ticket` may hold by now; a plain answer grows unseen."""
    if ticket.spec.stream:
        return ticket.prompt_tokens + ticket.output_seen_tokens
    return ticket.kv_tokens
