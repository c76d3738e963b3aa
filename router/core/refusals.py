"""The refusals of the core and their words, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Final

from router.core.bucket import Charge, Scope, Verdict
from router.core.types import Failure, Refusal
from router.errors import Reason


def model_not_found(model: str | None) -> Refusal:
    """No registered worker serves it."""
    return Refusal(
        reason=Reason.MODEL_NOT_FOUND,
        message=f"no worker serves the model {model!r:.200}",
        param="model",
    )


def no_workers(retry_after_s: float) -> Refusal:
    """None of the workers for the model is live."""
    return Refusal(
        reason=Reason.NO_WORKERS,
        message="no live worker serves this model",
        retry_after_s=max(1.0, retry_after_s),
    )


def none_registered(retry_after_s: float) -> Refusal:
    """There is no worker at all."""
    return Refusal(
        reason=Reason.NO_WORKERS,
        message=NONE_REGISTERED,
        retry_after_s=max(1.0, retry_after_s),
    )


def all_failing(retry_after_s: float) -> Refusal:
    """Every worker is live but answers with failures."""
    return Refusal(
        reason=Reason.NO_WORKERS,
        message="every worker of this model is failing",
        retry_after_s=max(1.0, retry_after_s),
    )


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


def nobody_left(failure: Failure | None) -> Refusal:
    """A retry was promised, but no untried worker is left.

    Without a failure: those that are left are routers through which the request came.
    """
    if failure is None:
        message = "no worker is live here but routers through which this request came"
        return Refusal(reason=Reason.LOOP_DETECTED, message=message)
    return Refusal(
        reason=failure.reason,
        message="the worker failed and no other is left to try",
        retry_after_s=1.0 if failure.reason in _WAITING_HELPS else None,
    )


def over_limit(tenant: str, charges: Sequence[Charge], verdict: Verdict) -> Refusal:
    """A limit has no room for the request now."""
    told = [
        (charge.rule, level)
        for charge, level in zip(charges, verdict.levels, strict=False)
        if charge.rule.scope is verdict.scope
    ]
    what = "a limit is reached" if verdict.scope is None else _REACHED[verdict.scope]
    # Permits come back when they do, which nobody knows beforehand.
    wait_s = 1.0 if verdict.wait_s is None else max(1.0, verdict.wait_s)
    again = f"try again in {ceil(wait_s)} s"
    if wait_s > _WAIT_TOLD_S_MAX:
        wait_s, again = _WAIT_TOLD_S_MAX, "it has room again in more than an hour"
    return Refusal(
        reason=Reason.RATE_LIMITED,
        message=f"{what.format(tenant=tenant)}; {again}",
        retry_after_s=wait_s,
        levels=tuple(told),
    )


def never_fits(tenant: str, charges: Sequence[Charge]) -> Refusal:
    """A request costs more than a full bucket holds: waiting never helps."""
    charge = next((c for c in charges if c.amount > c.rule.amount_max), charges[0])
    whose = _WHOSE[charge.rule.scope].format(tenant=tenant)
    return Refusal(
        reason=Reason.TOO_LARGE,
        message=f"the request costs {charge.amount:.4g} units, and {whose} never has more than "
        f"{charge.rule.amount_max:.4g}: ask for fewer max_tokens, or send a shorter prompt",
    )


def limits_unknown(retry_after_s: float | None) -> Refusal:
    """The store of the limits is away, and its class is not served unseen."""
    return Refusal(
        reason=Reason.LIMITS_UNKNOWN,
        message="whether the limits allow it cannot be told now",
        retry_after_s=max(1.0, retry_after_s or 0.0),
    )


NONE_REGISTERED: Final = (
    "no worker is registered: add one by `laneway workers add URL`, or under `workers` in the "
    "configuration"
)
# No client waits for days, and a limit may be raised meanwhile.
_WAIT_TOLD_S_MAX: Final = 3600.0
_REACHED: Final[Mapping[Scope, str]] = {
    Scope.TENANT_REQUESTS: "the tenant {tenant} is at its limit of requests per minute",
    Scope.TENANT_COST: "the tenant {tenant} is at its limit of cost units",
    Scope.TENANT_CONCURRENCY: "the tenant {tenant} is at its limit of requests at once",
    Scope.MODEL: "the model is at its limit",
    Scope.LANE: "the lane is at its limit",
    Scope.CLASS: "there is nothing left for requests of this priority",
    Scope.CLUSTER: "the cluster is at its limit",
}
_WHOSE: Final[Mapping[Scope, str]] = {
    Scope.TENANT_REQUESTS: "the tenant {tenant}",
    Scope.TENANT_COST: "the tenant {tenant}",
    Scope.TENANT_CONCURRENCY: "the tenant {tenant}",
    Scope.MODEL: "the model",
    Scope.LANE: "the lane",
    Scope.CLASS: "its priority class",
    Scope.CLUSTER: "the cluster",
}
_WAITING_HELPS = frozenset((Reason.UPSTREAM_OVERLOADED, Reason.NO_WORKERS))
