"""What relays and their brain tell each other of requests, as plain values and made of these again.

Each kind of value is a `Check`. What it reads it takes apart and replaces in place: it is of a
frame that was just decoded, and nobody else's. Objects are made by position, and their fields are
written out on both sides, as that is what costs least when it is compiled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from types import NoneType
from typing import Any, Final

from router.contract import Lane
from router.core import degrade
from router.core.adoption import Run
from router.core.bucket import Charge, Kind, Level, Rule, Scope
from router.core.degrade import Act, Decision
from router.core.limits import Reservation
from router.core.types import (
    Endpoint,
    Failure,
    Outcome,
    Priority,
    Refusal,
    RequestSpec,
    Usage,
)
from router.errors import Reason
from router.runtime.malformed import MalformedFrame

Fields = tuple[Any, ...]

_ENUMS: Final[tuple[type[Enum], ...]] = (
    Act, degrade.Level, Endpoint, Kind, Lane, Outcome, Priority, Reason, Scope,
)  # fmt: skip
# What members stand for: to ask one for its `value` is a call through Python.
PLAIN: Final[dict[Any, Any]] = {member: member.value for cls in _ENUMS for member in cls}
_RULES_MAX: Final = 20_000  # known by name
_rules: dict[tuple[str, str, str], Rule] = {}


class Check(ABC):
    """Makes of a value that was read what it stands for."""

    @abstractmethod
    def read(self, value: Any) -> Any:
        """What `value` stands for. Raises MalformedFrame."""


class Plain(Check):
    """Takes a value of one of some types as it is."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = frozenset(kinds)

    def read(self, value: Any) -> Any:
        """See `Check.read`."""
        if type(value) not in self._kinds:
            names = " or ".join(sorted(kind.__name__ for kind in self._kinds))
            raise MalformedFrame(f"{value!r:.80} where {names} is due")
        return value


class Member(Check):
    """Takes the value of a member of an enum."""

    def __init__(self, cls: type[Enum]) -> None:
        self._name = cls.__name__
        self._members: dict[Any, Any] = {member.value: member for member in cls}

    def read(self, value: Any) -> Any:
        """See `Check.read`."""
        try:
            return self._members[value]
        except (KeyError, TypeError) as exc:
            raise MalformedFrame(f"{value!r:.80} is no {self._name}") from exc


class TupleOf(Check):
    """Takes a list of values of one type."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def read(self, value: Any) -> tuple[Any, ...]:
        """See `Check.read`."""
        values, kind = _list(value), self._kind
        for each in values:
            if type(each) is not kind:
                raise MalformedFrame(f"{each!r:.80} in a list of {kind.__name__}")
        return tuple(values)


class OrNone(Check):
    """Takes null, too."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def read(self, value: Any) -> Any:
        """See `Check.read`."""
        return None if value is None else self._check.read(value)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise MalformedFrame(f"{value!r:.80} where a list is due")
    return value


def read_each(value: Any, checks: tuple[Check, ...]) -> list[Any]:
    """Read a list with a check for each of its values."""
    values = _list(value)
    if len(values) != len(checks):
        raise MalformedFrame(f"{values!r:.80} where {len(checks)} values are due")
    for at, check in enumerate(checks):
        values[at] = check.read(values[at])
    return values


INT: Final = Plain(int)
STR: Final = Plain(str)
BOOL: Final = Plain(bool)
FLOAT: Final = Plain(float, int)
INT_OR_NONE: Final = Plain(int, NoneType)
STR_OR_NONE: Final = Plain(str, NoneType)
FLOAT_OR_NONE: Final = Plain(float, int, NoneType)
REASON: Final = Member(Reason)
LANE: Final = Member(Lane)
OUTCOME: Final = Member(Outcome)
STRS: Final = TupleOf(str)
_SCOPE: Final = Member(Scope)
_KIND: Final = Member(Kind)


class Spec(Check):
    """What was asked."""

    def __init__(self) -> None:
        self._checks: tuple[Check, ...] = (
            STR, Member(Endpoint), STR_OR_NONE, STR, BOOL, INT, INT_OR_NONE, INT,
            TupleOf(int), STR_OR_NONE, Member(Priority), BOOL, BOOL, STRS, FLOAT_OR_NONE,
        )  # fmt: skip

    def fields_of(self, spec: RequestSpec) -> Fields:
        """As it is told."""
        return (
            spec.request_id, PLAIN[spec.endpoint], spec.model, spec.tenant, spec.stream,
            spec.prompt_bytes, spec.max_tokens, spec.samples, spec.prefix, spec.rid,
            PLAIN[spec.priority], spec.structured, spec.fixed, spec.avoid, spec.wait_s_max,
        )  # fmt: skip

    def read(self, value: Any) -> RequestSpec:
        """See `Check.read`."""
        v = read_each(value, self._checks)
        return RequestSpec(
            v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7],
            v[8], v[9], v[10], v[11], v[12], v[13], v[14],
        )  # fmt: skip


class Granted(Check):
    """What limits granted: the reservation, whether it borrowed, of each charge the name of its
    rule and the amount, and where each stood then (nothing, where the store could not look).
    """

    def fields_of(self, reservation: Reservation | None) -> Fields | None:
        """As it is told."""
        if reservation is None:
            return None
        charges = []
        for charge in reservation.charges:
            rule = charge.rule
            charges.append((rule.key, PLAIN[rule.scope], PLAIN[rule.kind], charge.amount))
        levels = [(level.limit, level.remaining, level.reset_s) for level in reservation.levels]
        return reservation.id, reservation.borrowed, charges, levels

    def read(self, value: Any) -> Reservation:
        """See `Check.read`."""
        name, borrowed, charges, levels = _row(value, 4)
        charged = []
        for each in _list(charges):
            key, scope, kind, amount = _row(each, 4)
            charged.append(Charge(_rule(key, scope, kind), FLOAT.read(amount)))
        stood = []
        for each in _list(levels):
            limit, remaining, reset_s = _row(each, 3)
            stood.append(_level(limit, remaining, reset_s))
        return Reservation(STR.read(name), tuple(charged), tuple(stood), BOOL.read(borrowed))


