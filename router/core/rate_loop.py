"""The slow loop: shares of the classes follow their attainment, a little and not often.

Every interval the loop looks at each class: error = target - attainment, over its last 200 feasible
requests or its last 30 seconds, whichever is more. The dead band below the target is never narrower
than 2.5 standard errors and one miss of what so few requests can tell, so noise moves next to
nothing. Then, first rule that applies:

1. Everybody with enough requests is below target: shares cannot help; the loop says so (shed the
   lowest class, add workers) and moves nothing.
2. A class is below target: the one that is most below gets a part of the share of the best class.
3. A class far above target still holds more than is configured for it: it gives a part back to
   those that have less than configured.
4. All are in SLO: all shares go back toward the configured ones, slowly.

Shares add up to 1 and stay in [floor, ceiling], always. What a move did shows only later, so what
was measured before the last move never justifies another transfer, and a move that goes against the
last one waits a whole window: not more than two changes of direction a minute at a window of 30 s,
whatever the figures do. Misses of failing workers and infeasible requests never count.
The shares are of the budget that the classes' `share_min` add up to. Source: A16, 2.7.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from typing import Final

from router.config import Config
from router.core.slo import SloMonitor, Totals
from router.core.types import Priority
from router.qos_settings import SloSettings

Shares = tuple[float, ...]  # by priority

_NOISE: Final = 2.5  # standard errors that a shortfall must exceed to be one
_STILL: Final = 1e-9  # a transfer or a time below this is none


class Act(StrEnum):
    """What the loop did, or why it did nothing. Closed: a metric label."""

    LIFT = "lift"  # the worst class got from the best
    GIVE_BACK = "give_back"  # a class far above target returned what it had got
    RETURN = "return"  # a step toward the configured shares
    OVERLOADED = "overloaded"  # all below target: shed the lowest class, add workers
    CONTENT = "content"  # nothing to do
    ENGINE_ERRORS = "engine_errors"  # the only shortfall is due to failing workers
    FEW_REQUESTS = "few_requests"  # a class looks bad, on too few requests to act
    NO_DONOR = "no_donor"  # a class is below target, and nobody has any to spare
    CLAMPED = "clamped"  # the class that is below target has all that it may have
    COOLING = "cooling"  # a move was made just now
    AGAINST_LAST = "against_last"  # it would go against the last move, which must stand a while

    @property
    def moves(self) -> bool:
        """Whether shares change."""
        return self in (Act.LIFT, Act.GIVE_BACK, Act.RETURN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one class showed when the loop looked. None: no requests at all."""

    attainment: float | None  # of feasible requests, workers' failures left out
    requests: int
    fresh_attainment: float | None  # the same since the last move
    fresh_requests: int
    engine_misses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One look of the loop and what came of it."""

    at: float
    act: Act
    applied: bool  # False: nothing changed, by its act or because the loop only observes
    why: str
    before: Shares
    after: Shares  # what it would have been, when only observing
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopView:
    """The loop at one moment."""

    loop: str  # adjust, observe, off
    shares: Shares
    configured: Shares
    guarantees: Shares
    last: Step | None
    moves: tuple[Step, ...]  # oldest first; holds only where the loop's mind changed
    overloaded: bool
    shed: Priority | None


class RateLoop:
    """Moves shares between classes. Call `step` when `due_at` has come."""

    def __init__(self, config: Config) -> None:
        self._settings = config.slo
        self._configured, self._budget = _configured(config)
        self._floors, self._ceilings = _bounds(self._configured, config.slo)
        self._shares = self._configured
        self._looks: deque[tuple[float, tuple[Totals, ...]]] = deque()
        self._moves: deque[Step] = deque(maxlen=config.slo.history_max)
        self._last: Step | None = None
        self._signs = [0] * len(Priority)  # whether a class last got (1) or gave (-1)
        self._moved_at = -inf
        self._transferred_at = -inf  # the last move that was more than a return
        self.due_at = -inf  # the moment of the next look

    @property
    def shares(self) -> Shares:
        """Shares of the budget by class; they add up to 1."""
        return self._shares

    @property
    def guarantees(self) -> Shares:
        """Minimum shares of the dispatched cost by class, as the queue wants them."""
        return tuple(share * self._budget for share in self._shares)

    @property
    def overloaded(self) -> bool:
        """Whether all classes are below target, so that no move could help: add workers."""
        return self._last is not None and self._last.act is Act.OVERLOADED

    @property
    def shed(self) -> Priority | None:
        """The class to turn away while `overloaded`: the lowest that is there; never the only one.

        None when not overloaded.
        """
        if self._last is None or self._last.act is not Act.OVERLOADED:
            return None
        there = [p for p in Priority if self._last.evidence[p].requests]
        return there[-1] if len(there) > 1 else None

    def view(self) -> LoopView:
        """Everything about the loop, frozen."""
        return LoopView(
            loop=self._settings.loop,
            shares=self._shares,
            configured=self._configured,
            guarantees=self.guarantees,
            last=self._last,
            moves=tuple(self._moves),
            overloaded=self.overloaded,
            shed=self.shed,
        )

    def configure(self, config: Config) -> None:
        """Take over new settings; other configured shares or bounds start anew from them."""
        configured, budget = _configured(config)
        bounds = _bounds(configured, config.slo)
        if (configured, *bounds) != (self._configured, self._floors, self._ceilings):
            self._shares = configured
            self._signs = [0] * len(Priority)
        if config.slo.loop != "adjust":
            self._shares = configured
        self._configured, self._budget = configured, budget
        self._floors, self._ceilings = bounds
        if config.slo.history_max != self._settings.history_max:
            self._moves = deque(self._moves, maxlen=config.slo.history_max)
        self._settings = config.slo

    def forget(self) -> None:
        """What it saw is past, and what it last found holds no longer; its moves stay."""
        self._looks.clear()
        self._last = None

    def adopt(self, shares: Shares) -> None:
        """Take over the shares that another router's loop decided; what this one saw is past."""
        self.forget()
        if self._settings.loop == "adjust":
            self._shares = shares

    def step(self, monitor: SloMonitor, *, now: float) -> Step | None:
        """Look at the classes and move what has to be moved; None while the loop is off."""
        settings = self._settings
        self.due_at = now + settings.interval_s
        if settings.loop == "off":
            self.forget()
            return None
        totals = tuple(monitor.totals(priority) for priority in Priority)
        evidence = tuple(self._evidence(totals, priority, now) for priority in Priority)
        self._looks.append((now, totals))
        while self._looks[0][0] < now - settings.window_s_max:
            self._looks.popleft()
        before = self._shares
        act, why, after = self._decided(evidence)
        if act.moves:
            act, why = self._restrained(act, why, after, now)
        moved = act.moves
        step = Step(
            at=now,
            act=act,
            applied=moved and settings.loop == "adjust",
            why=why,
            before=before,
            after=after if moved else before,
            evidence=evidence,
        )
        self._remember(step)
        return step

    # Inside.

    def _evidence(self, totals: tuple[Totals, ...], priority: Priority, now: float) -> Evidence:
        """A class since the look that is a window and enough samples ago; and since the last move.

        Before the first look nothing is known, so the first window starts with the loop.
        """
        settings, end = self._settings, totals[priority]
        start = fresh = end
        for at, look in reversed(self._looks):
            since = look[priority]
            if at >= self._transferred_at:
                fresh = since
            start = since
            if now - at >= settings.window_s and end.judged - since.judged >= settings.samples:
                break
        requests, fresh_requests = end.judged - start.judged, end.judged - fresh.judged
        return Evidence(
            attainment=(end.met - start.met) / requests if requests else None,
            requests=requests,
            fresh_attainment=(end.met - fresh.met) / fresh_requests if fresh_requests else None,
            fresh_requests=fresh_requests,
            engine_misses=end.engine_misses - start.engine_misses,
        )

    def _decided(self, evidence: Sequence[Evidence]) -> tuple[Act, str, Shares]:
        """The rule that applies, why, and the shares after it, before any restraint."""
        known = [p for p in Priority if evidence[p].fresh_requests >= self._settings.samples_min]
        gaps = {
            p: self._gap(evidence[p].fresh_attainment, evidence[p].fresh_requests) for p in known
        }
        below = [p for p in known if gaps[p] > 0]
        if below and len(below) == len(known):
            return Act.OVERLOADED, f"{_names(known)}: all below target", self._shares
        if below:
            # Of equals max takes the first: the most urgent.
            return self._lifted(max(below, key=lambda p: gaps[p]), known, evidence)
        given = self._given_back(known, evidence)
        if given is not None:
            return given
        return self._returned(evidence)

    def _lifted(
        self, worst: Priority, known: Sequence[Priority], evidence: Sequence[Evidence]
    ) -> tuple[Act, str, Shares]:
        settings, shares = self._settings, self._shares
        found = evidence[worst]
        attainment = found.fresh_attainment or 0.0
        why = f"{worst.name} at {attainment:.1%} of {found.fresh_requests}"
        room = self._ceilings[worst] - shares[worst]
        if room < _STILL:
            return Act.CLAMPED, f"{why}, at its ceiling", shares
        donors = [
            p
            for p in known
            if (evidence[p].fresh_attainment or 0.0) >= settings.target
            and shares[p] - self._floors[p] > _STILL
        ]
        if not donors:
            return Act.NO_DONOR, f"{why}, nobody above target has any to spare", shares
        # Of equals the least urgent gives.
        donor = max(donors, key=lambda p: (evidence[p].fresh_attainment or 0.0, p))
        far = settings.target - attainment > settings.far_gap
        ratio = settings.step_far_ratio if far else settings.step_ratio
        amount = min(ratio * shares[donor], shares[donor] - self._floors[donor], room)
        after = list(shares)
        after[donor] -= amount
        after[worst] += amount
        why = f"{why}: gets {amount:.2%} from {donor.name}"
        return Act.LIFT, why, _normal(after)

    def _given_back(
        self, known: Sequence[Priority], evidence: Sequence[Evidence]
    ) -> tuple[Act, str, Shares] | None:
        """Rule 3, or None when nobody has anything to give back."""
        settings, shares, configured = self._settings, self._shares, self._configured
        gaps = [c - s for c, s in zip(configured, shares, strict=True)]
        best: Priority | None = None
        for p in known:
            attainment = evidence[p].fresh_attainment or 0.0
            # One standard error: it only goes back to what was configured for it anyway.
            error = self._standard_error(evidence[p].fresh_requests)
            sure = attainment - settings.target > error
            above = attainment > settings.give_back_above and sure and gaps[p] < -_STILL
            if above and (best is None or gaps[p] < gaps[best]):
                best = p
        if best is None:
            return None
        amount = min(settings.step_ratio * shares[best], -gaps[best])
        lacking = sum(gap for gap in gaps if gap > 0)
        after = [s + amount * max(0.0, g) / lacking for s, g in zip(shares, gaps, strict=True)]
        after[best] -= amount
        why = f"{best.name} at {evidence[best].fresh_attainment:.1%}: gives back {amount:.2%}"
        return Act.GIVE_BACK, why, _normal(after)

    def _returned(self, evidence: Sequence[Evidence]) -> tuple[Act, str, Shares]:
        shares, target = self._shares, self._settings.target
        short = [p for p in Priority if (a := evidence[p].attainment) is not None and a < target]
        if short:
            doubt = [
                p for p in short if self._gap(evidence[p].attainment, evidence[p].requests) > 0
            ]
            act = Act.FEW_REQUESTS if doubt else Act.CONTENT
            return act, f"{_names(doubt or short)}: below target, not for certain", shares
        gaps = [c - s for c, s in zip(self._configured, shares, strict=True)]
        away = sum(gap for gap in gaps if gap > 0)
        if away < _STILL:
            return self._settled(evidence)
        part = min(1.0, self._settings.return_step / away)
        after = [s + part * gap for s, gap in zip(shares, gaps, strict=True)]
        return (
            Act.RETURN,
            "all in SLO: toward the configured shares",
            (self._configured if part == 1 else _normal(after)),
        )

    def _settled(self, evidence: Sequence[Evidence]) -> tuple[Act, str, Shares]:
        """Nothing to do; say so if it is only because failing workers do not count."""
        hurt = [
            p
            for p in Priority
            if (n := evidence[p].requests + evidence[p].engine_misses)
            and 1 - evidence[p].engine_misses / n < self._settings.target
        ]
        if hurt:
            return Act.ENGINE_ERRORS, f"{_names(hurt)}: workers fail", self._shares
        return Act.CONTENT, "all in SLO, at the configured shares", self._shares

    def _restrained(self, act: Act, why: str, after: Shares, now: float) -> tuple[Act, str]:
        """The move, or why it has to wait."""
        if now - self._moved_at < self._settings.cool_down_s - _STILL:
            return Act.COOLING, why
        signs = _signs(self._shares, after)
        against = any(new * old < 0 for new, old in zip(signs, self._signs, strict=True))
        if against and now - self._moved_at < self._settings.window_s:
            return Act.AGAINST_LAST, why
        self._moved_at = now
        self._signs = [new or old for new, old in zip(signs, self._signs, strict=True)]
        if self._settings.loop == "adjust":
            self._shares = after
            if act is not Act.RETURN:
                self._transferred_at = now
        return act, why

    def _remember(self, step: Step) -> None:
        if step.act.moves or self._last is None or self._last.act is not step.act:
            self._moves.append(step)
        self._last = step

    def _gap(self, attainment: float | None, requests: int) -> float:
        """How far an attainment is below target; 0 inside the dead band."""
        if attainment is None:
            return 0.0
        error = self._settings.target - attainment
        noise = _NOISE * self._standard_error(requests) + 1 / requests
        return error if error > max(self._settings.dead_band, noise) else 0.0

    def _standard_error(self, requests: int) -> float:
        """Of the attainment that `requests` show, at least 1 of them, of a class at target."""
        target = self._settings.target
        return sqrt(target * (1 - target) / requests)


def _configured(config: Config) -> tuple[Shares, float]:
    """The configured shares, adding up to 1, and what they are shares of."""
    parts = [settings.share_min for settings in config.classes.by_priority]
    budget = sum(parts)
    if budget <= 0:
        return tuple(1 / len(parts) for _ in parts), 0.0
    return _normal(parts), budget


def _bounds(configured: Shares, settings: SloSettings) -> tuple[Shares, Shares]:
    floors = tuple(min(settings.share_floor, share) for share in configured)
    ceilings = tuple(max(settings.share_ceiling, share) for share in configured)
    return floors, ceilings


def _normal(parts: Sequence[float]) -> Shares:
    total = sum(parts)
    return tuple(part / total for part in parts)


def _signs(before: Shares, after: Shares) -> list[int]:
    return [
        (new - old > _STILL) - (old - new > _STILL) for old, new in zip(before, after, strict=True)
    ]


def _names(classes: Sequence[Priority]) -> str:
    return ", ".join(p.name for p in classes)
