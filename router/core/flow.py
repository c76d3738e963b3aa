"""The order in which waiting requests are served: bands, guarantees, fairness, relegation.

All lanes and pools wait here together, so that an urgent request never stands behind a less urgent
one of another lane. The next ticket is chosen in three steps:

1. The band (P0 to P3). Strictly by urgency, except that each band is owed a minimum share of the
   cost that is dispatched while it waits: a band to which the cost of its next ticket is owed goes
   first. So a band that was promised a share phi and offers (sigma, phi * C) on a cluster of C cost
   units per second waits at most (sigma + Lmax) / (phi * C) + Lmax / C, Lmax being the largest
   single cost: a latency-rate server, as deficit round robin.
2. The tenant inside the band: start-time fair queueing. The head of a tenant's line carries the tag
   max(V, F), V the tag served last in the band and F where the tenant's last service ended;
   service of cost c moves F by c / weight. Backlogged tenants get equal cost over any time, up to
   one request, however many requests one of them sends.
3. First in, first out inside a tenant's line.

A ticket that can no longer get its first token in time is relegated to the late line, served by
age after everything that can still be in time. A ticket that waited much longer than its target
moves up one band at a time, never above P1. Source: docs/policy.md, flow control.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.pools import Pool
from router.core.types import Priority, Ticket

LATE: Final = len(Priority)  # the line behind all bands
_BANDS: Final = range(LATE)
_TENANTS_MAX: Final = 10_000  # remembered per band; beyond it those without a claim are forgotten
_OWED_MAX: Final = 4.0  # times a band's largest cost: what it can be owed at most
_LOWEST_PROMOTION: Final = int(Priority.P1)


@dataclass(slots=True, eq=False)
class _Line:
    """Waiting tickets of one tenant in one band of one pool, first in first."""

    tenant: str
    tag: float
    tickets: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)

    def first(self, skipped: Container[int]) -> Ticket | None:
        """The first ticket that was not skipped."""
        for number, ticket in self.tickets.items():
            if number not in skipped:
                return ticket
        return None


@dataclass(slots=True, eq=False)
class _Band:
    """One band over all pools: its fairness clock and what it is owed."""

    share: float = 0.0
    clock: float = 0.0  # V
    ends: dict[str, float] = field(default_factory=dict)  # F by tenant
    owed: float = 0.0
    waiting: int = 0
    cost_max: float = 0.0


class FlowQueue:
    """Waiting tickets of all lanes. Times are seconds, costs are cost units (docs/policy.md)."""

    def __init__(self, config: Config) -> None:
        self._bands = [_Band() for _ in Priority]
        self.configure(config)
        # By pool, then band: a heap of (tag, number of the first ticket, line); the late heap
        # holds (arrival, number, line of one ticket). Lines that emptied are dropped when met.
        self._heaps: dict[Pool, list[list[tuple[float, int, _Line]]]] = {}
        self._lines: dict[tuple[Pool, int, str], _Line] = {}
        self._members: dict[int, Ticket] = {}
        self.waits = self._members  # for those who only ask whether anybody waits, on each request
        self._depth = dict.fromkeys(Lane, 0)
        self._lane_bands = {lane: [0] * (LATE + 1) for lane in Lane}
        self._by_pool: dict[Pool, OrderedDict[int, Ticket]] = {}
        self._alarms: list[tuple[float, int, Ticket]] = []
        self._stash: list[tuple[list[tuple[float, int, _Line]], tuple[float, int, _Line]]] = []

    def configure(self, config: Config) -> None:
        """Take over new settings; what waits stays where it is."""
        self.settings = config.queue
        self._relegates = config.queue.order == "fair" and config.queue.relegate_ratio > 0
        self._tenants = config.tenants
        for band, settings in zip(self._bands, config.classes.by_priority, strict=True):
            band.share = settings.share_min

    def __len__(self) -> int:
        return len(self._members)

    def depth(self, lane: Lane) -> int:
        """Tickets of `lane` that wait."""
        return self._depth[lane]

    def waiting(self, band: int) -> int:
        """Tickets that wait in a band; LATE for the late line."""
        on_time = sum(b.waiting for b in self._bands)
        return len(self._members) - on_time if band == LATE else self._bands[band].waiting

    def holds(self, pool: Pool) -> bool:
        """Whether a ticket of `pool` waits."""
        return pool in self._by_pool

    @property
    def pools(self) -> list[Pool]:
        """The pools for which tickets wait."""
        return list(self._by_pool)

    def of_pool(self, pool: Pool) -> list[Ticket]:
        """All tickets that wait for `pool`."""
        return list(self._by_pool.get(pool, OrderedDict[int, Ticket]()).values())

    def oldest_arrival_at(self, lane: Lane) -> float | None:
        """When the ticket of `lane` that has waited longest came."""
        return min((t.arrived_at for t in self._members.values() if t.lane is lane), default=None)

    # Coming and going.

    def push(self, ticket: Ticket, *, now: float) -> None:
        """Add a ticket; one that comes back after a failed attempt keeps its age."""
        assert ticket.number not in self._members, "queued twice"
        self._members[ticket.number] = ticket
        self._depth[ticket.lane] += 1
        self._by_pool.setdefault(ticket.pool, OrderedDict())[ticket.number] = ticket
        if ticket.pool not in self._heaps:
            self._heaps[ticket.pool] = [[] for _ in range(LATE + 1)]
        self._enter(ticket, self._band_of(ticket, now))
        self._arm(ticket, now)

    def remove(self, ticket: Ticket) -> bool:
        """Take `ticket` out, wherever it stands; False when it is not here."""
        if self._members.pop(ticket.number, None) is None:
            return False
        self._depth[ticket.lane] -= 1
        tickets = self._by_pool[ticket.pool]
        del tickets[ticket.number]
        if not tickets:
            del self._by_pool[ticket.pool]
        self._exit(ticket)
        if len(self._alarms) > 2 * len(self._members) + 64:
            self._alarms = [entry for entry in self._alarms if entry[1] in self._members]
            heapify(self._alarms)
        return True

    def serve(self, ticket: Ticket) -> None:
        """Take `ticket` out because it is dispatched: bands and tenants are charged."""
        band_index = ticket.band
        on_time = band_index < LATE
        line = self._lines.get((ticket.pool, band_index, ticket.spec.tenant))
        tag = line.tag if line is not None else 0.0
        self.remove(ticket)
        for band in self._bands:
            if band.waiting:
                ceiling = _OWED_MAX * band.cost_max
                band.owed = min(ceiling, band.owed + band.share * ticket.cost)
            else:
                band.owed = 0.0
        if not on_time:
            return
        band = self._bands[band_index]
        band.owed = max(0.0, band.owed - ticket.cost)
        if band.waiting:
            tenant = ticket.spec.tenant
            band.clock = max(band.clock, tag)
            start = max(tag, band.ends.get(tenant, 0.0))
            band.ends[tenant] = start + ticket.cost / self._weight(tenant)
            if len(band.ends) > _TENANTS_MAX:
                band.ends = {name: end for name, end in band.ends.items() if end > band.clock}

    def settle(self, ticket: Ticket, cost: float) -> None:
        """Correct the tenant's account when the real cost of a served ticket is known."""
        band = self._bands[min(ticket.band, LATE - 1)]
        tenant = ticket.spec.tenant
        if tenant in band.ends:
            band.ends[tenant] += (cost - ticket.cost) / self._weight(tenant)

    def victim(self, newcomer: Ticket, *, now: float) -> Ticket | None:
        """Who gives way to `newcomer` in its full lane: the latest of a lower band, or nobody."""
        rank = self._band_of(newcomer, now)
        if not any(self._lane_bands[newcomer.lane][rank + 1 :]):
            return None
        worst: Ticket | None = None
        for ticket in self._members.values():
            if ticket.lane is newcomer.lane and ticket.band > rank:
                key = (ticket.band, ticket.number)
                if worst is None or key > (worst.band, worst.number):
                    worst = ticket
        return worst

    # Choosing.

    def offer(self, pools: list[Pool], skipped: Container[int], *, now: float) -> Ticket | None:
        """The next ticket to serve among `pools`, left in place; `skipped` ones did not fit.

        Call `end_round` when done with a round of offers.
        """
        if self.settings.order != "fair":
            return self._best_head(pools, skipped, now)
        for band in self._owed_bands(pools, skipped):
            return self._head(pools, band, skipped)
        for band in range(LATE + 1):
            ticket = self._head(pools, band, skipped)
            if ticket is not None:
                return ticket
        return None

    def end_round(self) -> None:
        """Put back what offers of this round moved aside."""
        for heap, entry in self._stash:
            heappush(heap, entry)
        self._stash.clear()

    # Time.

    def next_deadline(self) -> float | None:
        """When the first ticket changes its band or has waited too long."""
        alarms = self._alarms
        while alarms and self._stale(alarms[0]):
            heappop(alarms)
        return alarms[0][0] if alarms else None

    def expired(self, now: float) -> Ticket | None:
        """Move tickets whose band changes; return one that has waited too long, left in place."""
        while (due := self.next_deadline()) is not None and due <= now:
            ticket = self._alarms[0][2]
            if now >= ticket.queue_deadline_at:
                return ticket
            heappop(self._alarms)
            band = self._band_of(ticket, now)
            if band != ticket.band:
                self._exit(ticket)
                self._enter(ticket, band)
            self._arm(ticket, now)
        return None

    # Inside.

    def _weight(self, tenant: str) -> float:
        settings = self._tenants.get(tenant)
        return 1.0 if settings is None else settings.weight

    def _band_of(self, ticket: Ticket, now: float) -> int:
        settings = self.settings
        if self._relegates and now >= ticket.late_at:
            return LATE
        own = int(ticket.spec.priority)
        if settings.promote_after_targets and own > _LOWEST_PROMOTION:
            step_s = settings.promote_after_targets * ticket.ttft_target_s
            return max(_LOWEST_PROMOTION, own - int((now - ticket.arrived_at) / step_s))
        return own

    def _arm(self, ticket: Ticket, now: float) -> None:
        """Set the next moment at which the ticket must be looked at."""
        due = ticket.queue_deadline_at
        if self._relegates and now < ticket.late_at:
            due = min(due, ticket.late_at)
        if ticket.band != LATE and ticket.band > _LOWEST_PROMOTION:
            step_s = self.settings.promote_after_targets * ticket.ttft_target_s
            if step_s:
                steps = int((now - ticket.arrived_at) / step_s) + 1
                due = min(due, ticket.arrived_at + steps * step_s)
        ticket.alarm_at = due
        heappush(self._alarms, (due, ticket.number, ticket))

    def _stale(self, alarm: tuple[float, int, Ticket]) -> bool:
        due, number, ticket = alarm
        return number not in self._members or ticket.alarm_at != due

    def _enter(self, ticket: Ticket, band_index: int) -> None:
        ticket.band = band_index
        self._lane_bands[ticket.lane][band_index] += 1
        heap = self._heaps[ticket.pool][band_index]
        if band_index == LATE:
            ticket.rank = 2
            line = _Line("", ticket.arrived_at)
            line.tickets[ticket.number] = ticket
            self._lines[ticket.pool, LATE, str(ticket.number)] = line
            heappush(heap, (ticket.arrived_at, ticket.number, line))
            return
        band = self._bands[band_index]
        band.waiting += 1
        band.cost_max = max(band.cost_max, ticket.cost)
        key = (ticket.pool, band_index, ticket.spec.tenant)
        held = self._lines.get(key)
        if held is None:
            tag = max(band.clock, band.ends.get(ticket.spec.tenant, 0.0))
            held = self._lines[key] = _Line(ticket.spec.tenant, tag)
            heappush(heap, (tag, ticket.number, held))
        held.tickets[ticket.number] = ticket
        if ticket.number < next(reversed(held.tickets)) or len(held.tickets) > 1:
            _by_arrival(held.tickets, ticket)

    def _exit(self, ticket: Ticket) -> None:
        band_index = ticket.band
        self._lane_bands[ticket.lane][band_index] -= 1
        name = str(ticket.number) if band_index == LATE else ticket.spec.tenant
        line = self._lines[ticket.pool, band_index, name]
        del line.tickets[ticket.number]
        if not line.tickets:
            del self._lines[ticket.pool, band_index, name]
        if band_index != LATE:
            band = self._bands[band_index]
            band.waiting -= 1
            if not band.waiting:
                # Nobody waits, so nobody has a claim: the next busy period starts even.
                band.owed = band.clock = 0.0
                band.ends.clear()

    def _head(self, pools: list[Pool], band: int, skipped: Container[int]) -> Ticket | None:
        best: Ticket | None = None
        best_key = (0.0, 0)
        for pool in pools:
            entry = self._top(pool, band, skipped)
            if entry is not None and (best is None or entry[:2] < best_key):
                best, best_key = entry[2].first(skipped), entry[:2]
        return best

    def _top(
        self, pool: Pool, band: int, skipped: Container[int]
    ) -> tuple[float, int, _Line] | None:
        """The first entry with a ticket to offer; empty lines go, old tags are renewed."""
        heaps = self._heaps.get(pool)
        heap = heaps[band] if heaps else []
        while heap:
            tag, number, line = entry = heap[0]
            if not line.tickets:
                heappop(heap)
                continue
            if band != LATE:
                head = next(iter(line.tickets))
                renewed = max(line.tag, self._bands[band].ends.get(line.tenant, 0.0))
                if renewed != tag or head != number:
                    line.tag = renewed
                    heappop(heap)
                    heappush(heap, (renewed, head, line))
                    continue
            if line.first(skipped) is None:
                self._stash.append((heap, heappop(heap)))
                continue
            return entry
        return None

    def _owed_bands(self, pools: list[Pool], skipped: Container[int]) -> list[int]:
        """The band that is owed its next ticket, most owed for its share first; at most one."""
        best, best_surplus = -1, 0.0
        for index in _BANDS:
            band = self._bands[index]
            if not band.waiting or not band.share or not band.owed:
                continue
            head = self._head(pools, index, skipped)
            if head is not None and band.owed >= head.cost:
                surplus = (band.owed - head.cost) / band.share
                if best < 0 or surplus > best_surplus:
                    best, best_surplus = index, surplus
        return [best] if best >= 0 else []

    def _best_head(self, pools: list[Pool], skipped: Container[int], now: float) -> Ticket | None:
        """The first of the heads of all lines, by the dynamic order or by arrival."""
        dynamic = self.settings.order == "dynamic"
        best: Ticket | None = None
        best_key = (0.0, 0)
        for pool in pools:
            for (line_pool, _, _), line in self._lines.items():
                head = line.first(skipped) if line_pool is pool else None
                if head is not None:
                    key = (-dynamic_priority(head, now) if dynamic else 0.0, head.number)
                    if best is None or key < best_key:
                        best, best_key = head, key
        return best


def dynamic_priority(ticket: Ticket, now: float) -> float:
    """0.5 * tier + 0.3 * urgency + 0.2 * waiting, each 0 to 1; the highest is served first.

    Tier falls from 1 (P0) to 0 (P3), urgency is the share of the TTFT target that has passed, and
    waiting is capped at ten targets. Source: the brief, dynamic priority.
    """
    waited_s = now - ticket.arrived_at
    tier = 1 - int(ticket.spec.priority) / (LATE - 1)
    urgency = min(1.0, waited_s / ticket.ttft_target_s)
    waiting = min(1.0, waited_s / (10 * ticket.ttft_target_s))
    return 0.5 * tier + 0.3 * urgency + 0.2 * waiting


def _by_arrival(tickets: OrderedDict[int, Ticket], ticket: Ticket) -> None:
    """Move a ticket that came back, or changed its band, ahead of those that arrived later."""
    later = []
    for number in reversed(tickets):
        if number == ticket.number:
            continue
        if number < ticket.number:
            break
        later.append(number)
    for number in reversed(later):
        tickets.move_to_end(number)
