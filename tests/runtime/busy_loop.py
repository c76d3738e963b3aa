"""A loop whose turns take long, as under a flood."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_loop(turn_s: float) -> Iterator[None]:
    """Make every turn of the running loop last at least `turn_s`."""
    loop, over = asyncio.get_running_loop(), False

    def turn() -> None:
        if not over:
            time.sleep(turn_s)
            loop.call_soon(turn)

    turn()
    try:
        yield
    finally:
        over = True
