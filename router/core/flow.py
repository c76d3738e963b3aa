"""The order in which waiting requests are served: bands, guarantees, fairness, relegation.

All lanes and pools wait here together, so that an urgent request never stands behind a less urgent
one of another lane. Of those that compete for the same workers (a domain, see `bands`) the next
ticket is chosen in three steps:

1. The band (P0 to P3). Strictly by urgency, except that each band is owed a minimum share of the
   cost that is dispatched while it waits: a band to which the cost of its next ticket is owed goes
   first. So a band that was promised a share phi and offers (sigma, phi * C) on a cluster of C cost
   units per second waits at most (sigma + Lmax) / (phi * C) + Lmax / C, Lmax being the largest
   single cost: a latency-rate server, as deficit round robin.
2. The tenant inside the band: start-time fair queueing. The head of a tenant's line carries the tag
   max(V, F), V the tag served last in the band and F where the tenant's last service ended;
   service of cost c moves F by c / weight. Backlogged tenants get equal cost over any time, up to
   one request, however many requests one of them sends.
3. The place in the tenant's line: arrival plus a hundred times the prefill. So in a burst short
   prompts go first, and no request is passed by what comes longer after it than that.

A ticket that can no longer get its first token in time is relegated to the late line, served by
place after everything that can still be in time. But late P2 and P3 keep the share of their class:
one that is owed and has nothing in time serves its oldest late ticket. A ticket that waited much
longer than its target moves up one band at a time, never above P1, where nobody is relegated.
Source: docs/policy.md, flow control.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from random import Random
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.bands import Bill, Domain, Heads, Stand
from router.core.drain import LATE, PASSED, SHORT_S, WAITED, DrainEstimator, Left
from router.core.evict import victim
from router.core.line import Line
from router.core.pools import ANY_MODEL, Pool
from router.core.types import Priority, Ticket

# Seconds of waiting that weigh as much as one of prefill: within a burst the short ones go first,
# which keeps most requests in time; what comes long after it passes nobody, however short.
WAIT_PER_PREFILL: Final = 100.0
# What those get of the speed who wait when a request comes; the rest is for whom passes them.
_OWN_PART: Final = 1 / 7
_AT_THE_EDGE: Final = 0.8  # of the target: within a factor of two of all waits from 0.4 of it on
_LOWEST_PROMOTION: Final = int(Priority.P1)
_ALARMS_SLACK: Final = 64


class FlowQueue:
    """Waiting tickets of all lanes. Times are seconds, costs are cost units (docs/policy.md)."""

    def __init__(self, config: Config) -> None:
        self._members: dict[int, Ticket] = {}
        self.waits = self._members  # for those who only ask whether anybody waits, on each request
        self._domains: dict[str, Domain] = {}
        self._stands: dict[Pool, Stand] = {}  # only pools for which something waits
        self._depths = dict.fromkeys(Lane, 0)
        self._alarms: list[tuple[float, int, Ticket]] = []
        self.relegated = self.promoted = 0
        self.version = 0  # moves when the order does, but not when somebody comes
        self.newcomers: list[Ticket] = []  # or changed their band, since they were last taken
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings; what waits stays where it is."""
        self._config = config
        self.settings = config.queue
        self._is_fair = fair = config.queue.order == "fair"
        self._elephant_s = config.pacing.elephant_s
        self.version += 1
        self._wait_per_prefill = WAIT_PER_PREFILL if fair else 0.0
        self._relegates = fair and config.queue.relegate_ratio > 0
        self._promote_after = config.queue.promote_after_targets if fair else 0.0
        self._tenants = config.tenants
        for domain in self._domains.values():
            domain.drain.configure(config)
        self.set_shares([settings.share_min for settings in config.classes.by_priority])
        for ticket in self._members.values():
            if ticket.band != LATE:  # to be looked at now, as others may be late or move up
                ticket.alarm_at = ticket.arrived_at
        self._alarms = [(ticket.alarm_at, n, ticket) for n, ticket in self._members.items()]
        heapify(self._alarms)

    def set_shares(self, shares: Sequence[float]) -> None:
        """Set the minimum shares of the dispatched cost, by class; what is owed stays owed."""
        self.shares = tuple(shares)
        self.version += 1
        for domain in self._domains.values():
            domain.drain.set_shares(self.shares)
            for band, share in zip(domain.bands, self.shares, strict=True):
                band.share = share

    def __len__(self) -> int:
        return len(self._members)

    def depth(self, lane: Lane) -> int:
        """Tickets of `lane` that wait."""
        return self._depths[lane]

    def waiting(self, lane: Lane, band: int) -> Collection[Ticket]:
        """The tickets of `lane` that wait in a band; LATE for the late line."""
        crowds = (domain.crowds[lane][band] for domain in self._domains.values())
        return [ticket for crowd in crowds for ticket in crowd.values()]

    @property
    def urgent_wait(self) -> bool:
        """Whether tickets wait in the most urgent band."""
        return any(domain.bands[0].waiting for domain in self._domains.values())

    @property
    def domains(self) -> Collection[Domain]:
        """All domains of which something is known."""
        return self._domains.values()

    @property
    def pools(self) -> list[Pool]:
        """The pools for which tickets wait."""
        return list(self._stands)

    def of_pool(self, pool: Pool) -> list[Ticket]:
        """All tickets that wait for `pool`."""
        stand = self._stands.get(pool)
        return list(stand.tickets.values()) if stand else []

    def retry_after_s(self, ticket: Ticket, *, now: float, rng: Random) -> float:
        """Seconds after which the client of a refused ticket should come again."""
        domain, priority = self._domain(ticket.pool), ticket.spec.priority
        drain = domain.drain
        longest_s = min(drain.longest_s(priority), ticket.ttl_s)
        if longest_s <= 2 * SHORT_S:
            return drain.spread(longest_s / 2, rng)  # right, whatever comes
        speed = drain.prefill_per_s(now=now) if self._relegates else None
        if not speed:
            return drain.retry_after_s(priority, now=now, rng=rng, longest_s=longest_s)
        return drain.spread(self._wait_anew_s(domain, ticket, speed, longest_s, now), rng)

    def expected_wait_s(self, ticket: Ticket, *, now: float) -> float | None:
        """How long a ticket that came now would wait here, its own turn included.

        Of its class only what fair queueing serves before it counts. None when nothing is known of
        that, or nobody was served lately.
        """
        domain, priority = self._domain(ticket.pool), ticket.spec.priority
        drain, ahead, prefill_s = domain.drain, inf, ticket.prefill_s
        speed = drain.cost_per_s(now=now)
        if not speed:
            return None
        if self._is_fair and prefill_s:
            per_s = ticket.cost / prefill_s  # also of what takes turns with it: turns are of a cost
            most_s = ticket.ttft_target_s * speed / per_s  # behind more it would be late anyway
            place_at = now + self._wait_per_prefill * prefill_s
            work_s = domain.work_before_s(ticket, place_at, most_s)
            ahead = per_s * work_s if work_s <= most_s else inf
        forecast = drain.forecast(priority, now=now, ahead=ahead)
        if forecast is None:
            return None
        return drain.expected_s(priority, forecast) + ticket.cost / speed

    # Coming and going.

    def push(self, ticket: Ticket, *, now: float) -> None:
        """Add a ticket; one that comes back after a failed attempt keeps its age."""
        assert ticket.number not in self._members, "queued twice"
        self._members[ticket.number] = ticket
        stand = self._stands.get(ticket.pool)
        if stand is None:
            domain = self._domain(ticket.pool)
            stand = self._stands[ticket.pool] = domain.stands[ticket.pool] = Stand(domain)
        drain = stand.domain.drain
        ticket.queued_at = now
        # One that comes back goes ahead of others of its age, however long: no wait to measure.
        back = ticket.attempts or ticket.preempted
        # What was promised once is not given up for being late.
        ticket.lives_until = inf if back else now + ticket.ttl_s
        weight = 0.0 if back else self._wait_per_prefill
        ticket.place_at = ticket.arrived_at + weight * ticket.prefill_s
        ticket.forecast = None if back else drain.forecast(ticket.spec.priority, now=now)
        stand.tickets[ticket.number] = ticket
        self.newcomers.append(ticket)
        self._enter(stand, ticket, self._band_of(ticket, now))
        drain.enter(ticket.band, ticket.cost, now=now)
        self._arm(ticket, now)

    def take_out(self, ticket: Ticket, *, now: float) -> bool:
        """Take out a ticket that is to stand elsewhere, for `put_back`; False: it is not here."""
        return self.remove(ticket, now=now, left=Left.MOVED)

    def put_back(self, ticket: Ticket, *, now: float) -> None:
        """Add a ticket that was taken out to stand elsewhere; its wait goes on."""
        queued_at, forecast, lives_until = ticket.queued_at, ticket.forecast, ticket.lives_until
        self.push(ticket, now=now)
        ticket.queued_at, ticket.forecast, ticket.lives_until = queued_at, forecast, lives_until
        self._arm(ticket, now)

    def take_newcomers(self) -> list[Ticket]:
        """Who came since the last call, or changed its band; some may have left again."""
        newcomers, self.newcomers = self.newcomers, []
        return newcomers

    def evict(self, ticket: Ticket, *, now: float) -> None:
        """Take `ticket` out, if it waits, because its place goes to another."""
        self.remove(ticket, now=now, left=Left.EVICTED)

    def remove(self, ticket: Ticket, *, now: float, left: Left | None = None) -> bool:
        """Take `ticket` out, wherever it stands; False when it is not here."""
        if self._members.pop(ticket.number, None) is None:
            return False
        self.version += 1
        stand = self._stands[ticket.pool]
        del stand.tickets[ticket.number]
        self._exit(stand, ticket)
        left = left or (WAITED if now > ticket.queued_at else PASSED)
        stand.domain.drain.leave(ticket.band, ticket.cost, now=now, left=left)
        if not stand.tickets:
            del self._stands[ticket.pool], stand.domain.stands[ticket.pool]
        if len(self._alarms) > 2 * len(self._members) + _ALARMS_SLACK:
            self._alarms = [entry for entry in self._alarms if not self._stale(entry)]
            heapify(self._alarms)
        return True

    def serve(self, ticket: Ticket, *, now: float) -> None:
        """Take `ticket` out because it is dispatched: bands and tenants are charged.

        It may be one that does not wait here, dispatched while others do.
        """
        if ticket.number in self._members:
            domain = self._stands[ticket.pool].domain
            self.learn(ticket, now)
        else:
            domain = self._domain(ticket.pool)
            ticket.band = self._band_of(ticket, now)
        tag, tenant = self._tag(domain, ticket), ticket.spec.tenant
        domain.drain.sent(ticket.prefill_s, now=now)
        self.remove(ticket, now=now)
        domain.owe(cost := ticket.cost * domain.cost_ratio)
        band = domain.account(ticket)
        ticket.bill = bill = Bill(domain, band, cost)
        if band is None:
            return
        bill.taken = max(0.0, min(band.owed, cost))
        band.owed -= bill.taken
        if band.waiting and ticket.band != LATE:
            band.charge(tenant, tag, ticket.cost / self._weight(tenant))
            bill.period = band.period

    def settle(self, ticket: Ticket, cost: float) -> None:
        """Correct accounts, and what bands are owed, by what a served ticket really cost.

        A ticket is settled once for each time that it was served.
        """
        bill, ticket.bill = ticket.bill, None
        if bill is None:
            return
        if cost and ticket.cost:  # an attempt that brought nothing tells of no cost
            bill.domain.learn(ticket.cost, cost)
        band, tenant = bill.band, ticket.spec.tenant
        self.version += bill.domain.correct(bill, cost)
        if band is not None and band.period == bill.period and tenant in band.ends:
            band.ends[tenant] += (cost - ticket.cost) / self._weight(tenant)
            for stand in bill.domain.stands.values():
                if tenant in stand.lines[ticket.band]:
                    self.version += 1
                    if cost < ticket.cost:
                        stand.refile(tenant, ticket.band)

    def victim(self, newcomer: Ticket, *, now: float) -> Ticket | None:
        """Who gives way to `newcomer` in its full lane; None: nobody does."""
        own, rank = self._domain(newcomer.pool), self._band_of(newcomer, now)
        return victim(newcomer, rank, own, self._domains.values(), self._weight)

    def regroup(self, live: Container[str], *, now: float) -> None:
        """Membership moved: pools may compete with others now; of `live` domains all is kept."""
        for pool, stand in list(self._stands.items()):
            if pool.domain != stand.domain.name:
                tickets = list(stand.tickets.values())
                for ticket in tickets:
                    self.take_out(ticket, now=now)
                for ticket in tickets:
                    self.put_back(ticket, now=now)
        for name in [name for name, d in self._domains.items() if not d.stands]:
            if name not in live:
                del self._domains[name]

    # Choosing.

    def groups(self, pools: list[Pool]) -> list[list[Pool]]:
        """`pools`, apart where no request of one could take the place of one of another."""
        found: dict[str, list[Pool]] = {}
        for pool in pools:
            found.setdefault(pool.domain, []).append(pool)
        return [pools] if ANY_MODEL in found and len(found) > 1 else list(found.values())

    def heads(self, pools: Sequence[Pool], skipped: Container[int]) -> Heads | None:
        """The heads to choose from in a round of offers of `pools`; `skipped` ones did not fit.

        None when no such heads hold for a whole round: offers of several domains, or in an order
        that looks at every line. Then ask `offer` each time.
        """
        if not self._is_fair:
            return None
        stands = [stand for pool in pools if (stand := self._stands.get(pool)) is not None]
        domains = {stand.domain for stand in stands}
        return Heads(domains.pop(), stands, skipped) if len(domains) == 1 else None

    def offer(self, pools: Sequence[Pool], skipped: Container[int], *, now: float) -> Ticket | None:
        """The next ticket to serve among `pools`, left in place; `skipped` ones did not fit.

        Call `end_round` when done with a round of offers.
        """
        stands = [stand for pool in pools if (stand := self._stands.get(pool)) is not None]
        if self.settings.order != "fair":
            return self._best_head(stands, skipped, now)
        # Tags of different domains do not compare: of equal bands the oldest goes first.
        best: tuple[int, Ticket] | None = None
        for domain in dict.fromkeys(stand.domain for stand in stands):
            found = domain.choice([s for s in stands if s.domain is domain], skipped)
            if found is not None and (
                best is None or (found[0], found[1].number) < (best[0], best[1].number)
            ):
                best = found
        return None if best is None else best[1]

    def end_round(self) -> None:
        """Put back what offers of this round moved aside."""
        for stand in self._stands.values():
            stand.end_round()

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
            stand = self._stands[ticket.pool]
            if now >= ticket.held_until:
                return ticket
            heappop(self._alarms)
            old, new = ticket.band, self._band_of(ticket, now)
            if new != old:
                self._exit(stand, ticket)
                self._enter(stand, ticket, new)
                self.version += 1
                self.newcomers.append(ticket)  # its rank may be another
                stand.domain.drain.move(old, new, ticket.cost, now=now)
                if new == LATE:
                    self.relegated += 1
                self.promoted += new < old
            self._arm(ticket, now)
        return None

    def learn(self, ticket: Ticket, now: float) -> None:
        """The wait of a ticket that waits here is over: later forecasts learn of it."""
        waited_s = now - ticket.queued_at
        if waited_s > 0:
            drain = self._stands[ticket.pool].domain.drain
            priority, forecast = ticket.spec.priority, ticket.forecast
            drain.learn(priority, forecast, waited_s=waited_s, line=ticket.band, now=now)
        ticket.forecast = None

    def spare(self, ticket: Ticket, now: float) -> None:
        """Let a late ticket that waits here have its whole patience."""
        ticket.lives_until = inf
        self._arm(ticket, now)

    # Inside.

    def _domain(self, pool: Pool) -> Domain:
        domain = self._domains.get(pool.domain)
        if domain is None:
            drain = DrainEstimator(self._config)
            drain.set_shares(self.shares)
            domain = self._domains[pool.domain] = Domain(pool.domain, self.shares, drain)
        return domain

    def _weight(self, tenant: str) -> float:
        settings = self._tenants.get(tenant)
        return 1.0 if settings is None else settings.weight

    def _tag(self, domain: Domain, ticket: Ticket) -> float:
        """The tag of a ticket that is served from its line, or past all lines."""
        if ticket.band == LATE:
            return 0.0
        band, tenant = domain.bands[ticket.band], ticket.spec.tenant
        stand = self._stands.get(ticket.pool)
        line = stand.lines[ticket.band].get(tenant) if stand else None
        return band.tag(line or Line(tenant, band.clock))

    def _wait_anew_s(
        self, domain: Domain, ticket: Ticket, speed: float, longest_s: float, now: float
    ) -> float:
        """What `ticket` would wait if it came now, prompts being sent at `speed`.

        In time, when what fair queueing serves before it leaves soon enough at its part of the
        speed. Else among the late, as long as its class or their line takes. When a burst will be
        over nobody knows: where that is longer than a quarter of the longest wait, it is between
        this and all of it, the sooner the shorter its prompt.
        """
        drain, priority, prefill_s = domain.drain, ticket.spec.priority, ticket.prefill_s
        late_after_s = max(0.0, ticket.late_at - ticket.arrived_at)
        place_s = self._wait_per_prefill * prefill_s
        speed *= _OWN_PART
        most_s = late_after_s * speed
        work_s = prefill_s + domain.work_before_s(ticket, now + place_s, most_s)
        if work_s <= most_s:
            return min(work_s / speed, _AT_THE_EDGE * late_after_s, longest_s)
        late_s = max(late_after_s, drain.late_s(priority, now=now))
        return min(late_s, longest_s / 2, longest_s / 4 + place_s)

    def _band_of(self, ticket: Ticket, now: float) -> int:
        if self._relegates and now >= ticket.late_at:
            return LATE
        own = int(ticket.spec.priority)
        if self._promote_after and own > _LOWEST_PROMOTION:
            steps = _steps(ticket.arrived_at, self._promote_after * ticket.ttft_target_s, now)
            return max(_LOWEST_PROMOTION, own - steps)
        return own

    def _arm(self, ticket: Ticket, now: float) -> None:
        """Set the next moment at which the ticket must be looked at."""
        due = ticket.held_until
        if self._relegates and now < ticket.late_at:
            due = min(due, ticket.late_at)
        if self._promote_after and _LOWEST_PROMOTION < ticket.band < LATE:
            step_s = self._promote_after * ticket.ttft_target_s
            steps = _steps(ticket.arrived_at, step_s, now) + 1
            due = min(due, ticket.arrived_at + steps * step_s)
        ticket.alarm_at = due
        heappush(self._alarms, (due, ticket.number, ticket))

    def _stale(self, alarm: tuple[float, int, Ticket]) -> bool:
        due, number, ticket = alarm
        return number not in self._members or ticket.alarm_at != due

    def _enter(self, stand: Stand, ticket: Ticket, band_index: int) -> None:
        stand.enter(ticket, band_index)
        self._depths[ticket.lane] += 1

    def _exit(self, stand: Stand, ticket: Ticket) -> None:
        stand.exit(ticket)
        self._depths[ticket.lane] -= 1

    def _best_head(
        self, stands: Sequence[Stand], skipped: Container[int], now: float
    ) -> Ticket | None:
        """The first of the heads of all lines, by the dynamic order or by arrival."""
        dynamic = self.settings.order == "dynamic"
        best: Ticket | None = None
        best_key = (0.0, 0)
        for line in (line for stand in stands for lines in stand.lines for line in lines.values()):
            head = line.first(skipped)
            if head is not None:
                key = (-dynamic_priority(head, now) if dynamic else 0.0, head.number)
                if best is None or key < best_key:
                    best, best_key = head, key
        return best


def dynamic_priority(ticket: Ticket, now: float) -> float:
    """0.5 * tier + 0.3 * urgency + 0.2 * waiting, each 0 to 1; the highest is served first.

    Tier falls from 1 (P0) to 0 (P3), urgency is the share of the TTFT target that has passed, and
    waiting is capped at ten targets. docs/policy.md, Order.
    """
    waited_s = now - ticket.arrived_at
    tier = 1 - int(ticket.spec.priority) / (LATE - 1)
    urgency = min(1.0, waited_s / ticket.ttft_target_s)
    waiting = min(1.0, waited_s / (10 * ticket.ttft_target_s))
    return 0.5 * tier + 0.3 * urgency + 0.2 * waiting


def _steps(start: float, step_s: float, now: float) -> int:
    """How many moments `start + k * step_s`, k from 1, are over at `now`; rounding never lies."""
    steps = int((now - start) / step_s)
    if start + (steps + 1) * step_s <= now:
        return steps + 1
    return steps - (steps > 0 and start + steps * step_s > now)
