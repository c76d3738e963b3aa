"""What relays and their brain say to each other, as bytes.

A frame is its length, four bytes, and a JSON array of messages; a message is an array of its kind
and its fields. One frame carries all that a turn of the loop has to say: encoded and decoded by one
call of a library in C each, a message costs a third of what `struct` takes for it.

Both ends are of one release, and the socket is private. What is checked is the shape of a message:
a frame that is not as it must be is a fault of ours, and ends its link before anything is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import IntEnum, StrEnum
from functools import lru_cache
from operator import attrgetter
from struct import Struct
from types import NoneType
from typing import Any, Final, Generic, TypeVar

import orjson

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
from router.runtime.limit_lines import Told

VERSION: Final = 4
FRAME_BYTES_MAX: Final = 2**26
_LENGTH: Final = Struct("<I")
_RULES_MAX: Final = 20_000  # known by name

Message = tuple[Any, ...]
Check = Callable[[Any], Any]
Packs = Mapping[str, Callable[[Any], Any]]


class MalformedFrame(Exception):
    """Bytes that are no frame, or a message that is not of its kind's shape."""


# Kinds. From a relay:
# Either way: version, process id, number (0: the brain), a token of a brain's start (from a relay:
# of the one whose workers it knows, 0: of none).
HELLO: Final = 1
KNOWN: Final = 2  # a worker that it knows, from before the brain began; fields as of WORKER
RUNS: Final = 3  # a request that runs, likewise: number, spec, how far it is
ANNOUNCED: Final = 4  # that was all of these
SUBMIT: Final = 5  # number, spec
FIRST_TOKEN: Final = 6  # number
TOKENS: Final = 7  # number, output tokens
FAILED: Final = 8  # number, failure
PREEMPTED: Final = 9  # number
FINISHED: Final = 10  # number, outcome, reason, usage
EDGE_REFUSED: Final = 11  # reason, request id, target
PING: Final = 12  # CPU seconds, resident bytes and connections of the relay
RESUBMIT: Final = 13  # number, spec, what limits granted under a brain before
UNUSED: Final = 14  # spec, what limits granted, of one that ended while it waited for a brain
RESUMED: Final = 15  # that was all that waited when requests could come again
# From the brain:
# Registration (JSON), priority order, router id, whether it drains, whether it is of the file.
WORKER: Final = 20
WORKER_GONE: Final = 21  # worker id
READY: Final = 22  # requests may come
DISPATCH: Final = 23  # number, lane, worker id, decision, what its limits granted
JUDGED: Final = 24  # number, whether another attempt follows
REFUSE: Final = 25  # number, refusal
PREEMPT: Final = 26  # number
CUT: Final = 27  # number, reason, message
CONFIG: Final = 28  # the configuration in force (JSON)
PONG: Final = 29
WORKERS: Final = 30  # worker ids: there are no others
RESERVED: Final = 31  # number, what limits granted; it waits for a worker

T = TypeVar("T")


class Record(Generic[T]):
    """Takes a dataclass of plain values and enums apart, and puts it together again."""

    def __init__(self, cls: type[T], *, packs: Packs | None = None, **checks: Check) -> None:
        """`checks` reads each field of `cls`; `packs` says those that are no plain values."""
        self._cls = cls
        named = fields(cls)  # type: ignore[arg-type]  # every T here is a dataclass
        self._names = tuple(field.name for field in named)
        assert self._names == tuple(checks), f"{cls.__name__} has other fields"
        self._by_position = not any(field.kw_only for field in named)
        self._get = attrgetter(*self._names)
        self._packs = {self._names.index(name): pack for name, pack in (packs or {}).items()}
        self._checks = tuple(checks.values())
        # By position where what is made from a value is not the value itself.
        self._made = tuple(
            (at, check) for at, check in enumerate(self._checks) if not isinstance(check, _Plain)
        )
        self._shapes: set[tuple[type, ...]] = set()  # types of values that passed all checks

    def fields_of(self, value: T) -> tuple[Any, ...]:
        """The values of all fields, in order."""
        values: tuple[Any, ...] = self._get(value)
        if not self._packs:
            return values
        packs = self._packs
        return tuple(packs[at](each) if at in packs else each for at, each in enumerate(values))

    def __call__(self, values: Any) -> T:
        """Make the object. Raises MalformedFrame."""
        if type(values) is not list:
            raise MalformedFrame(f"{self._cls.__name__}: not a list of values")
        shape = tuple(map(type, values))
        if shape not in self._shapes:
            if len(values) != len(self._names):
                raise MalformedFrame(f"{self._cls.__name__}: {len(values)} values")
            for check, value in zip(self._checks, values, strict=True):
                check(value)
            self._shapes.add(shape)
        for at, make in self._made:
            values[at] = make(values[at])
        if self._by_position:  # to name the fields takes twice as long
            return self._cls(*values)
        return self._cls(**dict(zip(self._names, values, strict=True)))


