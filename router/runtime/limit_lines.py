"""What an answer says of the limits of its tenant: the X-RateLimit-* headers.

`x-ratelimit-limit`, `-remaining` and `-reset` are those of the tightest limit, `-reset` in seconds
until it is full again. Beside them stand requests in the names that OpenAI's clients read, with its
form of durations ("1m30s"), and cost units in names made alike. What the cluster, a model or a
class has left is told to nobody who is not refused because of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Final

from router.core.bucket import Kind, Level, Rule, Scope
from router.core.limits import Reservation, is_cost

Told = tuple[Rule, Level]
_TENANTS: Final = (Scope.TENANT_REQUESTS, Scope.TENANT_COST, Scope.TENANT_CONCURRENCY)
_SUFFIX: Final = {Scope.TENANT_REQUESTS: "requests", Scope.TENANT_COST: "cost"}


def limit_lines(reservation: Reservation) -> bytes:
    """The header lines for the answer to a request that was granted this."""
    rules = (charge.rule for charge in reservation.charges)
    told = [
        (rule, level)
        for rule, level in zip(rules, reservation.levels, strict=False)
        if rule.scope in _TENANTS
    ]
    named = limit_headers(told).items()
    return b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in named)


def limit_headers(told: Sequence[Told]) -> dict[str, str]:
    """The headers that say where these limits stand; none for none."""
    if not told:
        return {}
    named = {}
    tightest = min(told, key=lambda item: item[1].remaining / item[1].limit)
    for name, value in _figures(*tightest, duration=False):
        named[f"x-ratelimit-{name}"] = value
    for rule, level in told:
        suffix = _SUFFIX.get(rule.scope)
        if suffix is not None and rule.kind is Kind.RATE:
            for name, value in _figures(rule, level, duration=True):
                named[f"x-ratelimit-{name}-{suffix}"] = value
    return named


def _figures(rule: Rule, level: Level, *, duration: bool) -> Iterable[tuple[str, str]]:
    yield "limit", _number(level.limit)
    # Rounded down: what is said to remain is there. Nobody can send a part of a request.
    yield "remaining", _number(level.remaining if is_cost(rule) else int(level.remaining))
    if level.reset_s is not None:
        yield "reset", _duration(level.reset_s) if duration else str(ceil(level.reset_s))


def _number(value: float) -> str:
    whole = int(value)
    return str(whole) if value >= 100 or value == whole else f"{int(value * 1000) / 1000:g}"


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 250ms, 12s, 6m0s, 1h0m0s."""
    if seconds < 1:
        return f"{ceil(seconds * 1000)}ms"
    minutes, rest = divmod(ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
