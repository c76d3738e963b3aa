"""Choosing one worker among those that have room: six policies, all on live accounts.

Every policy skips workers without room, counts a worker's slow start as more load, and does not let
a worker whose figures are unknown look better than those that are known: what only reports can tell
is taken from the worst known candidate. Ties are broken by the seeded random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from random import Random
from typing import Final

from router.config import PolicySettings
from router.core.types import Ticket
from router.core.worker import Worker

Hits = Mapping[int, int]  # expected cached prompt tokens by worker slot
Pick = Callable[[list[Worker], Ticket, Hits, float], Worker | None]

# Scores this close are equal: measured rates of equal workers differ by more, and the luckiest of
# them must not get all that a quiet cluster has to do.
_CLEARLY_LESS: Final = 0.95
_STILL_EQUAL: Final = 1.05


def policy(settings: PolicySettings, rng: Random) -> Pick:
    """The policy of that name: `pick(workers, ticket, hits, now)`, None when all are full."""
    match settings.name:
        case "least_work":
            return LeastWork(rng).pick
        case "weighted":
            return Weighted(settings, rng).pick
        case "round_robin":
            return RoundRobin(rng).pick
        case "random":
            return Chance(rng).pick
        case "least_in_flight":
            return LeastInFlight(rng).pick
        case "power_of_two":
            return PowerOfTwo(rng).pick


def has_room(worker: Worker, ticket: Ticket, now: float) -> bool:
    """Whether `worker` may be given `ticket` now: permits, KV headroom, marks, not tried before."""
    if worker.valid_until <= now:
        worker.refresh(now)
    return (
        ticket.kv_tokens <= worker.room_tokens
        and ticket.prompt_tokens <= worker.ahead_tokens
        and worker.id not in ticket.tried
    )


def least_work_s(worker: Worker, ticket: Ticket, hits: Hits, now: float) -> float:
    """POLICY 2.2 as seconds, times the worker's cost; `worker` was refreshed."""
    hit = hits.get(worker.slot, 0)
    uncached = ticket.prompt_tokens - hit
    return (
        worker.base_s
        + worker.stalls * (now - worker.progress_at)
        + uncached * (worker.prefill_s + worker.attention_s * (hit + uncached / 2))
    ) * worker.factor


class LeastWork:
    """The fewest seconds of predicted waiting, decoding and KV pressure.

    `stalled + c*(pend + u) + attn*u*(hit + u/2) + 2*step(B + 1) + 0.05*k/(1 - k)`, where u is the
    prompt without its expected cached prefix; what no request changes is `base_s`.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, hits: Hits, now: float) -> Worker | None:
        """One pass without lists: with many workers this loop is the cost of a decision."""
        need, tried, prompt = ticket.kv_tokens, ticket.tried, ticket.prompt_tokens
        best: Worker | None = None
        best_s, ties = inf, 0
        worst_foreign_s = 0.0
        unknown: list[Worker] = []
        for worker in workers:
            if worker.valid_until <= now:
                worker.refresh(now)
            if need > worker.room_tokens or (tried and worker.id in tried):
                continue
            if prompt > worker.ahead_tokens + (hits.get(worker.slot, 0) if hits else 0):
                continue
            if worker.unknown:
                unknown.append(worker)
                continue
            worst_foreign_s = max(worst_foreign_s, worker.foreign_s)
            score_s = least_work_s(worker, ticket, hits, now)
            if score_s <= best_s * _STILL_EQUAL:
                best, best_s, ties = self._better(best, best_s, ties, worker, score_s)
        for worker in unknown:
            lift_s = max(0.0, worst_foreign_s - worker.foreign_s) * worker.factor
            score_s = least_work_s(worker, ticket, hits, now) + lift_s
            if score_s <= best_s * _STILL_EQUAL:
                best, best_s, ties = self._better(best, best_s, ties, worker, score_s)
        return best

    def _better(
        self, best: Worker | None, best_s: float, ties: int, worker: Worker, score_s: float
    ) -> tuple[Worker, float, int]:
        """Who leads now that `worker` came near: clearly less, then fewer streams, then chance."""
        if best is None or score_s < best_s * _CLEARLY_LESS or worker.streams < best.streams:
            return worker, min(best_s, score_s), 1
        if worker.streams == best.streams:
            ties += 1
            if self._rng.random() * ties < 1:
                best = worker
        return best, min(best_s, score_s), ties


class Weighted:
    """A10: `w1*norm(free KV) + w2*(1 - norm(queue)) + w3*(1 - norm(latency))`, highest wins.

    Each figure is live (report plus own dispatches), its norm the share of the largest among the
    candidates. What is minimised here is the complement, so that a worker's cost can multiply it.
    """

    def __init__(self, settings: PolicySettings, rng: Random) -> None:
        self._settings = settings
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, _hits: Hits, now: float) -> Worker | None:
        """The candidate with the least weighted load."""
        candidates = _candidates(workers, ticket, now)
        lift = _worst([w.foreign.waiting for w in candidates if not w.unknown])
        queue = _normed([w.waiting + _foreign(w, w.foreign.waiting, lift) for w in candidates])
        free = _normed(_filled([w.kv_free_tokens for w in candidates], min))
        latency = _normed(_filled([w.latency_s for w in candidates], max))
        weights = self._settings
        loads = [
            w.factor
            * (
                weights.weight_kv_free * (1 - free[i])
                + weights.weight_queue * queue[i]
                + weights.weight_latency * latency[i]
            )
            for i, w in enumerate(candidates)
        ]
        return _least(candidates, loads, self._rng)


class RoundRobin:
    """The candidate whose last turn is longest ago."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, _hits: Hits, now: float) -> Worker | None:
        """Turns are kept per worker, so full and missing ones do not disturb the order."""
        candidates = _warm(_candidates(workers, ticket, now), self._rng, now)
        return min(candidates, key=lambda worker: worker.turn, default=None)


