"""What an answer says of the limits of its tenant: the X-RateLimit-* headers.

`x-ratelimit-limit`, `-remaining` and `-reset` are those of the tightest limit, `-reset` in seconds
until it is full again. Beside them stand requests in the names that OpenAI's clients read, with its
form of durations ("1m30s"), and cost units in names made alike. What the cluster, a model or a
class has left is told to nobody who is not refused because of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from router.core.bucket import Kind, Level, Rule, Scope
from router.core.limits import Reservation

Told = tuple[Rule, Level]
_RATE: Final = Kind.RATE
# Before the figures of each: all that there is, what is left, when it is full again.
_NAMED: Final = {
    scope: (
        f"\r\nx-ratelimit-limit-{what}: ",
        f"\r\nx-ratelimit-remaining-{what}: ",
        f"\r\nx-ratelimit-reset-{what}: ",
    )
    for scope, what in ((Scope.TENANT_REQUESTS, "requests"), (Scope.TENANT_COST, "cost"))
}
_TEXTS_MAX: Final = 1024
_texts: dict[float, str] = {}  # of the limits that there are


def limit_lines(reservation: Reservation) -> bytes:
    """The header lines for the answer to a request that was granted this."""
    levels = reservation.levels
    if not levels:
        return b""
    charges = reservation.charges
    told = [(c.rule, levels[at]) for at, c in enumerate(charges) if c.rule.is_tenants]
    return _lines(told).encode()


def limit_headers(told: Sequence[Told]) -> dict[str, str]:
    """The headers that say where these limits stand; none for none."""
    return dict([line.split(": ") for line in _lines(told).splitlines()])


def _lines(told: Sequence[Told]) -> str:
    named, tightest, least = "", ("", "", ""), inf
    for rule, level in told:
        limit, left, reset_s = _limit(level.limit), level.remaining, level.reset_s
        # Rounded down: what is said to remain is there. Nobody can send a part of a request.
        remaining = _number(left) if rule.is_cost else str(int(left))
        if (part := left / level.limit) < least:
            reset = "" if reset_s is None else f"\r\nx-ratelimit-reset: {_up(reset_s)}"
            tightest, least = (limit, remaining, reset), part
        if rule.kind is _RATE and (before := _NAMED.get(rule.scope)) is not None:
            full, rest, again = before
            reset = "" if reset_s is None else f"{again}{_duration(reset_s)}"
            named = f"{named}{full}{limit}{rest}{remaining}{reset}"
    if least == inf:
        return ""
    limit, remaining, reset = tightest
    return f"x-ratelimit-limit: {limit}\r\nx-ratelimit-remaining: {remaining}{reset}{named}\r\n"


def _limit(limit: float) -> str:
    text = _texts.get(limit)
    if text is None:
        if len(_texts) >= _TEXTS_MAX:
            _texts.clear()
        text = _texts[limit] = _number(limit)
    return text


def _number(value: float) -> str:
    whole = int(value)
    return str(whole) if value >= 100 or value == whole else f"{int(value * 1000) / 1000:g}"


def _up(value: float) -> int:
    """Rounded up, as `math.ceil`, which is a call."""
    whole = int(value)
    return whole + 1 if whole < value else whole


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 250ms, 12s, 6m0s, 1h0m0s."""
    if seconds < 1:
        return f"{_up(seconds * 1000)}ms"
    minutes, rest = divmod(_up(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
