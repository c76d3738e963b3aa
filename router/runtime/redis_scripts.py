"""What goes into the Lua scripts and what comes out: keys, and numbers as little-endian doubles.

One call of a script has the asks, or the settlements, of one turn of the loop. Each bucket that
they name is in it once, with its rule, so a script needs no configuration, and routers that differ
in theirs for a moment do no harm. All keys carry one hash tag: a Redis Cluster keeps them on one
node, as it must, since one decision is about all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha1
from pathlib import Path
from struct import Struct
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
_DOUBLE_BYTES: Final = 8


class Script:
    """A script, and the digest by which a server that has seen it knows it."""

    def __init__(self, name: str, arithmetic: str | None = None) -> None:
        arithmetic = arithmetic or (_LUA / "bucket.lua").read_text()
        self.text = (arithmetic + (_LUA / f"{name}.lua").read_text()).encode()
        self.sha = sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def by_sha(self, arguments: Sequence[bytes]) -> tuple[bytes, ...]:
        """The command for a server that knows it."""
        return (b"EVALSHA", self.sha, *arguments)

    def in_full(self, arguments: Sequence[bytes]) -> tuple[bytes, ...]:
        """The command for one that does not, which knows it from then on."""
        return (b"EVAL", self.text, *arguments)


def key_of(prefix: str, name: str) -> str:
    """The key of `name` in Redis. What is in braces decides on which node of a Cluster it is."""
    return f"{{{prefix}}}:{name}"


class Call:
    """The keys and numbers of one call, being put together."""

    def __init__(self, prefix: str) -> None:
        self._prefix = key_of(prefix, "")
        self._keys = [f"{self._prefix}born".encode()]
        self._rules: dict[str, int] = {}
        self._rule_numbers: list[float] = []
        self._numbers: list[float] = []
        self._count = 0

    def add_ask(self, ask: Ask) -> None:
        """Reserve (or renew) this one."""
        self._begin(ask.reservation_id)
        self._numbers.append(ask.lease_s)
        self._add_charges(ask.charges)

    def add_settlement(self, settlement: Settlement) -> None:
        """Settle this one."""
        self._begin(settlement.reservation_id)
        self._add_charges(settlement.charges)

    def arguments(self) -> list[bytes]:
        """What follows the name of the script in the command."""
        numbers = [float(len(self._rules)), *self._rule_numbers, float(self._count), *self._numbers]
        blob = Struct(f"<{len(numbers)}d").pack(*numbers)
        return [str(len(self._keys)).encode(), *self._keys, blob]

    def _begin(self, reservation_id: str) -> None:
        self._count += 1
        self._keys.append(f"{self._prefix}reservation:{reservation_id}".encode())
        self._numbers.append(len(self._keys))

    def _add_charges(self, charges: Sequence[Charge]) -> None:
        numbers, rules = self._numbers, self._rules
        numbers.append(len(charges))
        for charge in charges:
            number = rules.get(charge.rule.key)
            numbers.append(self._add_rule(charge.rule) if number is None else number)
            numbers.append(charge.amount)

    def _add_rule(self, rule: Rule) -> int:
        """Name `rule` and, with a member, its whole family; returns its number, from 1."""
        family = rule.family
        if family is None:
            return self._number(rule, 0)
        parent = self._rules.get(family.parent.key) or self._number(family.parent, 0)
        for member in family.rules.values():
            self._number(member, parent)
        return self._rules[rule.key]

    def _number(self, rule: Rule, parent: int) -> int:
        self._keys.append(f"{self._prefix}{rule.key}".encode())
        self._rule_numbers += (
            len(self._keys), rule.kind is Kind.PERMITS, rule.rate_per_s, rule.burst,
            rule.debt_max, rule.warm_up_s, rule.amount_max, parent,
        )  # fmt: skip
        number = self._rules[rule.key] = len(self._rules) + 1
        return number


def verdicts(asks: Iterable[Ask], answer: bytes) -> list[Verdict]:
    """What the reserve script answered to `asks`. Raises ValueError when it is no such answer."""
    numbers = Struct(f"<{len(answer) // _DOUBLE_BYTES}d").unpack(answer)
    found, at = [], 0
    for ask in asks:
        size = 1 + 2 * len(ask.charges)
        status, *rest = numbers[at : at + size]
        if len(rest) + 1 != size:
            raise ValueError("the script's answer is too short")
        found.append(_verdict(ask, status, rest[::2], rest[1::2]))
        at += size
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
