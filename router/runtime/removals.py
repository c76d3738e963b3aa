"""Remembers which workers an operator removed, so that their agents do not bring them back.

An agent registers its worker again when a router has forgotten it. That is right after a restart
of the router and wrong after an operator's removal, so those are remembered for a while: for as
long as an agent may need to hear of it. Once told, an agent stays away by itself.
"""

from __future__ import annotations

from typing import Final

# Longer than any agent pauses between two questions, and than a pod takes to come back.
REMEMBERED_S: Final = 3600.0
_REMOVALS_MAX: Final = 1024


class Removals:
    """URLs of removed workers, each until its moment; the oldest go first when there are many."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, url: str, *, now: float, drain_s: float) -> None:
        """Remember that the worker at `url` was removed; it may drain for `drain_s`."""
        self.hold(url, until=now + drain_s + REMEMBERED_S)

    def hold(self, url: str, *, until: float) -> None:
        """Remember a removal that another router told of."""
        self._until.pop(url, None)
        if len(self._until) >= _REMOVALS_MAX:
            del self._until[next(iter(self._until))]
        self._until[url] = until

    def forget(self, url: str) -> None:
        """Let the worker at `url` come back."""
        self._until.pop(url, None)

    def holds(self, url: str, *, now: float) -> bool:
        """Whether the worker at `url` was removed, not long ago."""
        until = self._until.get(url)
        if until is not None and until <= now:
            del self._until[url]
            return False
        return until is not None
