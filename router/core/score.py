"""Choosing one worker among those that have room: six policies, all on live accounts.

Every policy skips workers without room, counts a worker's slow start as more load, and does not let
a worker whose figures are unknown look better than those that are known: what only reports can tell
is taken from the worst known candidate. Ties are broken by the seeded random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Final

from router.config import PolicySettings
from router.core.types import Ticket
from router.core.worker import Worker

Hits = Sequence[tuple[int, int]]  # workers' bits, and the prompt tokens that they have cached
Pick = Callable[[list[Worker], Ticket, Hits, float], Worker | None]

# Scores this close are equal: measured rates of equal workers differ by more, and the luckiest of
# them must not get all that a quiet cluster has to do. Nobody feels two milliseconds more or less.
_TIE: Final = 0.05
_ABOVE: Final = 1 + _TIE
_BELOW: Final = 1 - _TIE
_TIE_S: Final = 0.002
_STALL_GRACE_S: Final = 0.1


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


def stalled_s(worker: Worker, now: float) -> float:
    """Seconds for which a worker with waiting prompts has shown no progress, beyond what is usual.

    Up to its pending prefill and a tenth of a second nothing is amiss; counting that too would send
    a whole burst to whichever of two idle workers was sent its first request a moment later.
    """
    beyond_s = now - worker.progress_at - _STALL_GRACE_S
    if beyond_s <= 0:
        return 0.0
    return max(0.0, beyond_s - worker.rates.prefill_s * worker.pend_tokens)


def expected_hit(hits: Hits, worker: Worker) -> int:
    """Prompt tokens that `worker` is expected to have cached."""
    for bits, tokens in hits:
        if bits & worker.bit:
            return tokens
    return 0


class LeastWork:
    """The fewest seconds of predicted waiting, decoding and KV pressure.

    `stalled + c*(pend + u) + attn*u*(hit + u/2) + 2*step(B + 1) + 0.05*k/(1 - k)`, where u is the
    prompt without its expected cached prefix, so that u*(hit + u/2) = (prompt^2 - hit^2)/2. The
    last two terms are `worker.score`.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, hits: Hits, now: float) -> Worker | None:
        """The candidate with the lowest score; among equals the fewest streams, then chance.

        One pass without lists: with many workers this loop is the cost of a decision. What is rare
        (a retry, a worker with unknown figures) is left to `_pick_carefully`.
        """
        if ticket.tried:
            return self._pick_carefully(workers, ticket, hits, now)
        need, prompt = ticket.kv_tokens, ticket.prompt_tokens
        rank, pairs = ticket.rank, prompt * prompt
        chosen: Worker | None = None
        limit = clearly_less = inf
        lightest, ties = 0.0, 0
        for w in workers:
            if w.valid_until <= now:
                w.refresh(now)
            streams = w.streams
            if w.unknown:
                return self._pick_carefully(workers, ticket, hits, now)
            hit = expected_hit(hits, w) if hits else 0
            pend = w.pend_tokens + prompt - hit
            if (
                streams >= w.permits[rank]
                or w.kv_reserved_tokens + need > w.kv_admitted_tokens
                or (pend > w.pend_admitted_tokens[rank] and (w.waiting or w.pend_foreign))
            ):
                continue
            score = w.score + w.score_per_token * pend + w.score_per_pair * (pairs - hit * hit)
            stalls = w.score_per_s and now - w.progress_at > _STALL_GRACE_S
            score = score + w.score_per_s * stalled_s(w, now) if stalls else score
            if score <= limit:
                equal = score * _ABOVE + _TIE_S
                load = streams * w.part
                limit = equal if equal < limit else limit
                if score < clearly_less or load < lightest:
                    ties = 0
                elif load > lightest:
                    continue
                ties += 1
                if ties == 1 or self._rng.random() * ties < 1:
                    chosen, lightest, clearly_less = w, load, score * _BELOW - _TIE_S
        return chosen

    def _pick_carefully(
        self, workers: list[Worker], ticket: Ticket, hits: Hits, now: float
    ) -> Worker | None:
        candidates = _candidates(workers, ticket, hits, now)
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        scores = _work(candidates, ticket, hits, now)
        limit = min(scores) * _ABOVE + _TIE_S
        near = [candidates[at] for at, score in enumerate(scores) if score <= limit]
        return _least(near, [worker.streams * worker.part for worker in near], self._rng)


def _work(candidates: list[Worker], ticket: Ticket, hits: Hits, now: float) -> list[float]:
    """Scores by candidate, unknown ones lifted to what reports tell of the worst known one."""
    prompt = ticket.prompt_tokens
    worst = _worst([w.score_foreign for w in candidates if not w.unknown])
    scores = []
    for w in candidates:
        hit = expected_hit(hits, w)
        score = w.score + w.score_per_s * stalled_s(w, now)
        score += w.score_per_token * (w.pend_tokens + prompt - hit)
        score += w.score_per_pair * (prompt * prompt - hit * hit)
        lift = max(0.0, worst - w.score_foreign) if w.unknown else 0.0
        scores.append(score + lift)
    return scores


