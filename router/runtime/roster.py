"""Which workers a router with relays has, written down so that it outlives the brain.

Relays tell a new brain which workers they know, and one that hung while a worker left knows it
still. So what is taken back from relays is only what the brain before had when it ended: it writes
that down at the end of each turn of the loop in which something changed, into the folder of the
sockets, which is there as long as the supervisor. Where that can't be written there is no such
file, rather than one that is wrong: then the relays are believed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Final

import orjson

from router.contract import WorkerId, WorkerSpec

_log = logging.getLogger(__name__)

_NEW: Final = ".new"


class Roster:
    """URL of each worker, and whether it drains. Begins with what is written at `path`, if any.

    A worker of the brain before stays in it until it leaves, or all relays have said what they
    know.
    """

    def __init__(self, path: Path, *, loop: asyncio.AbstractEventLoop) -> None:
        self._path = path
        self._loop = loop
        self._writes_soon = False
        self._fails = False  # and the log says so
        before = _read(path)
        self._is_blind = before is None
        self._workers = before or {}
        self._drained = {name for name, (_, drains) in self._workers.items() if drains}

    def has(self, spec: WorkerSpec) -> bool:
        """Whether that worker, at that address, has not left, for all that is known."""
        known = self._workers.get(spec.worker_id)
        return self._is_blind if known is None else known[0] == spec.url

    def drained(self, worker_id: WorkerId) -> bool:
        """Whether the brain before had the worker drain."""
        return worker_id in self._drained

    def put(self, worker_id: WorkerId, url: str, *, drains: bool) -> None:
        """The worker is here."""
        if self._workers.get(worker_id) != (url, drains):
            self._workers[worker_id] = url, drains
            self._write_soon()

    def drop(self, worker_id: WorkerId) -> None:
        """The worker has left."""
        self._drained.discard(worker_id)
        if self._workers.pop(worker_id, None) is not None:
            self._write_soon()

    def keep(self, worker_ids: Set[WorkerId]) -> None:
        """There are no others."""
        for worker_id in self._workers.keys() - worker_ids:
            self.drop(WorkerId(worker_id))

    def _write_soon(self) -> None:
        """At the end of the loop's turn, in which thousands may come or leave."""
        if not self._writes_soon:
            self._writes_soon = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        """Replace the file as a whole: whoever is killed meanwhile leaves the old one."""
        self._writes_soon = False
        new = self._path.with_name(self._path.name + _NEW)
        try:
            new.write_bytes(orjson.dumps(self._workers))
            os.replace(new, self._path)
            self._fails = False
        except OSError as exc:
            if not self._fails:
                _log.warning("which workers there are can't be written down: %s", exc)
            self._fails = True
            with suppress(OSError):
                self._path.unlink()


def _read(path: Path) -> dict[str, tuple[str, bool]] | None:
    """What the brain before wrote; None: nothing that can be read."""
    try:
        written = orjson.loads(path.read_bytes())
        return {name: (str(url), bool(drains)) for name, (url, drains) in written.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        _log.warning("%s can't be read, relays are believed: %s", path, exc)
        return None
