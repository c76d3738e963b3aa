"""A look at many things, a part of them at a time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class Round(Generic[T]):
    """Goes through things that come and go, so that each has its turn within so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._left: list[T] = []  # that had no turn in this round
        self._at_once = 1

    def turn(self, things: Collection[T]) -> list[T]:
        """Whose turn it is in this step. When all had theirs, a round of `things` begins."""
        if not self._left:
            self._left = list(things)
            self._at_once = max(1, -(-len(self._left) // self._steps))
        turn = self._left[-self._at_once :]
        del self._left[-self._at_once :]
        return turn
