"""Choosing one worker among those that have room. Lower is better."""

from __future__ import annotations

from random import Random

from router.core.types import Ticket
from router.core.worker import Worker


def pick(groups: list[list[Worker]], ticket: Ticket, *, rng: Random, now: float) -> Worker | None:
    """The worker with the least work in the first group that has room; None when all are full."""
    for group in groups:
        best: Worker | None = None
        best_key = (0.0, 0.0)
        for worker in group:
            if worker.takes(ticket, now):
                work = (worker.pend_tokens + 500 * worker.streams) * worker.spec.cost
                key = (work, rng.random())
                if best is None or key < best_key:
                    best, best_key = worker, key
        if best is not None:
            return best
    return None
