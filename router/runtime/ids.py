"""Request ids: unique over processes, cheap, of one length."""

from __future__ import annotations

import os
from itertools import count
from typing import Final

_LAST: Final = [f"{number:03x}" for number in range(0x1000)]


class RequestIds:
    """Makes ids from a random part for the process and a number for the request."""

    __slots__ = ("_head", "_numbers", "_process")

    def __init__(self) -> None:
        self._process = os.urandom(10).hex()
        self._numbers = count()
        self._head = ""  # all but the last three digits

    def __call__(self) -> str:
        """Return the next id: 32 hexadecimal digits."""
        number = next(self._numbers)
        last = number & 0xFFF
        if not last:
            self._head = f"{self._process}{number >> 12:09x}"
        return self._head + _LAST[last]
