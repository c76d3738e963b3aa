"""Limits decided without asking Redis for each request: `limits.batch_s`.

What requests with the same set of rules (a tenant's, of one class and model) will probably take in
the next `batch_s` is fetched from the store ahead, of all the rules at once or not at all. Requests
then take from it here. It is filled up before it is used up: at three quarters, and in the same
call all others of which a third is used. When the lease of it is over, or a request needs more than
there is, what is left goes back, and the request asks the store as it would without leases; the
next batch is fetched in the same call. So nothing is ever granted that the store did not have.

The store gives ahead only out of plenty. Where a limit is nearly used up each request asks, and one
that the store denies does so again when other leases of this router had some of what it lacks.

Of one set a router has one lease: a reservation in the store, that is extended by each batch and
made smaller by what comes back. Its amounts are told as totals, so it does no harm if something is
told twice. What its requests did not use, or used too much, changes what is left here, and with
the next batch what the store knows, or at once when there is none. When nobody used it for a while
it is settled like any request; when its router dies, it ends as that router's requests do.

A batch is as large as the rate of its requests, found by doubling, and never more than a part of
any bucket: all routers together keep at most `_AHEAD_RATIO` of one from the others, and leases of
one router that want more of it together get parts in proportion. What two requests would exceed is
never fetched ahead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from math import inf
from operator import add, attrgetter
from typing import Final

from router.config import Config
from router.core.bucket import (
    Ask,
    Charge,
    DecidedBy,
    Kind,
    Level,
    Rule,
    Settlement,
    Verdict,
)
from router.limit_settings import LimitsSettings
from router.metrics_limits import LimitsView
from router.runtime.bucket_store import BucketStore, Decided

_AHEAD_RATIO: Final = 1 / 3  # of a bucket, in the leases of all routers
_FILLED_UP_AT: Final = 0.3  # of a batch, if something is fetched anyhow
_FETCHED_AT: Final = 0.75
# So long a lease lasts in the store at most, if it is not renewed: nobody else ends what a router
# that died had ahead. If the store was away for longer, what runs is taken anew.
_LEASE_S_MAX: Final = 30.0
_RATE_BATCHES: Final = 2  # terms over which a rate is found
_TIMER_S: Final = 0.001  # timers are as exact as that
_IDLE_BATCHES: Final = 4  # so many terms without a request, and a lease is settled
_BY_STORE: Final = (DecidedBy.REDIS, DecidedBy.MEMORY)
_PERMITS: Final = Kind.PERMITS
_AMOUNT: Final = attrgetter("amount")

_Identity = tuple[int, ...]


class _Lease:
    """What one set of rules has here. `taken` is in the store's books, `free` of it is left."""

    __slots__ = (
        "asked", "batch", "booked", "counted", "counted_from", "fetching", "free", "permits",
        "reservation_id", "rests_until", "rules", "running", "since", "size", "stored", "taken",
        "timed", "until", "unwanted", "verdict", "wakes_at", "wanted",
    )  # fmt: skip

    def __init__(self, rules: tuple[Rule, ...], now: float) -> None:
        nothing = [0.0] * len(rules)
        self.rules = rules  # kept, so that their ids are theirs
        self.permits = [place for place, rule in enumerate(rules) if rule.kind is _PERMITS]
        self.reservation_id: str | None = None  # None: the store has granted nothing yet
        self.taken = nothing
        self.free = nothing
        self.booked = nothing  # the last batch, as long as it counts as kept from others
        self.wanted = nothing  # what a batch would be if there were enough of everything
        self.until = -inf  # the end of the lease of what is free
        self.timed = False  # a timer will look whether it is over
        self.running = 0
        self.fetching = False
        self.unwanted = False  # what is being fetched is to go back as well
        self.rests_until = -inf  # nothing is fetched before, as the store had too little
        self.size = 0.5  # requests in a batch, as many as are wanted
        self.batch = 0.0  # and as many as were fetched
        self.since, self.asked = now, 0  # when the size was found, and the requests since then
        self.counted_from, self.counted = now, 0.0  # and those by which it was found
        self.wakes_at = inf  # after so many requests it is time to fill it up
        self.stored = nothing  # what was left in the store when the last batch was fetched
        # One for all that it grants. Its levels say what remains now, whenever they are read.
        self.verdict = Verdict(True, None, 0.0, False, (), DecidedBy.LEASE)

    def takes(self, charges: tuple[Charge, ...], now: float) -> bool:
        """Take `charges` of what is free, if that covers them."""
        if now >= self.until:
            return False
        free, stored = self.free, self.stored
        left = [free[place] - charge.amount for place, charge in enumerate(charges)]
        if min(left) < 0:
            return False
        self.free = left
        for place, level in enumerate(self.verdict.levels):
            level.remaining = stored[place] + left[place]
        self.running += 1
        return True

    def fetched(self, batch: list[float], levels: tuple[Level, ...], until: float) -> None:
        """The store granted a batch, which is leased until then; it stands at `levels` now."""
        self.until = until
        self.wakes_at = _FILLED_UP_AT * self.batch
        self.taken = list(map(add, self.taken, batch))
        self.free = list(map(add, self.free, batch))
        self.stored = [level.remaining for level in levels]
        self.verdict = Verdict(True, None, 0.0, False, levels, DecidedBy.LEASE)

    def ended(self, charges: tuple[Charge, ...], used: tuple[Charge, ...]) -> None:
        """A request that took `charges` is over."""
        self.running -= 1
        if len(used) != len(charges):
            amounts = {charge.rule.key: charge.amount for charge in used}
            used = tuple([Charge(c.rule, amounts.get(c.rule.key, c.amount)) for c in charges])
        free = self.free
        self.free = [
            free[place] + (charge.amount - used[place].amount)
            for place, charge in enumerate(charges)
        ]
        for place in self.permits:  # they come back whatever was done with them
            self.free[place] += used[place].amount

    def resize(self, batch_s: float, now: float) -> None:
        """Fit the size of batches to the rate, at most twice the last one. The rate is that of more
        than one batch: few requests are no measure of it, and leases whose sizes change all the
        time are never filled up together.
        """
        self.counted += self.asked
        counted_s = now - self.counted_from
        rate = self.counted / max(counted_s, 1e-6)
        self.size = min(2 * self.size, max(1.0, rate * batch_s))
        if counted_s > _RATE_BATCHES * batch_s:  # what came earlier counts less and less
            self.counted_from += counted_s / 2
            self.counted /= 2
        self.since, self.asked = now, 0

    def charges(self, amounts: list[float]) -> tuple[Charge, ...]:
        """Of each of its rules so much."""
        return tuple([Charge(r, max(0.0, a)) for r, a in zip(self.rules, amounts, strict=True)])


