"""Request ids: unique over processes, cheap, of one length."""

from __future__ import annotations

import os
from itertools import count


class RequestIds:
    """Makes ids from a random part for the process and a number for the request."""

    __slots__ = ("_numbers", "_process")

    def __init__(self) -> None:
        self._process = os.urandom(10).hex()
        self._numbers = count(1)

    def __call__(self) -> str:
        """Return the next id: 32 hexadecimal digits."""
        return f"{self._process}{next(self._numbers):012x}"
