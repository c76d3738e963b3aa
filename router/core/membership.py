"""What a router must do so that its workers are those that all routers agree on.

The registry that routers share holds `Entry`s of workers that were registered through any of them,
and `Removal`s of workers that were taken out. Workers from a router's own configuration file are
in no registry, unless they were changed through the admin API since; a removal takes them out too,
if it is younger than their place here. Pure: what is there in, steps out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from router.contract import WorkerId, WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A worker in the registry."""

    spec: WorkerSpec
    stamp: str  # of its registration: another one under the same id is another worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A worker that was taken out. Times are milliseconds on the clock of the registry."""

    id: WorkerId
    url: str
    at_ms: int
    drain_until_ms: int  # its requests have until then to end
    until_ms: int  # it is remembered until then
    barred: bool  # an operator did it, so its agent must not bring it back

    def drain_s(self, now_ms: int) -> float:
        """Seconds that its requests still have."""
        return max(0, self.drain_until_ms - now_ms) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A worker that this router has."""

    spec: WorkerSpec
    stamp: str | None  # of its entry; None: it is in no registry, as far as this router knows
    since_ms: int  # when it came, on the clock of the registry; 1: before any removal
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """Take a worker in."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Change:
    """Replace a worker's spec, and its stamp."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Drain:
    """Give a worker no new requests; it is gone when idle, at the latest after `deadline_s`."""

    worker_id: WorkerId
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Leave:
    """Forget a worker at once."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Restore:
    """Give the registry back a worker that it has lost."""

    entry: Entry


Step = Join | Change | Drain | Leave | Restore


def steps(
    entries: Mapping[WorkerId, Entry],
    removals: Iterable[Removal],
    present: Mapping[WorkerId, Present],
    *,
    now_ms: int,
    alive: Collection[WorkerId] = frozenset(),
) -> list[Step]:
    """The steps to take now; what has to wait for one of them comes with the next call.

    `alive` are workers with a lease that this router would renew. If the registry has let go one of
    them without a removal, its lease ended while no router that sees it could say so.
    """
    removals = list(removals)
    held = {entry.spec.url for entry in entries.values()} | {each.url for each in removals}
    removed = {removal.url: removal for removal in removals if removal.until_ms > now_ms}
    taken = {there.spec.url for there in present.values()}
    found: list[Step] = []
    for worker_id, there in present.items():
        step = _kept(worker_id, there, entries.get(worker_id), removed.get(there.spec.url), now_ms)
        if isinstance(step, Leave) and worker_id in alive and worker_id not in entries:
            step = _lost(there, held) or step
        if step is not None:
            found.append(step)
    found += [
        Join(entry)
        for worker_id, entry in entries.items()
        if worker_id not in present and entry.spec.url not in taken
    ]
    return found


def _kept(
    worker_id: WorkerId, there: Present, entry: Entry | None, removal: Removal | None, now_ms: int
) -> Step | None:
    """What becomes of a worker that is there."""
    if entry is not None:
        if there.draining:
            return None  # it leaves first; then the one in the registry joins
        if entry.spec.url != there.spec.url:
            return Leave(worker_id)
        same = entry.stamp == there.stamp and entry.spec == there.spec
        return None if same else Change(entry)
    if removal is not None and removal.at_ms < there.since_ms:
        removal = None
    if there.stamp is None and removal is None:
        return None
    if removal is not None and removal.drain_until_ms > now_ms:
        return None if there.draining else Drain(worker_id, removal.drain_s(now_ms))
    return Leave(worker_id)


def _lost(there: Present, held: Collection[str]) -> Restore | None:
    """A worker that the registry should have; not one whose URL it names in another way."""
    if there.stamp is None or there.draining or there.spec.url in held:
        return None
    return Restore(Entry(spec=there.spec, stamp=there.stamp))