class LeasedBuckets:
    """Decides from leases what they cover; all else `store` decides, which has all the limits.

    `replicas` is the number of routers that live. `name` is in ids of reservations, and no other
    router's. Nothing is fetched while `limits.batch_s` is 0.
    """

    def __init__(
        self,
        store: BucketStore,
        settings: LimitsSettings,
        *,
        name: str,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas = 1
        self._store = store
        self._batch_s = settings.batch_s
        self._lease_s = settings.lease_s
        self._name = name
        self._loop = loop
        self._clock = clock
        self._numbers = count()
        self._leases: dict[_Identity, _Lease] = {}
        self._running: dict[str, tuple[_Lease, tuple[Charge, ...]]] = {}
        self._booked: dict[str, float] = {}  # by rule: what all leases keep from others
        self._wanted: dict[str, float] = {}  # by rule: what they all would keep if they could
        self._low: dict[_Lease, Ask] = {}  # a third used, and the last that was asked of each
        self._asks = 0  # of the store, so far
        self._gave: dict[str, int] = {}  # by rule: the last ask before some of it went back
        self._gave_until = 0
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the store."""
        await self._store.start()

    async def aclose(self) -> None:
        """Give back what is left, and end the store."""
        if self._timer is not None:
            self._timer.cancel()
        self._closed = True
        for lease in self._leases.values():
            self._return(lease)
        await self._store.aclose()

    def reserve(self, ask: Ask, decided: Decided) -> None:
        """Decide `ask` at once if a lease covers it; else the store does."""
        if self._batch_s == 0:
            self._store.reserve(ask, decided)
            return
        charges, now = ask.charges, self._clock()
        identity = tuple([id(charge.rule) for charge in charges])
        lease = self._leases.get(identity)
        if lease is None:
            lease = self._leases[identity] = _Lease(tuple([c.rule for c in charges]), now)
            self._look_later()
        lease.asked += 1
        if lease.takes(charges, now):
            self._grant(lease, ask, decided)
            if lease.asked >= lease.wakes_at:
                self._runs_low(lease, ask, now)
            return
        if not lease.fetching:
            self._give_back(lease)
            self._low[lease] = ask
        self._asks += 1
        self._store.reserve(ask, partial(self._answered, lease, ask, decided, self._asks))
        self._fetch_low(now)

    def adopt(self, ask: Ask) -> None:
        """Hold what a process before this one granted, from a lease or not."""
        self._store.adopt(ask)

    def reclaim(self, prefix: str, *, own: str) -> None:
        """The store may take back what processes before this one held."""
        self._store.reclaim(prefix, own=own)

    def settle(self, settlement: Settlement) -> None:
        """End a reservation, here or in the store."""
        known = self._running.pop(settlement.reservation_id, None)
        if known is None:
            self._store.settle(settlement)
            return
        lease, charges = known
        lease.ended(charges, settlement.charges)
        if lease.until == -inf and not lease.fetching and any(lease.free):
            self._tell(lease)

    def on_config(self, config: Config) -> None:
        """Batches may change; what is leased already keeps its term."""
        self._batch_s = config.limits.batch_s
        self._lease_s = config.limits.lease_s
        self._store.on_config(config)

    def view(self) -> LimitsView:
        """What its series are made from."""
        return self._store.view()

    def _grant(self, lease: _Lease, ask: Ask, decided: Decided) -> None:
        self._running[ask.reservation_id] = lease, ask.charges
        decided(lease.verdict)

    def _answered(
        self, lease: _Lease, ask: Ask, decided: Decided, number: int, verdict: Verdict
    ) -> None:
        """The store decided. What it denies may be here meanwhile, or in other leases, or went back
        since it was asked.
        """
        if number > self._gave_until:  # and so are all that are still to be decided
            self._gave.clear()
        if verdict.granted:
            decided(verdict)
        elif lease.takes(ask.charges, self._clock()):
            self._grant(lease, ask, decided)
        elif self._give_back_others(ask, verdict, number):
            self._store.reserve(ask, decided)
        else:
            decided(verdict)

    # Fetching

    def _runs_low(self, lease: _Lease, ask: Ask, now: float) -> None:
        """A third of a batch is used: it is filled up with the next, which is perhaps itself."""
        if lease in self._low:
            self._fetch_low(now)
        else:
            self._low[lease] = ask
            lease.wakes_at = _FETCHED_AT * lease.batch

    def _fetch_low(self, now: float) -> None:
        low, self._low = self._low, {}
        for lease, ask in low.items():
            if not lease.fetching:
                self._fetch(lease, ask, now)

    def _fetch(self, lease: _Lease, ask: Ask, now: float) -> None:
        """Fetch what is missing to a batch of requests like `ask`, if there are enough of them."""
        lease.wakes_at = inf
        lease.resize(self._batch_s, now)
        amounts = list(map(_AMOUNT, ask.charges))
        wanted = [amount * lease.size for amount in amounts]
        _replace(self._wanted, lease.rules, lease.wanted, wanted)
        lease.wanted = wanted
        if lease.size < 2 or now < lease.rests_until:
            return
        size = min(map(self._room, [lease] * len(amounts), range(len(amounts)), amounts)) // 1
        batch = [max(0.0, a * size - free) for a, free in zip(amounts, lease.free, strict=True)]
        if size < 2 or not any(batch):
            return
        taken = lease.charges(list(map(add, lease.taken, batch)))
        extends = lease.reservation_id is not None
        name = lease.reservation_id or f"{self._name}:lease:{next(self._numbers)}"
        lease.fetching, lease.batch = True, size
        lease_s = min(self._lease_s, _LEASE_S_MAX)
        fetch = Ask(name, taken, ask.priority, lease_s, ahead=True, extends=extends)
        self._book(lease, [amount * size for amount in amounts])
        self._store.reserve(fetch, partial(self._fetched, lease, name, batch))

    def _room(self, lease: _Lease, place: int, amount: float) -> float:
        """How many requests that take so much of that rule may be fetched ahead for a lease."""
        if amount == 0:
            return lease.size
        rule = lease.rules[place]
        most = _AHEAD_RATIO * rule.burst / max(1, self.replicas)
        others = self._booked.get(rule.key, 0.0) - lease.booked[place]
        wanted = max(self._wanted[rule.key], lease.wanted[place])
        part = min(1.0, most / wanted) * lease.wanted[place]
        return min(part, most - others) / amount

    def _fetched(self, lease: _Lease, name: str, batch: list[float], verdict: Verdict) -> None:
        lease.fetching = False
        unwanted, lease.unwanted = lease.unwanted, False
        if verdict.granted:
            lease.reservation_id = name
            if unwanted:  # the store may have heard of that before it granted this
                self._book(lease, [0.0] * len(batch))
                self._went_back(lease)
                self._tell(lease)
                if self._closed:
                    self._return(lease)
                return
            lease.fetched(batch, verdict.levels, self._clock() + self._batch_s)
            if self._closed:
                self._return(lease)
            else:
                self._look_at_end(lease, self._batch_s)
            return
        lease.rests_until = self._clock() + self._batch_s
        lease.until = -inf
        self._book(lease, [0.0] * len(batch))
        if lease.reservation_id is None:
            return
        is_known = verdict.by in _BY_STORE  # whether it was taken
        if is_known and verdict.scope is None:  # the store has lost the reservation
            self._forget(lease)
        else:  # what went back before may not have been told, as this was on its way
            self._tell(lease)

    def _book(self, lease: _Lease, batch: list[float]) -> None:
        _replace(self._booked, lease.rules, lease.booked, batch)
        lease.booked = batch

    # Giving back

    def _look_at_end(self, lease: _Lease, after_s: float) -> None:
        if not lease.timed:
            lease.timed = True
            self._loop.call_later(after_s, self._over, lease)

    def _over(self, lease: _Lease) -> None:
        """The term of a batch is over, if it was not filled up or given back before."""
        lease.timed = False
        if lease.until == -inf or lease.fetching:
            return
        if (left_s := lease.until - self._clock()) > _TIMER_S:
            self._look_at_end(lease, left_s)
        else:
            self._give_back(lease)

    def _give_back_others(self, ask: Ask, verdict: Verdict, number: int) -> bool:
        """Give back what leases have of the limits that denied `ask`; whether there was any, or
        some went back since it was asked.
        """
        if verdict.never:
            return False
        keys = {
            charge.rule.key
            for charge, level in zip(ask.charges, verdict.levels, strict=False)  # perhaps none
            if charge.rule.scope is verdict.scope
            or (charge.rule.family is None and level.remaining < charge.amount)
        }
        if not keys.isdisjoint(self._booked):
            holding = [
                lease
                for lease in self._leases.values()
                if any(lease.free) and not keys.isdisjoint([rule.key for rule in lease.rules])
            ]
            for lease in holding:
                self._give_back(lease)
        return any(self._gave.get(key, 0) >= number for key in keys)

    def _give_back(self, lease: _Lease) -> None:
        """Nothing is free any more; what was used beyond it is told as well."""
        if lease.until != -inf:
            lease.until = -inf
            self._book(lease, [0.0] * len(lease.rules))
        if any(lease.free):
            lease.unwanted = lease.fetching
            self._went_back(lease)
            self._tell(lease)

    def _went_back(self, lease: _Lease) -> None:
        self._gave.update(dict.fromkeys([rule.key for rule in lease.rules], self._asks))
        self._gave_until = self._asks

    def _tell(self, lease: _Lease) -> None:
        """Let the store know what is taken without what is free."""
        lease.taken = [t - free for t, free in zip(lease.taken, lease.free, strict=True)]
        lease.free = [0.0] * len(lease.rules)
        if lease.reservation_id is not None:
            charges = lease.charges(lease.taken)
            self._store.settle(Settlement(lease.reservation_id, charges, ends=False))

    def _return(self, lease: _Lease) -> None:
        """Give back what is left, and settle the lease if no request holds on to it."""
        self._give_back(lease)
        if lease.reservation_id is not None and not lease.running:
            self._store.settle(Settlement(lease.reservation_id, lease.charges(lease.taken)))
            lease.reservation_id = None

    def _forget(self, lease: _Lease) -> None:
        """The store lost its reservation. What requests hold is taken with the next batch."""
        assert lease.reservation_id is not None
        self._store.settle(Settlement(lease.reservation_id, lease.charges(lease.taken)))
        lease.reservation_id, lease.rests_until = None, -inf
        held = [0.0] * len(lease.rules)
        for each, charges in self._running.values():
            if each is lease:
                held = list(map(add, held, map(_AMOUNT, charges)))
        lease.taken, lease.free = held, [0.0] * len(held)

    def _look_later(self) -> None:
        if self._timer is None:
            after_s = self._batch_s or 1.0
            self._timer = self._loop.call_later(after_s, self._look_at_all)

    def _look_at_all(self) -> None:
        """Give back what nobody used in time, and end what nobody uses at all."""
        self._timer = None
        now = self._clock()
        idle_since = now - _IDLE_BATCHES * self._batch_s
        for identity, lease in list(self._leases.items()):
            if lease.fetching or now < lease.until:
                continue
            if not lease.running and lease.since <= idle_since:
                del self._leases[identity]
                self._low.pop(lease, None)
                _replace(self._wanted, lease.rules, lease.wanted, [0.0] * len(lease.rules))
                self._return(lease)
            else:
                self._give_back(lease)
        if self._leases:
            self._look_later()


def _replace(
    totals: dict[str, float], rules: tuple[Rule, ...], before: list[float], after: list[float]
) -> None:
    """Let totals by rule have the figures of one lease as they are now."""
    for rule, old, new in zip(rules, before, after, strict=True):
        totals[rule.key] = total = totals.get(rule.key, 0.0) + new - old
        if total <= 0:
            del totals[rule.key]
