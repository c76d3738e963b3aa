"""The workers of this router, held to those that the registry names.

Some came through the admin API of this router, some through another's, some from the configuration
file; some leave by themselves. `core.membership` says what to do about each, the driver does it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from router.contract import WorkerId, WorkerSpec
from router.core.effects import WorkerChanged
from router.core.membership import (
    Change,
    Drain,
    Entry,
    Join,
    Leave,
    Present,
    Removal,
    Restore,
    Step,
    steps,
)
from router.errors import Reason, Refused
from router.runtime.driver import Driver
from router.runtime.registry_store import Heard
from router.runtime.removals import Removals

_log = logging.getLogger(__name__)

_LONG_AGO_MS: Final = 1  # 0 is not known


def about_removed(url: str) -> str:
    """What an agent is told whose worker was removed."""
    return (
        f"{url} was removed by an operator; registering it without ttl_s, as "
        "`laneway workers add` does, brings it back"
    )


class Members:
    """Joins, changes and removes workers here. `time_ms` is the registry's clock, 0 if unknown."""

    def __init__(
        self, driver: Driver, *, time_ms: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._driver = driver
        self._time_ms = time_ms
        self._clock = clock
        self._entries: dict[WorkerId, Entry] = {}
        self._removed: dict[str, Removal] = {}  # by URL
        self._removals = Removals()
        # The registration of each worker here (None: it is the file's), and when it came.
        self._came: dict[WorkerId, tuple[str | None, int]] = {}
        self._rest: dict[str, float] = {}  # by stamp: showed no life here, and is left until then
        self._moved = True  # something has changed since `steps` was last asked
        self._failing: set[WorkerId] = set()  # whose last step was not possible
        # What the registry has lost and has to be given back.
        self.lost: dict[WorkerId, Entry] = {}
        driver.on_worker_changed.append(self._worker_changed)

    def __len__(self) -> int:
        return len(self._came)

    @property
    def entries(self) -> list[Entry]:
        """What the registry holds, as far as this router knows."""
        return list(self._entries.values())

    @property
    def removed(self) -> list[Removal]:
        """What was removed, of which the same is true."""
        return list(self._removed.values())

    def stamp(self, worker_id: WorkerId) -> str | None:
        """The registration of a worker that is here; None: it is in no registry."""
        return self._came.get(worker_id, (None, 0))[0]

    # What this router was asked to do.

    def check_not_removed(self, spec: WorkerSpec) -> None:
        """Raise Refused for an agent whose worker an operator removed, as far as is known here."""
        if spec.ttl_s is not None and self._removals.holds(spec.url, now=self._clock()):
            raise Refused(Reason.REMOVED, about_removed(spec.url))

    def join(self, entry: Entry) -> None:
        """Take a worker in, unless an exchange was faster."""
        spec = entry.spec
        self._removals.forget(spec.url)
        if spec.worker_id not in self._came:
            self._driver.on_worker_joined(spec)
            self._came[spec.worker_id] = entry.stamp, self._time_ms()
            self._entries[spec.worker_id] = entry

    def change(self, entry: Entry) -> None:
        """Replace a worker's spec, if it is still here."""
        spec = entry.spec
        if spec.worker_id in self._came:
            self._driver.on_worker_updated(spec)
            self._came[spec.worker_id] = entry.stamp, self._came[spec.worker_id][1]
            self._entries[spec.worker_id] = entry

    def remove(self, spec: WorkerSpec, *, drain_s: float, barred: bool) -> None:
        """Take a worker out."""
        if barred:
            self._removals.add(spec.url, now=self._clock(), drain_s=drain_s)
        self._entries.pop(spec.worker_id, None)
        if drain_s:
            self._driver.on_drain(spec.worker_id, deadline_s=drain_s)
        else:
            self._driver.on_worker_left(spec.worker_id)

    # What the registry says.

    def take(self, heard: Heard) -> None:
        """Bring the workers here to what was heard."""
        if heard.entries is not None and heard.removals is not None:
            self._learn(heard.entries, heard.removals, heard.now_ms)
        if self._moved or self._rest:
            self._take_steps(heard.now_ms)

    def _learn(
        self, entries: dict[WorkerId, Entry], removed: dict[str, Removal], now_ms: int
    ) -> None:
        self._entries, self._removed, self._moved = entries, removed, True
        # Workers of the file came before the registry's clock was known.
        self._came = {id_: (stamp, ms or now_ms) for id_, (stamp, ms) in self._came.items()}
        for entry in entries.values():
            self._removals.forget(entry.spec.url)
        for removal in removed.values():
            if removal.barred and removal.until_ms > now_ms:
                until = self._clock() + (removal.until_ms - now_ms) / 1000
                self._removals.hold(removal.url, until=until)

    def _take_steps(self, now_ms: int) -> None:
        now = self._clock()
        self._rest = {stamp: until for stamp, until in self._rest.items() if until > now}
        entries = {id_: e for id_, e in self._entries.items() if e.stamp not in self._rest}
        present = self._present()
        alive = self._driver.dispatcher.peering.leased
        found = steps(entries, self._removed.values(), present, now_ms=now_ms, alive=alive.keys())
        self._moved = False  # the steps themselves may move it: something may wait for them
        self.lost = {}
        failing: set[WorkerId] = set()
        for step in found:
            worker_id = (
                step.worker_id if isinstance(step, Drain | Leave) else step.entry.spec.worker_id
            )
            try:
                self._step(step)
            except Exception:
                # The others are taken all the same, this one again the next time.
                if worker_id not in self._failing:
                    _log.exception("a worker can't become what the registry says: %s", worker_id)
                failing.add(worker_id)
        self._failing = failing
        self._moved = self._moved or bool(failing)

    def _step(self, step: Step) -> None:
        match step:
            case Join(entry):
                self.join(entry)
            case Change(entry):
                self.change(entry)
            case Drain(worker_id, deadline_s):
                self._driver.on_drain(worker_id, deadline_s=deadline_s)
            case Leave(worker_id):
                self._driver.on_worker_left(worker_id)
            case Restore(entry):
                self.lost[entry.spec.worker_id] = entry

    def _present(self) -> dict[WorkerId, Present]:
        members = self._driver.dispatcher.peering.members
        return {
            worker_id: Present(
                spec=spec,
                stamp=self._came[worker_id][0],
                since_ms=self._came[worker_id][1],
                draining=draining,
            )
            for worker_id, (spec, draining) in members.items()
        }

    def _came_now_or_long_ago(self, worker_id: WorkerId) -> int:
        """When a worker came that is in no registry; 0: now, and the registry's time is not known.

        What neither a registration nor the file names was here before this process: its relays
        knew it. What was removed since must go.
        """
        listed = any(spec.worker_id == worker_id for spec in self._driver.config.workers)
        return self._time_ms() if listed else _LONG_AGO_MS

    def _worker_changed(self, change: WorkerChanged) -> None:
        """Workers also come from the file, and leave by themselves."""
        self._moved = True
        if change.old is None:
            self._came.setdefault(
                change.worker_id, (None, self._came_now_or_long_ago(change.worker_id))
            )
        elif change.new is None:
            stamp, _ = self._came.pop(change.worker_id, (None, 0))
            entry = self._entries.get(change.worker_id)
            if stamp is not None and entry is not None and entry.spec.ttl_s is not None:
                # It showed no life here; where it does to another router, its lease goes on.
                self._rest[stamp] = self._clock() + entry.spec.ttl_s
