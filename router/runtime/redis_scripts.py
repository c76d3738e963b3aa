"""What goes into the Lua script and what comes out: keys, and numbers as little-endian doubles.

One call has the asks of one turn of the loop, and what was settled since the last. Each bucket that
they name is in it once, with its rule, so the script needs no configuration, and no harm is done by
routers that differ in theirs for a moment. All keys carry one hash tag: a Redis Cluster keeps them
on one node, as it must, since one decision is about all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from operator import attrgetter
from pathlib import Path
from struct import pack, unpack
from typing import Final, NamedTuple

from router.core.bucket import (
    Ask,
    Charge,
    DecidedBy,
    Kind,
    Rule,
    Settlement,
    Verdict,
    denied,
    level_of,
)

_LUA: Final = Path(__file__).parent / "lua"
# Under a name of its own: reading a member off its class is a slow look-up.
_PERMITS: Final = Kind.PERMITS
_REDIS: Final = DecidedBy.REDIS
_SETS_MAX: Final = 20_000  # remembered; written anew when they are needed


_PARTS: Final = ("bucket", "settle", "renew", "reserve")


class Script:
    """The script, and the digest by which a server that has seen it knows it."""

    def __init__(self, text: str | None = None) -> None:
        self.text = (text or script_text()).encode()
        self.sha = sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def by_sha(self, arguments: Sequence[bytes]) -> tuple[bytes, ...]:
        """The command for a server that knows it."""
        return (b"EVALSHA", self.sha, *arguments)

    def in_full(self, arguments: Sequence[bytes]) -> tuple[bytes, ...]:
        """The command for one that does not, which knows it from then on."""
        return (b"EVAL", self.text, *arguments)


def script_text() -> str:
    """The script as it is run."""
    return "".join((_LUA / f"{part}.lua").read_text() for part in _PARTS)


def key_of(prefix: str, name: str) -> str:
    """The key of `name` in Redis. What is in braces decides on which node of a Cluster it is."""
    return f"{{{prefix}}}:{name}"


class Codec:
    """Writes calls. Rules are few and live long, and so are the sets of them that requests are
    charged by; what is written of a set, most of a call, is remembered.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = key_of(prefix, "")
        self._reservation = key_of(prefix, "reservation:")
        # By the identity of the rules, which the entry keeps alive.
        self._sets: dict[tuple[int, ...], _Set] = {}

    def key(self, rule: Rule) -> bytes:
        """The key of a rule's bucket."""
        return f"{self._prefix}{rule.key}".encode()

    def reservation_in(self, permit: bytes) -> str:
        """The id of the reservation that holds this permit."""
        return permit.decode().removeprefix(self._reservation).partition("#")[0]

    def call(
        self,
        asks: Sequence[Ask] = (),
        settlements: Sequence[Settlement] = (),
        renewals: Sequence[Ask] = (),
    ) -> list[bytes]:
        """The arguments of a call that ends, renews and takes reservations, in this order.

        Numbers of each settlement: whether it ends, its set, the amounts that were used.
        """
        places: dict[_Set, int] = {}
        # Of a key with two rules, since the configuration changed, the first counts: the asks'.
        taken, taking = self._asks(asks, places)
        names: list[bytes] = []
        numbers: list[float] = [len(settlements)]
        for settlement in settlements:
            charges = settlement.charges
            number = self._number_of(charges, places)
            numbers += (settlement.ends, number, *map(_AMOUNT, charges))
            names.append(f"{self._reservation}{settlement.reservation_id}".encode())
        if renewals:
            names += self._names(renewals)
            numbers += self._renewing(renewals, places)
        else:
            numbers.append(0)
        numbers += taking
        sets = list(places)
        head = sets[0].head if len(sets) == 1 else _joined(self._prefix, sets)
        count_of_keys = len(head.keys) + len(names) + len(taken)
        doubles = head.numbers + _doubles(numbers)
        return [b"%d" % count_of_keys, *head.keys, *names, *taken, doubles]

    def _asks(
        self, asks: Sequence[Ask], places: dict[_Set, int]
    ) -> tuple[list[bytes], list[float]]:
        """The reservations, and of each its lease, whether it extends, whether it is ahead, how it
        borrows, its set and the amounts.
        """
        names: list[bytes] = []
        numbers: list[float] = [len(asks)]
        for ask in asks:
            charges = ask.charges
            number = self._number_of(charges, places)
            numbers += (ask.lease_s, ask.extends, ask.ahead, ask.borrows, number)
            numbers += map(_AMOUNT, charges)
            names.append(f"{self._reservation}{ask.reservation_id}".encode())
        return names, numbers

    def _renewing(self, renewals: Sequence[Ask], places: dict[_Set, int]) -> list[float]:
        """Of each its lease, whether Redis is to take it for granted, its set and the amounts."""
        numbers: list[float] = [len(renewals)]
        for ask in renewals:
            charges = ask.charges
            numbers += (ask.lease_s, ask.adopted, self._number_of(charges, places))
            numbers += map(_AMOUNT, charges)
        return numbers

    def _names(self, asks: Sequence[Ask]) -> list[bytes]:
        return [f"{self._reservation}{ask.reservation_id}".encode() for ask in asks]

    def _number_of(self, charges: tuple[Charge, ...], places: dict[_Set, int]) -> int:
        """The number, from 1, of the set of these charges' rules in a call."""
        identity = tuple(map(id, map(_RULE, charges)))
        one = self._sets.get(identity)
        if one is None:
            if len(self._sets) >= _SETS_MAX:
                self._sets.clear()
            one = self._sets[identity] = _Set(self._prefix, tuple(map(_RULE, charges)))
        return places.setdefault(one, len(places) + 1)


