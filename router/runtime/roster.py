"""Which workers a router with relays has, written down so that it outlives the brain.

Relays tell a new brain which workers they know, and one that hung while a worker left knows it
still. So what is taken back from relays is only what the brain before had when it ended: it writes
that down with each change, and at once when a worker leaves, into the folder of the sockets, which
is there as long as the supervisor.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Set
from pathlib import Path
from typing import Final

import orjson

from router.contract import WorkerId, WorkerSpec

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
        self._workers: dict[str, tuple[str, bool]] = {}
        if path.exists():
            written = orjson.loads(path.read_bytes())
            self._workers = {name: (url, drains) for name, (url, drains) in written.items()}
        self._drained = {name for name, (_, drains) in self._workers.items() if drains}
        self._write()

    def has(self, spec: WorkerSpec) -> bool:
        """Whether that worker, at that address, has not left."""
        known = self._workers.get(spec.worker_id)
        return known is not None and known[0] == spec.url

    def drained(self, worker_id: WorkerId) -> bool:
        """Whether the brain before had the worker drain."""
        return worker_id in self._drained

    def put(self, worker_id: WorkerId, url: str, *, drains: bool) -> None:
        """The worker is here."""
        self._workers[worker_id] = url, drains
        if drains:
            self._write()
        elif not self._writes_soon:
            self._writes_soon = True
            self._loop.call_soon(self._write)

    def drop(self, worker_id: WorkerId) -> None:
        """The worker has left."""
        self._drained.discard(worker_id)
        if self._workers.pop(worker_id, None) is not None:
            self._write()

    def keep(self, worker_ids: Set[WorkerId]) -> None:
        """There are no others."""
        for worker_id in self._workers.keys() - worker_ids:
            self.drop(WorkerId(worker_id))

    def _write(self) -> None:
        """Replace the file as a whole: whoever is killed meanwhile leaves the old one."""
        self._writes_soon = False
        new = self._path.with_name(self._path.name + _NEW)
        new.write_bytes(orjson.dumps(self._workers))
        os.replace(new, self._path)
