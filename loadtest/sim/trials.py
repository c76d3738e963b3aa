"""The trials S1 to S7: a scenario, the cluster it meets, and what breaks meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from loadtest.scenarios import SCENARIOS, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a worker at a moment."""

    at_s: float
    worker: int
    kind: Literal["kill", "revive", "slow", "freeze"]
    ratio: float = 1.0  # slow: steps last this many times as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Figures count requests that arrive between `measured_from_s` and `length_s`."""

    name: str
    scenario: Scenario
    workers: tuple[str, ...] = ("h100-8b",) * 8  # engine profiles
    faults: tuple[Fault, ...] = ()
    length_s: float = 120.0
    measured_from_s: float = 10.0
    prefix_block_tokens: int = 512


_MIXED = SCENARIOS["mixed"]
_ALL: Final = (
    Trial(name="S1", scenario=SCENARIOS["steady"]),
    Trial(name="S2", scenario=SCENARIOS["burst"]),
    Trial(name="S3", scenario=SCENARIOS["storm"]),
    Trial(name="S4", scenario=SCENARIOS["noisy"]),
    Trial(
        name="S5",
        scenario=_MIXED.at_rate(80),
        faults=(Fault(at_s=60, worker=2, kind="kill"), Fault(at_s=60, worker=5, kind="kill")),
    ),
    Trial(name="S6", scenario=_MIXED.at_rate(62), workers=("h100-8b",) * 4 + ("a100-8b",) * 4),
    Trial(name="S7", scenario=SCENARIOS["prefixes"]),
    Trial(name="S7x", scenario=SCENARIOS["prefixes"].at_rate(8.6)),
)
TRIALS: Final[Mapping[str, Trial]] = {trial.name: trial for trial in _ALL}
