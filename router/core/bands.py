"""The lines in which requests wait: by band, tenant and pool, and what is owed to whom.

A domain is a set of requests that compete for the same workers: the models that share a worker, and
those that share one with them. Shares, fairness and speeds are kept per domain, because a request
neither gains nor loses by what another domain's workers do. Inside it tags are those of start-time
fair queueing: a line's head carries max(V of the time its line began, F of its tenant).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nlargest
from itertools import chain, islice
from typing import Final

from router.contract import Lane
from router.core.drain import LATE, DrainEstimator
from router.core.line import NO_NUMBER, Line
from router.core.pools import Pool
from router.core.types import LATE_RANK, Priority, Ticket

TENANTS_MAX: Final = 10_000  # remembered per band; beyond it those with the least claim on them go
# Times the largest cost that waits: what a band can be owed at most. While something is owed, no
# more is, in all, than a head's cost for each band and one cost that was dispatched since. Less for
# a band of small requests would be lost to it; more piles up only while its workers are blocked.
_OWED_MAX: Final = 5.0
_RATIO_KEPT: Final = 0.98  # of what is known of real costs, with each that is
_SLACK: Final = 64  # dead entries that a heap may hold beside as many as it has living ones
LINES_MAX: Final = 64  # that are looked at for a refusal, of which a flood may cause thousands
_LATE_TENANT: Final = ""
_LATE_SHARE_FROM: Final = Priority.P2  # less urgent ones keep the share of their class
_OWED_RANK: Final = 1  # of a late one whose class is owed its turn: paced as one in time
# Where lines stand: by band, and behind these the late ones by class, as each is owed its share.
_SLOTS: Final = LATE + len(Priority)
_LATE_SLOTS: Final = range(LATE, _SLOTS)


def slot_of(ticket: Ticket) -> int:
    """The slot in which `ticket` waits."""
    return ticket.band if ticket.band != LATE else LATE + ticket.spec.priority


Entry = tuple[float, int, Line]


@dataclass(slots=True, eq=False)
class Band:
    """One band of a domain: its fairness clock and what it is owed."""

    share: float
    clock: float = 0.0  # V
    ends: dict[str, float] = field(default_factory=dict)  # F by tenant
    period: int = 0  # of those in which something waits; claims do not outlive theirs
    owed: float = 0.0  # below 0: what it got for dispatches that cost less than they seemed to
    began: int = 0  # how often its domain had dispatched when it was first owed something
    waiting: int = 0
    late: int = 0  # of its class, where those keep its share
    cost_max: float = 0.0
    tenants_max: int = TENANTS_MAX  # at which `ends` is looked through

    def enter(self, ticket: Ticket, dispatches: int) -> None:
        """One more waits, in the band or late, after so many dispatches."""
        if not (self.waiting or self.late):
            self.began = dispatches
        is_late = ticket.band == LATE
        self.late += is_late
        self.waiting += not is_late
        self.cost_max = max(self.cost_max, ticket.cost)

    def exit(self, ticket: Ticket) -> None:
        """One waits no more. Where nobody does, nobody has a claim: the next period starts even."""
        is_late = ticket.band == LATE
        self.late -= is_late
        self.waiting -= not is_late
        if not self.waiting:
            self.clock = 0.0
            self.ends.clear()
            self.period += 1
            self.tenants_max = TENANTS_MAX
            if not self.late:
                self.owed = self.cost_max = 0.0

    def tag(self, line: Line) -> float:
        """The tag of the line's head."""
        return max(line.since, self.ends.get(line.tenant, 0.0))

    def charge(self, tenant: str, tag: float, work: float) -> None:
        """A head with `tag` was served: `work` is its cost over its tenant's weight."""
        self.clock = max(self.clock, tag)
        self.ends[tenant] = tag + work
        if len(self.ends) > self.tenants_max:
            ahead = [(end, name) for name, end in self.ends.items() if end > self.clock]
            kept = nlargest(TENANTS_MAX, ahead)
            self.ends.clear()
            self.ends.update((name, end) for end, name in kept)
            self.tenants_max = 2 * TENANTS_MAX


