"""All workers: their life cycle, the probes that watch them, and who may serve which model.

A pool is the set of workers for one model in one lane, in groups by priority. Pools are kept while
membership stays the same and rebuilt at their next use after it moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from random import Random
from typing import Final

from router.config import Config
from router.contract import Lane, LoadReport, WorkerId, WorkerSpec
from router.core.breaker import Breaker
from router.core.effects import Effect, Probe, WorkerChanged
from router.core.timers import Timers
from router.core.types import WorkerState
from router.core.worker import Worker


class Signal(Enum):
    """What can happen to a worker's state."""

    ALIVE = auto()  # a poll was answered
    PROBES_FAILED = auto()  # too many polls in a row were not
    JOIN_TIMEOUT = auto()  # it never answered
    DRAIN = auto()


_W, _S = WorkerState, Signal
# The whole life of a worker; leaving is possible from everywhere. A pair that is missing here
# changes nothing: a draining worker only ever leaves, by going idle or at its deadline.
TRANSITIONS: Final[Mapping[tuple[WorkerState, Signal], WorkerState]] = {
    (_W.JOINING, _S.ALIVE): _W.ACTIVE,
    (_W.JOINING, _S.PROBES_FAILED): _W.EJECTED,
    (_W.JOINING, _S.JOIN_TIMEOUT): _W.EJECTED,
    (_W.ACTIVE, _S.PROBES_FAILED): _W.EJECTED,
    (_W.EJECTED, _S.ALIVE): _W.JOINING,
    (_W.JOINING, _S.DRAIN): _W.DRAINING,
    (_W.ACTIVE, _S.DRAIN): _W.DRAINING,
    (_W.EJECTED, _S.DRAIN): _W.DRAINING,
}

ANY_MODEL: Final = ""  # requests that name no model
UNLISTED: Final = "\0"  # models that only a worker with an unknown list may serve


class Pool:
    """The live workers for one model in one lane, highest priority first."""

    __slots__ = ("groups", "kv_total_max", "lane", "model", "others", "version")

    def __init__(self, model: str, lane: Lane) -> None:
        self.model = model
        self.lane = lane
        self.version = -1
        self.groups: list[list[Worker]] = []  # workers of this lane
        self.others: list[list[Worker]] = []  # workers of the other lane only
        self.kv_total_max: int | None = None  # None: at least one is unknown

    @property
    def live(self) -> bool:
        """Whether any worker could serve it, full or not."""
        return bool(self.groups or self.others)


