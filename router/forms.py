"""Reads a small field of a multipart form, as audio routes take it, without looking into its files.

Parts are found by their boundary, a search that runs at memory speed whatever a file weighs; only
the few lines before each part are read. What is not such a form has no fields: the worker will say
what is wrong with it. Pure; layer 2.
"""

from __future__ import annotations

from email.errors import MessageError
from email.message import Message
from typing import Final

_PARTS_MAX: Final = 64
_PART_HEAD_BYTES_MAX: Final = 8 * 1024
_FIELD_BYTES_MAX: Final = 4 * 1024


def form_field(content_type: bytes, body: bytes, name: str) -> str | None:
    """The text of the first field called `name`; None when there is none, or it is no text.

    Fields behind the first 64 parts, or longer than 4 KiB, are not found.
    """
    boundary = _parameter(content_type, "boundary")
    if not content_type.lower().startswith(b"multipart/form-data") or not boundary:
        return None
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    # The first boundary has a line before it only where there is a preamble.
    end = -2 if body.startswith(mark[2:]) else body.find(mark)
    if end == -1:
        return None
    for _ in range(_PARTS_MAX):
        start = body.find(b"\r\n", end + len(mark))
        end = body.find(mark, start)
        if start < 0 or end < 0:
            return None
        head_end = body.find(b"\r\n\r\n", start, min(end, start + _PART_HEAD_BYTES_MAX))
        if head_end < 0 or end - head_end > _FIELD_BYTES_MAX:
            continue
        if _name_of(body[start:head_end]) == name:
            return _text(body[head_end + 4 : end])
    return None


def _name_of(head: bytes) -> str | None:
    """The field that the head of a part names."""
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            return _parameter(value.strip(), "name")
    return None


def _parameter(value: bytes, name: str) -> str | None:
    """A parameter of a header's value."""
    message = Message()
    try:
        message["content-disposition"] = value.decode("latin-1")
        found = message.get_param(name, header="content-disposition")
    except (MessageError, ValueError):
        return None
    return found if isinstance(found, str) else None


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