_RULE: Final = attrgetter("rule")
_AMOUNT: Final = attrgetter("amount")


class _Entry(NamedTuple):
    """What is written of one rule."""

    key: str
    name: bytes  # in Redis
    numbers: bytes
    parent: str | None  # the key of its parent, or of what is above it, which comes before it


class _Head(NamedTuple):
    """How calls begin: the keys of their rules, and what the script is told of these."""

    keys: list[bytes]
    numbers: bytes


class _Set:
    """Rules by which requests are charged. Of the member of a family all of that is written, and
    of a guarantee what is above it.
    """

    __slots__ = ("entries", "head", "keys", "rules")

    def __init__(self, prefix: str, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.keys = tuple([rule.key for rule in rules])
        self.entries = [_entry(prefix, each) for rule in rules for each in _with_others(rule)]
        self.head = _joined(prefix, [self])  # of a call that has no other set


def _with_others(rule: Rule) -> Sequence[Rule]:
    if rule.family is not None:
        return [rule.family.parent, *rule.family.rules.values()]
    return [rule] if rule.above is None else [rule.above, rule]


def _entry(prefix: str, rule: Rule) -> _Entry:
    numbers = _doubles(
        (
            _kind(rule), rule.rate_per_s, rule.burst, rule.debt_max, rule.warm_up_s,
            rule.amount_max,
        )
    )  # fmt: skip
    before = rule.above if rule.family is None else rule.family.parent
    parent = None if before is None else before.key
    return _Entry(rule.key, f"{prefix}{rule.key}".encode(), numbers, parent)


def _kind(rule: Rule) -> int:
    if rule.kind is _PERMITS:
        return 1
    if rule.above is not None:
        return 3
    return 2 if rule.lends else 0


def _joined(prefix: str, sets: Sequence[_Set]) -> _Head:
    """All rules of `sets`, each once, and the sets as numbers of rules, from 1.

    A key that is there keeps its rule: a call may have a family as it was and as it is now.
    """
    places: dict[str, int] = {}
    names, rules, numbers = [f"{prefix}born".encode()], [b""], [float(len(sets))]
    for each in sets:
        for key, name, written, parent in each.entries:
            if key not in places:
                place = places[key] = len(places) + 1
                names.append(name)
                rules += (written, _doubles((0 if parent is None else place - places[parent],)))
        numbers += (len(each.keys), *map(places.__getitem__, each.keys))
    rules[0] = _doubles((len(places),))
    return _Head(names, b"".join(rules) + _doubles(numbers))


def _doubles(numbers: Sequence[float]) -> bytes:
    return pack(f"<{len(numbers)}d", *numbers)


def _numbers(doubles: bytes) -> tuple[float, ...]:
    if len(doubles) % 8:
        raise ValueError("the script's answer is no row of doubles")
    return unpack(f"<{len(doubles) // 8}d", doubles)


def verdicts(asks: Sequence[Ask], answer: bytes) -> list[Verdict]:
    """What the script answered to `asks`: of each a status, and of each charge its wait and what is
    left. Raises ValueError when it is no such answer.
    """
    numbers, found, at = _numbers(answer), [], 0
    for ask in asks:
        charges = ask.charges
        end = at + 1 + 2 * len(charges)
        if end > len(numbers):
            raise ValueError("the script's answer is too short")
        status = numbers[at]
        if status < 0:
            found.append(Verdict(False, None, None, False, (), _REDIS))
        else:
            levels = tuple(map(level_of, map(_RULE, charges), numbers[at + 2 : end : 2]))
            if status > 0:
                found.append(Verdict(True, None, 0.0, False, levels, _REDIS, status == 2))
            else:
                found.append(denied(charges, numbers[at + 1 : end : 2], levels, _REDIS))
        at = end
    return found