class Fleet:
    """The workers by id, in order of joining."""

    def __init__(
        self, config: Config, *, rng: Random, timers: Timers, effects: list[Effect]
    ) -> None:
        self.config = config
        self.workers: dict[WorkerId, Worker] = {}
        self._rng = rng
        self._timers = timers
        self._effects = effects
        self._version = 0
        self._pools: dict[tuple[str, Lane], Pool] = {}
        self._names: dict[str, str] = {}
        self._slots = 0

    def join(self, spec: WorkerSpec, *, now: float) -> Worker:
        """Add a worker; it is probed at once."""
        worker_id = spec.worker_id
        assert worker_id not in self.workers, f"{worker_id} joined twice"
        worker = Worker(
            spec=spec, id=worker_id, slot=self._slots, breaker=Breaker(self.config.breaker)
        )
        self._slots += 1
        self.workers[worker_id] = worker
        self._settle_spec(worker, (), None, None)
        self._effects.append(WorkerChanged(worker_id, None, worker.state, worker.why))
        self._changed()
        self._probe(worker, now)
        return worker

    def describe(
        self,
        worker: Worker,
        *,
        models: tuple[str, ...],
        kv_total_tokens: int | None,
        concurrency_max: int | None,
    ) -> None:
        """Take over what a worker said of itself; its spec's own values win."""
        self._settle_spec(worker, models, kv_total_tokens, concurrency_max)
        self._changed()

    def update(self, worker: Worker, spec: WorkerSpec) -> None:
        """Replace the spec of a worker."""
        worker.spec = spec
        self._settle_spec(worker, worker.models, worker.kv_total_tokens, None)
        self._changed()

    def on_alive(self, worker: Worker, report: LoadReport | None, *, now: float) -> None:
        """A poll was answered, with or without figures."""
        worker.probe_failures = 0
        if report is not None:
            worker.report = report
            worker.reported_at = now
            if report.kv_total_tokens and worker.kv_total_tokens is None:
                worker.kv_total_tokens = report.kv_total_tokens
        self.signal(worker, Signal.ALIVE, "answered its poll")

    def on_probe_failed(self, worker: Worker, why: str) -> None:
        """A poll was not answered."""
        worker.probe_failures += 1
        if worker.probe_failures >= self.config.probe.failures_to_eject:
            self.signal(worker, Signal.PROBES_FAILED, why)

    def signal(self, worker: Worker, signal: Signal, why: str) -> None:
        """Move a worker as TRANSITIONS says."""
        new = TRANSITIONS.get((worker.state, signal))
        if new is None or new is worker.state:
            return
        old, worker.state, worker.why = worker.state, new, why
        self._effects.append(WorkerChanged(worker.id, old, new, why))
        self._changed()

    def leave(self, worker: Worker, why: str) -> None:
        """Forget a worker. What still runs on it is finished on its own record."""
        del self.workers[worker.id]
        self._effects.append(WorkerChanged(worker.id, worker.state, None, why))
        self._changed()

    def model_key(self, model: str | None) -> str | None:
        """The name under which pools know `model`; None when nobody serves it."""
        if not model:
            return ANY_MODEL
        key = self._names.get(model)
        if key is not None:
            return key
        if self.config.catalog.unknown == "any" or not self._names:
            return ANY_MODEL
        unlisted = any(not worker.models_known for worker in self.workers.values())
        return UNLISTED if unlisted else None

    @property
    def models(self) -> dict[str, list[WorkerId]]:
        """Every model with the workers that serve it and are not ejected."""
        found: dict[str, list[WorkerId]] = {}
        for worker in self.workers.values():
            if worker.state is not WorkerState.EJECTED:
                for model in worker.models:
                    found.setdefault(model, []).append(worker.id)
        return found

    def pool(self, model_key: str, lane: Lane) -> Pool:
        """The pool of a model key in a lane, up to date."""
        pool = self._pools.get((model_key, lane))
        if pool is None:
            pool = self._pools[model_key, lane] = Pool(model_key, lane)
        if pool.version != self._version:
            self._rebuild(pool)
        return pool

    def _settle_spec(
        self,
        worker: Worker,
        models: tuple[str, ...],
        kv_total_tokens: int | None,
        concurrency_max: int | None,
    ) -> None:
        spec = worker.spec
        worker.models = spec.models or models
        worker.models_known = bool(worker.models)
        worker.kv_total_tokens = spec.kv_total_tokens or kv_total_tokens
        worker.concurrency_max = min(
            spec.concurrency_max or concurrency_max or self.config.headroom.concurrency_default,
            self.config.upstream.connections_max,
        )

    def _changed(self) -> None:
        self._version += 1
        names: dict[str, str] = {}
        for worker in self.workers.values():
            for model in worker.models:
                names[model] = model
        for model, settings in self.config.models.items():
            if model in names:
                for alias in settings.aliases:
                    names.setdefault(alias, model)
        self._names = names

    def _rebuild(self, pool: Pool) -> None:
        pool.version = self._version
        groups: dict[int, list[Worker]] = {}
        others: dict[int, list[Worker]] = {}
        totals: list[int | None] = []
        for worker in self.workers.values():
            if worker.state is not WorkerState.ACTIVE or not _serves(worker, pool.model):
                continue
            own = pool.lane in worker.spec.lanes
            if own or self.config.lanes.spill:
                side = groups if own else others
                side.setdefault(worker.spec.priority, []).append(worker)
                totals.append(worker.kv_total_tokens)
        pool.groups = [groups[key] for key in sorted(groups, reverse=True)]
        pool.others = [others[key] for key in sorted(others, reverse=True)]
        known = [total for total in totals if total is not None]
        pool.kv_total_max = max(known) if known and len(known) == len(totals) else None

    def _probe(self, worker: Worker, now: float) -> None:
        if self.workers.get(worker.id) is not worker:
            return
        self._effects.append(Probe(worker.id))
        probe = self.config.probe
        jitter = 1 + probe.jitter_ratio * self._rng.uniform(-1, 1)
        self._timers.call_at(
            now + probe.interval_s * jitter, lambda later: self._probe(worker, later)
        )


def _serves(worker: Worker, model: str) -> bool:
    if model == ANY_MODEL:
        return True
    if model == UNLISTED:
        return not worker.models_known
    return model in worker.models
