"""What a relay knows of a request that its brain decides on, and how it tells of it."""

from __future__ import annotations

from typing import Any, Final

from router.contract import Lane, WorkerId
from router.core.adoption import Run
from router.core.degrade import Decision
from router.core.limits import Reservation
from router.core.types import Failure, RequestSpec
from router.runtime import frames
from router.runtime.frames import Message
from router.runtime.packing import GRANTED, RUN, SPEC

_SHORT: Final = Lane.SHORT


class RelayTicket:
    """A request that is not over."""

    __slots__ = (
        "arrived_at",
        "attempts",
        "degraded",
        "dispatched_at",
        "failure",
        "first_token_at",
        "lane",
        "number",
        "output_tokens",
        "owner",
        "reservation",
        "runs",
        "sent",
        "spec",
        "told_tokens",
        "waits_until",
        "worker_id",
    )

    def __init__(self, number: int, spec: RequestSpec, owner: Any, arrived_at: float) -> None:
        self.number = number  # of this relay
        self.spec = spec
        self.owner = owner
        self.arrived_at = arrived_at
        self.waits_until = 0.0  # without a brain
        self.sent = False  # the brain that is there now knows of it
        self.runs = False  # on a worker
        self.failure: Failure | None = None  # of an attempt, not judged yet
        self.lane: Lane = _SHORT
        self.worker_id: WorkerId | None = None
        self.degraded: Decision | None = None
        self.reservation: Reservation | None = None  # what its limits granted
        self.attempts = 0
        self.dispatched_at = 0.0
        self.first_token_at: float | None = None
        self.output_tokens = 0
        self.told_tokens = 0  # of them, those that the brain knows of

    def asked(self) -> Message:
        """Ask for it after it waited, with what it was granted under a brain before."""
        spec = SPEC.fields_of(self.spec)
        if self.reservation is None:
            return (frames.SUBMIT, self.number, spec)
        return (frames.RESUBMIT, self.number, spec, GRANTED.fields_of(self.reservation))

    def running(self) -> Message:
        """Tell how far it is."""
        assert self.worker_id is not None
        run = Run(
            self.worker_id,
            self.lane,
            self.attempts,
            self.arrived_at,
            self.dispatched_at,
            self.first_token_at,
            self.output_tokens,
            self.reservation,
        )
        return (frames.RUNS, self.number, SPEC.fields_of(self.spec), RUN.fields_of(run))
