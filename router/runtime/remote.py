"""A request as its brain sees it, which a relay runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.core.types import Refusal, Ticket
from router.errors import Reason
from router.runtime import frames
from router.runtime.packing import DECISION, GRANTED, PLAIN, REFUSAL

if TYPE_CHECKING:
    from router.runtime.brain_link import RelayLink


class Remote:
    """Passes on to its relay what is decided. The driver owns it as if the request were here."""

    __slots__ = ("_link", "_number", "ticket")

    def __init__(self, link: RelayLink, number: int) -> None:
        self.ticket: Ticket
        self._link = link
        self._number = number

    def dispatch(self) -> None:
        """Have it sent to its worker."""
        ticket = self.ticket
        decision = ticket.degraded
        self._link.send(
            (
                frames.DISPATCH,
                self._number,
                PLAIN[ticket.lane],
                ticket.worker_id,
                None if decision is None else DECISION.fields_of(decision),
                GRANTED.fields_of(ticket.reservation),
            )
        )

    def reserved(self) -> None:
        """Have it known what it holds while it waits."""
        reservation = GRANTED.fields_of(self.ticket.reservation)
        self._link.send((frames.RESERVED, self._number, reservation))

    def refuse(self, refusal: Refusal) -> None:
        """Have it answered; it is over."""
        self._link.forget(self._number)
        self._link.send((frames.REFUSE, self._number, REFUSAL.fields_of(refusal)))

    def judged(self, *, again: bool) -> None:
        """Say what follows a failed attempt."""
        if not again:
            self._link.forget(self._number)
        self._link.send((frames.JUDGED, self._number, again))

    def preempt(self) -> bool:
        """Ask for it; what comes of that, the relay says later."""
        self._link.send((frames.PREEMPT, self._number))
        return False

    def sweep(self, now: float) -> None:
        """Its relay looks after it."""

    def cut(self, reason: Reason, message: str) -> None:
        """Have it ended; the relay says when that is done."""
        self._link.send((frames.CUT, self._number, PLAIN[reason], message))
