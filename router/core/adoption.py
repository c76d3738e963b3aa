"""Requests that run already when a core begins: a core before it dispatched them.

They are charged to their workers as if this core had sent them, but nothing is learnt from when
they were sent: this core did not see what the worker had to do then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from router.contract import Lane, WorkerId
from router.core import unseen
from router.core.classify import Classifier
from router.core.cost import CostModel
from router.core.headroom import grown_tokens, grows_unseen
from router.core.limits import Reservation
from router.core.pools import ANY_MODEL, Pools
from router.core.types import RequestSpec, Ticket, TicketState
from router.core.worker import Worker

_DISPATCHED: Final = TicketState.DISPATCHED
_STREAMING: Final = TicketState.STREAMING


@dataclass(slots=True)
class Run:
    """How far a request is that another core dispatched. Times are on the caller's clock."""

    worker_id: WorkerId
    lane: Lane
    attempts: int
    arrived_at: float
    dispatched_at: float
    first_token_at: float | None
    output_tokens: int  # so far
    reservation: Reservation | None = None  # what its limits granted; of their rules, the names


def adopted(
    spec: RequestSpec,
    run: Run,
    pools: Pools,
    classifier: Classifier,
    costs: CostModel,
    *,
    number: int,
    owner: object,
) -> Ticket:
    """The ticket of a request that runs, charged to nobody yet."""
    key = pools.model_key(spec.model)
    _, prompt, output, need = classifier.figures(spec, costs.of(key))
    pool = pools.get(ANY_MODEL if key is None else key, run.lane)
    at = run.arrived_at
    ticket = Ticket(spec, number, run.lane, prompt, output, need, at, at, pool, owner)
    ticket.state = _DISPATCHED if run.first_token_at is None else _STREAMING
    ticket.worker_id, ticket.attempts = run.worker_id, run.attempts
    ticket.dispatched_at, ticket.first_token_at = run.dispatched_at, run.first_token_at
    ticket.output_seen_tokens = run.output_tokens
    return ticket


def catch_up(ticket: Ticket, worker: Worker, seen_tokens: int, *, now: float) -> None:
    """Take an adopted ticket, which its worker is charged for, as far as it is."""
    if ticket.state is _STREAMING:
        worker.prefilled(ticket, now=now)
    elif grows_unseen(ticket):
        unseen.resume(worker, ticket, now=now)
    kv_tokens = grown_tokens(
        ticket.kv_tokens, prompt_tokens=ticket.prompt_tokens, output_seen_tokens=seen_tokens
    )
    worker.grow(ticket, output_seen_tokens=seen_tokens, kv_tokens=kv_tokens, now=now)
    worker.pace.began(worker.telling, now)
