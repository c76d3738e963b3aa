"""How a simulated worker misbehaves: plain data, set by flags or POST /fault. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


class BadFault(ValueError):
    """A fault that does not exist or has an impossible value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of one worker; the defaults are health.

    `hang`: nothing is answered and no step begins, until it is taken back; /fault itself answers.
    `stall`: no step begins, but HTTP answers, with figures that age, as a frozen SGLang scheduler.
    """

    slow_factor: float = 1.0  # steps last so many times as long
    hang: bool = False
    stall: bool = False
    freeze_figures: bool = False  # load answers repeat the figures of now, with their old time
    error_rate: float = 0.0  # share of inference requests that get a 500, by the worker's seed
    kill_after_requests: int | None = None  # dies with this inference request, as by SIGKILL
    restart_after_s: float | None = None  # and comes back; None: stays dead
    reset_after_chunks: int | None = None  # streams break with a reset after so many events


def with_changes(faults: Faults, changes: dict[str, Any]) -> Faults:
    """Return `faults` with the fields in `changes` replaced. Raises BadFault."""
    known = asdict(Faults())
    for name, value in changes.items():
        if name not in known:
            raise BadFault(f"{name}: unknown; known are {', '.join(known)}")
        if not _fits(name, value):
            raise BadFault(f"{name}: {value!r:.80} is not a {_TYPES[name]} in range")
    return replace(faults, **changes)


_TYPES = {field.name: str(field.type) for field in fields(Faults)}


def _fits(name: str, value: Any) -> bool:
    kind = _TYPES[name]
    if kind == "bool":
        return isinstance(value, bool)
    if value is None:
        return kind.endswith("None")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    if kind.startswith("int"):
        return isinstance(value, int) and value >= 0
    if name == "error_rate":
        return 0 <= value <= 1
    return value > 0 if name == "slow_factor" else value >= 0
