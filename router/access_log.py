"""The access log: one JSON line per finished request, written in batches off the event loop.

The lines of finished requests are made some at a time and kept in a bounded buffer. A timer hands
the buffer to a thread, one batch at a time, so a reader of our standard output that stalls can
stall neither the router nor its end: the buffer fills, further lines are dropped, and `dropped`
counts them. Every character that a terminal or a log shipper could take for a command is escaped.
Layer 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

import orjson

from router.core.types import RequestRecord
from router.errors import Reason
from router.records import Records

_log = logging.getLogger(__name__)

Write = Callable[[bytes], None]
Clock = Callable[[], float]

FLUSH_INTERVAL_S: Final = 0.25
LINES_MAX: Final = 50_000
_TARGET_BYTES_MAX: Final = 256
# Kept pieces of lines; they repeat from request to request.
_PIECES_MAX: Final = 2_000
_MILLISECONDS: Final = [f".{number:03d}Z" for number in range(1000)]
# JSON itself escapes C0 controls. DEL, C1 controls, line separators and bidi marks it leaves.
_UNSAFE: Final = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def write_fd(fd: int) -> Write:
    """Return a function that writes all of its bytes to file descriptor `fd`, blocking."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    return write


def safe_json(value: Any) -> str:
    """Return `value` as JSON with nothing in it that could be a control character."""
    encoded = orjson.dumps(value)
    if encoded.isascii() and b"\x7f" not in encoded:
        return encoded.decode()
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", encoded.decode())


class AccessLog:
    """Buffers and writes lines. Use from one event loop; `start` it, and `close` it at the end."""

    def __init__(
        self,
        write: Write,
        records: Records,
        *,
        wall_clock: Clock,
        clock: Clock,
        lines_max: int = LINES_MAX,
    ) -> None:
        self._writer = _Writer(write)
        self.records = records
        self._wall_clock = wall_clock
        self._clock = clock  # of the records' times
        self._lines_max = lines_max
        self._lines: list[str] = []
        self._pieces: dict[tuple[Any, ...], str] = {}
        self._flusher: asyncio.Task[None] | None = None
        self._second, self._second_text = -1, ""  # most lines are of the same as the one before
        self.dropped = 0
        records.observers.append(self._add)

    def refused_at_edge(self, reason: Reason, request_id: str, target: bytes) -> None:
        """Add the line of a request that was refused before the core knew of it."""
        self.records.hand_on()
        if len(self._lines) >= self._lines_max:
            self.dropped += 1
            return
        entry = {
            "time": self._time(self._wall_clock()),
            "id": request_id,
            "target": target[:_TARGET_BYTES_MAX].decode("latin-1"),
            "outcome": "refused",
            "reason": reason,
        }
        self._lines.append(safe_json(entry) + "\n")

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
        self.records.hand_on()
        if not self._lines:
            return
        batch, self._lines = self._lines, []
        try:
            await asyncio.wrap_future(self._writer.submit("".join(batch).encode()))
        except OSError as exc:
            self.dropped += len(batch)
            _log.warning("access log: %s", exc)

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.flush()

    def _add(self, records: list[RequestRecord]) -> None:
        """Make the lines of finished requests, as far as there is room for them."""
        room = self._lines_max - len(self._lines)
        if len(records) > room:
            self.dropped += len(records) - room
            records = records[:room]
        add, pieces = self._lines.append, self._pieces
        ahead_s, second = self._wall_clock() - self._clock(), self._second
        for record in records:
            key = (
                record.tenant,
                record.model,
                record.endpoint,
                record.lane,
                record.priority,
                record.stream,
                record.worker_id,
                record.outcome,
                record.reason,
                record.attempts,
                record.spilled,
                record.degraded,
                record.usage_known,
            )
            piece = pieces.get(key) or self._new_piece(key, record)
            name = record.request_id
            if not name.isalnum():
                name = safe_json(name)[1:-1]
            arrived_at, finished_at = record.arrived_at, record.finished_at
            dispatched_at, first_at = record.dispatched_at, record.first_token_at
            queue_s = "null" if dispatched_at is None else f"{dispatched_at - arrived_at:.4f}"
            ttft_s = "null" if first_at is None else f"{first_at - arrived_at:.4f}"
            cached = record.cached_tokens
            at = finished_at + ahead_s
            part_s = at - second
            if not 0.0 <= part_s < 1.0:
                second = self._new_second(at)
                part_s = at - second
            add(
                f'{{"time":"{self._second_text}{_MILLISECONDS[int(part_s * 1000)]}"'
                f',"id":"{name}",{piece},"queue_s":{queue_s},"ttft_s":{ttft_s}'
                f',"total_s":{finished_at - arrived_at:.4f}'
                f',"prompt_tokens":{record.prompt_tokens}'
                f',"cached_tokens":{"null" if cached is None else cached}'
                f',"output_tokens":{record.output_tokens}}}\n'
            )

    def _time(self, at: float) -> str:
        second = self._second if 0.0 <= at - self._second < 1.0 else self._new_second(at)
        return self._second_text + _MILLISECONDS[int((at - second) * 1000)]

    def _new_second(self, at: float) -> int:
        self._second = second = int(at)
        self._second_text = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return second

    def _new_piece(self, key: tuple[Any, ...], record: RequestRecord) -> str:
        if len(self._pieces) >= _PIECES_MAX:
            self._pieces.clear()
        piece = self._pieces[key] = _made_piece(record)
        return piece


class _Writer:
    """A thread that writes batches in their order. The process does not wait for it to end."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._batches: SimpleQueue[tuple[bytes, Future[None]]] = SimpleQueue()
        self._runner: Thread | None = None

    def submit(self, batch: bytes) -> Future[None]:
        """Write `batch`; the future ends when it is written."""
        if self._runner is None:
            self._runner = Thread(target=self._run, name="access-log", daemon=True)
            self._runner.start()
        written: Future[None] = Future()
        self._batches.put((batch, written))
        return written

    def _run(self) -> None:
        while True:
            batch, written = self._batches.get()
            if not written.set_running_or_notify_cancel():
                continue
            try:
                self._write(batch)
            except OSError as exc:
                written.set_exception(exc)
            else:
                written.set_result(None)


def _made_piece(record: RequestRecord) -> str:
    """The part of a line that is the same for many requests."""
    entry = {
        "tenant": record.tenant,
        "model": record.model,
        "endpoint": record.endpoint,
        "lane": record.lane,
        "priority": record.priority.name,
        "stream": record.stream,
        "worker": record.worker_id,
        "outcome": record.outcome,
        "reason": record.reason,
        "spilled": record.spilled,
        "degraded": record.degraded,
        "usage_known": record.usage_known,
        "attempts": record.attempts,
    }
    return safe_json(entry)[1:-1]
