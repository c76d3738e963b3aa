"""What goes into the Lua script and what comes out: keys, and numbers as little-endian doubles.

One call has the asks of one turn of the loop, and what was settled since the last. Each bucket that
they name is in it once, with its rule, so the script needs no configuration, and no harm is done by
routers that differ in theirs for a moment. All keys carry one hash tag: a Redis Cluster keeps them
on one node, as it must, since one decision is about all of them at once.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Final

from router.core.bucket import (
    Ask,
    DecidedBy,
    Kind,
    Level,
    Rule,
    Settlement,
    Verdict,
    denied,
    level_of,
)

_LUA: Final = Path(__file__).parent / "lua"
# Under a name of its own: reading a member off its class is a slow look-up.
_PERMITS: Final = Kind.PERMITS
_HEADS_MAX: Final = 20_000  # remembered; written anew when they are needed


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
    charged by; what is written of one set, most of a call, is remembered.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = key_of(prefix, "")
        self._reservation = key_of(prefix, "reservation:")
        # By the identity of the rules, which the entry keeps alive.
        self._heads: dict[_Identity, tuple[_Set, _Head]] = {}

    def call(
        self,
        asks: Sequence[Ask] = (),
        *,
        settlements: Sequence[Settlement] = (),
        renewals: Sequence[Ask] = (),
    ) -> list[bytes]:
        """The arguments of a call that ends, renews and takes reservations, in this order."""
        sets: dict[_Identity, _Set] = {}
        # Of a key with two rules, since the configuration changed, the first counts: the asks'.
        taken = self._part(asks, sets)
        renewed = self._part(renewals, sets)
        ended = self._part(settlements, sets)
        head = self._head(sets)
        reservations = [*ended.reservations, *renewed.reservations, *taken.reservations]
        count_of_keys = len(head.keys) + len(reservations)
        numbers = _doubles((*ended.numbers, *renewed.numbers, *taken.numbers))
        return [b"%d" % count_of_keys, *head.keys, *reservations, head.numbers + numbers]

    def _part(self, whats: Sequence[Ask | Settlement], sets: dict[_Identity, _Set]) -> _Part:
        """Of each its lease and whether it extends, or whether it ends; the number of its set of
        rules, and the amounts.
        """
        part = _Part([], [len(whats)])
        numbers = part.numbers
        for what in whats:
            if isinstance(what, Ask):
                numbers += (what.lease_s, what.extends)
            else:
                numbers.append(what.ends)
            charges = what.charges
            identity = tuple([id(charge.rule) for charge in charges])
            if identity not in sets:
                sets[identity] = [charge.rule for charge in charges]
            # Mostly there is one; else this is its place.
            numbers.append(1 if len(sets) == 1 else list(sets).index(identity) + 1)
            numbers += [charge.amount for charge in charges]
            part.reservations.append(f"{self._reservation}{what.reservation_id}".encode())
        return part

    def _head(self, sets: dict[_Identity, _Set]) -> _Head:
        if len(sets) != 1:
            return self._new_head(sets.values())
        ((identity, rules),) = sets.items()
        known = self._heads.get(identity)
        if known is None:
            if len(self._heads) >= _HEADS_MAX:
                self._heads.clear()
            known = self._heads[identity] = rules, self._new_head([rules])
        return known[1]

    def _new_head(self, sets: Iterable[_Set]) -> _Head:
        """All rules of `sets`, each once, and the sets as numbers of rules, from 1."""
        places: dict[str, int] = {}
        rule_numbers: list[float] = []
        set_numbers: list[float] = []
        for rules in sets:
            set_numbers.append(len(rules))
            for rule in rules:
                if rule.key not in places:
                    _add_rule(rule, places, rule_numbers)
                set_numbers.append(places[rule.key])
        names = ("born", *places)
        sets_count = float(sum(1 for _ in sets))
        numbers = _doubles((float(len(places)), *rule_numbers, sets_count, *set_numbers))
        return _Head([f"{self._prefix}{name}".encode() for name in names], numbers)


_Identity = tuple[int, ...]
_Set = list[Rule]


@dataclass(slots=True)
class _Part:
    """What a call ends, renews or takes."""

    reservations: list[bytes]
    numbers: list[float]


@dataclass(slots=True)
class _Head:
    """How calls begin: the keys of their rules, and what the script is told of these."""

    keys: list[bytes]
    numbers: bytes


def _add_rule(rule: Rule, places: dict[str, int], numbers: list[float]) -> None:
    """Add `rule`, or the whole family of a member: its parent and then the members.

    A key that is there keeps its rule: a call may have a family as it was and as it is now.
    """
    family = rule.family
    rules = [rule] if family is None else [family.parent, *family.rules.values()]
    for each in rules:
        if each.key in places:
            continue
        place = places[each.key] = len(places) + 1
        ahead = 0 if each.family is None else place - places[each.family.parent.key]
        numbers += (
            each.kind is _PERMITS, each.rate_per_s, each.burst, each.debt_max,
            each.warm_up_s, each.amount_max, ahead,
        )  # fmt: skip


def _doubles(numbers: Iterable[float]) -> bytes:
    values = array("d", numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def verdicts(asks: Iterable[Ask], answer: bytes) -> list[Verdict]:
    """What the script answered to `asks`. Raises ValueError when it is no such answer."""
    values = array("d")
    values.frombytes(answer)
    if sys.byteorder == "big":
        values.byteswap()
    numbers = values.tolist()
    found, at = [], 0
    for ask in asks:
        end = at + 1 + 2 * len(ask.charges)
        if end > len(numbers):
            raise ValueError("the script's answer is too short")
        found.append(
            _verdict(ask, numbers[at], numbers[at + 1 : end : 2], numbers[at + 2 : end : 2])
        )
        at = end
    return found


def _verdict(ask: Ask, status: float, waits_s: list[float], left: list[float]) -> Verdict:
    if status < 0:
        return Verdict(False, None, None, False, (), DecidedBy.REDIS)
    levels = tuple(
        [
            Level(charge.rule.burst, rest, None)
            if charge.rule.kind is _PERMITS
            else level_of(charge.rule, rest)
            for charge, rest in zip(ask.charges, left, strict=True)
        ]
    )
    if status == 1:
        return Verdict(True, None, 0.0, False, levels, DecidedBy.REDIS)
    return denied(ask.charges, waits_s, levels, DecidedBy.REDIS)
