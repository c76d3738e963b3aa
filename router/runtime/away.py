"""Decides while Redis is away: by class, a part of each limit in this process, all, or nothing."""

from __future__ import annotations

from typing import Final

from router.core.bucket import Ask, Charge, DecidedBy, Rule, Settlement, Verdict
from router.core.ledger import Ledger
from router.limit_settings import AwaySettings
from router.runtime.local_buckets import LEASE_S

_PARTS_MAX: Final = 20_000  # remembered; made anew when they are needed
_OPEN: Final = Verdict(True, None, 0.0, False, (), DecidedBy.OPEN)
_CLOSED: Final = Verdict(False, None, None, False, (), DecidedBy.CLOSED)


class AwayBuckets:
    """Decides without Redis. `replicas` is how many routers live, this one among them: each has
    that part of every limit, so that together they keep to it.
    """

    def __init__(self, settings: AwaySettings, *, now: float) -> None:
        self.replicas = 1
        self._policies = settings.by_priority
        self._ledger = Ledger(DecidedBy.LOCAL, now=now, lease_s_min=LEASE_S)
        self._parts: dict[str, tuple[Rule, int, Rule]] = {}

    def on_settings(self, settings: AwaySettings) -> None:
        """Go by these policies from now on."""
        self._policies = settings.by_priority

    def reserve(self, ask: Ask, now: float) -> Verdict:
        """Decide `ask` by the policy of its class; nothing is fetched ahead from here."""
        if ask.ahead:
            return _CLOSED
        match self._policies[ask.priority]:
            case "open":
                return _OPEN
            case "closed":
                return _CLOSED
            case "local":
                charges = tuple(Charge(self._part(c.rule), c.amount) for c in ask.charges)
                part = Ask(
                    ask.reservation_id, charges, ask.priority, ask.lease_s, borrows=ask.borrows
                )
                return self._ledger.reserve(part, now)

    def settle(self, settlement: Settlement, now: float) -> None:
        """End a reservation that was made here; others are not known."""
        self._ledger.settle(settlement, now)

    def _part(self, rule: Rule) -> Rule:
        known = self._parts.get(rule.key)
        if known is not None and known[0] is rule and known[1] == self.replicas:
            return known[2]
        if len(self._parts) >= _PARTS_MAX:
            self._parts.clear()
        part = rule.part(1 / max(1, self.replicas))
        self._parts[rule.key] = rule, self.replicas, part
        return part
