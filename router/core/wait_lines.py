"""Lines of tickets that wait until a limit lets them in.

There is a line for each limit and class. Only the first of a line asks again: so the earlier goes
first, and a long line asks the store no more often than a short one. Everybody in line has a
deadline, and a place is free as soon as its ticket is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

from router.core.bucket import Charge, Kind, Verdict
from router.core.timers import Timers
from router.core.types import Priority, Ticket

# How often is asked for what comes back nobody knows when: permits that other routers hold.
_POLL_S: Final = 0.25
_WAIT_S_MIN: Final = 0.001
# How soon after units came back: many requests end in a second, and each gives back a little.
_GIVEN_BACK_S: Final = 0.05
_Key = tuple[str, Priority]  # the limit that is waited for, and the class
Ask = Callable[[Ticket, float], None]
GiveUp = Callable[[Ticket, tuple[Charge, ...], Verdict, float], None]


@dataclass(slots=True, eq=False)
class _Line:
    """Who waits for one limit, first in first."""

    charges: tuple[Charge, ...]  # of the last ask, and what came of it
    verdict: Verdict
    tickets: dict[int, Ticket] = field(default_factory=dict)
    asks: bool = False  # its first one waits for the store's word, and for no moment
    again: bool = False  # meanwhile something happened that the word may not know of
    wake_at: float = inf
    armed: list[float] = field(default_factory=list)  # its timers, the next one last


class WaitLines:
    """All lines. `ask` lets the first of one ask again, `give_up` turns away who waited in vain."""

    def __init__(self, timers: Timers, *, ask: Ask, give_up: GiveUp) -> None:
        self._timers = timers
        self._ask = ask
        self._give_up = give_up
        self.places = 0
        self._lines: dict[_Key, _Line] = {}
        self.where: dict[int, _Key] = {}  # in which line each ticket is, by its number

    def __len__(self) -> int:
        return len(self.where)

    def join_others(
        self, ticket: Ticket, charges: tuple[Charge, ...], until: float, now: float
    ) -> bool:
        """Put a ticket that came behind those of its class who wait for a limit that it needs too.

        False: there are none, or it may not wait until then.
        """
        if self._lines:
            for charge in charges:
                key = charge.rule.key, ticket.spec.priority
                if key in self._lines:
                    return self._join(ticket, key, until, now)
        return False

    def wait(
        self,
        ticket: Ticket,
        charges: tuple[Charge, ...],
        verdict: Verdict,
        until: float,
        now: float,
    ) -> bool:
        """Let a ticket wait that was denied; False: it cannot."""
        if all(charge.rule.scope is not verdict.scope for charge in charges):
            return False  # for what, nobody knows
        at = now + (_POLL_S if verdict.wait_s is None else max(_WAIT_S_MIN, verdict.wait_s))
        if until <= now or (verdict.wait_s is not None and at > until):
            return False
        key = _key(ticket, charges, verdict)
        if self.where.get(ticket.number) != key:
            self.leave(ticket, now)
            if key not in self._lines:
                self._lines[key] = _Line(charges, verdict)
            if not self._join(ticket, key, until, now):
                return False
        line = self._lines[key]
        if _first(line) is ticket:
            line.charges, line.verdict, line.asks = charges, verdict, False
            self._wake_at(line, now + _WAIT_S_MIN if line.again else at)
        return True

    def leave(self, ticket: Ticket, now: float) -> None:
        """A ticket waits no more; who is first then asks at once."""
        key = self.where.pop(ticket.number, None)
        if key is None:
            return
        line = self._lines[key]
        was_first = _first(line) is ticket
        del line.tickets[ticket.number]
        if not line.tickets:
            del self._lines[key]
        elif was_first:
            line.asks = False
            self._let_ask(line, now)

    def freed(self, keys: Iterable[str], now: float) -> None:
        """Permits or units of these limits came back: who waits for a permit asks at once, who
        waits for refill soon.
        """
        for key in keys:
            for priority in Priority:
                line = self._lines.get((key, priority))
                if line is None:
                    continue
                if line.asks or line.verdict.wait_s is None:
                    self._let_ask(line, now)
                elif now + _GIVEN_BACK_S < line.wake_at:
                    self._wake_at(line, now + _GIVEN_BACK_S)

    def ask_all(self, now: float) -> None:
        """The limits are others now: the first of every line asks at once, if it does not ask."""
        for line in self._lines.values():
            if not line.asks:
                self._let_ask(line, now)

    def _join(self, ticket: Ticket, key: _Key, until: float, now: float) -> bool:
        line = self._lines[key]
        if until <= now or len(self.where) >= self.places:
            if not line.tickets:
                del self._lines[key]
            return False
        line.tickets[ticket.number] = ticket
        self.where[ticket.number] = key
        self._timers.call_at(until, partial(self._end, ticket.number))
        return True

    def _let_ask(self, line: _Line, now: float) -> None:
        if line.asks:
            line.again = True
        else:
            line.asks, line.again = True, False
            self._ask(_first(line), now)

    def _wake_at(self, line: _Line, at: float) -> None:
        """Let the first of a line ask then, and not before. A timer that comes earlier serves."""
        line.wake_at = at
        if not line.armed or at < line.armed[-1]:
            line.armed.append(at)
            self._timers.call_at(at, partial(self._wake, line))

    def _wake(self, line: _Line, now: float) -> None:
        """The moment may have come at which the first of a line fits."""
        line.armed.pop()
        if not line.tickets or line.asks:
            return
        if now < line.wake_at:
            self._wake_at(line, line.wake_at)
        else:
            self._let_ask(line, now)

    def _end(self, number: int, now: float) -> None:
        """A ticket's time in line is over; while it asks, the answer to that decides.

        It is named by its number: what is over long before its deadline must not live until then.
        """
        key = self.where.get(number)
        if key is None:
            return
        line = self._lines[key]
        ticket = line.tickets[number]
        if not (line.asks and _first(line) is ticket):
            self.leave(ticket, now)
            self._give_up(ticket, line.charges, line.verdict, now)


def _first(line: _Line) -> Ticket:
    return next(iter(line.tickets.values()))


def _key(ticket: Ticket, charges: tuple[Charge, ...], verdict: Verdict) -> _Key:
    rules = [charge.rule for charge in charges if charge.rule.scope is verdict.scope]
    kind = Kind.PERMITS if verdict.wait_s is None else Kind.RATE
    rule = next((rule for rule in rules if rule.kind is kind), rules[0])
    return rule.key, ticket.spec.priority