class Bill:
    """What a ticket was charged by its estimate, until it is known what it really cost."""

    __slots__ = ("band", "domain", "expected", "number", "period", "taken")

    def __init__(self, domain: Domain, band: Band | None, expected: float) -> None:
        self.domain = domain
        self.band = band  # of whose share it was served, if any
        self.expected = expected  # cost
        self.taken = 0.0  # of what that was owed
        self.number = domain.dispatches
        self.period: int | None = None  # of the band, in which its tenant was charged, if it was


class Domain:
    """All that waits for one set of workers."""

    __slots__ = (
        "_costs",
        "_estimates",
        "bands",
        "cost_ratio",
        "crowds",
        "depths",
        "dispatches",
        "drain",
        "name",
        "stands",
    )

    def __init__(self, name: str, shares: Iterable[float], drain: DrainEstimator) -> None:
        self.name = name
        self.bands = [Band(share) for share in shares]
        self.drain = drain
        self.dispatches = 0
        self.cost_ratio = 1.0  # real over estimated, of those that ended lately
        self._costs = self._estimates = 0.0
        self.stands: dict[Pool, Stand] = {}  # of the pools for which something waits
        self.depths = dict.fromkeys(Lane, 0)  # how many wait
        self.crowds: dict[Lane, list[dict[int, Ticket]]] = {  # by lane, band and number
            lane: [{} for _ in range(LATE + 1)] for lane in Lane
        }

    def lowest(self, lane: Lane) -> int | None:
        """The lowest band of `lane` in which something waits, LATE below all; None: in none."""
        if not self.depths[lane]:
            return None
        crowds, band = self.crowds[lane], LATE
        while not crowds[band]:
            band -= 1
        return band

    def account(self, ticket: Ticket) -> Band | None:
        """The band whose share `ticket` is served of: its own, or late that of its class.

        None for late P0 and P1: their share is for what can be in time.
        """
        if ticket.band != LATE:
            return self.bands[ticket.band]
        priority = ticket.spec.priority
        return self.bands[priority] if priority >= _LATE_SHARE_FROM else None

    def owe(self, cost: float) -> None:
        """`cost` was dispatched: each band that waits is owed its share of it."""
        self.dispatches += 1
        most = _OWED_MAX * max(band.cost_max for band in self.bands)
        for band in self.bands:
            if band.waiting or band.late:
                band.owed = min(most, band.owed + band.share * cost)

    def learn(self, estimated: float, cost: float) -> None:
        """A request cost so much; classes are owed and charged what estimates are worth."""
        self._estimates = _RATIO_KEPT * self._estimates + estimated
        self._costs = _RATIO_KEPT * self._costs + cost
        self.cost_ratio = self._costs / self._estimates

    def correct(self, bill: Bill, cost: float) -> bool:
        """What `bill` is for did `cost`, not as expected; True: somebody is owed more or less.

        Who came later is not concerned. The band that it was served of is charged `cost` where it
        was owed all that was expected; else it was its turn anyway, which leaves no debt.
        """
        taken, moved = bill.taken, False
        most = _OWED_MAX * max(band.cost_max for band in self.bands)
        for band in self.bands:
            if (band.waiting or band.late) and band.began < bill.number:
                more = band.share * (cost - bill.expected)
                if band is bill.band:
                    more += taken - cost
                    more = more if taken >= bill.expected else max(0.0, more)
                band.owed, moved = max(-most, min(most, band.owed + more)), True
        return moved

    def work_before_s(self, ticket: Ticket, place_at: float, most_s: float) -> float:
        """Prefill that goes before `ticket`, with that place in its class; above `most_s`, about.

        Of its own line that is all with a lower place. Of each line of another tenant it is as much
        as that and the ticket itself, or what is there; where there are many, some tell for all.
        """
        index, tenant, own_s = int(ticket.spec.priority), ticket.spec.tenant, 0.0
        stand = self.stands.get(ticket.pool)
        if stand is not None and (own := stand.lines[index].get(tenant)) is not None:
            own_s = own.work_before_s(place_at)
            here = ticket.number in stand.tickets and ticket.band == index
            if here and ticket.place_at <= place_at:
                own_s = max(0.0, own_s - ticket.prefill_s)
        others_s, stands = 0.0, self.stands.values()
        lines = chain.from_iterable(stand.lines[index].values() for stand in stands)
        for line in islice(lines, LINES_MAX):
            if line.tenant != tenant:
                others_s += min(line.work_s, own_s + ticket.prefill_s)
            if own_s + others_s > most_s:
                break
        count = sum(len(stand.lines[index]) for stand in stands)
        return own_s + others_s * max(1.0, count / LINES_MAX)

    def choice(self, stands: list[Stand], skipped: Container[int]) -> tuple[int, Ticket] | None:
        """The ticket of `stands` to serve next, with its rank: -1 when owed, else its band."""
        return Heads(self, stands, skipped).choice()


