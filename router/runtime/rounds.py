"""A look at many things, a part of them at a time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Generic, TypeVar

SWEEP_S: Final = 0.25  # between two steps
_STEPS_MAX: Final = 4

T = TypeVar("T")


def steps_for(deadline_s: float) -> int:
    """In how many steps a round keeps `deadline_s`: it is seen a quarter of it late at most.

    Of a wait a first turn sees the begin and another one the end.
    """
    return max(1, min(_STEPS_MAX, int(deadline_s / (8 * SWEEP_S))))


class Round(Generic[T]):
    """Goes through things that come and go, so that each has its turn within some steps."""

    def __init__(self) -> None:
        self._left: list[T] = []  # that had no turn in this round
        self._at_once = 1

    def turn(self, things: Collection[T], steps: int) -> list[T]:
        """Whose turn it is in this step. When all had theirs, a round of `things` begins."""
        if not self._left:
            self._left = list(things)
            self._at_once = max(1, -(-len(self._left) // steps))
        turn = self._left[-self._at_once :]
        del self._left[-self._at_once :]
        return turn
