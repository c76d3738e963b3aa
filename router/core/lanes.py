"""When a lane may use the other lane's workers.

Short requests are light, so they go to long workers as soon as their own would make them wait. Long
ones are heavy, so they go to short workers only where no short request will feel it: the worker is
all but idle, has KV memory to spare, and the prompt itself is no elephant.
"""

from __future__ import annotations

from math import inf
from typing import Final

from router.core.types import Ticket
from router.core.worker import Worker

_PENDING_S_MAX: Final = 0.03
_KV_RATIO_MAX: Final = 0.6
_GAIN_MIN: Final = 2.0


def short_spills(own_s: float, other_s: float, *, wait_s_max: float) -> bool:
    """Whether a short request leaves its lane: first token later than the limit, and better there.

    Both are predicted seconds to the first token; infinite for the own lane when it is full.
    """
    return own_s > wait_s_max and other_s < own_s


def long_spills(
    own_s: float, other: Worker, ticket: Ticket, hit_tokens: int, *, wait_s_max: float, now: float
) -> bool:
    """Whether a long request may go to `other`, a worker of the short lane.

    A wait of more than 30 ms before its own prefill, at most half as long a wait there, at most
    30 ms of prefill pending, KV memory below 60 % with the request counted in (unknown is not
    below), and a prompt that alone delays no short request past the limit at which those would
    leave.
    """
    if other.kv_total_tokens is None or other.unknown:
        return False
    other_s = other.ttft_s(ticket, hit_tokens, now=now)
    alone_s = other.rates.prefill_time_s(ticket.prompt_tokens - hit_tokens, hit_tokens)
    filled = (other.kv_load_tokens + ticket.kv_tokens) / other.kv_total_tokens
    return (
        own_s - alone_s > _PENDING_S_MAX
        and (own_s == inf or other_s * _GAIN_MIN <= own_s)
        and other_s - alone_s <= _PENDING_S_MAX
        and alone_s <= wait_s_max
        and filled < _KV_RATIO_MAX
    )
