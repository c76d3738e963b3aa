"""The buckets of one process: what they hold, what is reserved of it, and for how long.

The decision over all charges of an ask, without I/O: `redis: none` runs it in production, each
router runs one while Redis is away, and the scripts in `router/runtime/lua` do the same inside
Redis. Buckets come into being when they are first charged, and one that is full again is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from router.core.bucket import (
    Ask,
    Charge,
    DecidedBy,
    Family,
    Kind,
    Level,
    Rule,
    Settlement,
    Taking,
    Verdict,
    denied,
    first_level,
    guarantee_taking,
    is_ample,
    is_within,
    level_of,
    level_settled,
    own_kept,
    own_settled,
    refilled,
    room_wait_s,
    share_is_ample,
    share_room_wait_s,
    share_taking,
    wait_s,
)

# Buckets that may be known before full ones are looked for, which are as good as unknown.
_BUCKETS_BEFORE_SWEEP: Final = 1024
# Ends of reservations that are over or renewed, beside as many as are still valid.
_DEAD_ENDS_MAX: Final = 1024
_PERMITS: Final = Kind.PERMITS


@dataclass(slots=True)
class _Bucket:
    """A level as of `at`. Only a bucket that was taken from is one; all others are as new."""

    rule: Rule
    level: float
    at: float


@dataclass(slots=True, init=False)
class _Reservation:
    """What was taken, until it is settled or its lease is over."""

    ends_at: float
    charges: tuple[Charge, ...]
    # What came from the level of a rule itself, not lent, not borrowed: by key; all, where none is.
    own: dict[str, float]

    def __init__(self, ends_at: float, charges: tuple[Charge, ...], own: dict[str, float]) -> None:
        self.ends_at = ends_at
        self.charges = charges
        self.own = own

    def lacks(self, charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
        """What it does not hold yet of `charges`."""
        held = {charge.rule.key: charge.amount for charge in self.charges}
        return tuple(
            [Charge(c.rule, max(0.0, c.amount - held.get(c.rule.key, 0.0))) for c in charges]
        )

    def extend(self, charges: tuple[Charge, ...], own: dict[str, float]) -> None:
        """Hold these beside what it has of the same buckets."""
        before = {charge.rule.key: charge.amount for charge in self.charges}
        after, parts = [], {}
        for charge in charges:
            key, had = charge.rule.key, before.get(charge.rule.key, 0.0)
            after.append(Charge(charge.rule, charge.amount + had))
            if key in own or key in self.own:
                parts[key] = own.get(key, charge.amount) + self.own.get(key, had)
        self.charges, self.own = tuple(after), parts

    def amend(self, rule: Rule, used: float, own: float) -> None:
        """Hold so much of one bucket, the own part of it included."""
        self.charges = tuple([Charge(rule, used) if c.rule is rule else c for c in self.charges])
        self.own[rule.key] = own


class Ledger:
    """All buckets of a store, by key. `by` is what its verdicts say of themselves.

    No lease is shorter than `lease_s_min`, for owners that do not renew.
    """

    def __init__(self, by: DecidedBy, *, now: float, lease_s_min: float = 0.0) -> None:
        self._by = by
        self._lease_s_min = lease_s_min
        self._born_at = now
        self._buckets: dict[str, _Bucket] = {}
        self._permits: dict[str, float] = {}  # how many are held, by key
        self._reservations: dict[str, _Reservation] = {}
        self._ends: list[tuple[float, str]] = []
        self._sweep_at = _BUCKETS_BEFORE_SWEEP

    def size(self) -> int:
        """What it remembers: buckets, reservations and the moments at which these end."""
        return len(self._buckets) + len(self._reservations) + len(self._ends)

    def reserve(self, ask: Ask, now: float) -> Verdict:
        """Take everything that `ask` names, or nothing."""
        self._expire(now)
        charges = ask.charges
        is_new = not (ask.ahead or ask.extends or ask.reservation_id in self._reservations)
        if is_new and self._covers(charges, now):
            return Verdict(True, None, 0.0, False, self._take_covered(ask, now), self._by)
        if ask.extends:
            held = self._reservations.get(ask.reservation_id)
            if held is None:
                return Verdict(False, None, None, False, (), self._by)
            charges = held.lacks(charges)
        takings = [
            Taking(inf, 0.0)
            if ask.ahead and not self._leaves_plenty(charge, now)
            else self._taking(charge, charges, ask.borrows, now)
            for charge in charges
        ]
        waits = [taking.wait_s for taking in takings]
        if not any(waits):
            levels = self._take(ask, charges, takings, now)
            borrowed = ask.borrows > 0 and any(map(_is_borrowed, charges, takings))
            return Verdict(True, None, 0.0, False, levels, self._by, borrowed)
        levels = tuple([self._view(charge.rule, now) for charge in charges])
        return denied(ask.charges, waits, levels, self._by)

    def adopt(self, ask: Ask, now: float) -> None:
        """Hold what a ledger before this one granted: permits, whatever is left of them. What was
        charged went with that one, so what was used is charged when it is settled.
        """
        self._expire(now)
        if ask.reservation_id in self._reservations:
            return
        held = []
        for charge in ask.charges:
            rule = charge.rule
            amount = charge.amount if rule.kind is _PERMITS else 0.0
            held.append(Charge(rule, amount))
            if amount:
                self._permits[rule.key] = self._permits.get(rule.key, 0.0) + amount
        self._keep(ask, tuple(held), {}, now)

    def settle(self, settlement: Settlement, now: float) -> None:
        """Give back what was not used, or charge what was used beyond it. Once per reservation."""
        self._expire(now)
        reservation = self._reservations.get(settlement.reservation_id)
        if reservation is None:
            return
        if ends := settlement.ends:
            del self._reservations[settlement.reservation_id]
        held, used = reservation.charges, settlement.charges
        if len(used) != len(held):
            used = tuple([_of(used, charge) for charge in held])
        for at, charge in enumerate(held):
            rule, one = charge.rule, used[at]
            if rule.kind is _PERMITS and ends:
                self._release(rule, charge.amount)
            elif one is not charge:
                actual = one if one.rule is rule else _of(used, charge)
                if actual.amount != charge.amount:
                    self._give_back(reservation, charge, actual.amount, ends, now)

    def renew(self, reservation_id: str, lease_s: float, now: float) -> None:
        """Let a reservation last `lease_s` from now on, if it is not over yet."""
        self._expire(now)
        reservation = self._reservations.get(reservation_id)
        if reservation is not None:
            reservation.ends_at = now + lease_s
            self._push_end(reservation_id, reservation)

    def _taking(
        self, charge: Charge, charges: tuple[Charge, ...], borrows: float, now: float
    ) -> Taking:
        rule, amount = charge.rule, charge.amount
        if rule.kind is _PERMITS:
            held = self._permits.get(rule.key, 0.0)
            return Taking(0.0 if held + amount <= rule.burst else inf, amount)
        level = self._level(rule, now)
        if rule.family is None and rule.above is None:
            return Taking(wait_s(rule, level, amount), amount)
        if is_within(rule, level, amount):  # whatever the others have
            return Taking(0.0, amount)
        if rule.family is not None:
            return share_taking(rule, *self._levels(rule.family, now), amount)
        assert rule.above is not None
        room_in_s = inf
        if borrows > 0:
            lent = [each for each in charges if each.rule.lends]
            room_in_s = max([self._room_in_s(each, borrows, now) for each in lent], default=0.0)
        return guarantee_taking(rule, level, self._level(rule.above, now), amount, room_in_s)

    def _room_in_s(self, charge: Charge, ratio: float, now: float) -> float:
        rule, amount = charge.rule, charge.amount
        if rule.family is None:
            return room_wait_s(rule, self._level(rule, now), amount, ratio)
        return share_room_wait_s(rule, *self._levels(rule.family, now), amount, ratio)

    def _leaves_plenty(self, charge: Charge, now: float) -> bool:
        rule, amount = charge.rule, charge.amount
        if rule.kind is _PERMITS:
            return is_ample(rule, rule.burst - self._permits.get(rule.key, 0.0) - amount)
        family = rule.family
        if family is None:
            return is_ample(rule, self._level(rule, now) - amount)
        return share_is_ample(rule, *self._levels(family, now), amount)

    def _covers(self, charges: tuple[Charge, ...], now: float) -> bool:
        """Whether each level covers its charge, which is enough whatever the others have."""
        for charge in charges:
            rule, amount = charge.rule, charge.amount
            if rule.kind is _PERMITS:
                if self._permits.get(rule.key, 0.0) + amount > rule.burst:
                    return False
                continue
            bucket = self._buckets.get(rule.key)
            if bucket is None or amount > rule.burst or not rule.rate_per_s:
                return False
            if bucket.level < amount and refilled(bucket.level, now - bucket.at, rule) < amount:
                return False
        return True

    def _take_covered(self, ask: Ask, now: float) -> tuple[Level, ...]:
        """Take what `_covers` found to be there: `_take`, with its arithmetic in place."""
        levels = []
        for charge in ask.charges:
            rule, amount = charge.rule, charge.amount
            if rule.kind is _PERMITS:
                held = self._permits.get(rule.key, 0.0) + amount
                self._permits[rule.key] = held
                levels.append(Level(rule.burst, rule.burst - held, None))
                continue
            bucket = self._buckets[rule.key]
            burst, rate_per_s, level = rule.burst, rule.rate_per_s, bucket.level
            if now > bucket.at:
                level += (now - bucket.at) * rate_per_s
                bucket.at = now
            bucket.level = level = (burst if level > burst else level) - amount
            bucket.rule = rule
            levels.append(Level(burst, level, (burst - level) / rate_per_s))
            if rule.family is not None:
                self._bucket(rule.family.parent, now).level -= amount
        self._keep(ask, ask.charges, {}, now)
        return tuple(levels)

    def _take(
        self, ask: Ask, charges: tuple[Charge, ...], takings: list[Taking], now: float
    ) -> tuple[Level, ...]:
        """Take it, and say what is left."""
        levels = []
        for charge, taking in zip(charges, takings, strict=True):
            rule, amount, own = charge.rule, charge.amount, taking.own
            if rule.kind is _PERMITS:
                held = self._permits.get(rule.key, 0.0) + amount
                self._permits[rule.key] = held
                levels.append(level_of(rule, rule.burst - held))
                continue
            bucket = self._bucket(rule, now)
            bucket.level -= own
            levels.append(level_of(rule, bucket.level))
            if rule.family is not None:
                self._bucket(rule.family.parent, now).level -= amount
            elif rule.above is not None and own != amount:
                self._bucket(rule.above, now).level -= amount - own
        owns = {
            charge.rule.key: taking.own
            for charge, taking in zip(charges, takings, strict=True)
            if taking.own != charge.amount
        }
        known = self._reservations.get(ask.reservation_id)
        if known is not None:
            known.extend(charges, owns)
        else:
            self._keep(ask, charges, owns, now)
        if len(self._buckets) >= self._sweep_at:
            self._forget_full(now)
        return tuple(levels)

    def _keep(
        self, ask: Ask, charges: tuple[Charge, ...], own: dict[str, float], now: float
    ) -> None:
        reservation = _Reservation(now + max(ask.lease_s, self._lease_s_min), charges, own)
        self._reservations[ask.reservation_id] = reservation
        self._push_end(ask.reservation_id, reservation)

    def _give_back(
        self, held: _Reservation, charge: Charge, used: float, ends: bool, now: float
    ) -> None:
        """Leave a charge with what it used; of permits it gets no more that way."""
        rule, amount = charge.rule, charge.amount
        back = amount - used
        if rule.kind is _PERMITS:
            if back > 0:
                self._release(rule, back)
                held.amend(rule, used, used)
            return
        own = held.own.get(rule.key, amount)
        kept = own - back
        if rule.above is not None:
            kept = own_kept(amount, own, used)
            borrowed_back = (amount - own) - (used - kept)
            if borrowed_back != 0:
                self._settle_level(rule.above, borrowed_back, now)
            back = own - kept
        elif rule.family is not None:
            self._settle_level(rule.family.parent, back, now)
            back = own_settled(amount, own, used)
            kept = own - back
        if not ends:
            held.amend(rule, used, kept)
        self._settle_level(rule, back, now)

    def _settle_level(self, rule: Rule, back: float, now: float) -> None:
        bucket = self._bucket(rule, now)
        bucket.level = level_settled(bucket.level, rule, back)

    def _levels(self, family: Family, now: float) -> tuple[float, dict[str, float]]:
        """The parent's level, and those of the members by key."""
        own = {key: self._level(member, now) for key, member in family.rules.items()}
        return self._level(family.parent, now), own

    def _level(self, rule: Rule, now: float) -> float:
        bucket = self._buckets.get(rule.key)
        if bucket is None:
            return first_level(rule, now - self._born_at)
        return refilled(bucket.level, now - bucket.at, rule)

    def _bucket(self, rule: Rule, now: float) -> _Bucket:
        """A bucket whose level changes, brought up to date."""
        bucket = self._buckets.get(rule.key)
        if bucket is None:
            bucket = _Bucket(rule, first_level(rule, now - self._born_at), now)
            self._buckets[rule.key] = bucket
        else:
            bucket.level = refilled(bucket.level, now - bucket.at, rule)
            bucket.rule = rule
            bucket.at = max(bucket.at, now)
        return bucket

    def _view(self, rule: Rule, now: float) -> Level:
        """What a verdict says of `rule`."""
        if rule.kind is _PERMITS:
            return level_of(rule, rule.burst - self._permits.get(rule.key, 0.0))
        return level_of(rule, self._level(rule, now))

    def _release(self, rule: Rule, permits: float) -> None:
        left = self._permits.pop(rule.key, 0.0) - permits
        if left > 0:
            self._permits[rule.key] = left

    def _push_end(self, reservation_id: str, reservation: _Reservation) -> None:
        heappush(self._ends, (reservation.ends_at, reservation_id))
        if len(self._ends) > 2 * len(self._reservations) + _DEAD_ENDS_MAX:
            self._ends = [(held.ends_at, key) for key, held in self._reservations.items()]
            heapify(self._ends)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, reservation_id = heappop(self._ends)
            reservation = self._reservations.get(reservation_id)
            if reservation is not None and reservation.ends_at <= now:
                del self._reservations[reservation_id]
                for charge in reservation.charges:
                    if charge.rule.kind is _PERMITS:
                        self._release(charge.rule, charge.amount)

    def _forget_full(self, now: float) -> None:
        age_s = now - self._born_at
        self._buckets = {
            key: bucket
            for key, bucket in self._buckets.items()
            if age_s < bucket.rule.warm_up_s or self._level(bucket.rule, now) < bucket.rule.burst
        }
        self._sweep_at = max(_BUCKETS_BEFORE_SWEEP, 2 * len(self._buckets))


def _is_borrowed(charge: Charge, taking: Taking) -> bool:
    """Whether it is the bucket above a guarantee that is charged."""
    return charge.rule.above is not None and taking.own != charge.amount


def _of(used: Sequence[Charge], held: Charge) -> Charge:
    """What a settlement says of a charge that is held; the charge itself: nothing."""
    return next((charge for charge in used if charge.rule.key == held.rule.key), held)
