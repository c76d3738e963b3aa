"""Which share of each class meets its targets: the last thousand requests of every class.

A request is in SLO when it was served and both its targets hold: the time to the first token, and
the mean time per further token of a sequence. An answer that is not streamed comes whole, so it has
the time that a stream within both targets would have taken. Each request becomes one small code; a
class is a ring of codes with a count per code, so that counting a request costs the same at any
window.

Some requests say nothing of the service and are left out: the client's own errors, refusals of its
own limits, and clients that left before their target had passed. Misses by failing workers are
counted, but apart: no share of the cluster would have helped. So are infeasible requests, whose
prefill alone takes most of their target: a loop that chased them would chase for ever.
Source: docs/policy.md, SLO monitor (A15) and feasibility (2.11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from router.config import Config
from router.core.types import Outcome, Priority, RequestRecord
from router.errors import Reason

# A code is a sum of these; the codes of requests that are counted are those below _NONE.
MET: Final = 1
FEASIBLE: Final = 2
ENGINE: Final = 4  # missed because a worker failed
_NONE: Final = 8  # an empty place of a ring
_JUDGED_MISS: Final = FEASIBLE  # what a loop looks at: feasible, and not a worker's failure
_JUDGED_MET: Final = FEASIBLE | MET

_SUCCESS: Final = Outcome.SUCCESS
_ABORTED: Final = Outcome.ABORTED

# Refusals and failures that are the service's doing, by whether more share would have helped.
_BY_LOAD: Final = frozenset(
    (Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT, Reason.SHED, Reason.UPSTREAM_OVERLOADED)
)
_BY_ENGINE: Final = frozenset(
    (
        Reason.NO_WORKERS,
        Reason.SHUTTING_DOWN,
        Reason.CONNECTIONS_FULL,
        Reason.UPSTREAM_UNREACHABLE,
        Reason.UPSTREAM_ERROR,
        Reason.UPSTREAM_TIMEOUT,
        Reason.UPSTREAM_PROTOCOL,
        Reason.INTERNAL,
        Reason.RELAY_LOST,
    )
)


class Standing(StrEnum):
    """Where a class stands; worst last."""

    UNKNOWN = "unknown"  # nothing was counted yet
    MET = "met"
    BELOW_TARGET = "below_target"
    BELOW_FLOOR = "below_floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassView:
    """One class over its window. A share is None while it is a share of nothing."""

    priority: Priority
    ttft_target_s: float
    tpot_target_s: float
    requests: int
    met: int
    feasible_requests: int
    feasible_met: int
    engine_misses: int
    standing: Standing  # of the feasible requests

    @property
    def attainment(self) -> float | None:
        """The share of all requests that met their targets."""
        return self.met / self.requests if self.requests else None

    @property
    def attainment_feasible(self) -> float | None:
        """The same of those that could have met them."""
        return self.feasible_met / self.feasible_requests if self.feasible_requests else None


@dataclass(frozen=True, slots=True)
class Totals:
    """What a loop looks at: feasible requests since the start, workers' failures left out."""

    judged: int
    met: int
    engine_misses: int  # feasible ones


NOTHING_JUDGED: Final = Totals(0, 0, 0)


class _Window:
    """One class: its targets, the ring of its last codes, and how many there are of each."""

    __slots__ = ("counts", "others", "place", "ring", "totals", "tpot_target_s", "ttft_target_s")

    def __init__(self, size: int) -> None:
        self.ttft_target_s = self.tpot_target_s = 0.0
        self.totals = [0] * (_NONE + 1)  # by code, since the start
        self.others = NOTHING_JUDGED  # what other routers counted since they were first heard of
        self.resize(size)

    def resize(self, size: int) -> None:
        """Begin an empty ring of `size` places."""
        self.ring = bytearray([_NONE]) * size
        self.place = 0
        self.counts = [0] * (_NONE + 1)  # by code, in the ring
        self.counts[_NONE] = size


