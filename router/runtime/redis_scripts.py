"""What goes into the Lua script and what comes out: keys, and numbers as little-endian doubles.

One call has the asks of one turn of the loop, and what was settled since the last. Each bucket that
they name is in it once, with its rule, so the script needs no configuration, and no harm is done by
routers that differ in theirs for a moment. All keys carry one hash tag: a Redis Cluster keeps them
on one node, as it must, since one decision is about all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha1
from pathlib import Path
from struct import Struct
from typing import Final

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
# So many are remembered; the others are written anew when they are needed.
_SETS_MAX: Final = 20_000
_HEADS_MAX: Final = 4_096  # about a kB each


_PARTS: Final = ("bucket", "settle", "renew", "reserve")


def script_text() -> str:
    """The script as it is run."""
    return "".join((_LUA / f"{part}.lua").read_text() for part in _PARTS)


def key_of(prefix: str, name: str) -> str:
    """The key of `name` in Redis. What is in braces decides on which node of a Cluster it is."""
    return f"{{{prefix}}}:{name}"


class Codec:
    """Writes calls. Rules are few and live long, and so are the sets of them that requests are
    charged by; what is written of them, most of a call, is remembered.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = key_of(prefix, "")
        self._reservation = key_of(prefix, "reservation:").encode()
        self.script = script_text().encode()
        digest = sha1(self.script, usedforsecurity=False).hexdigest().encode()
        self._by_digest = _bulk(b"EVALSHA") + _bulk(digest)
        self._in_full = _bulk(b"EVAL") + _bulk(self.script)
        # By the identity of their first rule, which they keep alive.
        self._sets: dict[int, list[_Set]] = {}
        self._sets_count = 0
        self._heads: dict[tuple[_Set, ...], _Head] = {}

    def key(self, rule: Rule) -> bytes:
        """The key of a rule's bucket."""
        return f"{self._prefix}{rule.key}".encode()

    def reservation_in(self, permit: bytes) -> str:
        """The id of the reservation that holds this permit."""
        return permit.removeprefix(self._reservation).partition(b"#")[0].decode()

    def call(
        self,
        asks: Sequence[Ask] = (),
        settlements: Sequence[Settlement] = (),
        renewals: Sequence[Ask] = (),
        *,
        in_full: bool = False,
    ) -> bytes:
        """The command that ends, renews and takes reservations, in this order, as it is sent.

        It names the script by its digest, or has it `in_full` for a server that does not know it.
        """
        places: dict[_Set, int] = {}
        taken: list[bytes] = []
        taking: list[float] = [len(asks)]
        # Of a key with two rules, since the configuration changed, the first counts: the asks'.
        for ask in asks:
            taken.append(self._name(ask.reservation_id))
            taking += (ask.lease_s, ask.extends, ask.ahead, ask.borrows)
            self._add_charges(taking, ask.charges, places)
        names: list[bytes] = []
        numbers: list[float] = [len(settlements)]
        for settlement in settlements:
            names.append(self._name(settlement.reservation_id))
            numbers.append(settlement.ends)
            self._add_charges(numbers, settlement.charges, places)
        numbers.append(len(renewals))
        for renewal in renewals:
            names.append(self._name(renewal.reservation_id))
            numbers += (renewal.lease_s, renewal.adopted)
            self._add_charges(numbers, renewal.charges, places)
        names += taken
        numbers += taking
        head = self._head(tuple(places))
        doubles = head.numbers + _doubles(numbers)
        count = head.count + len(names)
        digits = b"%d" % count
        return b"*%d\r\n%b$%d\r\n%b\r\n%b%b$%d\r\n%b\r\n" % (
            count + 4, self._in_full if in_full else self._by_digest, len(digits), digits,
            head.keys, b"".join(names), len(doubles), doubles,
        )  # fmt: skip

    def _head(self, sets: tuple[_Set, ...]) -> _Head:
        head = self._heads.get(sets)
        if head is None:
            if len(self._heads) >= _HEADS_MAX:
                self._heads.clear()
            head = self._heads[sets] = _joined(self._prefix, sets)
        return head

    def _name(self, reservation_id: str) -> bytes:
        """Its key, as the protocol has it."""
        kind, name = self._reservation, reservation_id.encode()
        return b"$%d\r\n%b%b\r\n" % (len(kind) + len(name), kind, name)

    def _add_charges(
        self, numbers: list[float], charges: tuple[Charge, ...], places: dict[_Set, int]
    ) -> None:
        """The number, from 1, of the set of their rules in this call, and their amounts."""
        numbers.append(places.setdefault(self._set_of(charges), len(places) + 1))
        numbers += [charge.amount for charge in charges]

    def _set_of(self, charges: tuple[Charge, ...]) -> _Set:
        first = id(charges[0].rule) if charges else 0
        for one in self._sets.get(first, ()):
            if one.is_of(charges):
                return one
        if self._sets_count >= _SETS_MAX:
            self._sets.clear()
            self._sets_count = 0
        new = _Set(self._prefix, [charge.rule for charge in charges])
        self._sets.setdefault(first, []).append(new)
        self._sets_count += 1
        return new


