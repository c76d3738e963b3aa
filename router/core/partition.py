"""Which workers a router fills first, when several routers share them.

Several routers that each choose the best worker on figures a fraction of a second old all choose
the same one. So while there is at least one worker for each router, every worker has one owner,
which knows its load exactly because it put it there; the others only borrow it (`placement`).

Ownership is rendezvous hashing: each pair of a router and a worker has a weight, and pairs are
taken from the heaviest down. Alone that gives a router of four 0 to 5 of eight workers, while a
balancer gives all routers the same load; so a router that has its share of a kind of workers takes
no more of it. Shares differ by one at most, all routers compute the same from the same names, and
a router or worker that comes or goes moves few others. Source: B2.9.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from hashlib import blake2b

from router.contract import WorkerId


def weight(router: str, worker_id: WorkerId) -> int:
    """How much `router` is drawn to a worker: the same number on every machine."""
    digest = blake2b(f"{router}\0{worker_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def owners(routers: Iterable[str], worker_ids: Iterable[WorkerId]) -> dict[WorkerId, str]:
    """The owner of each worker. All of `worker_ids` are alike; no routers: no owners."""
    names, ids = sorted(set(routers)), sorted(set(worker_ids))
    if not names:
        return {}
    least, spare = divmod(len(ids), len(names))
    held = dict.fromkeys(names, 0)
    pairs = sorted(
        ((weight(name, worker), name, worker) for name in names for worker in ids), reverse=True
    )
    found: dict[WorkerId, str] = {}
    for _, name, worker in pairs:
        if worker in found or held[name] > least or (held[name] == least and not spare):
            continue
        spare -= held[name] == least
        held[name] += 1
        found[worker] = name
    return found


class Partition:
    """The routers there are, and which workers this one owns; alone it owns all."""

    def __init__(self) -> None:
        self._routers: tuple[str, ...] = ()
        self._own = ""

    @property
    def routers(self) -> int:
        """How many routers send to these workers, this one included."""
        return max(1, len(self._routers))

    def set_routers(self, routers: Iterable[str], *, own: str) -> bool:
        """Take over who is there, this router by its name `own`; whether that is news."""
        names = tuple(sorted({*routers, own}))
        moved = (names, own) != (self._routers, self._own)
        self._routers, self._own = names, own
        return moved

    def shares_all(self, worker_count: int) -> bool:
        """Whether all routers use all of so many workers, as there are too few to own."""
        return worker_count < self.routers

    def owned(self, kinds: Iterable[tuple[Hashable, WorkerId]]) -> frozenset[WorkerId]:
        """The workers that this router owns, of all, each given with its kind.

        Workers of one kind can stand in for each other; a router gets its share of every kind.
        """
        by_kind: dict[Hashable, list[WorkerId]] = {}
        for kind, worker_id in kinds:
            by_kind.setdefault(kind, []).append(worker_id)
        if self.routers == 1:
            return frozenset(worker for ids in by_kind.values() for worker in ids)
        found: list[WorkerId] = []
        for ids in by_kind.values():
            holders = owners(self._routers, ids)
            found += [worker for worker, name in holders.items() if name == self._own]
        return frozenset(found)
