"""Who of a line comes next: start-time fair queueing between tenants, first in first out in each.

A tenant's next ticket carries the tag max(V, F): V is the tag that was last served when the tenant
came to the line, F is where its own service ends, which grows by what it is granted over its
weight. The lowest tag is next. So tenants that always wait get equal parts by weight, whatever
number of tickets each has there; one that comes anew has no claim for the time before.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, nlargest
from typing import Final

from router.core.bands import TENANTS_MAX
from router.core.types import Ticket

# Outdated entries and accounts that are kept beside twice as many as are needed.
_SLACK: Final = 64
_NO_ENTRY: tuple[float, int] = (-1.0, -1)


class _Row:
    """The tickets of one tenant, by number in the order in which they came."""

    __slots__ = ("filed", "since", "tenant", "tickets")

    def __init__(self, tenant: str, since: float) -> None:
        self.tenant = tenant
        self.since = since  # V when it began
        self.tickets: dict[int, Ticket] = {}
        self.filed = _NO_ENTRY  # tag and number of its valid entry in the heap

    def __lt__(self, other: _Row) -> bool:
        """No order of its own: a heap may hold two entries of a row with one key."""
        return False


class TenantOrder:
    """The tickets of a line, and what each tenant was granted while there was one."""

    __slots__ = ("_clock", "_ends", "_ends_max", "_heap", "_rows", "tickets")

    def __init__(self) -> None:
        self.tickets: dict[int, Ticket] = {}
        self._clock = 0.0  # V
        self._ends: dict[str, float] = {}  # F
        self._ends_max = _SLACK  # at which it is looked through
        self._rows: dict[str, _Row] = {}
        self._heap: list[tuple[float, int, _Row]] = []

    @property
    def tenants(self) -> list[str]:
        """Whose tickets wait."""
        return list(self._rows)

    def add(self, ticket: Ticket) -> None:
        """Put a ticket behind those of its tenant."""
        tenant = ticket.spec.tenant
        row = self._rows.get(tenant)
        if row is None:
            row = self._rows[tenant] = _Row(tenant, self._clock)
        row.tickets[ticket.number] = self.tickets[ticket.number] = ticket
        if len(row.tickets) == 1:
            self._file(row)

    def drop(self, ticket: Ticket) -> None:
        """Take a ticket out, wherever it stands."""
        number, tenant = ticket.number, ticket.spec.tenant
        del self.tickets[number]
        row = self._rows[tenant]
        del row.tickets[number]
        if not row.tickets:
            row.filed = _NO_ENTRY
            del self._rows[tenant]
        elif row.filed[1] == number:
            self._file(row)
        if len(self._heap) > 2 * len(self._rows) + _SLACK:
            self._heap = [(*each.filed, each) for each in self._rows.values()]
            heapify(self._heap)

    def first(self) -> Ticket:
        """The next ticket of a line that is not empty."""
        while True:
            tag, number, row = self._heap[0]
            if row.filed == (tag, number):
                return row.tickets[number]
            heappop(self._heap)

    def charge(self, tenant: str, work: float, *, served: bool) -> None:
        """A tenant was granted so much over its weight, or gave so much back (below 0).

        `served`: it was granted to a ticket that stands here.
        """
        row = self._rows.get(tenant)
        tag = max(self._clock if row is None else row.since, self._ends.get(tenant, 0.0))
        if served:
            self._clock = max(self._clock, tag)
        self._ends[tenant] = tag + work
        if row is not None:
            self._file(row)
        if len(self._ends) > self._ends_max:
            self._forget()

    def _file(self, row: _Row) -> None:
        """Give a row the entry that its first ticket and its tenant's account ask for."""
        row.filed = max(row.since, self._ends.get(row.tenant, 0.0)), next(iter(row.tickets))
        heappush(self._heap, (*row.filed, row))

    def _forget(self) -> None:
        """Drop accounts that say no more than V; of very many, those that say least."""
        ahead = [(end, tenant) for tenant, end in self._ends.items() if end > self._clock]
        self._ends = {tenant: end for end, tenant in nlargest(TENANTS_MAX, ahead)}
        self._ends_max = 2 * len(self._ends) + _SLACK