class SloMonitor:
    """Attainment per class. `count` is on the hot path: a constant and small cost per request."""

    def __init__(self, config: Config) -> None:
        self._windows = [_Window(config.slo.window_requests) for _ in Priority]
        self._heard: Mapping[str, Sequence[Totals]] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new targets; what was counted keeps its verdict, but not in a resized ring."""
        self._settings = config.slo
        for window, settings in zip(self._windows, config.classes.by_priority, strict=True):
            window.ttft_target_s = settings.ttft_target_s
            window.tpot_target_s = settings.tpot_target_s
            if len(window.ring) != config.slo.window_requests:
                window.resize(config.slo.window_requests)

    def count(self, record: RequestRecord, *, feasible: bool = True) -> bool | None:
        """Count a finished request; True when it was in SLO, None when it is not counted."""
        window = self._windows[record.priority]
        began_at, outcome = record.first_token_at, record.outcome
        if outcome is _SUCCESS and not record.stream:
            target_s = window.ttft_target_s + window.tpot_target_s * record.further_tokens
            met = record.finished_at - record.arrived_at <= target_s
            code = met + FEASIBLE if feasible else int(met)
        elif began_at is not None and (outcome is _SUCCESS or outcome is _ABORTED):
            further = record.further_tokens
            met = began_at - record.arrived_at <= window.ttft_target_s and (
                not further or record.finished_at - began_at <= window.tpot_target_s * further
            )
            code = met + FEASIBLE if feasible else int(met)
        else:
            code = unanswered(record, ttft_target_s=window.ttft_target_s)
            if code == _NONE:
                return None
            met = code == MET
            code |= FEASIBLE * feasible
        ring, place, counts = window.ring, window.place, window.counts
        counts[ring[place]] -= 1
        counts[code] += 1
        window.totals[code] += 1
        ring[place] = code
        place += 1
        window.place = place if place < len(ring) else 0
        return met

    def totals(self, priority: Priority) -> Totals:
        """What all routers counted of a class, for loops that take differences."""
        return _sum(self.own_totals(priority), self._windows[priority].others)

    def own_totals(self, priority: Priority) -> Totals:
        """What has been counted of a class here since the start."""
        totals = self._windows[priority].totals
        return Totals(
            judged=totals[_JUDGED_MET] + totals[_JUDGED_MISS],
            met=totals[_JUDGED_MET],
            engine_misses=totals[FEASIBLE | ENGINE],
        )

    def hear(self, judged: Mapping[str, Sequence[Totals]]) -> bool:
        """Other routers, by name, say what they counted of each class since their start.

        True if there is anything new. Of one that was not heard of before only what comes counts.
        """
        fresh = False
        for name in judged.keys() & self._heard.keys():
            for window, new, old in zip(
                self._windows, judged[name], self._heard[name], strict=True
            ):
                if new != old:
                    window.others = _sum(window.others, _since(old, new))
                    fresh = True
        self._heard = dict(judged)
        return fresh

    def view(self, priority: Priority) -> ClassView:
        """One class over its window."""
        window = self._windows[priority]
        counts = window.counts
        met = counts[_JUDGED_MET]
        feasible_requests = met + counts[_JUDGED_MISS] + counts[FEASIBLE | ENGINE]
        return ClassView(
            priority=priority,
            ttft_target_s=window.ttft_target_s,
            tpot_target_s=window.tpot_target_s,
            requests=sum(counts[:_NONE]),
            met=met + counts[MET],
            feasible_requests=feasible_requests,
            feasible_met=met,
            engine_misses=counts[ENGINE] + counts[FEASIBLE | ENGINE],
            standing=self._standing(met, feasible_requests),
        )

    def snapshot(self) -> tuple[ClassView, ...]:
        """All classes, most urgent first."""
        return tuple(self.view(priority) for priority in Priority)

    def _standing(self, met: int, requests: int) -> Standing:
        if not requests:
            return Standing.UNKNOWN
        attainment = met / requests
        if attainment < self._settings.floor:
            return Standing.BELOW_FLOOR
        return Standing.MET if attainment >= self._settings.target else Standing.BELOW_TARGET


def _sum(one: Totals, other: Totals) -> Totals:
    return Totals(
        one.judged + other.judged, one.met + other.met, one.engine_misses + other.engine_misses
    )


def _since(old: Totals, new: Totals) -> Totals:
    return Totals(new.judged - old.judged, new.met - old.met, new.engine_misses - old.engine_misses)


def unanswered(record: RequestRecord, *, ttft_target_s: float) -> int:
    """The code, FEASIBLE apart, of a request without a first token or whose worker failed.

    _NONE for one that says nothing of the service.
    """
    waited_s = record.finished_at - record.arrived_at
    match record.outcome:
        case Outcome.SUCCESS:  # a stream without a token
            return MET if waited_s <= ttft_target_s else 0
        case Outcome.ABORTED:
            return 0 if _kept_waiting(record, waited_s) > ttft_target_s else _NONE
        case Outcome.CLIENT_ERROR:
            return _NONE
        case Outcome.REFUSED | Outcome.FAILED:
            if record.reason in _BY_LOAD:
                return 0
            failed = record.outcome is Outcome.FAILED or record.reason in _BY_ENGINE
            return ENGINE if failed else _NONE
        case _:
            assert_never(record.outcome)


def _kept_waiting(record: RequestRecord, waited_s: float) -> float:
    """The seconds that speak against us when the client left before any answer.

    A whole answer may take longer than the first token's target, once it is being made.
    """
    if record.stream or record.dispatched_at is None:
        return waited_s
    return record.dispatched_at - record.arrived_at
