"""Limits at work: asking the store for what a request will use, waiting for it, giving it back.

A ticket that limits concern is RESERVING until the store has granted all that it asked for. Refused
by a limit, it is made cheaper where that may be, then waits while it has time (`wait_lines`), then
is refused. What was granted is kept through retries and preemption, and settled exactly once, at
the ticket's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from router.config import Config
from router.core import refusals
from router.core.bucket import AMPLE_RATIO, Ask, Charge, DecidedBy, Kind, Scope, Settlement, Verdict
from router.core.cost import CostModel
from router.core.degrading import Degrading
from router.core.effects import Effect, Reserve, Settle
from router.core.limits import Limits, Reservation
from router.core.timers import Timers
from router.core.types import Priority, Refusal, RequestRecord, RequestSpec, Ticket, TicketState
from router.core.wait_lines import WaitLines

_RESERVING: Final = TicketState.RESERVING
_QUEUED: Final = TicketState.QUEUED


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservingView:
    """What limits did so far, and who waits for them."""

    active: bool  # some limit is set
    waiting: int
    held: int  # reservations of requests that are not over
    granted: Mapping[DecidedBy, int]  # each request counts once, however often it asked
    shortened: int
    refused: Mapping[tuple[DecidedBy, Scope | None], int]  # None: the store could not be asked
    borrowed: Mapping[Priority, float]  # cost units used above guarantees, by the request's class


class Reserving:
    """Reserves what tickets will use. Times are the driver's monotonic seconds.

    `enter` lets a ticket in that has all it needs, `refuse` turns one away.
    """

    def __init__(
        self,
        config: Config,
        *,
        router_id: str,
        costs: CostModel,
        degrading: Degrading,
        timers: Timers,
        effects: list[Effect],
        enter: Callable[[Ticket, float], None],
        refuse: Callable[[Ticket, Refusal, float], None],
    ) -> None:
        self._router_id = router_id
        self._costs = costs
        self._degrading = degrading
        self._timers = timers
        self._effects = effects
        self._enter = enter
        self._refuse = refuse
        self.lines = WaitLines(timers, ask=self._ask, give_up=self._last_resort)
        self.in_line: Mapping[int, object] = self.lines.where  # who waits, by ticket number
        self._asked: dict[int, Ask] = {}  # by ticket: the store decides on it
        self._outdated: set[int] = set()  # of these, what was asked before the settings changed
        self._held = self._shortened = self._asks = 0
        self._granted: dict[DecidedBy, int] = {}
        self._refused: Counter[tuple[DecidedBy, Scope | None]] = Counter()
        self._borrowed: dict[Priority, float] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings; what is reserved stays so."""
        self._settings = config.limits
        self._tokens_cap = config.degrade.tokens_cap
        self.lines.configure(config)
        self.limits = Limits(config, self._costs)
        self.active = self.limits.active

    def reconsider(self, now: float) -> None:
        """Settings were taken over: whoever waits is judged by them."""
        self._outdated = set(self._asked)
        self.lines.ask_all(now)

    def view(self) -> ReservingView:
        """How things stand."""
        return ReservingView(
            active=self.active,
            waiting=len(self.lines),
            held=self._held,
            granted=dict(self._granted),
            shortened=self._shortened,
            refused=dict(self._refused),
            borrowed=dict(self._borrowed),
        )

    def begin(self, ticket: Ticket, now: float) -> bool:
        """Reserve for a ticket that came; False: it has what it needs, and nothing was done."""
        charges = self.limits.charges(ticket)
        if not charges or ticket.reservation is not None:
            return False
        ticket.state = _RESERVING
        if not (
            self.lines
            and all(charge.amount <= charge.rule.amount_max for charge in charges)
            and self.lines.join_others(ticket, charges, self._deadline(ticket), now)
        ):  # what never fits is told so at once, whoever waits
            self._reserve(ticket, charges, now)
        return True

    def ask_of(self, spec: RequestSpec, reservation: Reservation) -> Ask | None:
        """The ask that a core before this one made for what it reserved.

        Limits that are gone since are left out; None: all of them.
        """
        found = [
            Charge(rule, charge.amount)
            for charge in reservation.charges
            if (rule := self.limits.rule(charge.rule.key, spec.tenant)) is not None
        ]
        if not found:
            return None
        name, lease_s = reservation.id, self._settings.lease_s
        return Ask(name, tuple(found), spec.priority, lease_s, adopted=True)

    def adopt(self, ticket: Ticket, reservation: Reservation) -> Ask | None:
        """Let a ticket keep what a core before this one reserved for it; `ask_of` that."""
        ask = self.ask_of(ticket.spec, reservation)
        if ask is not None:
            charges, levels = ask.charges, reservation.levels
            if len(charges) != len(levels):
                levels = ()
            self._held += 1
            ticket.reservation = Reservation(reservation.id, charges, levels, reservation.borrowed)
        return ask

    def decided(self, ticket: Ticket, verdict: Verdict, now: float) -> None:
        """The store said whether `ticket` has what it asked for; said again, it changes nothing."""
        ask = self._asked.pop(ticket.number, None)
        if ask is None:
            return
        outdated = ticket.number in self._outdated
        self._outdated.discard(ticket.number)
        if ticket.state is not _RESERVING:  # its client left meanwhile
            if verdict.granted:
                self._effects.append(Settle(ask.given_back()))
        elif verdict.granted:
            self._grant(ticket, ask, verdict, now)
        elif outdated:
            self._ask(ticket, now)
        elif not self._waits(ticket, ask.charges, verdict, now):
            self._last_resort(ticket, ask.charges, verdict, now)

    def left(self, ticket: Ticket, now: float) -> None:
        """A ticket is over that was still RESERVING."""
        self.lines.leave(ticket, now)

    def ended(self, ticket: Ticket, record: RequestRecord, now: float) -> None:
        """A ticket with a reservation is over: settle it."""
        reservation = ticket.reservation
        assert reservation is not None
        ticket.reservation = None
        self._held -= 1
        charges = self.limits.settled(ticket, reservation, record)
        self._effects.append(Settle(Settlement(reservation.id, charges)))
        if reservation.borrowed:
            units = sum(charge.amount for charge in charges if charge.rule.above is not None)
            priority = ticket.spec.priority
            self._borrowed[priority] = self._borrowed.get(priority, 0.0) + units
        if self.lines:
            self.lines.settled(ticket, reservation.charges, charges)
            self.lines.freed(_keys_with_more(reservation.charges, charges), now)

    # Asking.

    def _ask(self, ticket: Ticket, now: float) -> None:
        if charges := self.limits.charges(ticket):
            self._reserve(ticket, charges, now)
        else:  # its limits were taken away while it waited
            self._timers.call_at(now, partial(self._let_in, ticket))

    def _reserve(self, ticket: Ticket, charges: tuple[Charge, ...], now: float) -> None:
        assert ticket.number not in self._asked, "asked twice"
        self._asks += 1
        name = f"{self._router_id}:{self._asks}"  # no other ask has, of whatever router
        ask = Ask(
            name, charges, ticket.spec.priority, self._settings.lease_s,
            borrows=self._borrows(ticket, now),
        )  # fmt: skip
        self._asked[ticket.number] = ask
        self._effects.append(Reserve(ticket, ask))

    def _borrows(self, ticket: Ticket, now: float) -> float:
        """How much of what others share a ticket leaves that exceeds its tenant's guarantee; 0: it
        may not. Workers that are saturated have room only if the cluster's limit says so.
        """
        if not self.limits.lends_to_tenants:
            return 0.0
        saturation = self._degrading.saturation_for(ticket, now)
        if saturation is not None and saturation < self._settings.borrow_below:
            return AMPLE_RATIO
        return 1.0 if self.limits.cluster_lends else 0.0

    def _let_in(self, ticket: Ticket, now: float) -> None:
        if ticket.state is _RESERVING:
            ticket.state = _QUEUED
            self.lines.leave(ticket, now)
            self._enter(ticket, now)

    def _grant(self, ticket: Ticket, ask: Ask, verdict: Verdict, now: float) -> None:
        self._granted[verdict.by] = self._granted.get(verdict.by, 0) + 1
        self._held += 1
        ticket.reservation = Reservation(
            ask.reservation_id, ask.charges, verdict.levels, verdict.borrowed
        )
        ticket.state = _QUEUED
        if self.lines:
            self.lines.granted(ticket, ask.charges, now)
        self._enter(ticket, now)

    def _shorten(self, ticket: Ticket, charges: tuple[Charge, ...], verdict: Verdict) -> bool:
        """Make a ticket cheaper that a cost limit refused; False: nothing can be done."""
        if not self._settings.degrade or ticket.degraded is not None:
            return False
        costs = {charge.rule.scope for charge in charges if charge.rule.is_cost}
        if verdict.scope not in costs or self.limits.output_tokens(ticket) <= self._tokens_cap:
            return False
        if not self._degrading.shorten(ticket):
            return False
        self._shortened += 1
        return True

    # Waiting, or not.

    def _deadline(self, ticket: Ticket) -> float:
        return min(ticket.queue_deadline_at, ticket.arrived_at + self._settings.wait_s_max)

    def _waits(
        self, ticket: Ticket, charges: tuple[Charge, ...], verdict: Verdict, now: float
    ) -> bool:
        if verdict.never or verdict.by is DecidedBy.CLOSED:
            return False
        return self.lines.wait(ticket, charges, verdict, self._deadline(ticket), now)

    def _last_resort(
        self, ticket: Ticket, charges: tuple[Charge, ...], verdict: Verdict, now: float
    ) -> None:
        """A ticket can't wait any longer: it is made cheaper, or turned away."""
        if not self._shorten(ticket, charges, verdict):
            self._turn_away(ticket, charges, verdict, now)
        elif ticket.number in self.in_line or not self.lines.join_others(
            ticket, self.limits.charges(ticket), self._deadline(ticket), now
        ):
            self._ask(ticket, now)

    def _turn_away(
        self, ticket: Ticket, charges: tuple[Charge, ...], verdict: Verdict, now: float
    ) -> None:
        self._refused[verdict.by, verdict.scope] += 1
        if verdict.by is DecidedBy.CLOSED:
            refusal = refusals.limits_unknown(verdict.wait_s)
        elif verdict.never:
            refusal = refusals.never_fits(ticket.spec.tenant, charges)
        else:
            refusal = refusals.over_limit(ticket.spec.tenant, charges, verdict)
        self._refuse(ticket, refusal, now)


def _keys_with_more(reserved: tuple[Charge, ...], used: tuple[Charge, ...]) -> list[str]:
    """The limits that have more than before, now that of what was reserved so much was used."""
    keys: list[str] = []
    for before, after in zip(reserved, used, strict=True):
        rule = before.rule
        if rule.kind is Kind.PERMITS or after.amount < before.amount:
            # What comes back to one member of a family another may borrow.
            keys += [rule.key] if rule.family is None else rule.family.rules
    return keys
