"""What an answer says of the limits of its tenant: the X-RateLimit-* headers.

`x-ratelimit-limit`, `-remaining` and `-reset` are those of the tightest limit, `-reset` in seconds
until it is full again. Beside them stand requests in the names that OpenAI's clients read, with its
form of durations ("1m30s"), and cost units in names made alike. What the cluster, a model or a
class has left is told to nobody who is not refused because of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

from router.core.bucket import Kind, Level, Rule, Scope
from router.core.limits import Reservation, is_cost

Told = tuple[Rule, Level]
_TENANTS: Final = (Scope.TENANT_REQUESTS, Scope.TENANT_COST, Scope.TENANT_CONCURRENCY)
_SUFFIX: Final = {Scope.TENANT_REQUESTS: "-requests", Scope.TENANT_COST: "-cost"}


def limit_lines(reservation: Reservation) -> bytes:
    """The header lines for the answer to a request that was granted this."""
    told = [
        (charge.rule, level)
        for charge, level in zip(reservation.charges, reservation.levels, strict=False)
        if charge.rule.scope in _TENANTS
    ]
    lines = [f"{name}: {value}\r\n" for name, value in limit_headers(told).items()]
    return "".join(lines).encode()


def limit_headers(told: Sequence[Told]) -> dict[str, str]:
    """The headers that say where these limits stand; none for none."""
    named: dict[str, str] = {}
    if told:
        _tell(named, "", *min(told, key=_part_left))
    for rule, level in told:
        if rule.kind is Kind.RATE and (suffix := _SUFFIX.get(rule.scope)) is not None:
            _tell(named, suffix, rule, level)
    return named


def _part_left(told: Told) -> float:
    return told[1].remaining / told[1].limit


def _tell(named: dict[str, str], suffix: str, rule: Rule, level: Level) -> None:
    named[f"x-ratelimit-limit{suffix}"] = _number(level.limit)
    # Rounded down: what is said to remain is there. Nobody can send a part of a request.
    remaining = level.remaining if is_cost(rule) else int(level.remaining)
    named[f"x-ratelimit-remaining{suffix}"] = _number(remaining)
    if (reset_s := level.reset_s) is not None:
        named[f"x-ratelimit-reset{suffix}"] = _duration(reset_s) if suffix else str(ceil(reset_s))


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