class _Plain:
    """Takes a value of one of some types as it is."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = frozenset(kinds)

    def __call__(self, value: Any) -> Any:
        if type(value) not in self._kinds:
            raise MalformedFrame(f"{value!r:.80} where {_names(self._kinds)} is due")
        return value


def _names(kinds: frozenset[type]) -> str:
    return " or ".join(sorted(kind.__name__ for kind in kinds))


def _tuple_of(kind: type) -> Check:
    def check(values: Any) -> Any:
        if type(values) is not list or not set(map(type, values)) <= {kind}:
            raise MalformedFrame(f"{values!r:.80} where a list of {kind.__name__} is due")
        return tuple(values)

    return check


def _member(cls: type[IntEnum] | type[StrEnum]) -> Check:
    members: dict[Any, Any] = {member.value: member for member in cls}

    def check(value: Any) -> Any:
        try:
            return members[value]
        except (KeyError, TypeError) as exc:
            raise MalformedFrame(f"{value!r:.80} is no {cls.__name__}") from exc

    return check


def _or_none(check: Check) -> Check:
    if isinstance(check, _Plain):
        return _Plain(*check._kinds, NoneType)

    def checked(value: Any) -> Any:
        return None if value is None else check(value)

    return checked


# Where limits stand. Of their rules only what an answer says of them has to cross.


def _said(told: Iterable[Told]) -> list[tuple[Any, ...]]:
    return [
        (rule.scope, rule.kind, level.limit, level.remaining, level.reset_s) for rule, level in told
    ]


def _told(values: Any) -> tuple[Told, ...]:
    if type(values) is not list:
        raise MalformedFrame("limits are a list")
    return tuple(_told_one(value) for value in values)


def _told_one(value: Any) -> Told:
    if type(value) is not list or len(value) != len(_TOLD):
        raise MalformedFrame(f"{value!r:.80} where a limit is due")
    checks: tuple[Check, ...] = _TOLD
    read = [check(each) for check, each in zip(checks, value, strict=True)]
    return Rule("", read[0], rate_per_s=0.0, burst=1.0, kind=read[1]), Level(*read[2:])


# What limits granted: the reservation, whether it borrowed, of each charge the name of its rule and
# the amount, and where each stood then (nothing, where the store could not look).


def granted(reservation: Reservation | None) -> tuple[Any, ...] | None:
    """A reservation as both sides tell it."""
    if reservation is None:
        return None
    charges = [(c.rule.key, c.rule.scope, c.rule.kind, c.amount) for c in reservation.charges]
    levels = [(level.limit, level.remaining, level.reset_s) for level in reservation.levels]
    return reservation.id, reservation.borrowed, charges, levels


def _reservation(values: Any) -> Reservation:
    if type(values) is not list or tuple(map(type, values)) != (str, bool, list, list):
        raise MalformedFrame(f"{values!r:.80} where a reservation is due")
    name, borrowed, charges, levels = values
    read = tuple([Charge(_rule(*each[:3]), _float(each[3])) for each in _rows(charges, 4)])
    stood = tuple([Level(*_level(each)) for each in _rows(levels, 3)])
    return Reservation(name, read, stood, borrowed)


def _rows(values: list[Any], length: int) -> list[Any]:
    for each in values:
        if type(each) is not list or len(each) != length:
            raise MalformedFrame(f"{each!r:.80} where {length} values are due")
    return values


def _rule(key: Any, scope: Any, kind: Any) -> Rule:
    if not type(key) is type(scope) is type(kind) is str:
        raise MalformedFrame(f"{key!r:.80} names no rule")
    return _named(key, scope, kind)


@lru_cache(_RULES_MAX)
def _named(key: str, scope: str, kind: str) -> Rule:
    checks: tuple[Check, ...] = _TOLD
    return Rule(key, checks[0](scope), rate_per_s=0.0, burst=1.0, kind=checks[1](kind))


def _level(values: list[Any]) -> list[Any]:
    checks: tuple[Check, ...] = _TOLD[2:]
    return [check(each) for check, each in zip(checks, values, strict=True)]


_int, _str, _bool = _Plain(int), _Plain(str), _Plain(bool)
_float = _Plain(float, int)
_int_or_none, _str_or_none, _float_or_none = map(_or_none, (_int, _str, _float))
_reason = _member(Reason)
_lane = _member(Lane)
_TOLD: Final = (_member(Scope), _member(Kind), _float, _float, _float_or_none)

SPEC: Final = Record(
    RequestSpec,
    request_id=_str,
    endpoint=_member(Endpoint),
    model=_str_or_none,
    tenant=_str,
    stream=_bool,
    prompt_bytes=_int,
    max_tokens=_int_or_none,
    samples=_int,
    prefix=_tuple_of(int),
    rid=_str_or_none,
    priority=_member(Priority),
    structured=_bool,
    fixed=_bool,
    avoid=_tuple_of(str),
    wait_s_max=_float_or_none,
)
RUN: Final = Record(
    Run,
    packs={"reservation": granted},
    worker_id=_str,
    lane=_lane,
    attempts=_int,
    arrived_at=_float,
    dispatched_at=_float,
    first_token_at=_float_or_none,
    output_tokens=_int,
    reservation=_or_none(_reservation),
)
FAILURE: Final = Record(
    Failure,
    reason=_reason,
    blames_worker=_bool,
    retryable=_bool,
    retry_after_s=_float_or_none,
)
REFUSAL: Final = Record(
    Refusal,
    packs={"levels": _said},
    reason=_reason,
    message=_str,
    retry_after_s=_float_or_none,
    param=_str_or_none,
    levels=_told,
)
USAGE: Final = Record(
    Usage,
    prompt_tokens=_int_or_none,
    cached_tokens=_int_or_none,
    output_tokens=_int_or_none,
)
DECISION: Final = Record(
    Decision,
    act=_member(Act),
    level=_member(degrade.Level),
    max_tokens=_int_or_none,
    model=_str_or_none,
)

_SHAPES: Final[dict[int, tuple[Check, ...]]] = {
    HELLO: (_int, _int, _int, _int),
    KNOWN: (_str, _str_or_none, _str_or_none, _bool, _bool),
    RUNS: (_int, SPEC, RUN),
    ANNOUNCED: (),
    SUBMIT: (_int, SPEC),
    RESUBMIT: (_int, SPEC, _reservation),
    UNUSED: (SPEC, _reservation),
    RESUMED: (),
    FIRST_TOKEN: (_int,),
    TOKENS: (_int, _int),
    FAILED: (_int, FAILURE),
    PREEMPTED: (_int,),
    FINISHED: (_int, _member(Outcome), _or_none(_reason), _or_none(USAGE)),
    EDGE_REFUSED: (_reason, _str, _str),
    PING: (_float, _int, _int),
    WORKER: (_str, _str_or_none, _str_or_none, _bool, _bool),
    WORKER_GONE: (_str,),
    READY: (),
    DISPATCH: (_int, _lane, _str, _or_none(DECISION), _or_none(_reservation)),
    JUDGED: (_int, _bool),
    REFUSE: (_int, REFUSAL),
    PREEMPT: (_int,),
    CUT: (_int, _reason, _str),
    CONFIG: (_str,),
    PONG: (),
    WORKERS: (_tuple_of(str),),
    RESERVED: (_int, _reservation),
}


def frame(messages: Sequence[Message]) -> bytes:
    """Encode messages into one frame."""
    body = orjson.dumps(messages)
    return _LENGTH.pack(len(body)) + body


def messages_in(body: bytes) -> Iterator[tuple[int, list[Any]]]:
    """The messages of a frame, each its kind and its fields. Raises MalformedFrame."""
    try:
        messages = orjson.loads(body)
    except ValueError as exc:
        raise MalformedFrame(f"not JSON: {exc}") from exc
    if type(messages) is not list:
        raise MalformedFrame("not a list of messages")
    for message in messages:
        if type(message) is not list or not message or type(message[0]) is not int:
            raise MalformedFrame(f"{message!r:.80} is no message")
        kind = message[0]
        checks = _SHAPES.get(kind)
        if checks is None or len(message) != len(checks) + 1:
            raise MalformedFrame(f"{message!r:.80} has no known kind, or not its fields")
        del message[0]
        yield kind, [check(value) for check, value in zip(checks, message, strict=True)]


class Unframer:
    """Finds the frames in bytes as they are read."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies of the frames that are whole now. Raises MalformedFrame."""
        held = self._held + data if self._held else data
        at, end = 0, len(held)
        while end - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, at)
            if length > FRAME_BYTES_MAX:
                raise MalformedFrame(f"a frame of {length} bytes")
            start = at + _LENGTH.size
            if end - start < length:
                break
            at = start + length
            yield held[start:at]
        self._held = held[at:]
