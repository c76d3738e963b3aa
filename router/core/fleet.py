"""All workers: how they join, answer their polls, fall out, come back and leave.

The life cycle is the table TRANSITIONS; probes are scheduled here, each worker's next one by its
own jitter. A worker whose spec has a `ttl_s` is forgotten when it has shown no life for so long, so
that those that come and go by themselves cannot pile up. The fleet says what changed in effects;
what waits for room is the dispatcher's matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto
from functools import partial
from math import inf
from random import Random
from typing import Final

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core.breaker import Breaker
from router.core.effects import Effect, WorkerChanged
from router.core.headroom import usable_tokens
from router.core.peers import NO_LOAD, PeerLoad
from router.core.pools import Pools
from router.core.prefix import PrefixIndex
from router.core.sharing import hear
from router.core.timers import Timers
from router.core.types import WorkerState
from router.core.worker import Described, Worker

# The moments of an interval at which polls begin.
_PROBE_STEPS: Final = 20


class Signal(Enum):
    """What can happen to a worker's state."""

    ALIVE = auto()  # a poll was answered
    PROBES_FAILED = auto()  # too many in a row were not
    JOIN_TIMEOUT = auto()  # none was for too long
    DRAIN = auto()


_W, _S = WorkerState, Signal
_DRAINING: Final = WorkerState.DRAINING  # read for each request
_ACTIVE: Final = WorkerState.ACTIVE
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


