"""Deadlines that a late loop does not cut short.

A loop's timers run before it looks at its sockets. So after a turn that took too long, whatever
came in time would be given up unread. Patience passes in steps, at most one in each turn: until it
is over the loop has looked at its sockets so many times, however long its turns took.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

_STEPS: Final = 8


class Patience:
    """A context that TimeoutError ends after `within_s` of a loop that is in time."""

    __slots__ = ("_deadline", "_left", "_loop", "_step_s", "_timer")

    def __init__(self, within_s: float) -> None:
        self._deadline = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._step_s = within_s / _STEPS
        self._left = _STEPS
        self._timer: asyncio.TimerHandle

    async def __aenter__(self) -> None:
        await self._deadline.__aenter__()
        self._timer = self._loop.call_later(self._step_s, self._passed)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        await self._deadline.__aexit__(exc_type, exc, traceback)

    def _passed(self) -> None:
        self._left -= 1
        if self._left:
            self._timer = self._loop.call_later(self._step_s, self._passed)
        else:
            self._deadline.reschedule(self._loop.time())
