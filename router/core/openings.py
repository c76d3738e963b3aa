"""What a look at the queue may use, and what the last one found in its way.

Under overload most looks find what the one before found: nothing that waits fits anywhere. So a
round that sent nothing leaves behind what its tickets would have needed, and until some worker has
that much room, or the queue offers others, the next look ends there. A worker with news is asked at
once; all of them now and then, as what a worker admits moves by itself no faster than that.
Whether an elephant may start is a matter of all workers, so for its sake all of them are asked.
"""

from __future__ import annotations

from typing import Final

from router.contract import Lane
from router.core.elephants import Elephants
from router.core.pools import Pool
from router.core.types import Ticket
from router.core.worker import Worker

LOOK_S: Final = 0.02  # as old as a worker's derived figures may be
Need = tuple[float, float]  # KV tokens, and prompt tokens to prefill, at least
Needs = dict[tuple[Pool, int], Need]  # by pool and rank
Version = tuple[int, int, int]  # of membership, of what may be cached, of the order of the queue


class Openings:
    """The workers that take anything at all at one moment, by pool and rank."""

    __slots__ = ("_elephants", "_now", "_open", "_starts")

    def __init__(self, elephants: Elephants, now: float) -> None:
        self._elephants = elephants
        self._now = now
        self._open: dict[tuple[Pool, int], list[Worker]] = {}
        self._starts: dict[Pool, bool] = {}

    def of(self, pool: Pool, rank: int = 0) -> list[Worker]:
        """Workers of `pool` that may take some request of `rank`; by default the most urgent."""
        found = self._open.get((pool, rank))
        if found is None:
            members = pool.members.values()
            found = [worker for worker in members if worker.is_open(self._now, rank)]
            self._open[pool, rank] = found
        return found

    def fit(self, pool: Pool, rank: int, need: Need) -> bool:
        """Whether one of them has room for `need`."""
        return any(has_room(worker, rank, need, self._now) for worker in self.of(pool, rank))

    def fit_any(self, needs: Needs) -> bool:
        """Whether one of them has room for any of `needs`."""
        return any(self.fit(pool, rank, need) for (pool, rank), need in needs.items())

    def elephant_may_start(self, pool: Pool) -> bool:
        """Whether `pool` may be sent one more elephant."""
        may = self._starts.get(pool)
        if may is None:
            may = self._starts[pool] = self._elephants.may_start(pool, self._now)
        return may

    def used(self, worker: Worker) -> None:
        """`worker` was given something: it may take less now."""
        self._starts.clear()
        for (pool, rank), found in self._open.items():
            if worker.id in pool.members:
                if not worker.is_open(self._now, rank):
                    if worker in found:
                        found.remove(worker)
                elif worker not in found:
                    found.append(worker)


class Stuck:
    """A round over `pools` that ended with nothing more to send, and what would have to be there.

    One that tried all that waits holds whatever the order becomes; another, which ended at the
    lookahead or at a ticket that was passed over too often, only while the order stands as it was
    at its end. (What it served may have put some that it tried behind others that it did not: then
    these are tried when the order moves next. Whoever is ahead of them was.)
    """

    __slots__ = (
        "_cached",
        "_elephants",
        "_floors",
        "_needs",
        "complete",
        "lanes",
        "looked_at",
        "pools",
        "version",
    )

    def __init__(self, pools: list[Pool], now: float) -> None:
        self.pools = pools
        self.complete = False  # all that waits was tried, or would find its pool shut
        self.lanes: set[Lane] = set()  # that had no permit left
        self.looked_at = now  # when all workers were last asked
        self.version: Version = (-1, -1, -1)
        self._cached = False  # some prompts may be cached, and more of them with each dispatch
        self._needs: Needs = {}
        self._elephants: Needs = {}
        self._floors: Needs = {}  # of all of them, whatever may be cached by then

    def add(self, ticket: Ticket, prompt_tokens: int, floor_tokens: int, *, elephant: bool) -> None:
        """`ticket` found no room; a worker would have to prefill `prompt_tokens` of it at least.

        And `floor_tokens`, even if it had all of the prompt cached that is told apart.
        """
        self._cached = self._cached or bool(ticket.spec.prefix)
        key = ticket.pool, ticket.rank
        needs = self._elephants if elephant else self._needs
        _lower(needs, key, (ticket.kv_tokens, prompt_tokens))
        _lower(self._floors, key, (ticket.kv_tokens, floor_tokens))

    def shut(self, pool: Pool, rank: int = 0) -> None:
        """No worker of `pool` takes anything of `rank`; by default, anything at all."""
        self._needs[pool, rank] = self._floors[pool, rank] = 0.0, 0.0

    def floors(self, pools: list[Pool], version: Version) -> Needs | None:
        """Less than which nothing needs that waits for `pools`; None when that is not known."""
        known = self.complete and not self.lanes and self.version[0] == version[0]
        return self._floors if known and self.pools == pools else None

    def cover(self, floors: Needs) -> None:
        """Nothing was left to try, as there is no room for `floors`, those of an earlier round."""
        self.complete = True
        for key, need in floors.items():
            _lower(self._needs, key, need)
            _lower(self._floors, key, need)

    def is_exact(self, version: Version) -> bool:
        """Whether a round would try the same tickets now, with the same parts cached."""
        workers, cached, order = self.version
        return (
            version[0] == workers
            and (version[1] == cached or not self._cached)
            and (version[2] == order or self.complete)
        )

    def holds_for(self, worker: Worker, elephants: Elephants, now: float) -> bool:
        """Whether there is no room for any of them after news of `worker`."""
        for (pool, rank), need in self._needs.items():
            if worker.id in pool.members and has_room(worker, rank, need, now):
                return False
        return not self._elephant_fits(elephants, now, worker)

    def concerns_others(self, worker: Worker) -> bool:
        """Whether news of `worker` may let one of them go to another worker."""
        return any(worker.id in pool.members for pool, _ in self._elephants)

    def holds(self, elephants: Elephants, now: float) -> bool:
        """Whether no worker at all has room for any of them."""
        self.looked_at = now
        for (pool, rank), need in self._needs.items():
            if somebody_has_room(pool, rank, need, now):
                return False
        return not self._elephant_fits(elephants, now)

    def _elephant_fits(
        self, elephants: Elephants, now: float, worker: Worker | None = None
    ) -> bool:
        """Whether an elephant may go somewhere; with `worker`, one whose pool has that."""
        return any(
            (worker is None or worker.id in pool.members)
            and elephants.may_start(pool, now)
            and somebody_has_room(pool, rank, need, now)
            for (pool, rank), need in self._elephants.items()
        )


def _lower(needs: Needs, key: tuple[Pool, int], need: Need) -> None:
    kv_tokens, prompt_tokens = needs.get(key, need)
    needs[key] = min(kv_tokens, need[0]), min(prompt_tokens, need[1])


def has_room(worker: Worker, rank: int, need: Need, now: float) -> bool:
    """Whether `worker` would take a request of `rank` with that need."""
    if worker.valid_until <= now:
        worker.refresh(now)
    kv_tokens, prompt_tokens = need
    return (
        worker.streams < worker.permits[rank]
        and worker.kv_reserved_tokens + kv_tokens <= worker.kv_admitted_tokens
        and (
            worker.pend_tokens + prompt_tokens <= worker.pend_admitted_tokens[rank]
            or not (worker.waiting or worker.pend_foreign)
        )
    )


def somebody_has_room(pool: Pool, rank: int, need: Need, now: float) -> bool:
    """Whether any worker of `pool` has."""
    return any(has_room(worker, rank, need, now) for worker in pool.members.values())