class Fleet:
    """The workers by id, in order of joining, and the pools over them."""

    def __init__(
        self,
        config: Config,
        *,
        rng: Random,
        timers: Timers,
        effects: list[Effect],
        prefixes: PrefixIndex,
    ) -> None:
        self._config = config
        self._rng = rng
        self._timers = timers
        self._effects = effects
        self._prefixes = prefixes
        self._free_bits: list[int] = []
        self._probes_due: dict[float, list[Worker]] = {}  # by the moment of their next probe
        self.workers: dict[WorkerId, Worker] = {}
        self.pools = Pools(config, self.workers)

    def configure(self, config: Config) -> None:
        """Take over a new configuration."""
        self._config = config
        for worker in self.workers.values():
            worker.configure(config)
            self._settle(worker)
        self.pools.changed(config)

    def join(self, spec: WorkerSpec, *, now: float) -> None:
        """Add a worker; it is probed at once."""
        assert spec.worker_id not in self.workers, f"{spec.worker_id} joined twice"
        # Bits of prefix masks are reused, so that masks stay as short as the fleet is small.
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self.workers)
        worker = Worker(
            spec=spec,
            id=spec.worker_id,
            bit=bit,
            config=self._config,
            breaker=Breaker(self._config.breaker),
            effects=self._effects,
            alive_at=now,
        )
        self.workers[worker.id] = worker
        self._settle(worker)
        self._effects.append(WorkerChanged(worker.id, None, worker.state, worker.why))
        self.pools.changed(self._config)
        self._probe_when_due([worker], now)
        self._timers.call_at(
            now + self._config.probe.join_timeout_s, partial(self._join_over, worker)
        )

    def update(self, spec: WorkerSpec) -> None:
        """Replace the spec of a worker. Another URL is another engine, which joins as such."""
        worker = self.workers.get(spec.worker_id)
        if worker is None:
            return
        assert spec.url == worker.spec.url, f"{spec.worker_id} moved to another URL"
        worker.spec = spec
        self._settle(worker)
        self.pools.changed(self._config)

    def describe(self, worker_id: WorkerId, described: Described) -> None:
        """Take over what a worker said of itself; its spec's own values win.

        What it did not say this time stays as it was known: no answer is not an empty one.
        """
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        (models, kv_total, concurrency, kv_bytes), known = described, worker.described
        described = (
            models or known[0],
            kv_total or known[1],
            concurrency or known[2],
            kv_bytes or known[3],
        )
        if worker.described != described:
            worker.described = described
            self._settle(worker)
            self.pools.changed(self._config)

    def drain(self, worker_id: WorkerId, *, now: float, deadline_s: float) -> None:
        """Take a worker out of all pools; it leaves when idle, at the latest after `deadline_s`."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._signal(worker, Signal.DRAIN, "draining", now=now)
            self._timers.call_at(now + deadline_s, partial(self._drain_over, worker))
            if not worker.streams:
                self.idle(worker)

    def idle(self, worker: Worker) -> None:
        """`worker` runs nothing any more; if it is draining it leaves."""
        if worker.state is _DRAINING and self._here(worker):
            self._leave(worker, "drained")

    def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker at once. What still runs on it is finished on its own record."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._leave(worker, "removed")

    def on_report(self, worker_id: WorkerId, report: LoadReport, *, now: float) -> Worker | None:
        """A poll was answered with figures. Like the next two, returns the worker, if a member."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return None
        known = worker.report
        worker.report = report  # its sizes first: what it says of its load is measured by them
        if (
            known is None
            or known.kv_total_tokens != report.kv_total_tokens
            or known.max_running_requests != report.max_running_requests
            or known.workers != report.workers
        ):
            before = worker.kv_usable_tokens
            self._settle(worker)
            if worker.kv_usable_tokens != before:
                self.pools.changed(self._config)
        worker.valid_until = -inf
        worker.learn(report, now=now)
        self._alive(worker, now=now)
        return worker

    def on_report_missing(self, worker_id: WorkerId, why: str, *, now: float) -> Worker | None:
        """A poll was answered without figures that can be believed; the last ones age."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.why_unknown = why
            self._alive(worker, now=now)
        return worker

    def on_probe_failed(self, worker_id: WorkerId, why: str, *, now: float) -> Worker | None:
        """A poll was not answered."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._failed(worker, why, now=now)
        return worker

    def set_routers(self, names: Collection[str], *, own: str) -> None:
        """These routers send to the workers; this one is called `own`."""
        if self.pools.partition.set_routers(names, own=own):
            self.pools.changed(self._config)

    def heard(
        self, loads: Mapping[WorkerId, PeerLoad], silent: Mapping[WorkerId, PeerLoad], *, now: float
    ) -> None:
        """Other routers said what they have where; of `silent`, nothing is heard any more."""
        for worker in self.workers.values():
            load, gone = loads.get(worker.id, NO_LOAD), silent.get(worker.id, NO_LOAD)
            hear(worker, load, gone, now=now)

    def _alive(self, worker: Worker, *, now: float) -> None:
        worker.probing = False
        worker.answered = True
        worker.alive_at = now
        worker.probe_failures = 0
        was = worker.state
        if was is _ACTIVE or was is _DRAINING:
            return  # most are
        self._signal(worker, Signal.ALIVE, "answered its poll", now=now)
        if was is WorkerState.EJECTED and worker.state is WorkerState.JOINING:
            self._probe(worker, now)  # so that it does not wait a whole interval to be sure

    def _failed(self, worker: Worker, why: str, *, now: float) -> None:
        """Too many in a row eject a worker; one that never answered is still loading its model."""
        worker.probing = False
        worker.probe_failures += 1
        worker.why_unknown = why
        if worker.answered and worker.probe_failures >= self._config.probe.failures_to_eject:
            self._signal(worker, Signal.PROBES_FAILED, why, now=now)

    def _signal(self, worker: Worker, signal: Signal, why: str, *, now: float) -> None:
        """Move a worker as TRANSITIONS says."""
        new = TRANSITIONS.get((worker.state, signal))
        if new is None:
            return
        old, worker.state, worker.why = worker.state, new, why
        if new is WorkerState.ACTIVE:
            worker.rejoin(now=now)
        elif new is WorkerState.EJECTED:
            self._prefixes.forget(worker.bit)
        self._effects.append(WorkerChanged(worker.id, old, new, why))
        self.pools.changed(self._config)

    def _leave(self, worker: Worker, why: str) -> None:
        del self.workers[worker.id]
        self._prefixes.forget(worker.bit)
        self._free_bits.append(worker.bit)
        self._effects.append(WorkerChanged(worker.id, worker.state, None, why))
        self.pools.changed(self._config)

    def _here(self, worker: Worker) -> bool:
        # One that left and came back is another object under the same id.
        return self.workers.get(worker.id) is worker

    def _settle(self, worker: Worker) -> None:
        """What a worker is: its spec first, then its reports, then what it said of itself."""
        spec, (models, kv_total, concurrency, kv_bytes) = worker.spec, worker.described
        report = worker.report or LoadReport()
        worker.is_router = report.workers is not None
        worker.part = 1 / (report.workers or 1)
        if worker.is_router:  # what it says of itself elsewhere is one engine's answer
            kv_total = concurrency = None
        worker.cost, worker.ttl_s = spec.cost, spec.ttl_s
        worker.models = spec.models or models
        worker.kv_total_tokens = spec.kv_total_tokens or report.kv_total_tokens or kv_total
        self._settle_kv(worker, kv_bytes)
        worker.concurrency_max = min(
            spec.concurrency_max
            or concurrency
            or report.max_running_requests
            or self._config.headroom.concurrency_default,
            self._config.upstream.connections_max,
        )
        worker.valid_until = -inf

    def _settle_kv(self, worker: Worker, kv_bytes: float | None) -> None:
        """How much of its pool may be used: a token has the bytes that settings say, else it."""
        headroom, total = self._config.headroom, worker.kv_total_tokens
        sizes = self._config.kv_bytes_per_token
        set_sizes = [sizes[model] for model in worker.models if model in sizes]
        # A router keeps the margin of each of its engines itself.
        known = None if worker.is_router else max(set_sizes, default=kv_bytes)
        worker.kv_bytes_per_token = known
        worker.kv_usable_tokens = None
        if total is not None:
            worker.kv_usable_tokens = usable_tokens(
                total,
                ratio_max=headroom.kv_ratio_max,
                margin_bytes=headroom.kv_margin_mb * 2**20,
                bytes_per_token=known,
            )

    def _drain_over(self, worker: Worker, _now: float) -> None:
        if self._here(worker):
            self._leave(worker, "drain deadline passed")

    def _join_over(self, worker: Worker, now: float) -> None:
        if self._here(worker) and not worker.answered:
            why = f"never answered a poll: {worker.why_unknown or 'all are still out'}"
            self._signal(worker, Signal.JOIN_TIMEOUT, why, now=now)

    def _probe_when_due(self, due: list[Worker], now: float) -> None:
        """Probe on schedule; a poll that is still out is not overtaken, unless it was lost."""
        probe = self._config.probe
        interval_s, jitter_ratio, random = probe.interval_s, probe.jitter_ratio, self._rng.random
        lost_s = 2 * (probe.timeout_s + interval_s)
        # Several at once: with many workers, waking up for each would cost more than the polls.
        step_s = interval_s / _PROBE_STEPS
        left = iter(due)
        try:
            for worker in left:
                if worker.state is _DRAINING or self.workers.get(worker.id) is not worker:
                    continue
                ttl_s = worker.ttl_s
                if ttl_s is not None and now >= worker.alive_at + ttl_s:
                    self._leave(worker, f"showed no life for {ttl_s:g} s")
                    continue
                if not worker.probing or now >= worker.probed_at + lost_s:
                    self._probe(worker, now)
                jitter = 1 + jitter_ratio * (2 * random() - 1)
                self._probe_at(round((now + interval_s * jitter) / step_s) * step_s, worker)
        finally:
            for worker in left:  # behind one that raised
                self._probe_at(now, worker)

    def _probe_at(self, at: float, worker: Worker) -> None:
        due = self._probes_due.get(at)
        if due is None:
            due = self._probes_due[at] = []
            self._timers.call_at(at, partial(self._probes_begin, at))
        due.append(worker)

    def _probes_begin(self, at: float, now: float) -> None:
        self._probe_when_due(self._probes_due.pop(at), now)

    def _probe(self, worker: Worker, now: float) -> None:
        worker.probing = True
        worker.probed_at = now
        worker.mark(now)
        self._effects.append(worker.probe)
