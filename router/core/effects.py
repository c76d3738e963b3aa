"""What the core wants done. The driver executes effects in order and reports results as events."""

from __future__ import annotations

from dataclasses import dataclass

from router.contract import WorkerId
from router.core.bucket import Ask, Settlement
from router.core.degrade import LevelChange
from router.core.rate_loop import Step
from router.core.types import Refusal, RequestRecord, Ticket, WorkerState


@dataclass(slots=True, init=False)
class Dispatch:
    """Send the ticket's request to `ticket.worker_id` now."""

    ticket: Ticket

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket


@dataclass(slots=True)
class Refuse:
    """Answer the ticket's client with a refusal; the ticket is over. Its `Finish` follows."""

    ticket: Ticket
    refusal: Refusal


@dataclass(slots=True, init=False)
class Finish:
    """A request is over; emitted exactly once per ticket."""

    record: RequestRecord

    def __init__(self, record: RequestRecord) -> None:
        self.record = record


@dataclass(slots=True)
class Probe:
    """Poll this worker's load and liveness."""

    worker_id: WorkerId


@dataclass(slots=True)
class WorkerChanged:
    """A worker's state moved; `new` is None when it is gone for good. For log and pools."""

    worker_id: WorkerId
    old: WorkerState | None
    new: WorkerState | None
    why: str


@dataclass(slots=True)
class LevelChanged:
    """The degrade ladder of a domain moved, named after one of its models. For the log."""

    domain: str
    change: LevelChange


@dataclass(slots=True)
class Preempt:
    """Stop the ticket's attempt without telling its client, and say `on_preempted`.

    Only if the client has no byte of the answer yet; otherwise nothing is to be done or said.
    """

    ticket: Ticket


@dataclass(slots=True)
class SharesJudged:
    """The slow loop moved shares (or would have, when it only observes), or found that no move
    could help. For the log.
    """

    step: Step


@dataclass(slots=True)
class BreakerMoved:
    """A worker's breaker opened, or closed again; failed trials in between are no news."""

    worker_id: WorkerId
    opened: bool


@dataclass(slots=True, init=False)
class Reserve:
    """Ask the store of the limits; say `on_reserved` with its verdict, perhaps at once."""

    ticket: Ticket
    ask: Ask

    def __init__(self, ticket: Ticket, ask: Ask) -> None:
        self.ticket = ticket
        self.ask = ask


@dataclass(slots=True, init=False)
class Settle:
    """Tell the store what a request really used; once for each reservation that was granted."""

    settlement: Settlement

    def __init__(self, settlement: Settlement) -> None:
        self.settlement = settlement


Effect = (
    Dispatch
    | Refuse
    | Finish
    | Reserve
    | Settle
    | Probe
    | Preempt
    | WorkerChanged
    | BreakerMoved
    | LevelChanged
    | SharesJudged
)
