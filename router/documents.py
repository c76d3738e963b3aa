"""Reads JSON: large texts by whichever of two parsers is faster for them. Pure; layer 2.

orjson goes through strings byte by byte, jiter (of pydantic) by vectors until an escape or a byte
beyond ASCII comes, each of which costs it more. So a few samples of a large body choose. They
differ in numbers that no machine word holds: what has any is read by orjson, as all else is. Only
one that is beyond all floats and replaced by a later value of the same name is not refused.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, Final

from orjson import loads
from pydantic_core import from_json

# Below, a choice costs what it saves.
_LARGE_BYTES: Final = 64 * 1024
_SAMPLE_BYTES: Final = 1024
# In one sample: jiter loses above about one escape in 40 bytes, and by lists of numbers.
_ESCAPES_MAX: Final = 20
_COMMAS_MAX: Final = 64
_INTEGERS: Final = range(-(2**63), 2**64)  # that orjson reads as such


def document_of(body: bytes) -> Any:
    """Return what `orjson.loads(body)` does. Raises its ValueError."""
    if len(body) >= _LARGE_BYTES and _is_plain(body):
        try:
            document = from_json(body, allow_inf_nan=False, cache_strings="none")
        except ValueError:
            return loads(body)  # to say why, or to read what is nested more deeply
        if _has_plain_numbers(document):
            return document
    return loads(body)


def _is_plain(body: bytes) -> bool:
    """Whether `body` looks like long strings of ASCII with few escapes."""
    for quarter in (1, 2, 3):
        start = quarter * (len(body) // 4)
        sample = body[start : start + _SAMPLE_BYTES]
        if (
            not sample.isascii()
            or _count(sample, b"\\") > _ESCAPES_MAX
            or _count(sample, b",") > _COMMAS_MAX
        ):
            return False
    return True


def _count(sample: bytes, byte: bytes) -> int:
    """What `sample.count(byte)` does, which looks at each byte where `replace` looks by vectors."""
    return len(sample) - len(sample.replace(byte, b""))


def _has_plain_numbers(document: Any) -> bool:
    """Whether both parsers read all its numbers alike. Goes level by level, without calls."""
    level: list[Any] = [document]
    while level:
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is str:
                continue
            if kind is dict:
                inner += value.values()
            elif kind is list:
                inner += value
            elif kind is int:
                if value not in _INTEGERS:
                    return False
            elif kind is float and not isfinite(value):
                return False
        level = inner
    return True
