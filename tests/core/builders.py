"""Values for tests of the core: everything has a default, tests name only what matters to them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from router.config import Config
from router.contract import Lane, LoadReport, WorkerId, WorkerSpec
from router.core.breaker import Breaker
from router.core.dispatcher import Dispatcher
from router.core.effects import Dispatch, Effect, Finish, Probe, Refuse
from router.core.pools import Pool
from router.core.snapshot import WorkerView
from router.core.types import (
    Endpoint,
    Failure,
    Outcome,
    Refusal,
    RequestRecord,
    RequestSpec,
    Ticket,
    TicketState,
)
from router.core.worker import Worker
from router.errors import Reason

IDLE = LoadReport(running_requests=0, queued_requests=0, queued_uncached_tokens=0, kv_used_tokens=0)
FULL_ENGINE = Failure(reason=Reason.UPSTREAM_OVERLOADED, blames_worker=False)
SERVER_ERROR = Failure(reason=Reason.UPSTREAM_ERROR)
# A token of it takes 128 KiB of KV memory.
LLAMA_8B: dict[str, Any] = {"layers": 32, "kv_heads": 8, "head_dim": 128}
# No slow start, no pacing, nothing stale: what tests about other things want.
PLAIN: dict[str, Any] = {
    "policy": {"slow_start_s": 0.0},
    "probe": {"stale_after_s": 600.0},
    "pacing": {"enabled": False},
}


def config(**sections: dict[str, Any]) -> Config:
    """A Config that differs from the defaults in the given sections only."""
    return Config.model_validate(sections)


def plain_config(**sections: dict[str, Any]) -> Config:
    """Without slow start and staleness, unless said otherwise."""
    return config(**{**PLAIN, **{k: {**PLAIN.get(k, {}), **v} for k, v in sections.items()}})


def worker_spec(name: str = "w1", **fields: Any) -> WorkerSpec:
    """A worker of model m with a KV pool of 400,000 tokens."""
    given = {"url": f"http://{name}:1", "id": name, "models": ("m",), "kv_total_tokens": 400_000}
    return WorkerSpec.model_validate(given | fields)


def request_spec(**fields: Any) -> RequestSpec:
    """A streamed chat request of about 100 prompt tokens for 100 output tokens."""
    given: dict[str, Any] = {
        "request_id": "r",
        "endpoint": Endpoint.CHAT,
        "model": "m",
        "stream": True,
        "prompt_bytes": 396,
        "max_tokens": 100,
    }
    return RequestSpec(**(given | fields))


def ticket(number: int = 1, **fields: Any) -> Ticket:
    """A ticket as `on_request` makes it, 100 prompt tokens and 100 of output."""
    pool = Pool("m", Lane.SHORT)
    made = Ticket(request_spec(), number, Lane.SHORT, 100, 100, 200, 0.0, 30.0, pool)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def worker(name: str = "w1", *, bit: int = 1, settings: Config | None = None, **f: Any) -> Worker:
    """An idle worker whose figures are known for ever."""
    settings = settings or plain_config()
    made = Worker(
        spec=worker_spec(name),
        id=WorkerId(name),
        bit=bit,
        config=settings,
        breaker=Breaker(settings.breaker),
        kv_total_tokens=400_000,
        kv_usable_tokens=settings.headroom.kv_ratio_max * 400_000,
        concurrency_max=256,
        fresh_until=1e9,
        known_until=1e9,
    )
    for field, value in f.items():
        setattr(made, field, value)
    return made


@dataclass
class Bench:
    """A dispatcher under test, with the effects that it has put out so far."""

    core: Dispatcher
    now: float = 0.0

    def __post_init__(self) -> None:
        self.effects: list[Effect] = []

    def join(self, *names: str, report: LoadReport | None = IDLE, **fields: Any) -> None:
        """Register workers and, unless `report` is None, let them answer their first poll."""
        for name in names:
            self.core.on_worker_joined(worker_spec(name, **fields), now=self.now)
            if report is not None:
                self.core.on_report(WorkerId(name), report, now=self.now)
        self.take()

    def ask(self, **fields: Any) -> Ticket:
        """A request comes now."""
        made = self.core.on_request(request_spec(**fields), owner=None, now=self.now)
        self.take()
        return made

    def end(self, made: Ticket, outcome: Outcome = Outcome.SUCCESS) -> None:
        """Its relay says that it is over."""
        self.core.on_finished(made, outcome, now=self.now)
        self.take()

    def fail(self, made: Ticket, failure: Failure = SERVER_ERROR) -> bool:
        """Its attempt fails before the first byte."""
        again = self.core.on_attempt_failed(made, failure, now=self.now)
        self.take()
        return again

    def report(self, name: str, **figures: Any) -> None:
        """A worker answers its poll."""
        self.core.on_report(WorkerId(name), LoadReport(**figures), now=self.now)
        self.take()

    def pass_to(self, at: float) -> None:
        """Let time pass until `at`, with every timer called at its moment."""
        while (due := self.core.next_deadline()) is not None and due <= at:
            self.now = max(self.now, due)
            self.core.on_timer(now=self.now)
            self.take()
        self.now = at

    def take(self) -> list[Effect]:
        """Collect the effects; returns the new ones."""
        new = self.core.take_effects()
        self.effects += new
        return new

    def view(self, name: str) -> WorkerView:
        """What a snapshot shows of one worker."""
        return next(w for w in self.core.snapshot(now=self.now).workers if w.id == name)

    def streams(self) -> dict[str, int]:
        """Requests at once by worker."""
        return {str(w.id): w.streams for w in self.core.snapshot(now=self.now).workers}

    @property
    def dispatched(self) -> list[Ticket]:
        """Tickets in order of dispatch."""
        return [effect.ticket for effect in self.effects if isinstance(effect, Dispatch)]

    @property
    def records(self) -> list[RequestRecord]:
        """Records in order of ending."""
        return [effect.record for effect in self.effects if isinstance(effect, Finish)]

    @property
    def probes(self) -> list[WorkerId]:
        """Workers in order of their polls."""
        return [effect.worker_id for effect in self.effects if isinstance(effect, Probe)]

    def refusal(self, made: Ticket) -> Refusal:
        """Why `made` was refused."""
        return next(e.refusal for e in self.effects if isinstance(e, Refuse) and e.ticket is made)


def bench(*names: str, seed: int = 1, **sections: Any) -> Bench:
    """A dispatcher with plain settings and the given workers, all active and idle."""
    made = Bench(Dispatcher(plain_config(**sections), rng=Random(seed)))
    made.join(*names)
    return made


def one_at_a_time(**sections: Any) -> Bench:
    """A dispatcher with one worker, which takes one request at a time."""
    made = bench(**sections)
    made.join("w1", concurrency_max=1)
    return made


def waits(made: Ticket) -> bool:
    """Whether it is held in the queue, or pauses before a retry."""
    return made.state is TicketState.QUEUED


def runs(made: Ticket) -> bool:
    """Whether it was sent to a worker that has not answered yet."""
    return made.state is TicketState.DISPATCHED
