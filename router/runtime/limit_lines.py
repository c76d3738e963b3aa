"""What an answer says of the limits of its tenant: the X-RateLimit-* headers.

`x-ratelimit-limit`, `-remaining` and `-reset` are those of the tightest limit, `-reset` in seconds
until it is full again. Beside them stand requests in the names that OpenAI's clients read, with its
form of durations ("1m30s"), and cost units in names made alike. What the cluster, a model or a
class has left is told to nobody who is not refused because of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, inf
from typing import Final

from router.core.bucket import Kind, Level, Rule, Scope
from router.core.limits import Reservation

Told = tuple[Rule, Level]
_TENANTS: Final = (Scope.TENANT_REQUESTS, Scope.TENANT_COST, Scope.TENANT_CONCURRENCY)
_SUFFIX: Final = {Scope.TENANT_REQUESTS: "-requests", Scope.TENANT_COST: "-cost"}
_RATE: Final = Kind.RATE


def limit_lines(reservation: Reservation) -> bytes:
    """The header lines for the answer to a request that was granted this."""
    told = []
    for charge, level in zip(reservation.charges, reservation.levels, strict=False):
        if (rule := charge.rule).scope in _TENANTS:
            told.append((rule, level))
    return _lines(told).encode()


def limit_headers(told: Sequence[Told]) -> dict[str, str]:
    """The headers that say where these limits stand; none for none."""
    return dict([line.split(": ") for line in _lines(told).splitlines()])


def _lines(told: Sequence[Told]) -> str:
    tightest, named, least = "", "", inf
    for rule, level in told:
        # Rounded down: what is said to remain is there. Nobody can send a part of a request.
        remaining = level.remaining if rule.is_cost else int(level.remaining)
        limit, left, reset_s = _limit(level.limit), _number(remaining), level.reset_s
        if (part := level.remaining / level.limit) < least:
            least = part
            reset = "" if reset_s is None else f"x-ratelimit-reset: {ceil(reset_s)}\r\n"
            tightest = f"x-ratelimit-limit: {limit}\r\nx-ratelimit-remaining: {left}\r\n{reset}"
        if (of := _SUFFIX.get(rule.scope)) is not None and rule.kind is _RATE:
            named += f"x-ratelimit-limit{of}: {limit}\r\nx-ratelimit-remaining{of}: {left}\r\n"
            if reset_s is not None:
                named += f"x-ratelimit-reset{of}: {_duration(reset_s)}\r\n"
    return tightest + named


def _number(value: float) -> str:
    whole = int(value)
    return str(whole) if value >= 100 or value == whole else f"{int(value * 1000) / 1000:g}"


_limit = lru_cache(1024)(_number)  # of as many different numbers as the configuration has


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 250ms, 12s, 6m0s, 1h0m0s."""
    if seconds < 1:
        return f"{ceil(seconds * 1000)}ms"
    minutes, rest = divmod(ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