class Weighted:
    """`w1*norm(free KV) + w2*(1 - norm(queue)) + w3*(1 - norm(latency))`, highest wins.

    Each figure is live (report plus own dispatches), its norm the share of the largest among the
    candidates. What is minimised here is the complement, so that a worker's cost can multiply it.
    """

    def __init__(self, settings: PolicySettings, rng: Random) -> None:
        self._settings = settings
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, hits: Hits, now: float) -> Worker | None:
        """The candidate with the least weighted load."""
        candidates = _candidates(workers, ticket, hits, now)
        lift = _worst([w.foreign.waiting for w in candidates if not w.unknown])
        queue = _normed([w.waiting + _foreign(w, w.foreign.waiting, lift) for w in candidates])
        free = _normed(_filled([kv_free_tokens(w) for w in candidates], min))
        latency = _normed(_filled([latency_s(w) for w in candidates], max))
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


def kv_free_tokens(worker: Worker) -> float | None:
    """KV tokens that nobody uses or was promised; None while that is unknown."""
    if worker.unknown or worker.kv_total_tokens is None:
        return None
    return max(0.0, worker.kv_total_tokens - worker.kv_load_tokens)


def latency_s(worker: Worker) -> float | None:
    """Mean seconds to the first token: own measurement, else as reported, else unknown."""
    if worker.ttft_mean_s is None and worker.report is not None and worker.foreign.known:
        return worker.report.ttft_mean_s
    return worker.ttft_mean_s


class RoundRobin:
    """The candidate whose last turn is longest ago."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, hits: Hits, now: float) -> Worker | None:
        """Turns are kept per worker, so full and missing ones do not disturb the order."""
        candidates = _warm(_candidates(workers, ticket, hits, now), self._rng, now)
        return min(candidates, key=lambda worker: worker.turn, default=None)


class Chance:
    """Any candidate, at random."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, hits: Hits, now: float) -> Worker | None:
        """Each with the same chance; less in slow start."""
        candidates = _warm(_candidates(workers, ticket, hits, now), self._rng, now)
        return self._rng.choice(candidates) if candidates else None


class LeastInFlight:
    """The candidate with the fewest requests at once, own and reported."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, hits: Hits, now: float) -> Worker | None:
        """Fewest requests, times cost."""
        candidates = _candidates(workers, ticket, hits, now)
        return _least(candidates, _in_flight(candidates), self._rng)


class PowerOfTwo:
    """Of two candidates drawn at random, the one with fewer requests at once."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, workers: list[Worker], ticket: Ticket, hits: Hits, now: float) -> Worker | None:
        """Draw two, compare."""
        candidates = _candidates(workers, ticket, hits, now)
        if len(candidates) > 2:
            candidates = self._rng.sample(candidates, 2)
        return _least(candidates, _in_flight(candidates), self._rng)


def _candidates(workers: list[Worker], ticket: Ticket, hits: Hits, now: float) -> list[Worker]:
    """The workers that may be given `ticket` now: permits, KV, pace, no mark, not tried yet."""
    need, prompt = ticket.kv_tokens, ticket.prompt_tokens
    rank = ticket.rank
    found = [
        w
        for w in workers
        if (w.valid_until > now or w.refresh(now))
        and w.streams < w.permits[rank]
        and w.kv_reserved_tokens + need <= w.kv_admitted_tokens
        and (
            w.pend_tokens + prompt - expected_hit(hits, w) <= w.pend_admitted_tokens[rank]
            or not (w.waiting or w.pend_foreign)
        )
    ]
    if ticket.tried:
        found = [worker for worker in found if worker.id not in ticket.tried]
    return found


def _warm(candidates: list[Worker], rng: Random, now: float) -> list[Worker]:
    """The candidates less those that slow start leaves out this time; never none of them."""
    if not [worker for worker in candidates if worker.warm_at > now]:
        return candidates
    # Shares count against the warmest, so that a cluster that starts as a whole is not held back.
    shares = [worker.share(now) for worker in candidates]
    most = max(shares)
    return [candidates[at] for at, share in enumerate(shares) if share >= most * rng.random()]


def _in_flight(candidates: list[Worker]) -> list[float]:
    lift = _worst([w.others_streams for w in candidates if not w.unknown])
    return [
        w.factor * w.part * (w.streams + 1 + _foreign(w, w.others_streams, lift))
        for w in candidates
    ]


def _foreign(worker: Worker, figure: float, worst_known: float) -> float:
    return max(figure, worst_known) if worker.unknown else figure


def _worst(figures: list[float]) -> float:
    worst = 0.0  # as `max` with a default, which is slow where all else is compiled
    for figure in figures:
        worst = max(worst, figure)
    return worst


def _filled(figures: list[float | None], worst: Callable[[list[float]], float]) -> list[float]:
    """`figures` with each unknown one replaced by the worst that is known."""
    known = [figure for figure in figures if figure is not None]
    if len(known) == len(figures):
        return known
    filler = worst(known) if known else 0.0
    return [filler if figure is None else figure for figure in figures]


def _normed(figures: list[float]) -> list[float]:
    most = _worst(figures)
    return [figure / most for figure in figures] if most > 0 else [0.0] * len(figures)


def _least(candidates: list[Worker], loads: list[float], rng: Random) -> Worker | None:
    """The candidate with the least load, equals by chance."""
    if not candidates:
        return None
    limit = min(loads) + 1e-9
    equals = [candidates[at] for at, load in enumerate(loads) if load <= limit]
    return equals[0] if len(equals) == 1 else rng.choice(equals)
