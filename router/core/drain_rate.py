"""How fast a lane's queue drains, and from that how long a refused client should wait."""

from __future__ import annotations

from math import exp
from random import Random
from typing import Final

_MEMORY_S: Final = 10.0
_RETRY_AFTER_S: Final = (1.0, 60.0)


class DrainRate:
    """Dispatches per second, old ones fading over ten seconds."""

    __slots__ = ("_at", "_level", "_since")

    def __init__(self) -> None:
        self._level = 0.0
        self._at: float | None = None
        self._since = 0.0

    def count(self, now: float) -> None:
        """One more request was dispatched."""
        if self._at is None:
            self._since = now
        else:
            self._level *= exp((self._at - now) / _MEMORY_S)
        self._level += 1
        self._at = now

    def per_s(self, now: float) -> float:
        """The recent rate; 0 when nothing was ever dispatched."""
        if self._at is None:
            return 0.0
        # Shortly after the start the memory holds less than its length; never under one second.
        remembered_s = _MEMORY_S * (1 - exp(-max(1.0, now - self._since) / _MEMORY_S))
        return self._level * exp((self._at - now) / _MEMORY_S) / remembered_s


def retry_after_s(*, queued: int, drain_per_s: float, rng: Random) -> float:
    """Seconds until a request that comes then should find room: what waits over how fast it goes.

    Stretched by up to 30 % at random, so that those refused together do not return together.
    """
    least, most = _RETRY_AFTER_S
    if drain_per_s * most < queued + 1:
        return most
    return max(least, (queued + 1) / drain_per_s) * rng.uniform(1.0, 1.3)
