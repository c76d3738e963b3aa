"""Named workloads, used by the load test and by the simulator alike.

`short`, `long` and `mixed` are for a cluster of any size: choose the rate. The others have the
rates of the benchmark on eight H100 workers with an 8B model, which a rate of one's own scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from loadtest.workload import Flow, MaxTokensRule, RangeLengths, Tier, TraceLengths, Window

# Up to this max_tokens a request belongs to the short lane, as the router has it by default.
SHORT_TOKENS_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Flows under a name. The first one is the base: its rate is the scenario's rate."""

    name: str
    about: str
    flows: tuple[Flow, ...]

    @property
    def rate_per_s(self) -> float:
        """Mean requests per second of the base flow."""
        return self.flows[0].rate_per_s

    def at_rate(self, rate_per_s: float) -> Scenario:
        """The same scenario with its base at `rate_per_s`, the other flows in proportion."""
        factor = rate_per_s / self.rate_per_s
        flows = (replace(flow, rate_per_s=flow.rate_per_s * factor) for flow in self.flows)
        return replace(self, flows=tuple(flows))


def lane_of(max_tokens: int) -> str:
    """The lane in which the default router serves a request: the word in reports."""
    return "short" if max_tokens <= SHORT_TOKENS_MAX else "long"


_SHORT = Flow(
    rate_per_s=20,
    lengths=TraceLengths(output_tokens_max=SHORT_TOKENS_MAX),
    max_tokens=MaxTokensRule(tight_share=1.0, round_figures=(), tokens_max=SHORT_TOKENS_MAX),
)
_LONG = Flow(rate_per_s=5, lengths=TraceLengths(output_tokens_min=SHORT_TOKENS_MAX + 1))
_STORM = Flow(
    rate_per_s=6,
    lengths=RangeLengths(prompt_tokens=(8_000, 40_000), output_tokens=(300, 2_000)),
    window=Window(start_s=40, length_s=40),
    tier=Tier.FREE,
)
_NOISY = Flow(
    rate_per_s=90,
    window=Window(start_s=40, length_s=60),
    tier=Tier.STANDARD,
    tenant="tenant-noisy",
)
# Conversations return after minutes: hardly any would within the time that is simulated if copies
# at native speed were laid over each other, and in half a copy they would lack turns.
_CONVERSATIONS = Flow(
    rate_per_s=5,
    lengths=TraceLengths(shares=(("mooncake_fast25_conversation", 1.0),)),
    at_speed=True,
)

_ALL: Final = (
    Scenario(name="short", about="Short chats: answers up to 256 tokens.", flows=(_SHORT,)),
    Scenario(name="long", about="Long generations: answers above 256 tokens.", flows=(_LONG,)),
    Scenario(name="mixed", about="Short and long as traced.", flows=(Flow(rate_per_s=10),)),
    Scenario(name="steady", about="The benchmark's mix, steady.", flows=(Flow(rate_per_s=95),)),
    Scenario(
        name="burst",
        about="A base load that is four times as high for 10 s each minute.",
        flows=(
            Flow(rate_per_s=55),
            Flow(rate_per_s=165, window=Window(start_s=20, length_s=10, every_s=60)),
        ),
    ),
    Scenario(
        name="storm",
        about="A base load; between 40 and 80 s very long prompts with long answers.",
        flows=(Flow(rate_per_s=60), _STORM),
    ),
    Scenario(
        name="noisy",
        about="A base load; between 40 and 100 s one tenant sends more than all others together.",
        flows=(Flow(rate_per_s=60), _NOISY),
    ),
    Scenario(
        name="prefixes",
        about="Long conversations that share their beginnings.",
        flows=(_CONVERSATIONS,),
    ),
)
SCENARIOS: Final[Mapping[str, Scenario]] = {scenario.name: scenario for scenario in _ALL}
