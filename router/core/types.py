"""The values that the policy core works on.

`RequestSpec` is what the edge learned about a request, `Ticket` its life in the core,
`RequestRecord` what remains of it. Times are seconds on the caller's monotonic clock; token counts
are LLM tokens. Spec, ticket, usage and record are made once per request on the hot path, so they
are slotted but not frozen, and made by position there: to name their fields takes twice as long.
Only the core writes to a ticket, and nobody to a spec or a record.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum, auto
from math import inf
from typing import TYPE_CHECKING, Final

from router.contract import Lane, WorkerId
from router.errors import Reason

if TYPE_CHECKING:
    from router.core.bands import Bill
    from router.core.bucket import Level, Rule
    from router.core.degrade import Act, Decision
    from router.core.drain import Forecast
    from router.core.limits import Reservation
    from router.core.pools import Pool
    from router.core.worker import Worker

LATE_RANK: Final = 2  # a ticket's, once its target is out of reach


class Priority(IntEnum):
    """Priority classes, most urgent first."""

    P0 = 0  # real-time
    P1 = 1  # normal, paid
    P2 = 2  # batch, free
    P3 = 3  # offline


class Endpoint(StrEnum):
    """Families of inference routes: they differ in token fields, defaults and answers."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate"
    MESSAGES = "messages"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    OTHER = "other"  # rerank, score, classify, tokenize, ...: prefill only


# Families whose answers are not generated token by token.
PREFILL_ONLY: Final = frozenset((Endpoint.EMBEDDINGS, Endpoint.OTHER))


class Outcome(StrEnum):
    """How a request ended. Closed: a metric label."""

    SUCCESS = "success"
    CLIENT_ERROR = "client_error"  # the worker answered 4xx; its business, not a worker's failure
    REFUSED = "refused"  # never dispatched
    FAILED = "failed"  # dispatched, and the worker or the way to it failed
    ABORTED = "aborted"  # the client left, or the router ended it: then there is a reason


class TicketState(Enum):
    """QUEUED -> DISPATCHED -> STREAMING -> FINISHED; a retry goes from DISPATCHED to QUEUED.

    RESERVING comes before QUEUED where limits concern the request.
    """

    RESERVING = auto()
    QUEUED = auto()
    DISPATCHED = auto()
    STREAMING = auto()
    FINISHED = auto()


class WorkerState(StrEnum):
    """States of a worker; `fleet` has the table of transitions."""

    JOINING = "joining"
    ACTIVE = "active"
    EJECTED = "ejected"
    DRAINING = "draining"


_P1: Final = Priority.P1
_QUEUED: Final = TicketState.QUEUED


