"""The access log: one JSON line per finished request, written in batches off the event loop.

Lines are encoded when a request ends and kept in a bounded buffer. A timer hands the buffer to a
writer thread, one batch at a time, so a reader of our standard output that stalls can never stall
the router: the buffer fills, further lines are dropped, and `dropped` counts them. Every character
that a terminal or a log shipper could take for a command is escaped. Layer 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from router.core.types import RequestRecord
from router.errors import Reason

_log = logging.getLogger(__name__)

Write = Callable[[bytes], None]
WallClock = Callable[[], float]

FLUSH_INTERVAL_S: Final = 0.25
LINES_MAX: Final = 50_000
# JSON itself escapes C0 controls. DEL, C1 controls, line separators and bidi marks it leaves.
_UNSAFE: Final = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def write_fd(fd: int) -> Write:
    """Return a function that writes all of its bytes to file descriptor `fd`, blocking."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    return write


def encoded_line(entry: dict[str, Any]) -> bytes:
    """Return `entry` as one line of JSON with nothing in it that could be a control character."""
    line = orjson.dumps(entry)
    if line.isascii() and b"\x7f" not in line:
        return line + b"\n"
    text = _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", line.decode())
    return text.encode() + b"\n"


class AccessLog:
    """Buffers and writes lines. Use from one event loop; `start` it, and `close` it at the end."""

    def __init__(self, write: Write, *, wall_clock: WallClock, lines_max: int = LINES_MAX) -> None:
        self._write = write
        self._wall_clock = wall_clock
        self._lines_max = lines_max
        self._lines: list[bytes] = []
        self._flusher: asyncio.Task[None] | None = None
        self._second = 0
        self._second_text = ""
        self.dropped = 0

    def record(self, record: RequestRecord) -> None:
        """Add the line of a finished request."""
        if len(self._lines) >= self._lines_max:
            self.dropped += 1
            return
        self._lines.append(encoded_line(_entry(record, self._time())))

    def refused_at_edge(
        self, reason: Reason, *, request_id: str, method: str, path: str, status: int
    ) -> None:
        """Add the line of a request that was refused before it reached the dispatcher."""
        if len(self._lines) >= self._lines_max:
            self.dropped += 1
            return
        entry = {
            "time": self._time(),
            "id": request_id,
            "outcome": "refused",
            "reason": reason.value,
            "method": method[:16],
            "path": path[:256],
            "status": status,
        }
        self._lines.append(encoded_line(entry))

    def start(self) -> None:
        """Begin to flush by timer, in the running loop."""
        self._flusher = asyncio.get_running_loop().create_task(self._flush_forever())

    async def close(self, *, timeout_s: float = 2.0) -> None:
        """Write what is buffered and stop. Gives up, with a warning, after `timeout_s`."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        try:
            await asyncio.wait_for(self.flush(), timeout_s)
        except TimeoutError:
            _log.warning("access log: its reader stalls; the last lines are lost")
        if self.dropped:
            _log.warning("access log: %d lines were dropped", self.dropped)

    async def flush(self) -> None:
        """Write every buffered line; returns when they are written."""
        if not self._lines:
            return
        batch, self._lines = self._lines, []
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._write, b"".join(batch))
        except OSError as exc:
            self.dropped += len(batch)
            _log.warning("access log: %s", exc)

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.flush()

    def _time(self) -> str:
        now = self._wall_clock()
        second = int(now)
        if second != self._second:
            self._second = second
            self._second_text = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._second_text}.{int((now - second) * 1000):03d}Z"


def _entry(record: RequestRecord, time: str) -> dict[str, Any]:
    arrived_at = record.arrived_at
    dispatched_at, first_token_at = record.dispatched_at, record.first_token_at
    return {
        "time": time,
        "id": record.request_id,
        "tenant": record.tenant,
        "model": record.model,
        "endpoint": record.endpoint.value,
        "lane": record.lane.value,
        "priority": record.priority.name,
        "stream": record.stream,
        "worker": record.worker_id,
        "outcome": record.outcome.value,
        "reason": None if record.reason is None else record.reason.value,
        "attempts": record.attempts,
        "spilled": record.spilled,
        "queue_s": None if dispatched_at is None else round(dispatched_at - arrived_at, 4),
        "ttft_s": None if first_token_at is None else round(first_token_at - arrived_at, 4),
        "total_s": round(record.finished_at - arrived_at, 4),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "usage_known": record.usage_known,
    }
