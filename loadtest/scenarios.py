"""Named scenarios: what traffic comes, on which workers, what breaks. Locust and simulator share them.

Rates are for eight H100-8B workers; `scaled` gives the same scenario for another cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from loadtest.workload import Flow, RangeLengths, Tier, TraceLengths, Window

NOISY_TENANT: Final = "noisy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a worker at a moment."""

    at_s: float
    worker: int
    kind: str  # kill, revive, slow, freeze
    ratio: float = 1.0  # slow: steps last this many times as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Traffic, cluster and faults. Figures count requests that arrive from `measured_from_s` on."""

    name: str
    flows: tuple[Flow, ...]
    workers: tuple[str, ...] = ("h100-8b",) * 8  # engine profiles
    faults: tuple[Fault, ...] = ()
    length_s: float = 120.0
    measured_from_s: float = 10.0
    prefix_block_tokens: int = 512

    def scaled(self, ratio: float, workers: tuple[str, ...]) -> Scenario:
        """The same traffic at `ratio` times the rate, on other workers."""
        flows = tuple(replace(flow, rate_per_s=flow.rate_per_s * ratio) for flow in self.flows)
        return replace(self, flows=flows, workers=workers)


def _mixed(rate_per_s: float, window: Window | None = None) -> Flow:
    return Flow(rate_per_s=rate_per_s, window=window or Window())


_STORM = Flow(
    rate_per_s=6.0,
    lengths=RangeLengths(prompt_tokens=(8_000, 40_000), output_tokens=(300, 2_000)),
    window=Window(start_s=40.0, length_s=40.0),
    tier=Tier.FREE,
)
_NOISY = Flow(
    rate_per_s=90.0,
    window=Window(start_s=40.0, length_s=60.0),
    tier=Tier.STANDARD,
    tenant=NOISY_TENANT,
)
_MOONCAKE = TraceLengths(shares=(("mooncake_fast25_conversation", 1.0),))

SCENARIOS: Final[Mapping[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="S1", flows=(_mixed(95.0),)),
        Scenario(
            name="S2",
            flows=(
                _mixed(55.0),
                _mixed(165.0, Window(start_s=30.0, length_s=10.0, every_s=60.0)),
            ),
        ),
        Scenario(name="S3", flows=(_mixed(60.0), _STORM)),
        Scenario(name="S4", flows=(_mixed(60.0), _NOISY)),
        Scenario(
            name="S5",
            flows=(_mixed(80.0),),
            faults=(Fault(at_s=60.0, worker=2, kind="kill"), Fault(at_s=60.0, worker=5, kind="kill")),
        ),
        Scenario(
            name="S6", flows=(_mixed(62.0),), workers=("h100-8b",) * 4 + ("a100-8b",) * 4
        ),
        Scenario(name="S7", flows=(Flow(rate_per_s=3.44 * 1.5, lengths=_MOONCAKE),)),
        Scenario(name="S7x", flows=(Flow(rate_per_s=3.44 * 2.5, lengths=_MOONCAKE),)),
    )
}
