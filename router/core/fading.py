"""A rate over the last while: what was added fades, so old amounts weigh less and less."""

from __future__ import annotations

from math import exp


class FadingRate:
    """Amounts per second, averaged over the last `memory_s` seconds. 0 before the first."""

    __slots__ = ("_at", "_level", "_memory_s")

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._level = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """Count `amount`."""
        self._level = amount + self._level * exp((self._at - now) / self._memory_s)
        self._at = now

    def per_s(self, now: float) -> float:
        """The rate; it needs some `memory_s` to get there after a change."""
        return self._level * exp((self._at - now) / self._memory_s) / self._memory_s