def _row(value: Any, length: int) -> list[Any]:
    values = _list(value)
    if len(values) != length:
        raise MalformedFrame(f"{values!r:.80} where {length} values are due")
    return values


def _rule(key: Any, scope: Any, kind: Any) -> Rule:
    if not type(key) is type(scope) is type(kind) is str:
        raise MalformedFrame(f"{key!r:.80} names no rule")
    named = key, scope, kind
    rule = _rules.get(named)
    if rule is None:
        if len(_rules) >= _RULES_MAX:
            _rules.clear()
        rule = Rule(key, _SCOPE.read(scope), rate_per_s=0.0, burst=1.0, kind=_KIND.read(kind))
        _rules[named] = rule
    return rule


def _level(limit: Any, remaining: Any, reset_s: Any) -> Level:
    return Level(FLOAT.read(limit), FLOAT.read(remaining), FLOAT_OR_NONE.read(reset_s))


class Told(Check):
    """Where limits stand that refuse. Of their rules only what an answer says of them crosses."""

    def read(self, value: Any) -> tuple[tuple[Rule, Level], ...]:
        """See `Check.read`."""
        told = []
        for each in _list(value):
            scope, kind, limit, remaining, reset_s = _row(each, 5)
            told.append((_rule("", scope, kind), _level(limit, remaining, reset_s)))
        return tuple(told)


class HowFar(Check):
    """How far a request is that runs."""

    def __init__(self) -> None:
        self._checks: tuple[Check, ...] = (
            STR, LANE, INT, FLOAT, FLOAT, FLOAT_OR_NONE, INT, OrNone(GRANTED),
        )  # fmt: skip

    def fields_of(self, run: Run) -> Fields:
        """As it is told."""
        return (
            run.worker_id, PLAIN[run.lane], run.attempts, run.arrived_at, run.dispatched_at,
            run.first_token_at, run.output_tokens, GRANTED.fields_of(run.reservation),
        )  # fmt: skip

    def read(self, value: Any) -> Run:
        """See `Check.read`."""
        return Run(*read_each(value, self._checks))


class Failed(Check):
    """How an attempt failed."""

    def __init__(self) -> None:
        self._checks: tuple[Check, ...] = REASON, BOOL, BOOL, FLOAT_OR_NONE

    def fields_of(self, failure: Failure) -> Fields:
        """As it is told."""
        reason = PLAIN[failure.reason]
        return reason, failure.blames_worker, failure.retryable, failure.retry_after_s

    def read(self, value: Any) -> Failure:
        """See `Check.read`."""
        reason, blames_worker, retryable, retry_after_s = read_each(value, self._checks)
        return Failure(
            reason=reason,
            blames_worker=blames_worker,
            retryable=retryable,
            retry_after_s=retry_after_s,
        )


class Refused(Check):
    """Why a request is refused."""

    def __init__(self) -> None:
        self._checks: tuple[Check, ...] = REASON, STR, FLOAT_OR_NONE, STR_OR_NONE, Told()

    def fields_of(self, refusal: Refusal) -> Fields:
        """As it is told."""
        levels = [
            (PLAIN[rule.scope], PLAIN[rule.kind], level.limit, level.remaining, level.reset_s)
            for rule, level in refusal.levels
        ]
        reason = PLAIN[refusal.reason]
        return reason, refusal.message, refusal.retry_after_s, refusal.param, levels

    def read(self, value: Any) -> Refusal:
        """See `Check.read`."""
        reason, message, retry_after_s, param, levels = read_each(value, self._checks)
        return Refusal(
            reason=reason,
            message=message,
            retry_after_s=retry_after_s,
            param=param,
            levels=levels,
        )


class Used(Check):
    """What a request used."""

    def __init__(self) -> None:
        self._checks: tuple[Check, ...] = INT_OR_NONE, INT_OR_NONE, INT_OR_NONE

    def fields_of(self, usage: Usage) -> Fields:
        """As it is told."""
        return usage.prompt_tokens, usage.cached_tokens, usage.output_tokens

    def read(self, value: Any) -> Usage:
        """See `Check.read`."""
        prompt_tokens, cached_tokens, output_tokens = read_each(value, self._checks)
        return Usage(prompt_tokens, cached_tokens, output_tokens)


class Degraded(Check):
    """What overload changed of a request."""

    def __init__(self) -> None:
        self._checks: tuple[Check, ...] = (
            Member(Act), Member(degrade.Level), INT_OR_NONE, STR_OR_NONE,
        )  # fmt: skip

    def fields_of(self, decision: Decision) -> Fields:
        """As it is told."""
        return PLAIN[decision.act], PLAIN[decision.level], decision.max_tokens, decision.model

    def read(self, value: Any) -> Decision:
        """See `Check.read`."""
        act, level, max_tokens, model = read_each(value, self._checks)
        return Decision(act, level, max_tokens, model)


SPEC: Final = Spec()
GRANTED: Final = Granted()
RUN: Final = HowFar()
FAILURE: Final = Failed()
REFUSAL: Final = Refused()
USAGE: Final = Used()
DECISION: Final = Degraded()