class _Entry:
    """What is written of one rule."""

    __slots__ = ("key", "name", "numbers", "parent")

    def __init__(self, prefix: str, rule: Rule) -> None:
        self.key = rule.key
        self.name = _bulk(f"{prefix}{rule.key}".encode())  # of its bucket in Redis
        self.numbers = _doubles(
            [
                _kind(rule), rule.rate_per_s, rule.burst, rule.debt_max, rule.warm_up_s,
                rule.amount_max,
            ]
        )  # fmt: skip
        # The key of its parent, or of what is above it, which comes before it.
        parent = rule.above if rule.family is None else rule.family.parent
        self.parent = None if parent is None else parent.key


class _Head:
    """How calls begin: the keys of their rules, and what the script is told of these."""

    __slots__ = ("count", "keys", "numbers")

    def __init__(self, count: int, keys: bytes, numbers: bytes) -> None:
        self.count = count
        self.keys = keys
        self.numbers = numbers


class _Set:
    """Rules by which requests are charged. Of the member of a family all of that is written, and
    of a guarantee what is above it.
    """

    __slots__ = ("entries", "keys", "rules")

    def __init__(self, prefix: str, rules: list[Rule]) -> None:
        self.rules = rules
        self.keys = [rule.key for rule in rules]
        self.entries = [_Entry(prefix, each) for rule in rules for each in _with_others(rule)]

    def is_of(self, charges: tuple[Charge, ...]) -> bool:
        """Whether these are the charges' rules, in their order."""
        rules = self.rules
        return len(rules) == len(charges) and all(
            charges[place].rule is rule for place, rule in enumerate(rules)
        )


def _with_others(rule: Rule) -> Sequence[Rule]:
    if rule.family is not None:
        return [rule.family.parent, *rule.family.rules.values()]
    return [rule] if rule.above is None else [rule.above, rule]


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
    names, rules = [_bulk(f"{prefix}born".encode())], [b""]
    numbers: list[float] = [len(sets)]
    for each in sets:
        for entry in each.entries:
            key, parent = entry.key, entry.parent
            if key not in places:
                place = places[key] = len(places) + 1
                names.append(entry.name)
                rules.append(entry.numbers)
                rules.append(_double(0 if parent is None else place - places[parent]))
        numbers.append(len(each.keys))
        numbers += [places[key] for key in each.keys]
    rules[0] = _double(len(places))
    return _Head(len(names), b"".join(names), b"".join(rules) + _doubles(numbers))


def _bulk(value: bytes) -> bytes:
    """A string as the protocol of Redis has it."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


@lru_cache
def _row(count: int) -> Struct:
    return Struct(f"<{count}d")


def _doubles(numbers: Sequence[float]) -> bytes:
    return _row(len(numbers)).pack(*numbers)


@lru_cache
def _double(number: int) -> bytes:
    return _doubles([number])


def verdicts(asks: Sequence[Ask], answer: bytes) -> list[Verdict]:
    """What the script answered to `asks`: of each a status, and of each charge its wait and what is
    left. Raises ValueError when it is no such answer.
    """
    if len(answer) % 8:
        raise ValueError("the script's answer is no row of doubles")
    numbers: tuple[float, ...] = _row(len(answer) // 8).unpack(answer)
    found, at = [], 0
    for ask in asks:
        charges = ask.charges
        end = at + 1 + 2 * len(charges)
        if end > len(numbers):
            raise ValueError("the script's answer is too short")
        status = numbers[at]
        if status < 0:
            found.append(Verdict(False, None, None, False, (), _REDIS))
        else:
            place, left = at + 2, []
            for charge in charges:
                left.append(level_of(charge.rule, numbers[place]))
                place += 2
            levels = tuple(left)
            if status > 0:
                found.append(Verdict(True, None, 0.0, False, levels, _REDIS, status == 2))
            else:
                found.append(denied(charges, numbers[at + 1 : end : 2], levels, _REDIS))
        at = end
    return found
