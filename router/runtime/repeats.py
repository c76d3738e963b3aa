"""Heads that a client sends again and again.

A client on a kept-alive connection writes the same head for each request, but for the length of
its body. The parts around that number are remembered once httptools has judged them; a head of the
very same bytes needs no second judgement. Anything else goes to httptools as ever, and a client
whose heads keep differing is soon no longer compared.
"""

from __future__ import annotations

import re
from typing import Final

from router.runtime.front import Standing
from router.runtime.heads import RequestHead

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)
_DIGITS_MAX: Final = 9
# Longer heads are not worth the memory on each connection.
_HEAD_BYTES_MAX: Final = 4096


class KnownHead:
    """A judged head, cut where its Content-Length stands.

    What it says of who sends it holds until the rules change; then its owner forgets it.
    """

    __slots__ = ("_after", "_before", "_reach", "_start", "head", "standing", "tenant")

    def __init__(
        self,
        raw: bytes,
        length: re.Match[bytes],
        *,
        head: RequestHead,
        tenant: str,
        standing: Standing,
    ) -> None:
        self._start = length.start(1)  # of the number, and how far what follows it may reach
        self._reach = self._start + _DIGITS_MAX + len(raw) - length.end(1)
        self._before = raw[: self._start]
        self._after = raw[length.end(1) :]  # begins with what is no digit
        self.head = head
        self.tenant = tenant
        self.standing = standing

    def matched(self, data: bytes) -> tuple[int, int] | None:
        """Return where the body begins in `data` and how long it is, if the head is this one."""
        if not data.startswith(self._before):
            return None
        start, after = self._start, self._after
        end = data.find(after, start, self._reach)
        digits = data[start:end]
        if end < 0 or not digits.isdigit():
            return None
        return end + len(after), int(digits)


def length_of(data: bytes, *, whole: bool) -> tuple[bytes, re.Match[bytes]] | None:
    """Return the head at the beginning of `data` and the place of its length.

    None when `data` is not exactly one request, or the beginning of one if it is not `whole`, whose
    head has a length; or when that head is not worth remembering.
    """
    end = data.find(b"\r\n\r\n") + 4
    if not 4 <= end <= _HEAD_BYTES_MAX:
        return None
    raw = data[:end]
    match = _LENGTH.search(raw)
    if match is None:
        return None
    missing = int(match[1]) - (len(data) - end)
    return (raw, match) if (missing == 0 if whole else missing > 0) else None