class Heads:
    """The first ticket of each band among some stands of a domain, while tickets are offered.

    It looks again only where `changed` says that something happened: a ticket of the band was
    passed over, or served.
    """

    __slots__ = ("_domain", "_heads", "_known", "_skipped", "_stands")

    def __init__(self, domain: Domain, stands: list[Stand], skipped: Container[int]) -> None:
        self._domain = domain
        self._stands = stands
        self._skipped = skipped
        self._heads: list[Ticket | None] = [None] * _SLOTS
        self._known = [False] * _SLOTS

    def changed(self, ticket: Ticket) -> None:
        """`ticket`, a head, was passed over or is gone."""
        self._known[slot_of(ticket)] = False

    def choice(self) -> tuple[int, Ticket] | None:
        """The ticket to serve next, with its rank: -1 when owed, else its band."""
        ticket = self._owed()
        if ticket is not None:
            return -1, ticket
        for band in range(LATE):
            ticket = self._heads[band] if self._known[band] else self._look(band)
            if ticket is not None:
                return band, ticket
        for slot in _LATE_SLOTS:
            head = self._heads[slot] if self._known[slot] else self._look(slot)
            if head is not None and (ticket is None or _is_older(head, ticket)):
                ticket = head
        return None if ticket is None else (LATE, ticket)

    def _owed(self) -> Ticket | None:
        """The next ticket of the class to which it is owed, most owed for its share first."""
        best, most = None, -1.0
        for index, band in enumerate(self._domain.bands):
            if not band.share or band.owed <= 0:
                continue
            head = self._heads[index] if self._known[index] else self._look(index)
            if head is None and band.late:
                head = self._late(index)
            if head is not None and band.owed >= (cost := head.cost * self._domain.cost_ratio):
                surplus = (band.owed - cost) / band.share
                if surplus > most:
                    best, most = head, surplus
        if best is not None and best.band == LATE:
            best.rank = min(best.rank, _OWED_RANK)
        return best

    def _late(self, index: int) -> Ticket | None:
        """The oldest late ticket of a class with nothing in time; None once it was passed."""
        slot = LATE + index
        head = self._heads[slot] if self._known[slot] else self._look(slot)
        return None if any(stand.passed(slot) for stand in self._stands) else head

    def _look(self, slot: int) -> Ticket | None:
        self._known[slot] = True
        head = self._heads[slot] = _head(self._stands, slot, self._skipped)
        return head


