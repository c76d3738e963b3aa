"""Frames between relays and brain: whatever goes in comes out, and nothing else is taken."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.contract import Lane, WorkerId
from router.core import degrade
from router.core.adoption import Run
from router.core.bucket import Charge, Kind, Level, Rule, Scope
from router.core.degrade import Act, Decision
from router.core.limits import Reservation
from router.core.types import Endpoint, Failure, Outcome, Priority, Refusal, RequestSpec, Usage
from router.errors import Reason
from router.runtime import frames, packing
from router.runtime.frames import FRAME_BYTES_MAX, Unframer, frame, messages_in
from router.runtime.malformed import MalformedFrame

COUNTS = st.integers(0, 2**53)
TEXT = st.text(max_size=40)  # of any characters that UTF-8 can carry
SECONDS = st.floats(0, 1e9)
LEVELS = st.builds(Level, limit=SECONDS, remaining=SECONDS, reset_s=st.none() | SECONDS)
RULES = st.builds(  # as far as an answer says anything of them
    Rule,
    key=st.just(""),
    scope=st.sampled_from(Scope),
    rate_per_s=st.just(0.0),
    burst=st.just(1.0),
    kind=st.sampled_from(Kind),
)
NAMED = st.builds(  # as far as the next brain has to know a rule
    Rule,
    key=TEXT,
    scope=st.sampled_from(Scope),
    rate_per_s=st.just(0.0),
    burst=st.just(1.0),
    kind=st.sampled_from(Kind),
)
RESERVATIONS = st.builds(
    Reservation,
    id=TEXT,
    charges=st.lists(st.builds(Charge, NAMED, SECONDS), max_size=3).map(tuple),
    levels=st.lists(LEVELS, max_size=3).map(tuple),
    borrowed=st.booleans(),
)
HASHES = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(tuple)


def values_of(cls: type[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """How to draw each field of a class that crosses; a field that is added has to be here."""
    by_name: dict[str, st.SearchStrategy[Any]] = {
        "endpoint": st.sampled_from(Endpoint),
        "model": st.none() | TEXT,
        "prefix": HASHES,
        "rid": st.none() | TEXT,
        "priority": st.sampled_from(Priority),
        "max_tokens": st.none() | COUNTS,
        "worker_id": TEXT.map(WorkerId),
        "lane": st.sampled_from(Lane),
        "first_token_at": st.none() | SECONDS,
        "reason": st.sampled_from(Reason),
        "retry_after_s": st.none() | SECONDS,
        "wait_s_max": st.none() | SECONDS,
        "param": st.none() | TEXT,
        "act": st.sampled_from(Act),
        "level": st.sampled_from(degrade.Level),
        "prompt_tokens": st.none() | COUNTS,
        "cached_tokens": st.none() | COUNTS,
        "avoid": st.lists(TEXT.map(WorkerId), max_size=3).map(tuple),
        "reservation": st.none() | RESERVATIONS,
        "levels": st.lists(st.tuples(RULES, LEVELS), max_size=3).map(tuple),
    }
    if cls is Usage:
        by_name["output_tokens"] = st.none() | COUNTS
    by_type = {"str": TEXT, "int": COUNTS, "bool": st.booleans(), "float": SECONDS}
    return {
        field.name: by_name[field.name] if field.name in by_name else by_type[type_name(field)]
        for field in dataclasses.fields(cls)
    }


def type_name(field: dataclasses.Field[Any]) -> str:
    # A compiled class knows a plain type itself, an interpreted one its name.
    return field.type if isinstance(field.type, str) else field.type.__name__


RECORDS = [
    (packing.SPEC, RequestSpec),
    (packing.RUN, Run),
    (packing.FAILURE, Failure),
    (packing.REFUSAL, Refusal),
    (packing.USAGE, Usage),
    (packing.DECISION, Decision),
]


def bodies(data: bytes) -> list[bytes]:
    return list(Unframer().feed(data))


@pytest.mark.parametrize(("record", "cls"), RECORDS, ids=lambda each: getattr(each, "__name__", ""))
@settings(max_examples=40)
@given(data=st.data())
def test_every_field_of_what_crosses_arrives(
    record: Any, cls: type[Any], data: st.DataObject
) -> None:
    value = data.draw(st.builds(cls, **values_of(cls)))
    (body,) = bodies(frame([(0, record.fields_of(value))]))
    arrived = record.read(json.loads(body)[0][1])
    assert arrived == value
    for field in dataclasses.fields(cls):
        assert type(getattr(arrived, field.name)) is type(getattr(value, field.name)), field.name


SPECS = st.builds(RequestSpec, **values_of(RequestSpec))
MESSAGES = st.one_of(
    st.tuples(st.just(frames.SUBMIT), COUNTS, SPECS),
    st.tuples(st.just(frames.TOKENS), COUNTS, COUNTS),
    st.tuples(
        st.just(frames.FINISHED),
        COUNTS,
        st.sampled_from(Outcome),
        st.none() | st.sampled_from(Reason),
        st.none() | st.builds(Usage, **values_of(Usage)),
    ),
    st.tuples(st.just(frames.JUDGED), COUNTS, st.booleans()),
    st.tuples(st.just(frames.CUT), COUNTS, st.sampled_from(Reason), TEXT),
    st.just((frames.READY,)),
    st.just((frames.RESUMED,)),
)


def wired(message: tuple[Any, ...]) -> tuple[Any, ...]:
    """A message as it is sent."""
    records: dict[type, Any] = {RequestSpec: packing.SPEC, Usage: packing.USAGE}
    return tuple(
        records[type(value)].fields_of(value) if type(value) in records else value
        for value in message
    )


@given(
    batches=st.lists(st.lists(MESSAGES, min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(1, 200), min_size=1, max_size=10),
)
def test_messages_arrive_in_order_however_the_bytes_are_cut(
    batches: list[list[tuple[Any, ...]]], cuts: list[int]
) -> None:
    data = b"".join(frame([wired(message) for message in batch]) for batch in batches)
    arrived: list[tuple[Any, ...]] = []
    unframer, at, turn = Unframer(), 0, 0
    while at < len(data):
        piece = data[at : at + cuts[turn % len(cuts)]]
        at, turn = at + len(piece), turn + 1
        for body in unframer.feed(piece):
            arrived += map(tuple, messages_in(body))
    assert arrived == [message for batch in batches for message in batch]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=20,
)


@given(
    body=st.binary(max_size=60)
    | JSON.map(json.dumps).map(str.encode)
    | st.lists(
        st.tuples(st.integers(0, 30), JSON, JSON).map(list) | st.lists(JSON, max_size=3), max_size=3
    ).map(lambda made: json.dumps(made).encode())
)
def test_what_is_no_frame_is_a_malformed_one_and_nothing_worse(body: bytes) -> None:
    try:
        for message in messages_in(body):
            assert type(message[0]) is int
    except MalformedFrame:
        pass


@pytest.mark.parametrize(
    "message",
    [
        [frames.TOKENS, 1],
        [frames.TOKENS, 1, 2, 3],
        [frames.TOKENS, "1", 2],
        [frames.TOKENS, True, 2],
        [frames.JUDGED, 1, 1],
        [99, 1],
        [frames.FINISHED, 1, "fine", None, None],
        [frames.FINISHED, 1, "success", None, [1, 2]],
        [frames.SUBMIT, 1, {}],
        [frames.SUBMIT, 1, [*packing.SPEC.fields_of(RequestSpec("r", Endpoint.CHAT))][:-1]],
        [],
        "text",
    ],
)
def test_a_message_of_another_shape_is_malformed(message: Any) -> None:
    with pytest.raises(MalformedFrame):
        messages_in(json.dumps([message]).encode())


def test_hashes_of_another_type_are_malformed() -> None:
    fields = [*packing.SPEC.fields_of(RequestSpec("r", Endpoint.CHAT, prefix=(1, 2)))]
    fields[fields.index((1, 2))] = [1, "2"]
    with pytest.raises(MalformedFrame):
        messages_in(json.dumps([[frames.SUBMIT, 1, fields]]).encode())


def test_a_frame_above_the_limit_is_malformed_before_it_is_read() -> None:
    with pytest.raises(MalformedFrame, match="bytes"):
        bodies((FRAME_BYTES_MAX + 1).to_bytes(4, "little"))
