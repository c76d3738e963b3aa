"""Request ids: unique over processes, cheap, of one length."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

_LAST: Final = [f"{number:03x}" for number in range(0x1000)]


def request_ids() -> Callable[[], str]:
    """Return what gives the next id at each call: 32 hexadecimal digits."""
    return _ids().__next__


def _ids() -> Iterator[str]:
    """A random part for the process, and a number for the request."""
    process = os.urandom(10).hex()
    for number in count():
        head = f"{process}{number:09x}"
        for last in _LAST:
            yield head + last
