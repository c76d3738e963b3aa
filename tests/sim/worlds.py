"""Short trials on four workers: the benchmark's shapes, a tenth as long."""

from __future__ import annotations

from math import inf
from typing import Any, Final

from loadtest.scenarios import Scenario
from loadtest.sim.trials import Fault, Trial
from loadtest.workload import Flow, RangeLengths, Tier, Window

FOUR: Final = ("h100-8b",) * 4
SEEDS: Final = range(20)


def scenario(*flows: Flow) -> Scenario:
    """Flows under no name."""
    return Scenario(name="", about="", flows=flows)


def trial(name: str, *flows: Flow, length_s: float = 8.0, **fields: Any) -> Trial:
    """Flows as a short trial, measured from 1 s on."""
    given: dict[str, Any] = {"workers": FOUR, "length_s": length_s, "measured_from_s": 1.0}
    return Trial(name=name, scenario=scenario(*flows), **(given | fields))


def flow(rate_per_s: float, *, begin_s: float = 0.0, length_s: float = inf, **fields: Any) -> Flow:
    """Lengths of the traces, Poisson arrivals: short trials must not hang on one crowd."""
    window = Window(start_s=begin_s, length_s=length_s)
    given: dict[str, Any] = {"rate_per_s": rate_per_s, "gamma_shape": 1.0, "window": window}
    return Flow(**(given | fields))


_STORM = RangeLengths(prompt_tokens=(8_000, 40_000), output_tokens=(300, 2_000))
_ANSWERS = RangeLengths(prompt_tokens=(100, 600), output_tokens=(300, 900))
_NOISY: Final[dict[str, Any]] = {"tier": Tier.STANDARD, "tenant": "tenant-noisy"}
_LOSS = (Fault(at_s=4, worker=1, kind="kill"),)
SHORT: Final = {
    made.name: made
    for made in (
        trial("S1", flow(45)),
        trial("S2", flow(28), flow(90, begin_s=2, length_s=2), length_s=6),
        trial("S3", flow(30), flow(3, begin_s=1, length_s=5, lengths=_STORM, tier=Tier.FREE)),
        trial("S4", flow(30), flow(60, begin_s=1, length_s=3.5, **_NOISY), length_s=5),
        trial("S5", flow(40), faults=_LOSS),
        trial("KV", flow(35, lengths=_ANSWERS), kv_total_tokens=20_000, length_s=6),
        trial("S6", flow(31), workers=("h100-8b",) * 2 + ("a100-8b",) * 2),
        trial(
            "P3",
            flow(45, tier=Tier.PREMIUM),
            flow(3, tier=Tier.OFFLINE),
            workers=FOUR[:2],
            length_s=6,
        ),
    )
}
