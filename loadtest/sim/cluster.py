"""The world that a router is tried in: clients, engines, faults and the clock.

Everything happens in one heap of (moment, order, action). A job is one client's request; it ends
served, refused or lost. The router under trial is told what a real one would see: arrivals, first
tokens, ends, failures and answers to its own polls, never the inside of an engine.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final, Protocol

import msgspec

from loadtest.arrivals import WorkItem
from router.contract import LoadReport
from workers.engine import Engine
from workers.engine_model import (
    Admission,
    EngineFigures,
    EngineProfile,
    EngineRequest,
    EngineSettings,
    Event,
    EventKind,
)

POLL_DELAY_S = 0.002  # a poll's way there and back
_SAMPLES_MAX = 256  # past figures of a worker whose reports lag


class Ending(StrEnum):
    """How a job ended."""

    SERVED = "served"
    REFUSED = "refused"
    LOST = "lost"  # its worker died after the first token, or nobody was left to try


# Members of enums are found slowly; these are asked for at each event.
_SERVED: Final = Ending.SERVED
_FIRST_TOKEN: Final = EventKind.FIRST_TOKEN
_FINISHED: Final = EventKind.FINISHED
_RETRACTED: Final = EventKind.RETRACTED
_ACCEPTED: Final = Admission.ACCEPTED


class Job:
    """One request of one client, from arrival to its end."""

    __slots__ = (
        "attempts",
        "ended_at",
        "ending",
        "first_token_at",
        "handle",
        "item",
        "output_tokens",
        "reason",
        "request",
        "retry_after_s",
        "server",
    )

    def __init__(self, item: WorkItem) -> None:
        self.item = item
        self.handle: Any = None  # the router's own record of it
        self.request: EngineRequest | None = None
        self.server: Server | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.ending: Ending | None = None
        self.reason = ""
        self.retry_after_s: float | None = None
        self.attempts = 0
        self.output_tokens = 0  # generated in the end; fewer than asked when degraded

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token; inf when there was none."""
        if self.first_token_at is None:
            return math.inf
        return self.first_token_at - self.item.at_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per further token; 0 for answers of one token."""
        if self.first_token_at is None or self.ended_at is None:
            return math.inf
        return (self.ended_at - self.first_token_at) / max(1, self.output_tokens - 1)


@dataclass(slots=True, eq=False)
class Server:
    """One simulated worker of the cluster."""

    index: int
    name: str
    profile: EngineProfile
    engine: Engine
    alive: bool = True
    killed: bool = False  # at least once
    # What is wrong with its answers to polls.
    frozen: LoadReport | None = None  # it answers with this instead of its figures
    mute: bool = False  # it answers, without figures
    lag_s: float = 0.0  # its figures are this old
    skew_s: float = 0.0  # it takes its figures for this much older than they are
    samples: deque[tuple[float, LoadReport]] = field(
        default_factory=lambda: deque(maxlen=_SAMPLES_MAX)
    )
    armed_at: float = math.inf
    awake: Callable[[float], None] = field(init=False)
    jobs: dict[str, Job] = field(default_factory=dict)

    def report(self, now: float) -> LoadReport:
        """What it answers to a poll that reaches it at `now`."""
        if self.frozen is not None:
            return self.frozen
        if not self.lag_s and not self.skew_s:
            return self.figures()
        taken_at, figures = now, self.figures()
        for at, past in self.samples:
            if at <= now - self.lag_s:
                taken_at, figures = at, past
        return msgspec.structs.replace(figures, age_s=max(0.0, now - taken_at + self.skew_s))

    def figures(self) -> LoadReport:
        """Its load as it is."""
        figures = self.engine.figures()
        return LoadReport(
            running_requests=figures.running_requests,
            queued_requests=figures.waiting_requests,
            queued_uncached_tokens=figures.waiting_uncached_tokens,
            max_running_requests=self.engine.settings.max_running_requests,
            kv_used_tokens=figures.kv_used_tokens,
            kv_total_tokens=figures.kv_total_tokens,
            prefill_tokens_total=figures.prefill_tokens_total,
            prefill_busy_s_total=figures.prefill_busy_us_total / 1e6,
            decode_moments=figures.decode_moments,
            age_s=0.0,
            ready=True,
        )


class PollFault(Enum):
    """Why a poll brought no figures."""

    DEAD = auto()  # no answer
    MUTE = auto()  # an answer without figures


Polled = LoadReport | PollFault


class Router(Protocol):
    """What is tried: Laneway's dispatcher, a baseline, or several of one of them."""

    def start(self, cluster: Cluster) -> None:
        """Learn of the cluster; called once, before the first arrival."""

    def arrive(self, job: Job) -> None:
        """A client sent a request: call `cluster.send` or `cluster.refuse`, now or later."""

    def first_token(self, job: Job) -> None:
        """The job's worker answered."""

    def ended(self, job: Job) -> None:
        """The job was served whole."""

    def failed(self, job: Job, *, began: bool) -> None:
        """The job's worker died or refused it, before or after the answer began."""

    def progress(self) -> None:
        """Called at a fixed pace while jobs run; `cluster.generated` has their tokens."""


