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
# Of the limits that have names of their own: the lines that each has, and that of when it is full.
_NAMED: Final = {
    scope: (
        f"x-ratelimit-limit-{what}: %s\r\nx-ratelimit-remaining-{what}: %s\r\n",
        f"x-ratelimit-reset-{what}: %s\r\n",
    )
    for scope, what in ((Scope.TENANT_REQUESTS, "requests"), (Scope.TENANT_COST, "cost"))
}
_RATE: Final = Kind.RATE


def limit_lines(reservation: Reservation) -> bytes:
    """The header lines for the answer to a request that was granted this."""
    stood = zip(reservation.charges, reservation.levels, strict=False)
    return _lines([(c.rule, level) for c, level in stood if c.rule.scope in _TENANTS]).encode()


def limit_headers(told: Sequence[Told]) -> dict[str, str]:
    """The headers that say where these limits stand; none for none."""
    return dict([line.split(": ") for line in _lines(told).splitlines()])


def _lines(told: Sequence[Told]) -> str:
    named, least = "", inf
    tightest: tuple[str, str, float | None] | None = None
    for rule, level in told:
        limit, left, reset_s = _limit(level.limit), level.remaining, level.reset_s
        # Rounded down: what is said to remain is there. Nobody can send a part of a request.
        remaining = _number(left) if rule.is_cost else str(int(left))
        if (part := left / level.limit) < least:
            least, tightest = part, (limit, remaining, reset_s)
        if (names := _NAMED.get(rule.scope)) is not None and rule.kind is _RATE:
            named += names[0] % (limit, remaining)
            if reset_s is not None:
                named += names[1] % _duration(reset_s)
    if tightest is None:
        return ""
    limit, remaining, reset_s = tightest
    reset = "" if reset_s is None else f"x-ratelimit-reset: {ceil(reset_s)}\r\n"
    return f"x-ratelimit-limit: {limit}\r\nx-ratelimit-remaining: {remaining}\r\n{reset}{named}"


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