class Chance:
    """Any candidate, at random."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, _hits: Hits, now: float) -> Worker | None:
        """Each with the same chance; less in slow start."""
        candidates = _warm(_candidates(workers, ticket, now), self._rng, now)
        return self._rng.choice(candidates) if candidates else None


class LeastInFlight:
    """The candidate with the fewest requests at once, own and reported."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, _hits: Hits, now: float) -> Worker | None:
        """Fewest requests, times cost."""
        candidates = _candidates(workers, ticket, now)
        return _least(candidates, _in_flight(candidates), self._rng)


class PowerOfTwo:
    """Of two candidates drawn at random, the one with fewer requests at once."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, _hits: Hits, now: float) -> Worker | None:
        """Draw two, compare."""
        candidates = _candidates(workers, ticket, now)
        if len(candidates) > 2:
            candidates = self._rng.sample(candidates, 2)
        return _least(candidates, _in_flight(candidates), self._rng)


def _candidates(workers: list[Worker], ticket: Ticket, now: float) -> list[Worker]:
    return [worker for worker in workers if has_room(worker, ticket, now)]


def _warm(candidates: list[Worker], rng: Random, now: float) -> list[Worker]:
    """The candidates less those that slow start leaves out this time; never none of them."""
    if all(now >= worker.warm_at for worker in candidates):
        return candidates
    # Shares count against the warmest, so that a cluster that starts as a whole is not held back.
    shares = [worker.share(now) for worker in candidates]
    most = max(shares)
    return [w for w, share in zip(candidates, shares, strict=True) if share >= most * rng.random()]


def _in_flight(candidates: list[Worker]) -> list[float]:
    lift = _worst([w.foreign.streams for w in candidates if not w.unknown])
    return [w.factor * (w.streams + 1 + _foreign(w, w.foreign.streams, lift)) for w in candidates]


def _foreign(worker: Worker, figure: float, worst_known: float) -> float:
    return max(figure, worst_known) if worker.unknown else figure


def _worst(figures: list[float]) -> float:
    return max(figures, default=0.0)


def _filled(figures: list[float | None], worst: Callable[[list[float]], float]) -> list[float]:
    """`figures` with each unknown one replaced by the worst that is known."""
    known = [figure for figure in figures if figure is not None]
    if len(known) == len(figures):
        return known
    filler = worst(known) if known else 0.0
    return [filler if figure is None else figure for figure in figures]


def _normed(figures: list[float]) -> list[float]:
    most = max(figures, default=0.0)
    return [figure / most for figure in figures] if most > 0 else [0.0] * len(figures)


def _least(candidates: list[Worker], loads: list[float], rng: Random) -> Worker | None:
    """The candidate with the least load, equals by chance."""
    if not candidates:
        return None
    limit = min(loads) + 1e-9
    equals = [w for w, load in zip(candidates, loads, strict=True) if load <= limit]
    return equals[0] if len(equals) == 1 else rng.choice(equals)