class Cluster:
    """Engines, clients and the clock."""

    def __init__(
        self,
        profiles: Iterable[tuple[str, EngineProfile]],
        *,
        settings: EngineSettings,
        progress_s: float = 0.25,
        poll_delay_s: float = POLL_DELAY_S,
    ) -> None:
        self.now = 0.0
        self.servers = [
            Server(index, f"w{index}-{name}", profile, Engine(profile, settings))
            for index, (name, profile) in enumerate(profiles)
        ]
        for server in self.servers:
            server.awake = partial(self._awake, server)
        self.settings = settings
        self.jobs: list[Job] = []
        self.retractions = 0
        self.retired: list[EngineFigures] = []  # of engines that died
        self._router: Router
        self._items: Iterator[WorkItem]
        self._item: WorkItem | None = None  # the next one
        self._length_s = 0.0
        self._progress_s = progress_s
        self._poll_delay_s = poll_delay_s
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._open = 0  # jobs that have not ended
        self._arriving = True

    # What a scenario does.

    def run(self, router: Router, items: Iterable[WorkItem], *, length_s: float) -> None:
        """Play `items` that arrive before `length_s`, then go on until every job has ended."""
        self._router = router
        router.start(self)
        self._items, self._length_s = iter(items), length_s
        self._await_item()
        self.at(0.0, self._progress)
        heap = self._heap
        while heap and (self._arriving or self._open):
            self.now, _, action = heappop(heap)
            action(self.now)

    def at(self, moment: float, action: Callable[[float], None]) -> None:
        """Call `action` with the time at `moment`."""
        self._order += 1
        heappush(self._heap, (moment, self._order, action))

    def kill(self, index: int) -> None:
        """A worker dies: its streams are cut, its requests fail, it answers nothing."""
        server = self.servers[index]
        server.alive, server.killed = False, True
        self.retired.append(server.engine.figures())
        jobs, server.jobs = list(server.jobs.values()), {}
        for job in jobs:
            self._fail(job)

    def revive(self, index: int) -> None:
        """A dead worker comes back, empty."""
        server = self.servers[index]
        server.engine = Engine(server.profile, self.settings)
        server.armed_at = math.inf
        server.alive = True

    # What a router does.

    def send(self, job: Job, index: int, *, max_tokens: int | None = None) -> None:
        """Hand the job to a worker; a dead or full one makes it fail at once."""
        server, item = self.servers[index], job.item
        job.attempts += 1
        limit = max_tokens or item.max_tokens
        job.output_tokens = min(item.output_tokens, limit)
        job.request = EngineRequest(
            id=f"{item.number}.{job.attempts}",
            prompt_tokens=item.prompt_tokens,
            output_tokens=job.output_tokens,
            max_new_tokens=limit,
            blocks=item.prefix_blocks,
        )
        job.server = server
        if not server.alive:
            self.at(self.now, lambda _: self._fail(job))
            return
        self._catch_up(server)
        admission = server.engine.submit(job.request, now=self.now)
        if admission is not _ACCEPTED:
            self.at(self.now, lambda _: self._fail(job))
            return
        server.jobs[job.request.id] = job
        self._arm(server)

    def cancel(self, job: Job) -> None:
        """Close the connection to the job's worker: it stops working on it."""
        server, request = job.server, job.request
        if server is not None and request is not None and request.id in server.jobs:
            del server.jobs[request.id]
            self._catch_up(server)
            server.engine.abort(request.id, now=self.now)
            self._arm(server)

    def refuse(self, job: Job, reason: str, retry_after_s: float | None) -> None:
        """Answer the client that it gets nothing."""
        job.reason, job.retry_after_s = reason, retry_after_s
        self._end(job, Ending.REFUSED, self.now)

    def lose(self, job: Job, reason: str) -> None:
        """Give a job up whose worker failed."""
        job.reason = reason
        self._end(job, Ending.LOST, self.now)

    def poll(self, index: int, answer: Callable[[Polled, float], None]) -> None:
        """Ask a worker for its load; the answer comes after the way there and back.

        Beyond the usual two milliseconds a delay is one of the way back: figures are old by then.
        """
        late_s = self._poll_delay_s - POLL_DELAY_S

        def arrived(now: float) -> None:
            server = self.servers[index]
            polled: Polled = PollFault.DEAD
            if server.alive:
                self._catch_up(server)
                polled = PollFault.MUTE if server.mute else server.report(now)
            if late_s > 0:
                self.at(now + late_s, lambda later: answer(polled, later))
            else:
                answer(polled, now)

        self.at(self.now + POLL_DELAY_S, arrived)

    def generated(self, job: Job) -> int:
        """Output tokens of a running job, as its stream shows them."""
        assert job.server is not None
        assert job.request is not None
        return job.server.engine.generated_tokens(job.request)

    def digest(self) -> str:
        """A hash over everything that happened to every job: equal for equal runs."""
        hasher = hashlib.sha256()
        for job in self.jobs:
            server = job.server.name if job.server else ""
            moments = _exact(job.first_token_at), _exact(job.ended_at), _exact(job.retry_after_s)
            hasher.update(f"{job.item.number} {server} {moments} {job.ending}\n".encode())
        return hasher.hexdigest()

    # Inside.

    def _await_item(self) -> None:
        """Let the next item arrive at its moment."""
        self._item = item = next(self._items, None)
        if item is None or item.at_s >= self._length_s:
            self._arriving = False
        else:
            self.at(item.at_s, self._arrived)

    def _arrived(self, _: float) -> None:
        assert self._item is not None
        job = Job(self._item)
        self.jobs.append(job)
        self._open += 1
        self._router.arrive(job)
        self._await_item()

    def _progress(self, now: float) -> None:
        for server in self.servers:
            if server.alive and server.jobs:
                self._catch_up(server)
            if server.lag_s:
                server.samples.append((now, server.figures()))
        self._router.progress()
        self.at(now + self._progress_s, self._progress)

    def _arm(self, server: Server) -> None:
        """Wake up when the engine has news; an earlier wake-up that turns out early is harmless."""
        moment = server.engine.next_event_at()
        if moment < server.armed_at:
            server.armed_at = moment
            self.at(moment, server.awake)

    def _awake(self, server: Server, now: float) -> None:
        if server.armed_at == now:
            server.armed_at = math.inf
            if server.alive:
                self._catch_up(server)
                self._arm(server)

    def _catch_up(self, server: Server) -> None:
        for event in server.engine.advance(self.now):
            self._happened(server, event)

    def _happened(self, server: Server, event: Event) -> None:
        kind = event.kind
        if kind is _RETRACTED:
            self.retractions += 1
            return
        job = server.jobs.get(event.request.id)
        if job is None:
            return  # cancelled before
        if kind is _FIRST_TOKEN:
            if job.first_token_at is None:
                job.first_token_at = event.at
                self._router.first_token(job)
        elif kind is _FINISHED:
            del server.jobs[event.request.id]
            self._end(job, _SERVED, event.at)
            self._router.ended(job)
        elif kind is EventKind.EVICTED:
            del server.jobs[event.request.id]
            self._fail(job)

    def _fail(self, job: Job) -> None:
        self._router.failed(job, began=job.first_token_at is not None)

    def _end(self, job: Job, ending: Ending, at: float) -> None:
        assert job.ending is None, f"job {job.item.number} ended twice"
        job.ending, job.ended_at = ending, at
        self._open -= 1


def _exact(moment: float | None) -> str:
    """All of a float, in less time than its shortest decimal form takes."""
    return "" if moment is None else float(moment).hex()
