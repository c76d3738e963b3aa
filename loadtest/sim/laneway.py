"""Laneway itself as a router under trial: the real dispatcher, driven in virtual time.

It sees what the service sees: an estimate of the prompt from its bytes, polls once a second, its
own streams. `exact=True` makes it know the lengths of prompts and answers, `dedicated=True` gives
each lane workers of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from random import Random
from typing import Final, cast

from loadtest.arrivals import WorkItem
from loadtest.sim.cluster import Cluster, Job, Polled, PollFault, Server
from loadtest.sim.ghosts import Ghosts
from loadtest.trace import BLOCK_TOKENS
from loadtest.workload import Tier
from router.config import Config
from router.contract import Lane, WorkerId, WorkerSpec
from router.core.aims import Aims
from router.core.bucket import DecidedBy
from router.core.dispatcher import Dispatcher
from router.core.effects import Dispatch, Finish, Preempt, Probe, Refuse, Reserve, Settle
from router.core.ledger import Ledger
from router.core.peers import NOBODY, PeerLoad
from router.core.prefix import BLOCK_BYTES, STRIDE_BYTES, WHOLE_BLOCKS, blocks_of
from router.core.types import (
    Endpoint,
    Failure,
    Outcome,
    Priority,
    RequestRecord,
    RequestSpec,
    Ticket,
    TicketState,
    Usage,
)
from router.errors import Reason

# Members of enums are found slowly; these are asked for at each request.
_QUEUED: Final = TicketState.QUEUED
_P3: Final = Priority.P3
_CHAT: Final = Endpoint.CHAT
_SUCCESS: Final = Outcome.SUCCESS
MODEL = "model"
BYTES_PER_TOKEN = 4
_PER_BLOCK: Final = BLOCK_TOKENS * BYTES_PER_TOKEN // BLOCK_BYTES  # the edge's in one of a trace
_PER_STRIDE: Final = STRIDE_BYTES // BLOCK_BYTES // _PER_BLOCK  # a trace's in one stride
PRIORITY = {
    Tier.PREMIUM: Priority.P0,
    Tier.STANDARD: Priority.P1,
    Tier.FREE: Priority.P2,
    Tier.OFFLINE: Priority.P3,
}
WARM_UP_S = 60.0  # workers joined this long before the first request, so slow start is over
LONG_SHARE = 5 / 8  # of the workers, where lanes have their own


class LanewayRouter:
    """Drives a `Dispatcher`: the simulator's counterpart of router.runtime.driver."""

    def __init__(
        self, config: Config, *, seed: int | str, exact: bool = False, dedicated: bool = False
    ) -> None:
        self.core = Dispatcher(config, rng=Random(f"{seed}/router"))
        self.records: list[RequestRecord] = []
        self.ghosts = Ghosts(config.waits_s_max, elephant_s=config.pacing.elephant_s)
        self.dispatched_cost = dict.fromkeys(Priority, 0.0)  # while P3 waits
        self._aims = Aims(config)
        self._blocks_max = config.prefix.blocks_max
        self._limits = Ledger(DecidedBy.MEMORY, now=0.0)
        self.ttl_s = config.cluster.ttl_s
        self._exact = exact
        self._dedicated = dedicated
        self._offline: set[int] = set()  # tickets of P3 that wait
        self._noise = Random(f"{seed}/lengths")
        self._armed_at: float | None = None
        self._running: dict[int, Job] = {}
        self._index: dict[WorkerId, int] = {}
        self._cluster: Cluster

    def start(self, cluster: Cluster) -> None:
        """Join every worker, long enough ago."""
        self._cluster = cluster
        for server in cluster.servers:
            spec = self._spec_of(server, len(cluster.servers))
            self._index[spec.worker_id] = server.index
            self.core.on_worker_joined(spec, now=-WARM_UP_S)
            self.core.on_worker_described(
                spec.worker_id,
                models=(MODEL,),
                kv_total_tokens=server.profile.kv_total_tokens,
                concurrency_max=server.engine.settings.max_running_requests,
                now=-WARM_UP_S,
            )
            self.core.on_report(spec.worker_id, server.report(-WARM_UP_S), now=-WARM_UP_S)
        self.core.on_timer(now=0.0)
        self._execute(0.0)

    def _spec_of(self, server: Server, count: int) -> WorkerSpec:
        lanes = frozenset(Lane)
        if self._dedicated:
            is_long = server.index >= count - round(count * LONG_SHARE)
            lanes = frozenset((Lane.LONG if is_long else Lane.SHORT,))
        return WorkerSpec(url=f"http://{server.name}:1", id=server.name, lanes=lanes)

    def arrive(self, job: Job) -> None:
        """Hand a request to the core, as the edge describes it."""
        now = self._cluster.now
        job.handle = ticket = self.core.on_request(self._spec(job), owner=job, now=now)
        if ticket.state is _QUEUED:
            self._queued(ticket)
        self._execute(now)

    def _queued(self, ticket: Ticket) -> None:
        self.ghosts.queued(ticket)
        if ticket.spec.priority is _P3:
            self._offline.add(ticket.number)

    def first_token(self, job: Job) -> None:
        """The first byte came."""
        now = self._cluster.now
        self.core.on_first_token(job.handle, now=now)
        self._execute(now)

    def ended(self, job: Job) -> None:
        """The answer is complete; the worker said how long it was."""
        now = self._cluster.now
        item, request = job.item, job.request
        assert request is not None
        self._running.pop(item.number, None)
        usage = Usage(
            prompt_tokens=item.prompt_tokens,
            cached_tokens=request.cached_tokens,
            output_tokens=job.output_tokens,
        )
        self.ghosts.ended(job.handle, self._aims.cost(item.prompt_tokens, job.output_tokens))
        self.core.on_finished(job.handle, _SUCCESS, usage=usage, now=now)
        self._execute(now)

    def failed(self, job: Job, *, began: bool) -> None:
        """The worker died or was full; before the first token the core may try another."""
        now = self._cluster.now
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

    def heard(
        self,
        loads: Mapping[WorkerId, PeerLoad],
        now: float,
        *,
        silent: Mapping[WorkerId, PeerLoad] = NOBODY,
    ) -> None:
        """What other routers have on the workers, and what those had that are silent now."""
        self.core.peering.on_loads(loads, silent=silent, now=now)
        self._execute(now)

    def progress(self) -> None:
        """Tell the core how far each stream is, as the driver's sweep does."""
        core, cluster = self.core, self._cluster
        now = cluster.now
        for job in list(self._running.values()):
            if job.first_token_at is not None:
                core.on_tokens(job.handle, cluster.generated(job), now=now)
        self._execute(now)

    @property
    def p3_cost_ratio(self) -> float:
        """P3's share of the cost that was dispatched while P3 waited; nan if it never did."""
        total = sum(self.dispatched_cost.values())
        return self.dispatched_cost[Priority.P3] / total if total else nan

    def _spec(self, job: Job) -> RequestSpec:
        item = job.item
        # The edge counts bytes; how many make a token differs from text to text.
        noise = 1.0 if self._exact else self._noise.lognormvariate(0.0, 0.1)
        return RequestSpec(
            request_id=str(item.number),
            endpoint=_CHAT,
            model=MODEL,
            tenant=item.tenant,
            priority=PRIORITY[item.tier],
            stream=True,
            prompt_bytes=max(1, round(item.prompt_tokens * BYTES_PER_TOKEN * noise)),
            max_tokens=item.output_tokens if self._exact else item.max_tokens,
            prefix=prefix_of(item, self._blocks_max),
        )

    def _execute(self, now: float) -> None:
        while self.core.effects:
            for effect in self.core.take_effects():
                match effect:
                    case Dispatch(ticket):
                        self._dispatch(ticket, now)
                    case Refuse(ticket, refusal):
                        job = cast("Job", ticket.owner)
                        self._left(ticket)
                        if refusal.retry_after_s is not None:
                            self.ghosts.refused(ticket, refusal.retry_after_s, now=now)
                        self._cluster.refuse(job, refusal.reason, refusal.retry_after_s)
                    case Probe(worker_id):
                        self._probe(worker_id)
                    case Finish(record):
                        self.records.append(record)
                    case Reserve() | Settle():
                        self._limit(effect, now)
                    case Preempt(ticket):
                        self._preempt(ticket, now)
                    case _:
                        pass  # log lines in the service
        self._arm(now)

    def _limit(self, effect: Reserve | Settle, now: float) -> None:
        """Keep the limits, as the in-process store does."""
        if isinstance(effect, Settle):
            self._limits.settle(effect.settlement, now)
            return
        ticket = effect.ticket
        self.core.on_reserved(ticket, self._limits.reserve(effect.ask, now), now=now)
        if ticket.state is _QUEUED:
            self._queued(ticket)

    def _left(self, ticket: Ticket) -> None:
        self.ghosts.left(ticket)
        self._offline.discard(ticket.number)

    def _dispatch(self, ticket: Ticket, now: float) -> None:
        if self._offline:
            self.dispatched_cost[ticket.spec.priority] += ticket.cost
        self._left(ticket)
        self.ghosts.dispatched(ticket, now=now)
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
        def answered(polled: Polled, now: float) -> None:
            match polled:
                case PollFault.DEAD:
                    self.core.on_probe_failed(worker_id, "no answer", now=now)
                case PollFault.MUTE:
                    self.core.on_report_missing(worker_id, "no figures", now=now)
                case report:
                    self.core.on_report(worker_id, report, now=now)
            self._execute(now)

        self._cluster.poll(self._index[worker_id], answered)

    def _arm(self, now: float) -> None:
        due = self.core.next_deadline()
        if due is None or (self._armed_at is not None and self._armed_at <= due):
            return
        self._armed_at = moment = max(due, now)
        self._cluster.at(moment, self._fire)

    def _fire(self, now: float) -> None:
        if self._armed_at == now:
            self._armed_at = None
            self.core.on_timer(now=now)
            self._execute(now)


def prefix_of(item: WorkItem, blocks_max: int) -> tuple[int, ...]:
    """The blocks and strides of a prompt, laid out as the edge does and named by the trace's."""
    numbers = item.prefix_blocks
    at = WHOLE_BLOCKS // _PER_BLOCK
    blocks = [number * _PER_BLOCK + part for number in numbers[:at] for part in range(_PER_BLOCK)]
    blocks += [number * _PER_BLOCK for number in numbers[at + _PER_STRIDE - 1 :: _PER_STRIDE]]
    return tuple(blocks[: min(blocks_of(item.prompt_tokens * BYTES_PER_TOKEN), blocks_max)])
