"""The refusals of the core and their words, in one place."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from router.core.breaker import BreakerState
from router.core.types import Refusal
from router.core.worker import Worker
from router.errors import Reason


def model_not_found(model: str | None) -> Refusal:
    """No registered worker serves it."""
    return Refusal(
        reason=Reason.MODEL_NOT_FOUND,
        message=f"no worker serves the model {model!r:.200}",
        param="model",
    )


def no_workers(retry_after_s: float) -> Refusal:
    """Workers for the model exist nowhere, or none of them is live."""
    return Refusal(
        reason=Reason.NO_WORKERS,
        message="no live worker serves this model",
        retry_after_s=max(1.0, retry_after_s),
    )


def all_failing(retry_after_s: float) -> Refusal:
    """Every worker is live but answers with failures."""
    return Refusal(
        reason=Reason.NO_WORKERS,
        message="every worker of this model is failing",
        retry_after_s=max(1.0, retry_after_s),
    )


def out_of_order(workers: Collection[Worker], deadline_at: float, now: float) -> Refusal | None:
    """Why nobody should wait until `deadline_at` for `workers`, live as they are, if so."""
    back_at = min((worker.away_until for worker in workers), default=now)
    if back_at <= now:
        return None
    if all(worker.breaker.state is BreakerState.OPEN for worker in workers):
        return all_failing(back_at - now)
    return workers_pause(back_at - now) if deadline_at < back_at < inf else None


def too_large(*, need_tokens: int, limit_tokens: int) -> Refusal:
    """No worker could hold the request, even when idle."""
    return Refusal(
        reason=Reason.TOO_LARGE,
        message=f"the request needs about {need_tokens} tokens of KV memory; "
        f"the largest worker admits {limit_tokens}",
    )


def queue_full(retry_after_s: float) -> Refusal:
    """All workers are full and so is the queue."""
    return Refusal(
        reason=Reason.QUEUE_FULL,
        message="all workers are busy and the queue is full",
        retry_after_s=retry_after_s,
    )


def queue_timeout(waited_s: float, retry_after_s: float) -> Refusal:
    """No worker had room in time."""
    return Refusal(
        reason=Reason.QUEUE_TIMEOUT,
        message=f"no worker had room within {waited_s:.1f} s",
        retry_after_s=retry_after_s,
    )


def shed(retry_after_s: float) -> Refusal:
    """Its class is turned away so that more urgent ones are served."""
    return Refusal(
        reason=Reason.SHED,
        message="overloaded: requests of this priority are turned away for now",
        retry_after_s=retry_after_s,
    )


def workers_pause(retry_after_s: float) -> Refusal:
    """Every worker asked to be left alone for longer than the request may wait."""
    return Refusal(
        reason=Reason.UPSTREAM_OVERLOADED,
        message="every worker asked for a pause",
        retry_after_s=max(1.0, retry_after_s),
    )


def only_back() -> Refusal:
    """No worker is left but routers through which the request came."""
    message = "No worker is live here but routers through which this request came."
    return Refusal(reason=Reason.LOOP_DETECTED, message=message)


def retries_over(reason: Reason) -> Refusal:
    """A retry was promised, but no untried worker is left."""
    return Refusal(
        reason=reason,
        message="the worker failed and no other is left to try",
        retry_after_s=1.0 if reason in _WAITING_HELPS else None,
    )


_WAITING_HELPS = frozenset((Reason.UPSTREAM_OVERLOADED, Reason.NO_WORKERS))
