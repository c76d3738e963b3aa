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
    Charge,
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
_BLOCKS_MAX: Final = 50_000  # remembered; written anew when they are needed


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
    """Writes calls. What it writes of a rule is remembered, since rules are few and live long."""

    def __init__(self, prefix: str) -> None:
        self._prefix = key_of(prefix, "")
        self._born = key_of(prefix, "born").encode()
        self._reservation = key_of(prefix, "reservation:")
        self._blocks: dict[str, tuple[Rule, _Block]] = {}

    def call(
        self,
        asks: Sequence[Ask] = (),
        *,
        settlements: Sequence[Settlement] = (),
        renewals: Sequence[Ask] = (),
    ) -> list[bytes]:
        """The arguments of a call that ends, renews and takes reservations, in this order."""
        call = _Call(self._born)
        call.numbers.append(len(settlements))
        for settlement in settlements:
            self._add_reservation(call, settlement)
        for leases in (renewals, asks):
            call.numbers.append(len(leases))
            for ask in leases:
                call.numbers.append(ask.lease_s)
                self._add_reservation(call, ask)
        return call.arguments()

    def _add_reservation(self, call: _Call, what: Ask | Settlement) -> None:
        call.reservations.append(f"{self._reservation}{what.reservation_id}".encode())
        self._add_charges(call, what.charges)

    def _add_charges(self, call: _Call, charges: Sequence[Charge]) -> None:
        numbers, known = call.numbers, call.rules
        numbers.append(len(charges))
        for charge in charges:
            rule = charge.rule
            number = known.get(rule.key)
            numbers.append(call.add(self._block(rule), rule.key) if number is None else number)
            numbers.append(charge.amount)

    def _block(self, rule: Rule) -> _Block:
        """`rule`, or the whole family of a member: its parent and then the members."""
        remembered = self._blocks.get(rule.key)
        if remembered is not None and remembered[0] is rule:
            return remembered[1]
        family = rule.family
        rules = [rule] if family is None else [family.parent, *family.rules.values()]
        numbers: list[float] = []
        for ahead, each in enumerate(rules):
            numbers += (
                each.kind is Kind.PERMITS, each.rate_per_s, each.burst, each.debt_max,
                each.warm_up_s, each.amount_max, ahead,
            )  # fmt: skip
        block = _Block(
            [each.key for each in rules],
            [f"{self._prefix}{each.key}".encode() for each in rules],
            _doubles(numbers),
        )
        if len(self._blocks) >= _BLOCKS_MAX:
            self._blocks.clear()
        self._blocks[rule.key] = rule, block
        return block


@dataclass(slots=True)
class _Block:
    """Rules that go into a call together, as they are written there."""

    names: list[str]
    keys: list[bytes]
    numbers: bytes


class _Call:
    """One call that is being put together. Rules are numbered from 1, as their keys come."""

    __slots__ = ("blocks", "keys", "numbers", "reservations", "rules")

    def __init__(self, born: bytes) -> None:
        self.keys = [born]
        self.rules: dict[str, int] = {}
        self.blocks: list[bytes] = []
        self.reservations: list[bytes] = []
        self.numbers: list[float] = []

    def add(self, block: _Block, name: str) -> int:
        """Add the rules of `block`; returns the number of the one called `name`."""
        for each in block.names:
            self.rules[each] = len(self.rules) + 1
        self.keys += block.keys
        self.blocks.append(block.numbers)
        return self.rules[name]

    def arguments(self) -> list[bytes]:
        """What follows the name of the script in the command."""
        keys = [*self.keys, *self.reservations]
        head = _doubles((len(self.rules),))
        numbers = b"".join((head, *self.blocks, _doubles(self.numbers)))
        return [b"%d" % len(keys), *keys, numbers]


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
    levels = tuple(
        Level(charge.rule.burst, rest, None)
        if charge.rule.kind is Kind.PERMITS
        else level_of(charge.rule, rest)
        for charge, rest in zip(ask.charges, left, strict=True)
    )
    if status == 1:
        return Verdict(True, None, 0.0, False, levels, DecidedBy.REDIS)
    if status == 0:
        return denied(ask.charges, waits_s, levels, DecidedBy.REDIS)
    return Verdict(False, None, None, False, levels, DecidedBy.REDIS)
