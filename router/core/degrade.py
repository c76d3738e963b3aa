"""What saturation costs: shorter answers, then a smaller model, then refusal, lowest class first.

A ladder of levels, each with a threshold on one figure, the saturation:

    level  above  P3                    P2                    P0, P1
    1      0.8    max_tokens is cut     max_tokens is cut     as they are
    2      0.9    smaller model, or cut cut to half of that   as they are
                  to half of that
    3      1.0    smaller model, or cut smaller model, or cut as they are
                  to a quarter          to a quarter

Who may go to no smaller model is refused when those of its class have waited until their patience
is nearly over: it would time out as well. Until then it is held: to be late is not to be refused.
P0 and P1 are refused by their deadline alone; an operator may let them go to the smaller model too,
at level 3 (`degrade.fallback_from`). A level begins when saturation has been above its
threshold for a moment and ends when it has been clearly below it for long, so it does not flutter.
A request that fits as it is stays as it is, at any level; so does one whose output has a structure
that a cut would break, and one of a tenant that does not want it. The latter two are not spared
refusal: the ladder may only not change them.
Source: docs/policy.md, degradation (A14, 2.10).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import inf
from typing import Final

from router.core.types import Priority
from router.qos_settings import DegradeSettings

HEADER: Final = "x-laneway-degraded"
_CHANGES_MAX: Final = 100


class Level(IntEnum):
    """How far down the ladder the router is."""

    NORMAL = 0
    CUT = 1  # shorter answers for P2 and P3
    SHED_P3 = 2
    SHED_P2 = 3


class Act(StrEnum):
    """What becomes of a request. Closed: a metric label."""

    KEEP = "keep"  # as it is; it waits if it does not fit
    CUT = "cut"  # with a smaller max_tokens
    OTHER_MODEL = "other_model"  # by its model's fallback, perhaps cut too
    REFUSE = "refuse"


# Members of enums are found slowly; these are asked for at each request under overload.
_KEEP: Final = Act.KEEP
_CUT: Final = Act.CUT
_OTHER_MODEL: Final = Act.OTHER_MODEL
_REFUSE: Final = Act.REFUSE
_CUT_AT: Final = Level.CUT
_P2: Final = Priority.P2


@dataclass(slots=True, init=False, kw_only=True)
class Decision:
    """What to do with one request. `max_tokens` and `model` are set where they are to change."""

    act: Act
    level: Level
    max_tokens: int | None
    model: str | None

    def __init__(
        self, act: Act, level: Level, max_tokens: int | None = None, model: str | None = None
    ) -> None:
        self.act = act
        self.level = level
        self.max_tokens = max_tokens
        self.model = model

    @property
    def header(self) -> str | None:
        """The value of HEADER that tells the client; None when nothing was changed."""
        changes = []
        if self.model is not None:
            changes.append(f"model={self.model}")
        if self.max_tokens is not None:
            changes.append(f"max_tokens={self.max_tokens}")
        return "; ".join([*changes, f"level={int(self.level)}"]) if changes else None


@dataclass(slots=True, init=False)
class Facts:
    """What the ladder asks of a request."""

    priority: Priority
    fits: bool  # a worker could take it now, as it is
    times_out: bool  # as others of its class wait now, its patience would end before its turn
    changeable: bool  # the tenant's setting
    structured: bool  # response_format, json_schema, regex, ebnf, tools: found by the edge
    generates: bool  # answers token by token, so max_tokens means something
    max_tokens: int | None  # as the client asked; None: no limit
    fallback: str | None  # its model's fallback, if that is served and not saturated itself

    def __init__(
        self,
        *,
        priority: Priority,
        fits: bool,
        times_out: bool,
        changeable: bool,
        structured: bool,
        generates: bool,
        max_tokens: int | None,
        fallback: str | None,
    ) -> None:
        self.priority = priority
        self.fits = fits
        self.times_out = times_out
        self.changeable = changeable
        self.structured = structured
        self.generates = generates
        self.max_tokens = max_tokens
        self.fallback = fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelChange:
    """The ladder moved."""

    at: float
    old: Level
    new: Level
    saturation: float


@dataclass(slots=True, eq=False)
class _Rung:
    """One level with its threshold."""

    threshold: float
    above_since: float | None = None  # None: not above it
    held_at: float = -inf  # the last moment at which saturation was not clearly below
    on: bool = False


class Ladder:
    """The level of one pool of workers. Observe it often; a few times a second is enough."""

    def __init__(self, settings: DegradeSettings) -> None:
        self.settings = settings
        self.level = Level.NORMAL
        self.saturation: float | None = None  # as last observed
        self._rungs = [_Rung(threshold) for threshold in _thresholds(settings)]
        self._changes: deque[LevelChange] = deque(maxlen=_CHANGES_MAX)

    def configure(self, settings: DegradeSettings) -> None:
        """Take over new settings; the level follows with the next observation."""
        self.settings = settings
        for rung, threshold in zip(self._rungs, _thresholds(settings), strict=True):
            rung.threshold = threshold

    @property
    def changes(self) -> tuple[LevelChange, ...]:
        """The last moves of the level, oldest first."""
        return tuple(self._changes)

    def observe(self, saturation: float | None, *, now: float) -> LevelChange | None:
        """Take note of the saturation, which stands until the next call.

        None: unknown. It neither begins nor ends a level. Returns the change of level, if any.
        """
        self.saturation = saturation
        for rung in self._rungs:
            self._judge(rung, saturation, now)
        new = Level(max((n for n, rung in enumerate(self._rungs, 1) if rung.on), default=0))
        if new is self.level:
            return None
        seen = 0.0 if saturation is None else saturation
        change = LevelChange(at=now, old=self.level, new=new, saturation=seen)
        self.level = new
        self._changes.append(change)
        return change

    def decide(self, facts: Facts) -> Decision:
        """What becomes of a request now."""
        return decide(facts, level=self.level, settings=self.settings)

    def _judge(self, rung: _Rung, saturation: float | None, now: float) -> None:
        settings = self.settings
        if not settings.enabled:
            rung.on, rung.above_since = False, None
            return
        if saturation is None:
            rung.above_since, rung.held_at = None, now
            return
        if saturation <= rung.threshold:
            rung.above_since = None
        elif rung.above_since is None:
            rung.above_since = now
        if saturation > rung.threshold - settings.hysteresis:
            rung.held_at = now
        if rung.above_since is not None and now - rung.above_since >= settings.rise_s:
            rung.on = True
        elif now - rung.held_at >= settings.fall_s:
            rung.on = False


def saturation(
    *, hold_ratio: float | None, duty_min: float | None, kv_ratio: float | None
) -> float | None:
    """S = max(hold age / TTFT target, 1 - least prefill duty, KV in use); None when all unknown.

    An unknown part is left out: it neither raises nor hides what is known. Source: 2.10.
    """
    parts = [hold_ratio, None if duty_min is None else 1 - duty_min, kv_ratio]
    return max((part for part in parts if part is not None), default=None)


def decide(facts: Facts, *, level: Level, settings: DegradeSettings) -> Decision:
    """What becomes of a request at `level`."""
    priority = facts.priority
    if not settings.enabled or facts.fits:
        return Decision(act=_KEEP, level=level)
    changeable = facts.changeable and (settings.structured or not facts.structured)
    tokens = _cut_tokens(facts, level, settings) if changeable else None
    if level >= _ELSEWHERE_AT[priority]:
        if changeable and facts.fallback is not None and priority >= settings.fallback_from:
            return Decision(act=_OTHER_MODEL, level=level, model=facts.fallback, max_tokens=tokens)
        if facts.times_out and priority >= _P2:
            return Decision(act=_REFUSE, level=level)
    if tokens is not None:
        return Decision(act=_CUT, level=level, max_tokens=tokens)
    return Decision(act=_KEEP, level=level)


# From which level on a class goes to the smaller model, or nowhere.
_ELSEWHERE_AT: Final = {
    Priority.P0: Level.SHED_P2,
    Priority.P1: Level.SHED_P2,
    Priority.P2: Level.SHED_P2,
    Priority.P3: Level.SHED_P3,
}


def _cut_tokens(facts: Facts, level: Level, settings: DegradeSettings) -> int | None:
    """The smaller max_tokens of a request; None when there is nothing to cut."""
    if level < _CUT_AT or facts.priority < _P2 or not facts.generates:
        return None
    cap = max(settings.tokens_floor, settings.tokens_cap >> (level - _CUT_AT))
    return cap if facts.max_tokens is None or facts.max_tokens > cap else None


def _thresholds(settings: DegradeSettings) -> tuple[float, float, float]:
    return settings.cut_above, settings.shed_p3_above, settings.shed_p2_above
