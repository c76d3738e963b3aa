"""Laneway itself as a router under trial: the real dispatcher, driven in virtual time.

It sees what the service sees: an estimate of the prompt from its bytes, polls once a second, its
own streams. `exact=True` turns it into *limit*: the same policy, but prompt lengths and output
lengths are known and polls come every 20 ms, which bounds what better information could gain.
"""

from __future__ import annotations

from random import Random
from typing import cast

from loadtest.sim.cluster import Cluster, Job
from loadtest.trace import BLOCK_TOKENS
from loadtest.workload import Tier
from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.effects import (
    Dispatch,
    Finish,
    LevelChanged,
    Preempt,
    Probe,
    Refuse,
    SharesJudged,
    WorkerChanged,
)
from router.core.types import (
    Endpoint,
    Failure,
    Outcome,
    Priority,
    RequestRecord,
    RequestSpec,
    Ticket,
    Usage,
)
from router.errors import Reason

MODEL = "model"
BYTES_PER_TOKEN = 4
HASHED_BYTES = 512  # router.wire's block
PRIORITY = {Tier.PREMIUM: Priority.P0, Tier.STANDARD: Priority.P1, Tier.FREE: Priority.P2}
WARM_UP_S = 60.0  # workers joined this long before the first request, so slow start is over


class LanewayRouter:
    """Drives a `Dispatcher`: the simulator's counterpart of router.runtime.driver."""

    def __init__(self, config: Config, *, seed: int, exact: bool = False) -> None:
        self.core = Dispatcher(config, rng=Random(f"{seed}/router"))
        self.records: list[RequestRecord] = []
        self._exact = exact
        self._noise = Random(f"{seed}/lengths")
        self._armed_at: float | None = None
        self._running: dict[int, Job] = {}
        self._index: dict[WorkerId, int] = {}
        self._cluster: Cluster

    def start(self, cluster: Cluster) -> None:
        """Join every worker, long enough ago."""
        self._cluster = cluster
        for server in cluster.servers:
            spec = WorkerSpec(url=f"http://{server.name}:1", id=server.name)
            self._index[spec.worker_id] = server.index
            self.core.on_worker_joined(spec, now=-WARM_UP_S)
            self.core.on_worker_described(
                spec.worker_id,
                models=(MODEL,),
                kv_total_tokens=server.profile.kv_total_tokens,
                concurrency_max=server.engine.settings.max_running_requests,
                now=-WARM_UP_S,
            )
            self.core.on_report(spec.worker_id, server.report(), now=-WARM_UP_S)
        self.core.on_timer(now=0.0)
        self._execute(0.0)

    def arrive(self, job: Job, *, now: float) -> None:
        """Hand a request to the core, as the edge describes it."""
        job.handle = self.core.on_request(self._spec(job), owner=job, now=now)
        self._execute(now)

    def first_token(self, job: Job, *, now: float) -> None:
        """The first byte came."""
        self.core.on_first_token(job.handle, now=now)
        self._execute(now)

    def ended(self, job: Job, *, now: float) -> None:
        """The answer is complete; the worker said how long it was."""
        item, request = job.item, job.request
        assert request is not None
        self._running.pop(item.number, None)
        usage = Usage(
            prompt_tokens=item.prompt_tokens,
            cached_tokens=request.cached_tokens,
            output_tokens=job.output_tokens,
        )
        self.core.on_finished(job.handle, Outcome.SUCCESS, usage=usage, now=now)
        self._execute(now)

    def failed(self, job: Job, *, began: bool, now: float) -> None:
        """The worker died or was full; before the first token the core may try another."""
        self._running.pop(job.item.number, None)
        if began:
            self.core.on_finished(job.handle, Outcome.FAILED, reason=Reason.UPSTREAM_ERROR, now=now)
            self._cluster.lose(job, "stream cut")
        else:
            assert job.server is not None
            dead = not job.server.alive
            reason = Reason.UPSTREAM_UNREACHABLE if dead else Reason.UPSTREAM_OVERLOADED
            failure = Failure(reason=reason, blames_worker=dead)
            if not self.core.on_attempt_failed(job.handle, failure, now=now):
                self._cluster.lose(job, reason)
        self._execute(now)

    def progress(self, *, now: float) -> None:
        """Tell the core how far each stream is, as the driver's sweep does."""
        for job in self._running.values():
            if job.first_token_at is not None:
                self.core.on_tokens(job.handle, self._cluster.generated(job), now=now)
        self._execute(now)

    def _spec(self, job: Job) -> RequestSpec:
        item = job.item
        # The edge counts bytes; how many make a token differs from text to text.
        noise = 1.0 if self._exact else self._noise.lognormvariate(0.0, 0.1)
        per_block = BLOCK_TOKENS * BYTES_PER_TOKEN // HASHED_BYTES
        prefix = tuple(
            block * per_block + part for block in item.prefix_blocks for part in range(per_block)
        )
        return RequestSpec(
            request_id=str(item.number),
            endpoint=Endpoint.CHAT,
            model=MODEL,
            tenant=item.tenant,
            priority=PRIORITY[item.tier],
            stream=True,
            prompt_bytes=max(1, round(item.prompt_tokens * BYTES_PER_TOKEN * noise)),
            max_tokens=item.output_tokens if self._exact else item.max_tokens,
            prefix=prefix,
        )

    def _execute(self, now: float) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                match effect:
                    case Dispatch(ticket):
                        self._dispatch(ticket)
                    case Refuse(ticket, refusal):
                        job = cast("Job", ticket.owner)
                        self._cluster.refuse(job, refusal.reason, refusal.retry_after_s)
                    case Probe(worker_id):
                        self._probe(worker_id)
                    case Finish(record):
                        self.records.append(record)
                    case Preempt(ticket):
                        self._preempt(ticket, now)
                    case WorkerChanged() | LevelChanged() | SharesJudged():
                        pass  # log lines in the service
        self._arm(now)

    def _dispatch(self, ticket: Ticket) -> None:
        job = cast("Job", ticket.owner)
        assert ticket.worker_id is not None
        self._running[job.item.number] = job
        cut = None if ticket.degraded is None else ticket.degraded.max_tokens
        self._cluster.send(job, self._index[ticket.worker_id], max_tokens=cut)

    def _preempt(self, ticket: Ticket, now: float) -> None:
        job = cast("Job", ticket.owner)
        if job.first_token_at is None and job.ending is None:
            self._running.pop(job.item.number, None)
            self._cluster.cancel(job)
            self.core.on_preempted(ticket, now=now)

    def _probe(self, worker_id: WorkerId) -> None:
        def answered(report: LoadReport | None, now: float) -> None:
            if report is None:
                self.core.on_probe_failed(worker_id, "no answer", now=now)
            else:
                self.core.on_report(worker_id, report, now=now)
            self._execute(now)

        self._cluster.poll(self._index[worker_id], answered)

    def _arm(self, now: float) -> None:
        due = self.core.next_deadline()
        if due is None or (self._armed_at is not None and self._armed_at <= due):
            return
        moment = max(due, now)
        self._armed_at = moment

        def fire(now: float) -> None:
            if self._armed_at == moment:
                self._armed_at = None
                self.core.on_timer(now=now)
                self._execute(now)

        self._cluster.at(moment, fire)