@dataclass(slots=True, init=False)
class RequestSpec:
    """What the edge learned about a request; never changed."""

    request_id: str
    endpoint: Endpoint
    model: str | None  # None: the body names none, so any worker may serve it
    tenant: str
    stream: bool
    prompt_bytes: int  # bytes of prompt text, not of JSON around it
    max_tokens: int | None  # as the client asked; None: absent
    samples: int  # n or best_of, times the prompts of a batch: sequences that are generated
    prefix: tuple[int, ...]  # chained hashes, one per whole block of prompt bytes
    rid: str | None  # the client's own id in the body, by which it may ask for an abort
    priority: Priority
    structured: bool  # asks for output of a given form, or gives tools
    fixed: bool  # nothing in its body can be changed: it is no JSON
    avoid: tuple[WorkerId, ...]  # routers that it came through
    wait_s_max: float | None  # what is left of its client's patience; None: as its class has

    def __init__(  # noqa: PLR0917 - made by position
        self,
        request_id: str,
        endpoint: Endpoint,
        model: str | None = None,
        tenant: str = "anonymous",
        stream: bool = False,
        prompt_bytes: int = 0,
        max_tokens: int | None = None,
        samples: int = 1,
        prefix: tuple[int, ...] = (),
        rid: str | None = None,
        priority: Priority = _P1,
        structured: bool = False,
        fixed: bool = False,
        avoid: tuple[WorkerId, ...] = (),
        wait_s_max: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.model = model
        self.tenant = tenant
        self.stream = stream
        self.prompt_bytes = prompt_bytes
        self.max_tokens = max_tokens
        self.samples = samples
        self.prefix = prefix
        self.rid = rid
        self.priority = priority
        self.structured = structured
        self.fixed = fixed
        self.avoid = avoid
        self.wait_s_max = wait_s_max


@dataclass(slots=True, init=False)
class Usage:
    """Token counts that the worker reported at the end; None: it did not say."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None

    def __init__(
        self,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.output_tokens = output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a ticket was refused; the edge turns it into an answer."""

    reason: Reason
    message: str
    retry_after_s: float | None = None
    param: str | None = None  # the field of the body that is at fault
    levels: tuple[tuple[Rule, Level], ...] = ()  # where the limits stand that refused it


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one attempt at a worker failed, before the first byte went to the client.

    `blames_worker` is False for a full engine's own 429/503: that is load, not ill health.
    `retryable` is False when another worker would answer the same.
    `retry_after_s` is the pause that the worker itself asked for.
    """

    reason: Reason
    blames_worker: bool = True
    retryable: bool = True
    retry_after_s: float | None = None


class Ticket:
    """A request's life in the core. Written by the core only.

    `owner` belongs to the driver: the exchange (or simulated client) that waits for effects.
    `prefill_s` is what its prompt takes the fastest worker of its pool when that is idle, without
    what is expected to be cached of it; `ttft_target_s` is that of its class, or of the nearest in
    which this is possible at all. The two with `whole` in their names are the same of all of its
    prompt. `kv_grown_tokens` is the part of `kv_tokens` by which a plain answer grew as it ran.
    """

    __slots__ = (
        "alarm_at",
        "arrived_at",
        "attempts",
        "band",
        "began_step",
        "bill",
        "cache_awaited_at",
        "charge_number",
        "cost",
        "degraded",
        "dispatched_at",
        "failure",
        "first_token_at",
        "forecast",
        "heir",
        "hit_tokens",
        "kv_grown_tokens",
        "kv_tokens",
        "lane",
        "late_at",
        "lives_until",
        "not_before_at",
        "number",
        "output_seen_tokens",
        "output_tokens",
        "owner",
        "pending",
        "place_at",
        "pool",
        "preempted",
        "prefill_s",
        "prefill_whole_s",
        "prompt_tokens",
        "queue_deadline_at",
        "queued_at",
        "rank",
        "reservation",
        "skips",
        "spec",
        "spilled",
        "state",
        "tried",
        "ttft_target_s",
        "ttft_target_whole_s",
        "ttl_s",
        "worker",
        "worker_id",
    )

    def __init__(  # noqa: PLR0917 - made by position
        self,
        spec: RequestSpec,
        number: int,
        lane: Lane,
        prompt_tokens: int,
        output_tokens: int,
        kv_tokens: int,
        arrived_at: float,
        queue_deadline_at: float,
        pool: Pool,
        owner: object = None,
    ) -> None:
        self.spec = spec
        self.number = number  # arrival order; breaks ties
        self.lane = lane
        self.prompt_tokens = prompt_tokens  # estimated
        self.output_tokens = output_tokens  # expected per sequence
        self.kv_tokens = kv_tokens  # reserved now: prompt plus output reserve, all sequences
        self.arrived_at = arrived_at
        self.queue_deadline_at = queue_deadline_at
        self.pool = pool  # the workers that may serve it
        self.owner = owner
        self.state: TicketState = _QUEUED
        self.cache_awaited_at: float | None = None  # since when it waits for who has it cached
        self.worker_id: WorkerId | None = None  # the last one tried
        self.worker: Worker | None = None  # who is charged for it now; None: nobody
        self.pending = self.spilled = False  # its prompt counts as waiting for prefill on `worker`
        self.attempts = self.output_seen_tokens = self.kv_grown_tokens = 0
        self.began_step: float | None = None  # that of `worker` with which its plain answer began
        self.charge_number = 0  # of a plain one: how many `worker` was charged for before it
        self.tried: tuple[WorkerId, ...] = ()  # workers of earlier attempts
        self.failure: Failure | None = None  # how the last attempt failed
        self.queued_at = self.not_before_at = 0.0  # it last joined the queue; a retry's pause ends
        # What flow control goes by. In its line it stands before all with a higher place.
        self.place_at, self.cost = 0.0, 1.0  # cost units
        self.prefill_s = self.prefill_whole_s = 0.0
        self.ttft_target_s = self.ttft_target_whole_s = 1.0
        # When it yields to others, and is given up once it is late; after how long; its next alarm.
        self.late_at = self.lives_until = self.ttl_s = self.alarm_at = inf
        self.rank = 1  # in pacing: 0 P0, 1 others that can be in time, 2 late ones
        self.band = self.hit_tokens = 0  # where it waits, or waited; expected hit on worker_id
        self.forecast: Forecast | None = None  # of its wait, when it did
        self.bill: Bill | None = None  # what it was charged by its estimate, until it is settled
        self.skips = self.preempted = 0  # how often others went ahead, or it had to give way
        self.dispatched_at: float | None = None
        self.first_token_at: float | None = None
        self.degraded: Decision | None = None  # what overload changed of it
        self.heir: Ticket | None = None  # who gets its place when it does
        self.reservation: Reservation | None = None  # what its limits granted, until it is settled

    @property
    def held_until(self) -> float:
        """When it has waited too long: its patience is over, or its time to live in the queue."""
        return min(self.queue_deadline_at, self.lives_until)


@dataclass(slots=True, init=False)
class RequestRecord:
    """What remains of a finished request: the one source for metrics, log and accounting."""

    request_id: str
    tenant: str
    model: str | None  # as the client named it
    served_model: str | None  # as workers name it; None: none of them is known to serve it
    endpoint: Endpoint
    lane: Lane
    priority: Priority
    stream: bool
    worker_id: WorkerId | None  # the last one tried
    outcome: Outcome
    reason: Reason | None  # None on success and when the client left
    attempts: int
    spilled: bool
    arrived_at: float
    dispatched_at: float | None
    first_token_at: float | None
    finished_at: float
    prompt_tokens: int  # as reported, else estimated
    cached_tokens: int | None
    output_tokens: int  # as reported, else counted; of all its sequences together
    usage_known: bool
    degraded: Act | None  # what overload did to it
    preempted: int
    samples: int  # sequences that were asked for, 1 or more

    def __init__(  # noqa: PLR0917 - made by position
        self,
        request_id: str,
        tenant: str,
        model: str | None,
        served_model: str | None,
        endpoint: Endpoint,
        lane: Lane,
        priority: Priority,
        stream: bool,
        worker_id: WorkerId | None,
        outcome: Outcome,
        reason: Reason | None,
        attempts: int,
        spilled: bool,
        arrived_at: float,
        dispatched_at: float | None,
        first_token_at: float | None,
        finished_at: float,
        prompt_tokens: int,
        cached_tokens: int | None,
        output_tokens: int,
        usage_known: bool,
        degraded: Act | None = None,
        preempted: int = 0,
        samples: int = 1,
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.model = model
        self.served_model = served_model
        self.endpoint = endpoint
        self.lane = lane
        self.priority = priority
        self.stream = stream
        self.worker_id = worker_id
        self.outcome = outcome
        self.reason = reason
        self.attempts = attempts
        self.spilled = spilled
        self.arrived_at = arrived_at
        self.dispatched_at = dispatched_at
        self.first_token_at = first_token_at
        self.finished_at = finished_at
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.output_tokens = output_tokens
        self.usage_known = usage_known
        self.degraded = degraded
        self.preempted, self.samples = preempted, samples

    @property
    def further_tokens(self) -> float:
        """Output tokens after the first of a sequence, the mean of all; 0 where there is none."""
        further = self.output_tokens / self.samples - 1
        return further if further > 0 else 0.0
