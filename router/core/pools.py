"""Which workers may serve which model in which lane.

A pool is the set of live workers for one model in one lane, in groups by priority. Its lists are
built at their first use after membership moved, never per request. Names in requests are client
text: all names that no worker is known to serve share one pool, so pools are bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from router.config import Config
from router.contract import Lane, WorkerId
from router.core.partition import Partition
from router.core.rates import Rates
from router.core.types import WorkerState
from router.core.worker import Worker

ANY_MODEL: Final = ""  # requests that name no model
UNLISTED: Final = "\0"  # models that only a worker with an unknown list may serve


class Group:
    """Workers of one lane and priority: those of this router, and those that it may borrow."""

    __slots__ = ("_by_bit", "lent", "own", "workers")

    def __init__(self, workers: list[Worker], owned: Collection[WorkerId] | None) -> None:
        self.workers = workers
        self._by_bit = {worker.bit: worker for worker in workers}
        self.own: Group = self  # all of them where the routers share all, or there is one router
        self.lent: list[Worker] = []
        if owned is not None:
            self.own = Group([worker for worker in workers if worker.id in owned], None)
            self.lent = [worker for worker in workers if worker.id not in owned]

    def holders(self, bits: int, most: int) -> list[Worker]:
        """At most `most` of the workers whose bit is set in `bits`."""
        found: list[Worker] = []
        while bits and len(found) < most:
            bit = bits & -bits
            bits ^= bit
            worker = self._by_bit.get(bit)
            if worker is not None:
                found.append(worker)
        return found


class Pool:
    """The live workers for one model in one lane, highest priority first."""

    __slots__ = (
        "domain",
        "groups",
        "joining",
        "kv_need_max",
        "kv_own_max",
        "lane",
        "members",
        "model",
        "others",
        "rates",
        "routers",
        "served_model",
        "version",
    )

    def __init__(self, model: str, lane: Lane) -> None:
        self.model = model
        self.served_model = None if model in (ANY_MODEL, UNLISTED) else model
        self.lane = lane
        self.version = -1
        self.domain = model  # of all pools that compete for the same workers, by a model's name
        self.groups: list[Group] = []  # workers of this lane
        self.others: list[Group] = []  # workers of the other lane only, when it may spill
        self.members: dict[WorkerId, Worker] = {}  # both; empty: nobody could serve it
        self.joining: list[Worker] = []  # not heard of since they came; they may serve it, too
        # Larger requests fit none of them; None: at least one pool's size is unknown.
        self.kv_need_max: int | None = None
        self.kv_own_max: int | None = None  # the same for the workers of this lane alone
        self.routers = 1  # how many send to them
        self.rates: Rates | None = None  # of its fastest worker; None: it has none


class Pools:
    """All pools over `workers`, a mapping that the fleet keeps."""

    def __init__(self, config: Config, workers: Mapping[WorkerId, Worker]) -> None:
        self._config = config
        self._workers = workers
        self.version = 0  # moves with every change
        self.partition = Partition()
        self._owned: tuple[int, frozenset[WorkerId]] = (-1, frozenset())  # by version
        self._pools: dict[tuple[str, Lane], Pool] = {}
        self._names: dict[str, str] = {}  # a model or an alias -> the model as workers name it
        self._domains: dict[str, str] = {}  # by model
        self._unlisted = False

    def changed(self, config: Config) -> None:
        """Membership, a state, a worker's models or the configuration moved."""
        self._config = config
        self.version += 1
        self._names = {model: model for worker in self._regular() for model in worker.models}
        self._unlisted = any(not worker.models for worker in self._regular())
        self._domains = _connected([worker.models or (UNLISTED,) for worker in self._regular()])
        for model, settings in config.models.items():
            served = [name for name in (model, *settings.aliases) if name in self._names]
            for alias in (model, *settings.aliases) if served else ():
                self._names.setdefault(alias, served[0])
        for key in [key for key in self._pools if not self._kept(key[0])]:
            del self._pools[key]

    @property
    def has_workers(self) -> bool:
        """Whether any worker is registered, whatever its state."""
        return bool(self._workers)

    def model_key(self, model: str | None) -> str | None:
        """The name under which pools know `model`; None when nobody serves it."""
        if not model:
            return ANY_MODEL
        key = self._names.get(model)
        if key is not None:
            return key
        if self._config.catalog.unknown == "any" or not self._names:
            return ANY_MODEL
        return UNLISTED if self._unlisted else None

    def named(self, model: str) -> str | None:
        """The same, but only of a worker that says it serves `model`."""
        return self._names.get(model)

    def models(self) -> dict[str, list[WorkerId]]:
        """Every model with the workers that serve it and are not ejected."""
        found: dict[str, list[WorkerId]] = {}
        for worker in self._regular():
            if worker.state is not WorkerState.EJECTED:
                for model in worker.models:
                    found.setdefault(model, []).append(worker.id)
        return found

    def served(self) -> Iterable[str]:
        """Every model of a registered worker, whatever the worker's state."""
        return dict.fromkeys(self._names.values())

    @property
    def domains(self) -> Collection[str]:
        """The names of the domains there are."""
        return {*self._domains.values(), ANY_MODEL}

    @property
    def live(self) -> list[Pool]:
        """The pools that were asked for and have a worker, up to date."""
        return [pool for pool in map(self.fresh, self._pools.values()) if pool.members]

    def get(self, model_key: str, lane: Lane) -> Pool:
        """The pool of a model key in a lane, up to date."""
        pool = self._pools.get((model_key, lane))
        if pool is None:
            pool = self._pools[model_key, lane] = Pool(model_key, lane)
        if pool.version != self.version:
            self._rebuild(pool)
        return pool

    def fresh(self, pool: Pool) -> Pool:
        """`pool`, its lists up to date."""
        if pool.version != self.version:
            self._rebuild(pool)
        return pool

    def _group(self, workers: list[Worker]) -> Group:
        owned = self.owned
        all_share = self.partition.shares_all(len(workers))
        return Group(workers, None if self.partition.routers == 1 or all_share else owned)

    @property
    def owned(self) -> frozenset[WorkerId]:
        """The live workers that this router owns, wherever there are enough to own."""
        version, owned = self._owned
        if version != self.version:
            live = [w for w in self._regular() if w.state is WorkerState.ACTIVE]
            kinds = [(worker.models, worker.spec.lanes, worker.spec.priority) for worker in live]
            owned = self.partition.owned(zip(kinds, (w.id for w in live), strict=True))
            counts = Counter(kinds)
            for worker, kind in zip(live, kinds, strict=True):
                alone = worker.id in owned and not self.partition.shares_all(counts[kind])
                worker.peers.sharers = 1 if alone else self.partition.routers
            self._owned = self.version, owned
        return owned

    def _domain_of(self, model_key: str) -> str:
        if model_key == ANY_MODEL:
            # Requests for any model compete with all: with one domain they are part of it.
            names = dict.fromkeys(self._domains.values())
            return next(iter(names)) if len(names) == 1 else ANY_MODEL
        return self._domains.get(model_key, model_key)

    def _kept(self, model_key: str) -> bool:
        return model_key in (ANY_MODEL, UNLISTED) or model_key in self._names

    def _regular(self) -> list[Worker]:
        # Halves of a prefill/decode pair cannot serve a request alone.
        return [w for w in self._workers.values() if w.spec.worker_type == "regular"]

    def _takes(self, worker: Worker, lane: Lane) -> bool:
        return self._config.lanes.spill or lane in worker.spec.lanes

    def _may_join(self, worker: Worker, pool: Pool) -> bool:
        if worker.state is not WorkerState.JOINING or worker.answered:
            return False
        return self._takes(worker, pool.lane) and (not worker.models or _serves(worker, pool.model))

    def _rebuild(self, pool: Pool) -> None:
        pool.version = self.version
        pool.domain = self._domain_of(pool.model)
        pool.routers = self.partition.routers
        sides: tuple[dict[int, list[Worker]], dict[int, list[Worker]]] = ({}, {})
        pool.members = {}
        pool.joining = [w for w in self._regular() if self._may_join(w, pool)]
        for worker in self._regular():
            if worker.state is not WorkerState.ACTIVE or not _serves(worker, pool.model):
                continue
            if self._takes(worker, pool.lane):
                own = pool.lane in worker.spec.lanes
                sides[0 if own else 1].setdefault(worker.spec.priority, []).append(worker)
                pool.members[worker.id] = worker
        pool.groups, pool.others = (
            [self._group(side[priority]) for priority in sorted(side, reverse=True)]
            for side in sides
        )
        by_speed = min(pool.members.values(), key=lambda w: w.rates.prefill_s, default=None)
        pool.rates = None if by_speed is None else by_speed.rates
        of_lane = [worker for group in pool.groups for worker in group.workers]
        pool.kv_own_max = _need_max(of_lane)
        pool.kv_need_max = _need_max(pool.members.values())


def _need_max(workers: Iterable[Worker]) -> int | None:
    """What the largest of `workers` admits; None where one does not say its size, or none is."""
    usable = [worker.kv_usable_tokens for worker in workers]
    known = [tokens for tokens in usable if tokens is not None]
    return int(max(known)) if known and len(known) == len(usable) else None


def _serves(worker: Worker, model_key: str) -> bool:
    if model_key == ANY_MODEL:
        return True
    if model_key == UNLISTED:
        return not worker.models
    return model_key in worker.models


def _connected(offers: Sequence[Sequence[str]]) -> dict[str, str]:
    """The domain of each model, given what each worker serves: models that share one share it."""
    homes: dict[str, str] = {}
    for models in offers:
        met = dict.fromkeys(homes[model] for model in models if model in homes)
        home = next(iter(met), models[0])
        if len(met) > 1:
            homes = {model: home if old in met else old for model, old in homes.items()}
        homes.update(dict.fromkeys(models, home))
    return homes
