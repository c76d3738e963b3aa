"""Where the limits of a router are kept: the port that its driver asks, and what it says of itself.

`LocalBuckets` keeps them in this process, `RedisBuckets` in Redis for all routers together, and
`LeasedBuckets` before it saves most of the questions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.config import Config
from router.core.bucket import Ask, Settlement, Verdict
from router.metrics_limits import LimitsView

Decided = Callable[[Verdict], None]


class BucketStore(Protocol):
    """Decides asks, and takes back what was not used."""

    async def start(self) -> None:
        """Get ready; a store that is away does not keep the router from starting."""
        ...

    def reserve(self, ask: Ask, decided: Decided) -> None:
        """Decide `ask`; call `decided` exactly once, perhaps before this returns.

        Never later than `limits.timeout_s` and a moment. Reservation ids are never used twice but
        to extend a reservation.
        """
        ...

    def adopt(self, ask: Ask) -> None:
        """Hold what a store before this one granted, its process died since. Settled like others.

        Permits count from now on, even if there are fewer by now; nothing is charged by this.
        """
        ...

    def reclaim(self, prefix: str, *, own: str) -> None:
        """All is adopted: of reservations whose ids begin with `prefix`, but not with `own`, the
        others are of processes that died, and hold no permits.
        """
        ...

    def settle(self, settlement: Settlement) -> None:
        """End a granted reservation, once, or change its amounts. It does not block, and what
        cannot be told now is remembered. Charges that it does not name count as used in full.
        """
        ...

    def on_config(self, config: Config) -> None:
        """Go by these settings from now on."""
        ...

    def view(self) -> LimitsView:
        """What its series are made from."""
        ...

    async def aclose(self) -> None:
        """Tell what is still to be told, if that is possible, and end."""
        ...
