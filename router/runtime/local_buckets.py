"""Limits kept in this process: `redis: {mode: none}`. Each router stands alone with its limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from router.config import Config
from router.core.bucket import Ask, DecidedBy, Settlement
from router.core.ledger import Ledger
from router.metrics_limits import LimitsView
from router.runtime.bucket_store import Decided

# Who holds a lease and who keeps it die together, so none needs to be renewed here: it is as long
# as a request can be.
LEASE_S: Final = 86_400.0


class LocalBuckets:
    """A ledger on this process' clock. Every verdict is given before `reserve` returns."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ledger = Ledger(DecidedBy.MEMORY, now=clock(), lease_s_min=LEASE_S)

    async def start(self) -> None:
        """Nothing is to be opened."""

    def reserve(self, ask: Ask, decided: Decided) -> None:
        """Decide `ask` at once."""
        decided(self._ledger.reserve(ask, self._clock()))

    def adopt(self, ask: Ask) -> None:
        """Hold what a process before this one granted."""
        self._ledger.adopt(ask, self._clock())

    def reclaim(self, prefix: str, *, own: str) -> None:
        """What a process before this one held was gone with it."""

    def settle(self, settlement: Settlement) -> None:
        """End a reservation."""
        self._ledger.settle(settlement, self._clock())

    def on_config(self, config: Config) -> None:
        """Rules come with what is asked, and nothing else is set."""

    def view(self) -> LimitsView:
        """What its series are made from."""
        return LimitsView()

    async def aclose(self) -> None:
        """Nothing is open."""
