"""Whose requests fall behind their target while they wait, of late.

In overload a class lives at the edge: what is served within its target and what falls behind, to
wait for long, differ by chance and by tenant, but a tenant that floods loses most of its requests,
and one that sends little loses none. So what becomes of a request is foretold by what became of the
last ones of its tenant in its class, and of its class where these were few.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp
from typing import Final

TALLIES_MAX: Final = 4_000  # remembered; the one that was quiet for longest is forgotten
ELEPHANT: Final = 2  # the largest size
_FEW: Final = 2.0  # outcomes that tell nothing
_ALL: Final = None  # all tenants
_Key = tuple[int, str | None, int]


class Lateness:
    """Outcomes of waiting requests by class, tenant and size, fading."""

    __slots__ = ("_tallies", "memory_s")

    def __init__(self, memory_s: float) -> None:
        self.memory_s = memory_s
        # Late ones, all of them, and when last counted.
        self._tallies: OrderedDict[_Key, tuple[float, float, float]] = OrderedDict()

    def count(self, band: int, tenant: str, size: int, *, late: bool, now: float) -> None:
        """A request was served in time, or fell behind."""
        tallies = self._tallies
        for key in ((band, tenant, size), (band, _ALL, size)):
            late_ones, total, at = tallies.pop(key, (0.0, 0.0, now))
            kept = exp((at - now) / self.memory_s)
            tallies[key] = late_ones * kept + late, total * kept + 1.0, now
        while len(tallies) > TALLIES_MAX:
            tallies.popitem(last=False)

    def ratio(self, band: int, tenant: str, size: int, *, now: float) -> float | None:
        """The share that fell behind lately, 0 to 1; None while too few are known."""
        for key in ((band, tenant, size), (band, _ALL, size)):
            late_ones, total, at = self._tallies.get(key, (0.0, 0.0, now))
            if total * exp((at - now) / self.memory_s) >= _FEW:
                return late_ones / total
        return None


def size_of(prefill_s: float, elephant_s: float) -> int:
    """Requests of one size have like chances: 0 small, 1 long, 2 an elephant.

    A long prefill leaves less of the target for a wait, and an elephant waits for its own turn.
    """
    return (prefill_s > elephant_s / 3) + (prefill_s > elephant_s)