class Stand:
    """What waits for one pool."""

    __slots__ = ("_stash", "domain", "heaps", "lines", "tickets")

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.tickets: dict[int, Ticket] = {}
        # By slot: lines by tenant (late ones by ticket), and a heap of their entries. An entry that
        # its line is not filed by any more is dropped when met.
        self.lines: list[dict[str | int, Line]] = [{} for _ in range(_SLOTS)]
        self.heaps: list[list[Entry]] = [[] for _ in range(_SLOTS)]
        self._stash: list[tuple[int, Entry]] = []  # moved aside in this round of offers

    def enter(self, ticket: Ticket, band_index: int) -> None:
        """Put `ticket` into a band, or LATE."""
        ticket.band = band_index
        self.domain.crowds[ticket.lane][band_index][ticket.number] = ticket
        self.domain.depths[ticket.lane] += 1
        slot = slot_of(ticket)
        lines, band = self.lines[slot], self.domain.account(ticket)
        if band_index == LATE or band is None:
            ticket.rank = LATE_RANK
            line = lines[ticket.number] = Line(_LATE_TENANT, ticket.place_at)
        else:
            held = lines.get(ticket.spec.tenant)
            line = held or Line(ticket.spec.tenant, band.clock)
            lines[ticket.spec.tenant] = line
        if band is not None:
            band.enter(ticket, self.domain.dispatches)
        line.add(ticket)
        self.file(line, slot)

    def exit(self, ticket: Ticket) -> None:
        """Take `ticket` out of its band."""
        slot = slot_of(ticket)
        lines = self.lines[slot]
        name = ticket.number if slot >= LATE else ticket.spec.tenant
        line = lines[name]
        line.drop(ticket)
        del self.domain.crowds[ticket.lane][ticket.band][ticket.number]
        self.domain.depths[ticket.lane] -= 1
        if line.count:
            self.file(line, slot)
        else:
            line.filed_number = NO_NUMBER
            del lines[name]
        if (band := self.domain.account(ticket)) is not None:
            band.exit(ticket)
        heap = self.heaps[slot]
        if len(heap) > 2 * len(lines) + _SLACK:
            heap[:] = [(line.filed_tag, line.filed_number, line) for line in lines.values()]
            heapify(heap)

    def file(self, line: Line, slot: int) -> None:
        """Give `line` the entry that its head and its tenant's account ask for."""
        tag = line.since if slot >= LATE else self.domain.bands[slot].tag(line)
        number = line.first_number
        if number != line.filed_number or tag != line.filed_tag:
            line.filed_tag, line.filed_number = tag, number
            heappush(self.heaps[slot], (tag, number, line))

    def refile(self, tenant: str, slot: int) -> None:
        """The account of `tenant` went down; one that went up is seen when its line is met."""
        line = self.lines[slot].get(tenant)
        if line is not None:
            self.file(line, slot)

    def top(self, slot: int, skipped: Container[int]) -> Entry | None:
        """The first entry with a ticket to offer; those without are moved aside for this round."""
        heap = self.heaps[slot]
        while heap:
            entry = tag, number, line = heap[0]
            if line.filed_number != number or line.filed_tag != tag:
                heappop(heap)
            elif slot < LATE and self.domain.bands[slot].tag(line) != tag:
                heappop(heap)
                self.file(line, slot)
            elif skipped and line.first(skipped) is None:
                self._stash.append((slot, heappop(heap)))
            else:
                return entry
        return None

    def passed(self, slot: int) -> bool:
        """Whether any line of the slot was moved aside in this round."""
        return any(moved == slot for moved, _ in self._stash)

    def end_round(self) -> None:
        """Put back what was moved aside."""
        for slot, entry in self._stash:
            heappush(self.heaps[slot], entry)
        self._stash.clear()


def _before(one: Entry, other: Entry) -> bool:
    """Whether `one` comes first; their lines do not count."""
    return one[0] < other[0] or (one[0] == other[0] and one[1] < other[1])


def _is_older(one: Ticket, other: Ticket) -> bool:
    """Whether `one` comes first of two late ones."""
    return (one.place_at, one.number) < (other.place_at, other.number)


def _head(stands: list[Stand], slot: int, skipped: Container[int]) -> Ticket | None:
    best: Entry | None = None
    for stand in stands:
        if stand.heaps[slot]:
            entry = stand.top(slot, skipped)
            if entry is not None and (best is None or _before(entry, best)):
                best = entry
    return None if best is None else best[2].first(skipped)
