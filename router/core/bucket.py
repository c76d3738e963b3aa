"""Limits as arithmetic on plain values: token buckets, shares of one bucket, permits.

A bucket is a level and the moment it was last brought up to date; nothing runs in the background.
`now` is seconds on the caller's clock, any epoch, so the asyncio driver and the simulator run the
same code. `router/runtime/lua/bucket.lua` repeats this arithmetic inside Redis, operation by
operation, and tests/runtime/test_bucket_parity.py holds the two together.

An ask names all that a request would take, and gets all of it or nothing. A level may be negative:
a request that used more than it reserved leaves a debt, at most `debt_max`, and whatever asks next
waits until refill has paid it off. An amount above the capacity never fits. There is one exception,
for buckets that are a part of a larger one: what fits the larger one passes when the part is full,
and leaves a debt too, else a class of few tokens could never run a long prompt.

Members of a family (the priority classes) share their parent's bucket. Each has a level of its own,
filled at its guaranteed part of the rate, and what is in it nobody else can take: the parent's
level is never lent below the sum of its members' levels. So a member within its guarantee passes
whatever the others do, and above it whatever the others leave is its to take, up to the whole rate.

What a router takes for requests to come no other has meanwhile. So that is granted only out of
plenty: where half of every bucket that it draws on is left.

A guarantee has a bucket above it: a request that does not fit within the guarantee may borrow. That
is charged to the bucket above alone, whose rate is the ceiling less the guarantee, so the guarantee
is whole when there is nothing to borrow any more. One borrows where enough is left of every bucket
that others share: half of it, or all when the workers are saturated. An amount that leaves less
passes when the bucket is full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import Final, NamedTuple

from router.core.types import Priority


class Scope(StrEnum):
    """What a limit is about. Closed: a metric label, and a detail of refusals."""

    TENANT_REQUESTS = "tenant_requests"
    TENANT_COST = "tenant_cost"
    TENANT_CONCURRENCY = "tenant_concurrency"
    MODEL = "model"
    LANE = "lane"
    CLASS = "class"
    CLUSTER = "cluster"


_TENANTS_OWN: Final = (Scope.TENANT_REQUESTS, Scope.TENANT_COST, Scope.TENANT_CONCURRENCY)


class Kind(StrEnum):
    """How a limit counts."""

    RATE = "rate"  # a token bucket
    PERMITS = "permits"  # so many at once, each by a lease


class DecidedBy(StrEnum):
    """Who gave a verdict. Closed: a metric label."""

    REDIS = "redis"
    MEMORY = "memory"  # in-process buckets, by configuration
    LEASE = "lease"  # out of tokens that were fetched from Redis ahead
    LOCAL = "local"  # in-process buckets, because Redis is away
    OPEN = "open"  # granted unseen, because Redis is away
    CLOSED = "closed"  # refused unseen, because Redis is away


@dataclass(frozen=True, slots=True)
class Rule:
    """What the configuration says of one bucket. Units are the caller's: requests or cost units."""

    key: str  # names the bucket in its store, like "tenant:acme:cost"
    scope: Scope
    rate_per_s: float  # refill in units per second, 0 or more; 0 for permits
    burst: float  # capacity in units, above 0; for permits how many may be held at once
    kind: Kind = Kind.RATE
    debt_max: float = 0.0  # units that settlement may take a level below 0
    # A bucket that its store has never seen begins empty when the store itself does, and full once
    # the store is this old. 0: always full.
    warm_up_s: float = 0.0
    # An amount above it never fits. More than `burst` only for a part of a larger bucket.
    amount_max: float = inf
    family: Family | None = field(default=None, repr=False)  # whose member it is
    # It is a guarantee, and this is what may be borrowed above it: a plain bucket.
    above: Rule | None = None
    lends: bool = False  # others share it: who borrows leaves a part of it
    is_cost: bool = field(init=False, repr=False, compare=False)  # cost units, not requests
    is_tenants: bool = field(init=False, repr=False, compare=False)  # a tenant's own

    def __post_init__(self) -> None:
        is_cost = self.kind is Kind.RATE and self.scope is not Scope.TENANT_REQUESTS
        object.__setattr__(self, "is_cost", is_cost)
        object.__setattr__(self, "is_tenants", self.scope in _TENANTS_OWN)
        if self.amount_max == inf:
            object.__setattr__(self, "amount_max", self.burst)
        numbers = (self.rate_per_s, self.burst, self.debt_max, self.warm_up_s, self.amount_max)
        if not all(0 <= number < inf for number in numbers) or self.burst == 0:
            raise ValueError(
                f"{self.key}: a limit's figures are finite, 0 or more, its burst not 0"
            )
        if self.amount_max < self.burst:
            raise ValueError(f"{self.key}: amount_max {self.amount_max} is below its burst")

    def part(self, ratio: float) -> Rule:
        """This rule for a store that has `ratio` (0 to 1] of it, as one of several routers does.

        An amount that fits the whole fits the part. Of permits at least one is left.
        """
        if self.kind is Kind.PERMITS:
            return Rule(self.key, self.scope, 0.0, max(1.0, self.burst * ratio // 1), self.kind)
        if self.family is not None:
            return Family(self.family.parent.part(ratio), self.family.members).rules[self.key]
        return Rule(
            self.key, self.scope, self.rate_per_s * ratio, self.burst * ratio,
            debt_max=self.debt_max * ratio, warm_up_s=self.warm_up_s, amount_max=self.amount_max,
            above=self.above and self.above.part(ratio), lends=self.lends,
        )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A bucket and those who share it: `members` are their keys and guaranteed shares of it.

    Shares are above 0 and add up to 1 or less; what they leave is anyone's.
    """

    parent: Rule
    members: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if not self.members or min(share for _, share in self.members) <= 0:
            raise ValueError(f"{self.parent.key}: every guaranteed share is above 0")
        if (total := sum(share for _, share in self.members)) > 1 + 1e-9:
            raise ValueError(f"{self.parent.key}: the guaranteed shares add up to {total:.0%}")

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """A rule for each member, by key.

        A charge on one draws on the parent too; the same ask must not charge the parent besides.
        A ceiling is a plain rule of its own, charged in the same ask.
        """
        whole = self.parent
        return {
            key: Rule(
                key, Scope.CLASS, whole.rate_per_s * share, whole.burst * share,
                debt_max=whole.debt_max * share, warm_up_s=whole.warm_up_s,
                amount_max=whole.amount_max, family=self, lends=True,
            )
            for key, share in self.members
        }  # fmt: skip


@dataclass(slots=True, init=False)
class Charge:
    """An amount that one request takes from one bucket, 0 or more units; of permits 1.

    Requests share them: none is ever changed.
    """

    rule: Rule
    amount: float

    def __init__(self, rule: Rule, amount: float) -> None:
        self.rule = rule
        self.amount = amount


@dataclass(slots=True, init=False)
class Ask:
    """All that one request would take: it gets everything or nothing. One charge per rule.

    What is not settled within `lease_s` stays charged, and permits go back: its router is dead.
    One that `extends` a reservation takes only what that lacks of these amounts, so it may be told
    twice, and lasts no longer by that; when the reservation is over it gets nothing.
    """

    reservation_id: str
    charges: tuple[Charge, ...]
    priority: Priority
    lease_s: float
    ahead: bool = False  # for requests to come: only the shared store grants it, out of plenty
    extends: bool = False
    # It may exceed guarantees where this ratio of all that others share is left; 0: nowhere.
    borrows: float = 0.0
    adopted: bool = False  # a process before this one was granted it, perhaps from a lease

    def __init__(  # noqa: PLR0917 - made by position
        self,
        reservation_id: str,
        charges: tuple[Charge, ...],
        priority: Priority,
        lease_s: float,
        ahead: bool = False,
        extends: bool = False,
        borrows: float = 0.0,
        adopted: bool = False,
    ) -> None:
        self.reservation_id = reservation_id
        self.charges = charges
        self.priority = priority
        self.lease_s = lease_s
        self.ahead = ahead
        self.extends = extends
        self.borrows = borrows
        self.adopted = adopted

    def given_back(self) -> Settlement:
        """Ends its reservation as one that used nothing."""
        return Settlement(self.reservation_id, tuple([Charge(c.rule, 0.0) for c in self.charges]))


@dataclass(slots=True, init=False)
class Settlement:
    """What a request really used: the rules of its ask, with the actual amounts.

    The difference goes back, or becomes a debt; permits are released. The first one counts.
    One that does not end the reservation leaves it with these amounts, permits too.
    """

    reservation_id: str
    charges: tuple[Charge, ...]
    ends: bool = True

    def __init__(self, reservation_id: str, charges: tuple[Charge, ...], ends: bool = True) -> None:
        self.reservation_id = reservation_id
        self.charges = charges
        self.ends = ends


@dataclass(slots=True, init=False)
class Level:
    """Where one bucket stands after a verdict."""

    limit: float
    remaining: float  # 0 or more; of a family's member and of a guarantee, within it
    reset_s: float | None  # until it is full, if nobody takes; None: unknown, or it does not refill

    def __init__(self, limit: float, remaining: float, reset_s: float | None) -> None:
        self.limit = limit
        self.remaining = remaining
        self.reset_s = reset_s


@dataclass(slots=True, init=False)
class Verdict:
    """The answer to an ask. `levels` are its charges', in their order; none without a look."""

    granted: bool
    scope: Scope | None  # that denied it, the one with the longest wait
    wait_s: float | None  # 0 when granted; else until it may fit; None: unknown
    never: bool  # an amount is more than a full bucket holds
    levels: tuple[Level, ...]
    by: DecidedBy
    borrowed: bool = False  # granted above a guarantee, and charged to the bucket there

    def __init__(  # noqa: PLR0917 - made by position
        self,
        granted: bool,
        scope: Scope | None,
        wait_s: float | None,
        never: bool,
        levels: tuple[Level, ...],
        by: DecidedBy,
        borrowed: bool = False,
    ) -> None:
        self.granted = granted
        self.scope = scope
        self.wait_s = wait_s
        self.never = never
        self.levels = levels
        self.by = by
        self.borrowed = borrowed


# Waits are found by division, so the level at their end may be short by a rounding error.
_SLACK: Final = 1e-9
AMPLE_RATIO: Final = 0.5


def refilled(level: float, elapsed_s: float, rule: Rule) -> float:
    """A level after `elapsed_s`; a clock that went back refills nothing."""
    if elapsed_s > 0:
        level += elapsed_s * rule.rate_per_s
    return rule.burst if level > rule.burst else level


def first_level(rule: Rule, store_age_s: float) -> float:
    """The level of a bucket that its store does not know."""
    if store_age_s >= rule.warm_up_s:
        return rule.burst
    return rule.burst * max(0.0, store_age_s) / rule.warm_up_s


def needed(rule: Rule, amount: float, spare: float = 0.0) -> float:
    """The level at which `amount` fits and leaves `spare`, full at most; inf if it never does."""
    return inf if amount > rule.amount_max else min(amount + spare, rule.burst) * (1 - _SLACK)


def wait_s(rule: Rule, level: float, amount: float, spare: float = 0.0) -> float:
    """Seconds until `amount` fits: 0 when it does now, inf when refill never gets there."""
    missing = needed(rule, amount, spare) - level
    if missing <= 0:
        return 0.0
    return missing / rule.rate_per_s if rule.rate_per_s > 0 else inf


def is_ample(rule: Rule, left: float) -> bool:
    """Whether what is left in a bucket, or of permits, is plenty for whoever asks next."""
    return left >= AMPLE_RATIO * rule.burst


def level_settled(level: float, rule: Rule, surplus: float) -> float:
    """A level after `surplus` units came back to it; negative ones become a debt.

    What exceeds the capacity is lost, and what exceeds `debt_max` is forgiven.
    """
    if surplus >= 0:
        return min(rule.burst, level + surplus)
    return max(level + surplus, min(level, -rule.debt_max))


class Taking(NamedTuple):
    """Whether a member of a family can take an amount, and from where."""

    wait_s: float  # 0: now
    own: float  # of the amount, from the level of the rule itself: not lent, not borrowed


def is_within(rule: Rule, level: float, amount: float) -> bool:
    """Whether `amount` fits into the level of a member or a guarantee, which is its to take."""
    return amount <= rule.burst and level >= needed(rule, amount)


def share_taking(rule: Rule, whole: float, own: Mapping[str, float], amount: float) -> Taking:
    """Look whether the member of `rule` can take `amount`, given its family's levels.

    `whole` is the parent's level, `own` has the members'. Within the guarantee nothing else
    counts. Out of the surplus that others leave, the member's own level is used up first.
    """
    level = own[rule.key]
    if is_within(rule, level, amount):
        return Taking(0.0, amount)
    lent_in_s = _surplus_wait_s(rule, whole, own, amount)
    return _beyond(rule, level, amount, lent_in_s, min(max(0.0, level), amount))


def guarantee_taking(
    rule: Rule, level: float, above: float, amount: float, room_in_s: float
) -> Taking:
    """Look whether `amount` fits within the guarantee `rule`, or may be borrowed.

    `above` is the level of the bucket above it; `room_in_s` is how long the buckets that others
    share take to have room, inf when nothing may be borrowed.
    """
    if is_within(rule, level, amount):
        return Taking(0.0, amount)
    assert rule.above is not None
    if amount > rule.amount_max:
        return Taking(inf, 0.0)
    lent_in_s = max(room_in_s, wait_s(rule.above, above, amount))
    return _beyond(rule, level, amount, lent_in_s, 0.0)


def _beyond(rule: Rule, level: float, amount: float, lent_in_s: float, own: float) -> Taking:
    """What does not fit into a level is lent in so many seconds, and takes `own` from it then."""
    if lent_in_s == 0.0:
        return Taking(0.0, own)
    own_in_s = wait_s(rule, level, amount)
    if own_in_s == 0.0:  # more than the capacity, which is full
        return Taking(0.0, amount)
    return Taking(min(lent_in_s, own_in_s), 0.0)


def room_wait_s(rule: Rule, level: float, amount: float, ratio: float) -> float:
    """Seconds until `ratio` of a bucket that is shared is left without `amount`, or it is full."""
    return wait_s(rule, level, amount, ratio * rule.burst)


def share_room_wait_s(
    rule: Rule, whole: float, own: Mapping[str, float], amount: float, ratio: float
) -> float:
    """The same of the parent, and of what is the member's to take. Levels as in `share_taking`."""
    assert rule.family is not None
    left_in_s = _surplus_wait_s(rule, whole, own, amount, ratio * rule.burst)
    return max(room_wait_s(rule.family.parent, whole, amount, ratio), left_in_s)


def share_is_ample(rule: Rule, whole: float, own: Mapping[str, float], amount: float) -> bool:
    """Whether plenty is left without `amount`, in the parent and of what is this member's to take.

    Levels as in `share_taking`.
    """
    family = rule.family
    assert family is not None
    left = whole - amount
    held = sum([max(0.0, own[key]) for key in family.rules if key != rule.key])
    return is_ample(family.parent, left) and is_ample(rule, left - held)


def _surplus_wait_s(
    rule: Rule, whole: float, own: Mapping[str, float], amount: float, spare: float = 0.0
) -> float:
    """Seconds until what the other members leave covers `amount` and `spare`, if nobody takes
    meanwhile.

    An amount above all that the others can ever leave passes when they leave as much as they can.
    Until then the parent fills at its rate and the others, from where they are positive until they
    are full, hold back a part of that.
    """
    family = rule.family
    assert family is not None
    parent = family.parent
    if amount > parent.amount_max:
        return inf
    others = [(each, own[key]) for key, each in family.rules.items() if key != rule.key]
    most = parent.burst - sum(each.burst for each, _ in others)
    missing = min(amount + spare, most) * (1 - _SLACK) - whole + sum(max(0.0, v) for _, v in others)
    if missing <= 0:
        return 0.0
    if parent.rate_per_s == 0:
        return inf
    slope, waited = parent.rate_per_s, 0.0
    for at, change in _slopes(others):
        if slope * (at - waited) >= missing:
            break
        missing -= slope * (at - waited)
        slope, waited = slope + change, at
    return waited + missing / slope if slope > 0 else inf


def _slopes(others: Sequence[tuple[Rule, float]]) -> list[tuple[float, float]]:
    """When members begin and end to hold back refill: seconds from now, and the change in rate."""
    changes = []
    for rule, level in others:
        if level < rule.burst:
            changes.append((max(0.0, -level / rule.rate_per_s), -rule.rate_per_s))
            changes.append(((rule.burst - level) / rule.rate_per_s, rule.rate_per_s))
    changes.sort()
    return changes


def own_settled(reserved: float, own: float, actual: float) -> float:
    """Units that come back to a member's own level; what was lent comes back first."""
    back = reserved - actual
    return back if back < 0 else max(0.0, back - (reserved - own))


def own_kept(reserved: float, own: float, actual: float) -> float:
    """What a request that used `actual` has of a guarantee; the rest is of the bucket above.

    What was borrowed comes back first, and who borrowed has used there what it used too much.
    """
    return actual if own == reserved else min(own, actual)


def level_of(rule: Rule, level: float) -> Level:
    """What a verdict says of a token bucket that stands at `level`, or of so many free permits."""
    burst, rate_per_s = rule.burst, rule.rate_per_s
    if rate_per_s > 0:
        return Level(burst, level if level > 0 else 0.0, (burst - level) / rate_per_s)
    full = level >= burst and rule.kind is Kind.RATE
    return Level(burst, max(0.0, level), 0.0 if full else None)


def denied(
    charges: Sequence[Charge], waits_s: Sequence[float], levels: tuple[Level, ...], by: DecidedBy
) -> Verdict:
    """The verdict on an ask of which something does not fit. The longest wait decides.

    A wait is inf when refill does not help, or no one can say: permits come back when they do, and
    for what is asked ahead nobody waits.
    """
    longest = max(waits_s)
    worst = charges[waits_s.index(longest)]
    never = [charge for charge in charges if charge.amount > charge.rule.amount_max]
    scope = (never[0] if never else worst).rule.scope
    return Verdict(False, scope, None if longest == inf else longest, bool(never), levels, by)
