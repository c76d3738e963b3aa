"""Lines of tickets that wait until a limit lets them in.

There is a line for each limit and class. Tenants take turns in it by what they are granted over
their weights, and of one tenant the earlier goes first (`tenant_order`). Only the first of a line
asks again: so a long line asks the store no more often than a short one. Where other routers have a
line for the same, the line of one that is ahead asks later (`line_pace`). Everybody in line has a
deadline, and a place is free as soon as its ticket is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

from router.config import Config
from router.core.bucket import Charge, DecidedBy, Kind, Scope, Verdict
from router.core.line_pace import LinePace
from router.core.peers import PeerLine
from router.core.tenant_order import TenantOrder
from router.core.timers import Timers
from router.core.types import Priority, Ticket

# How often is asked for what comes back nobody knows when: permits that other routers hold.
_POLL_S: Final = 0.25
_WAIT_S_MIN: Final = 0.001
# How soon after units came back: many requests end in a second, and each gives back a little.
_GIVEN_BACK_S: Final = 0.05
# How often a line that is held back looks whether it still is.
_PLACES_PER_FREE: Final = 4  # a line has, at most, for each place that nobody has
_LOOK_S: Final = 0.25
# What is told of lines: so many of them, so many tenants of each by name.
LINES_MAX: Final = 32
TENANTS_MAX: Final = 64
_HEARD_WITHIN_S: Final = 1.0  # what others said holds for so long, and for some exchanges
_EXCHANGES: Final = 3
_NOT_ASKED: Final = Verdict(False, None, None, False, (), DecidedBy.REDIS)
_TENANTS: Final = (Scope.TENANT_REQUESTS, Scope.TENANT_COST, Scope.TENANT_CONCURRENCY)
_Key = tuple[str, Priority]  # the limit that is waited for, and the class
Ask = Callable[[Ticket, float], None]
GiveUp = Callable[[Ticket, tuple[Charge, ...], Verdict, float], None]


@dataclass(slots=True, eq=False)
class _Line:
    """Who waits for one limit; perhaps nobody, where only other routers' requests wait for it."""

    charges: tuple[Charge, ...]  # of the last ask, and what came of it
    verdict: Verdict
    common: bool  # several tenants share the limit
    pace: LinePace
    order: TenantOrder = field(default_factory=TenantOrder)
    left: set[str] = field(default_factory=set)  # tenants that waited since others were heard of
    passed: dict[str, float] = field(default_factory=dict)  # when tenants were last let past it
    asking: Ticket | None = None  # waits for the store's word, and for no moment
    again: bool = False  # meanwhile something happened that the word may not know of
    wake_at: float = inf
    armed: list[float] = field(default_factory=list)  # its timers, the next one last


