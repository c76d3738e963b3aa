"""Two parsers of JSON must read every text alike, or refuse it alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.types import Endpoint
from router.documents import document_of
from router.wire import rewritten

# As long as it takes to be large, and of the kind that the faster parser is chosen for.
FILLER = b'{"content": "%b", "rest": ' % (
    b"a line of some sixty characters, and an escape for its end\\n" * 2_000
)


def outcome(parse: Callable[[bytes], Any], body: bytes) -> Any:
    """What `parse` returns or raises."""
    try:
        return parse(body)
    except ValueError as exc:
        return exc


def read(body: bytes) -> Any:
    """What `document_of` returns or raises, which is what orjson does."""
    document, expected = outcome(document_of, body), outcome(orjson.loads, body)
    assert repr(document) == repr(expected)  # value, type and order, down to the sign of zero
    return document


def is_read_by_jiter(body: bytes, monkeypatch: pytest.MonkeyPatch) -> bool:
    def never(body: bytes) -> None:
        raise AssertionError(body[-100:])

    with monkeypatch.context() as patch:
        patch.setattr("router.documents.loads", never)
        try:
            document_of(body)
        except AssertionError:
            return False
    return True


@pytest.mark.patches
def test_prose_is_read_by_the_faster_parser_and_what_slows_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chat(text: str) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()

    assert is_read_by_jiter(
        chat("a line of some sixty characters, as prose has them\n" * 3_000), monkeypatch
    )
    assert not is_read_by_jiter(chat("short\n" * 30_000), monkeypatch)
    assert not is_read_by_jiter(chat('"quoted" ' * 20_000), monkeypatch)
    assert not is_read_by_jiter(chat("\u00e9t\u00e9 " * 20_000), monkeypatch)
    assert not is_read_by_jiter(json.dumps(list(range(100_000))).encode(), monkeypatch)
    assert not is_read_by_jiter(chat("a short prompt"), monkeypatch)


@pytest.mark.parametrize(
    "number",
    [
        b"0", b"-0", b"-0.0", b"0.1", b"1e5", b"1E400", b"-1e400", b"1e-400", b"NaN", b"Infinity",
        b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808",
        b"-9223372036854775809", b"18446744073709551615", b"18446744073709551616", b"1" * 400,
        b"01", b"1.", b".5", b"-", b"+1",
    ],
)  # fmt: skip
def test_numbers_are_read_alike_wherever_they_stand(number: bytes) -> None:
    for place in (b"%b", b"[%b]", b'{"a": [{"b": %b}]}', b'[[1], {"c": 0.5}, {"d": [true, %b]}]'):
        read(FILLER + place % number + b"}")


@pytest.mark.parametrize("depth", [3, 190, 210, 800, 1_100])
def test_nesting_is_read_alike(depth: int) -> None:
    read(FILLER + b"[" * depth + b"]" * depth + b"}")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(value=VALUES, ascii_only=st.booleans())
def test_values_are_read_alike(value: Any, ascii_only: bool) -> None:
    read(
        FILLER + json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass") + b"}"
    )


PIECES = st.sampled_from(
    [
        b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\x00", b"\x1f", b"\x7f",
        b"\\u", b"\\ud800", b"\\udc00", b"\\ud83d\\ude00", b"\xc3", b"\xa9", b"\xff",
        b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f\x98\x80", b"-", b".", b"e",
        b"+", b"0", b"12", b"true", b"null", b"NaN", b"//", b"'", b"a", b"1" * 30,
    ]
)  # fmt: skip


@given(
    pieces=st.lists(PIECES | st.binary(max_size=3), max_size=8),
    place=st.sampled_from([b'"%b"}', b"%b}", b'{"a": %b}}', b'"a", "content": %b}', b"1}%b"]),
)
def test_broken_text_is_refused_alike(pieces: list[bytes], place: bytes) -> None:
    read(FILLER + place % b"".join(pieces))


@given(at=st.integers(20, len(FILLER) - 30), piece=PIECES)
def test_what_is_wrong_inside_a_long_string_is_found(at: int, piece: bytes) -> None:
    read(FILLER[:at] + piece + FILLER[at:] + b"1}")


@pytest.mark.parametrize("body", [b"\xef\xbb\xbf", b"", b" ", b"\x00"])
def test_what_stands_around_the_document_is_read_alike(body: bytes) -> None:
    read(body + FILLER + b"1}")
    read(FILLER + b"1}" + body)


def test_of_a_name_said_twice_the_last_value_counts() -> None:
    assert read(FILLER + b'1, "rest": 2, "content": 3}') == {"content": 3, "rest": 2}


def test_a_number_beyond_all_that_is_replaced_harms_nobody() -> None:
    body = FILLER + b"1" * 400 + b', "rest": 2, "max_tokens": 9}'
    assert document_of(body)["rest"] == 2
    cut = orjson.loads(rewritten(body, Endpoint.CHAT, max_tokens=5, model=None))
    assert cut == document_of(body) | {"max_tokens": 5}
