"""What Redis is still to be told: settlements, and which reservations live on.

Pure bookkeeping: `RedisBuckets` sends it. Everything here goes by reservation id and may be told
twice without harm, so what was under way when a connection was lost is simply told again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from math import inf
from typing import Final

from router.core.bucket import Ask, Charge, Kind, Rule, Settlement

_UNSETTLED_MAX: Final = 100_000


class Unsettled:
    """Settlements by id, at most so many; beyond that the oldest are given up.

    What changes a reservation goes first: it makes room for the asks that are sent behind it, and
    others build upon it. What ends one can wait, and there may be many of these after an outage.
    """

    def __init__(self, most: int = _UNSETTLED_MAX) -> None:
        self.lost = 0
        self._most = most
        # Both oldest first. What ends a reservation takes the place of a change not told yet.
        self._first: OrderedDict[str, Settlement] = OrderedDict()
        self._others: OrderedDict[str, Settlement] = OrderedDict()

    def __len__(self) -> int:
        return len(self._first) + len(self._others)

    @property
    def first(self) -> int:
        """How many go before all others."""
        return len(self._first)

    def add(self, settlement: Settlement) -> None:
        """Remember it until it is taken."""
        name = settlement.reservation_id
        goes_first = name in self._first or not settlement.ends
        (self._first if goes_first else self._others)[name] = settlement
        if len(self) > self._most:
            (self._others or self._first).popitem(last=False)
            self.lost += 1

    def take(self, most: int) -> list[Settlement]:
        """The next ones, which are under way from now on."""
        taken = _popped(self._first, most)
        return taken + _popped(self._others, most - len(taken))

    def give_up(self, settlements: Iterable[Settlement]) -> None:
        """They were under way, and Redis can't take them."""
        self.lost += sum(1 for _ in settlements)

    def put_back(self, settlements: Iterable[Settlement]) -> None:
        """They were under way, and nobody knows whether they arrived. Of each id the last word
        holds, of these and of what was said since.
        """
        last = {settlement.reservation_id: settlement for settlement in settlements}
        for name, settlement in last.items():
            if name not in self._first and name not in self._others:
                self.add(settlement)


def _popped(waiting: OrderedDict[str, Settlement], most: int) -> list[Settlement]:
    return [waiting.popitem(last=False)[1] for _ in range(min(most, len(waiting)))]


class Orphans:
    """Which permits are of processes of this router that died. Each limit is looked at once."""

    def __init__(self) -> None:
        self._prefix = self._own = ""
        self._until = -inf
        self._looked_at: set[str] = set()

    def look_for(self, prefix: str, *, own: str, until: float) -> None:
        """Begin to look, `until` all of them have ended by themselves."""
        self._prefix, self._own, self._until = prefix, own, until
        self._looked_at.clear()

    def to_look_at(self, ask: Ask, now: float) -> list[Rule]:
        """The limits of `ask` that are to be looked at; they are from now on."""
        if now >= self._until:
            self._looked_at.clear()
            return []
        permits = [charge.rule for charge in ask.charges if charge.rule.kind is Kind.PERMITS]
        rules = [rule for rule in permits if rule.key not in self._looked_at]
        self._looked_at.update([rule.key for rule in rules])
        return rules

    def has(self, reservation_id: str, held: Held) -> bool:
        """Whether it is one of theirs that nobody adopted."""
        theirs = reservation_id.startswith(self._prefix)
        return theirs and not reservation_id.startswith(self._own) and reservation_id not in held


class Held:
    """Reservations in Redis that have not ended, and when each is to be renewed."""

    def __init__(self) -> None:
        self._asks: dict[str, tuple[Ask, float]] = {}

    def __len__(self) -> int:
        return len(self._asks)

    def __contains__(self, reservation_id: str) -> bool:
        return reservation_id in self._asks

    def adopt(self, ask: Ask, now: float) -> None:
        """A process before this one was granted it."""
        self._asks[ask.reservation_id] = ask, now + ask.lease_s / 3

    def add(self, ask: Ask, now: float) -> None:
        """Redis granted it. What it extends lasts no longer by that."""
        known = self._asks.get(ask.reservation_id)
        self._asks[ask.reservation_id] = ask, now + ask.lease_s / 3 if known is None else known[1]

    def ended(self, settlement: Settlement) -> Settlement | None:
        """The settlement for Redis, all charges named; None if the reservation is not there."""
        known = self._asks.pop(settlement.reservation_id, None)
        if known is None:
            return None
        ask = known[0]
        if len(settlement.charges) == len(ask.charges):
            return settlement
        used = {charge.rule.key: charge.amount for charge in settlement.charges}
        charges = tuple(Charge(c.rule, used.get(c.rule.key, c.amount)) for c in ask.charges)
        return Settlement(ask.reservation_id, charges)

    def to_renew(self, now: float, most: int) -> list[Ask]:
        """Those whose lease is to be renewed by now; they count as renewed."""
        due = [ask for ask, renew_at in self._asks.values() if renew_at <= now]
        asks = list(islice(due, most))
        for ask in asks:
            self._asks[ask.reservation_id] = ask, now + ask.lease_s / 3
        return asks