class WaitLines:
    """All lines. `ask` lets the first of one ask again, `give_up` turns away who waited in vain."""

    def __init__(self, timers: Timers, *, ask: Ask, give_up: GiveUp) -> None:
        self._timers = timers
        self._ask = ask
        self._give_up = give_up
        self._lines: dict[_Key, _Line] = {}
        self.where: dict[int, _Key] = {}  # in which line each ticket is, by its number
        self._heard_at = -inf  # of other routers
        self._said: dict[str, tuple[float, float]] = {}  # when each spoke: on its clock, on ours

    def __len__(self) -> int:
        return len(self.where)

    def __bool__(self) -> bool:
        """Whether there is a line, with somebody in it or not."""
        return bool(self._lines)

    def configure(self, config: Config) -> None:
        """Take over new settings."""
        self._places = config.queue.depth_max
        self._tenants = config.tenants
        exchanges_s = _EXCHANGES * config.cluster.sync_interval_s
        self._heard_within_s = max(_HEARD_WITHIN_S, exchanges_s)

    def join_others(
        self, ticket: Ticket, charges: tuple[Charge, ...], until: float, now: float
    ) -> bool:
        """Put a ticket that came to those of its class who wait for a limit that it needs too.

        False: there are none, or it may not wait until then.
        """
        for charge in charges:
            key = charge.rule.key, ticket.spec.priority
            line = self._lines.get(key)
            if line is None:
                continue
            if line.order.tickets:
                if not self._join(ticket, key, until, now):
                    return False
                if line.asking is None and line.order.first() is ticket:
                    self._let_ask(line, now)  # the moment to ask was another's
                return True
            if self._is_held(line, now):
                return self._begin(key, ticket, charges, until, now)
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
                common = verdict.scope not in _TENANTS
                self._lines[key] = _Line(charges, verdict, common, LinePace(now))
            if not self._join(ticket, key, until, now):
                return False
        line = self._lines[key]
        if _first(line) is ticket:
            line.charges, line.verdict, line.asking = charges, verdict, None
            self._wake_at(line, now + _WAIT_S_MIN if line.again else at)
        return True

    def granted(self, ticket: Ticket, charges: tuple[Charge, ...], now: float) -> None:
        """A ticket was granted this, in line or past it, and waits no more."""
        where = self.where.get(ticket.number)
        for charge in charges:
            key = charge.rule.key, ticket.spec.priority
            if (line := self._lines.get(key)) is not None:
                self._charge(line, ticket, charge.amount, served=key == where)
                if key != where and (
                    ticket.spec.tenant in line.passed or len(line.passed) < TENANTS_MAX
                ):
                    line.passed[ticket.spec.tenant] = now
                line.pace.took(charge.amount, now)
        self.leave(ticket, now)

    def settled(
        self,
        ticket: Ticket,
        reserved: tuple[Charge, ...],
        used: tuple[Charge, ...],
    ) -> None:
        """A ticket used so much of what it was granted."""
        for before, after in zip(reserved, used, strict=True):
            line = self._lines.get((before.rule.key, ticket.spec.priority))
            if line is not None and after.amount != before.amount:
                surplus = after.amount - before.amount
                self._charge(line, ticket, surplus, served=False)
                line.pace.granted += surplus

    def leave(self, ticket: Ticket, now: float) -> None:
        """A ticket waits no more; who is first then asks at once."""
        key = self.where.pop(ticket.number, None)
        if key is None:
            return
        line = self._lines[key]
        was_first = _first(line) is ticket
        line.order.drop(ticket)
        if len(line.left) < TENANTS_MAX:
            line.left.add(ticket.spec.tenant)
        if was_first:
            line.asking = None
        if not line.order.tickets:
            line.again, line.wake_at = False, inf
            self._end_if_unused(key, line)
        elif was_first:
            self._let_ask(line, now)

    def freed(self, keys: Iterable[str], now: float) -> None:
        """Permits or units of these limits came back: who waits for a permit asks at once, who
        waits for refill soon.
        """
        for key in keys:
            for priority in Priority:
                line = self._lines.get((key, priority))
                if line is None or not line.order.tickets:
                    continue
                if line.asking is not None or line.verdict.wait_s is None:
                    self._let_ask(line, now)
                elif now + _GIVEN_BACK_S < line.wake_at:
                    self._wake_at(line, now + _GIVEN_BACK_S)

    def ask_all(self, now: float) -> None:
        """The limits are others now: the first of every line asks at once, if it does not ask."""
        for line in self._lines.values():
            if line.order.tickets and line.asking is None:
                self._ask_now(line, now)

    # Other routers.

    def tell(self, now: float) -> tuple[PeerLine, ...]:
        """The lines for common limits in which somebody waits, or did since others were heard."""
        waited = [
            (key, line)
            for key, line in self._lines.items()
            if line.common and (line.order.tickets or line.left)
        ]
        return tuple([self._told(key, line, now) for key, line in waited[:LINES_MAX]])

    def hear(self, told: Mapping[str, Sequence[PeerLine]], now: float) -> None:
        """What other routers last said of their lines, by their names."""
        self._heard_at = now
        if not self._lines and not told:
            return
        others: dict[_Key, dict[str, PeerLine]] = {}
        for name, lines in self._fresh(told, now).items():
            for each in lines:
                others.setdefault((each.key, each.priority), {})[name] = each
        for key in others.keys() - self._lines.keys():
            self._lines[key] = _Line((), _NOT_ASKED, True, LinePace(now))
        for key, line in [each for each in self._lines.items() if each[1].common]:
            self._hear(key, line, others.get(key, {}), now)

    def _fresh(
        self, told: Mapping[str, Sequence[PeerLine]], now: float
    ) -> dict[str, Sequence[PeerLine]]:
        """What routers say that are heard of: the word of one that died stays for a while."""
        before, self._said = self._said, {}
        for name, lines in told.items():
            at, since = before.get(name, (None, now))
            self._said[name] = lines[0].at, since if at == lines[0].at else now
        return {
            name: lines
            for name, lines in told.items()
            if now - self._said[name][1] <= self._heard_within_s
        }

    def _hear(self, key: _Key, line: _Line, others: Mapping[str, PeerLine], now: float) -> None:
        pace, waited = line.pace, bool(line.order.tickets or line.left)
        since = now - pace.memory_s
        line.passed = {tenant: at for tenant, at in line.passed.items() if at > since}
        own = self._told(key, line, now, () if waited else line.passed)
        pace.hear(own, others, now)
        line.left.clear()
        self._end_if_unused(key, line)

    def _told(self, key: _Key, line: _Line, now: float, passed: Iterable[str] = ()) -> PeerLine:
        tenants = list(dict.fromkeys([*line.order.tenants, *line.left, *passed]))
        named = {tenant: self._weight(tenant) for tenant in tenants[:TENANTS_MAX]}
        more = sum([self._weight(tenant) for tenant in tenants[TENANTS_MAX:]])
        pace, (name, priority) = line.pace, key
        return PeerLine(name, priority, pace.began, now, pace.granted, named, more)

    # Inside.

    def _weight(self, tenant: str) -> float:
        settings = self._tenants.get(tenant)
        return 1.0 if settings is None else settings.weight

    def _charge(self, line: _Line, ticket: Ticket, amount: float, *, served: bool) -> None:
        tenant = ticket.spec.tenant
        routers = line.pace.sharers.get(tenant, 1)
        line.order.charge(tenant, amount * routers / self._weight(tenant), served=served)

    def _is_held(self, line: _Line, now: float) -> bool:
        """Whether other routers have to be looked at before the line asks."""
        return line.pace.is_held and now - self._heard_at <= self._heard_within_s

    def _begin(
        self, key: _Key, ticket: Ticket, charges: tuple[Charge, ...], until: float, now: float
    ) -> bool:
        """A line that is held begins, though nobody was denied: those who come ask by turns."""
        if not self._join(ticket, key, until, now):
            return False
        line = self._lines[key]
        rule = next(charge.rule for charge in charges if charge.rule.key == key[0])
        wait_s = None if rule.kind is Kind.PERMITS else max(0.0, line.pace.due - now)
        line.charges = charges
        line.verdict = Verdict(False, rule.scope, wait_s, False, (), DecidedBy.REDIS)
        self._let_ask(line, now)
        return True

    def _end_if_unused(self, key: _Key, line: _Line) -> None:
        if not line.order.tickets and not line.pace.is_shared:
            del self._lines[key]

    def _join(self, ticket: Ticket, key: _Key, until: float, now: float) -> bool:
        line = self._lines[key]
        free = self._places - len(self.where)
        # What floods one limit leaves places to those who wait for others (Choudhury and Hahne,
        # Dynamic queue length thresholds, 1998).
        if until <= now or len(line.order.tickets) >= _PLACES_PER_FREE * free:
            self._end_if_unused(key, line)
            return False
        line.order.add(ticket)
        self.where[ticket.number] = key
        self._timers.call_at(until, partial(self._end, ticket.number))
        return True

    def _let_ask(self, line: _Line, now: float) -> None:
        if line.asking is not None:
            line.again = True
        elif self._is_held(line, now) and (due := line.pace.due) > now:
            self._wake_at(line, min(due, now + _LOOK_S))
        else:
            self._ask_now(line, now)

    def _ask_now(self, line: _Line, now: float) -> None:
        line.asking, line.again = line.order.first(), False
        self._ask(line.asking, now)

    def _wake_at(self, line: _Line, at: float) -> None:
        """Let the first of a line ask then, and not before. A timer that comes earlier serves."""
        line.wake_at = at
        if not line.armed or at < line.armed[-1]:
            line.armed.append(at)
            self._timers.call_at(at, partial(self._wake, line))

    def _wake(self, line: _Line, now: float) -> None:
        """The moment may have come at which the first of a line fits."""
        line.armed.pop()
        if not line.order.tickets or line.asking is not None:
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
        ticket = line.order.tickets[number]
        if line.asking is not ticket:
            self.leave(ticket, now)
            self._give_up(ticket, line.charges, line.verdict, now)


def _first(line: _Line) -> Ticket:
    """Who is asking, or asks next."""
    return line.asking or line.order.first()


def _key(ticket: Ticket, charges: tuple[Charge, ...], verdict: Verdict) -> _Key:
    rules = [charge.rule for charge in charges if charge.rule.scope is verdict.scope]
    kind = Kind.PERMITS if verdict.wait_s is None else Kind.RATE
    rule = next((rule for rule in rules if rule.kind is kind), rules[0])
    return rule.key, ticket.spec.priority
