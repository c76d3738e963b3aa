"""What a workload is: flows of requests, side by side; `arrivals` draws them.

A flow takes its lengths from the public traces or from ranges; its arrivals are the traces' own or
a Gamma renewal process. The traces name no tier, tenant or max_tokens, so these are drawn. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from random import Random
from typing import Final

from loadtest.trace import Trace, read_trace

TENANTS: Final = 20
TENANT_ZIPF_EXPONENT: Final = 0.8


class Tier(StrEnum):
    """Service tiers. Their shares of requests are in TIER_SHARES; offline is never drawn."""

    PREMIUM = "premium"
    STANDARD = "standard"
    FREE = "free"
    OFFLINE = "offline"


TIER_SHARES: Final = {Tier.PREMIUM: 0.2, Tier.STANDARD: 0.5, Tier.FREE: 0.3}
# Targets of the tiers: seconds to the first token, mean seconds per further token.
TTFT_TARGET_S: Final = {
    Tier.PREMIUM: 0.1,
    Tier.STANDARD: 0.5,
    Tier.FREE: 2.0,
    Tier.OFFLINE: 30.0,
}
TPOT_TARGET_S: Final = {
    Tier.PREMIUM: 0.05,
    Tier.STANDARD: 0.075,
    Tier.FREE: 0.15,
    Tier.OFFLINE: 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTokensRule:
    """How clients choose max_tokens: some tightly, the others one of a few round figures.

    A tight choice is the next power of two at or above the output times a factor of 1 to 2.
    """

    tight_share: float = 0.5
    round_figures: tuple[tuple[float, int], ...] = ((0.3, 1024), (0.2, 4096))  # share, tokens
    tokens_max: int | None = None

    def __post_init__(self) -> None:
        shares = self.tight_share + sum(share for share, _ in self.round_figures)
        if not math.isclose(shares, 1.0):
            raise ValueError(f"shares add up to {shares}, not to 1")

    def drawn(self, output_tokens: int, rng: Random) -> int:
        """Return the max_tokens of a request whose answer would have `output_tokens`."""
        tokens = self._choice(output_tokens, rng)
        return tokens if self.tokens_max is None else min(tokens, self.tokens_max)

    def _choice(self, output_tokens: int, rng: Random) -> int:
        point = rng.random() - self.tight_share
        for share, tokens in self.round_figures:
            if 0 <= point < share:
                return tokens
            point -= share
        wish = max(1.0, output_tokens * rng.uniform(1, 2))
        return int(2 ** math.ceil(math.log2(wish)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLengths:
    """Lengths of public traces, by share; only rows whose output is within bounds."""

    shares: tuple[tuple[str, float], ...] = (("azure2023_conv", 0.7), ("azure2023_code", 0.3))
    output_tokens_min: int = 0
    output_tokens_max: int = 1_000_000

    def trace(self, name: str) -> Trace:
        """The rows of trace `name` that count."""
        return _trace_within(name, self.output_tokens_min, self.output_tokens_max)


@cache
def _trace_within(name: str, low: int, high: int) -> Trace:
    """The rows of trace `name` with an output of `low` to `high` tokens."""
    return read_trace(name).where(lambda row: low <= row.output_tokens <= high)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLengths:
    """Lengths drawn evenly from ranges, ends included."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When a flow sends: from `start_s` for `length_s`, and again each `every_s` if that is set."""

    start_s: float = 0.0
    length_s: float = math.inf
    every_s: float | None = None

    def holds(self, at_s: float) -> bool:
        """Whether a request may arrive at `at_s`."""
        since_s = at_s - self.start_s
        if since_s >= 0 and self.every_s is not None:
            since_s %= self.every_s
        return 0 <= since_s < self.length_s

    def is_over(self, at_s: float) -> bool:
        """Whether nothing can arrive at or after `at_s`."""
        return self.every_s is None and at_s >= self.start_s + self.length_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Requests of one kind. `rate_per_s` is the mean while the window is open.

    `gamma_shape` None: the traces' own arrivals. Otherwise gaps are Gamma distributed: shape 1 is
    Poisson, below 1 burstier (0.5 and 0.25 imitate BurstGPT); ranges without a shape are Poisson.
    `tier` and `tenant`, when set, hold for all requests of the flow. `at_speed`: the rate is
    reached by playing each trace faster or slower as a whole, not by laying copies over each other.
    """

    rate_per_s: float
    lengths: TraceLengths | RangeLengths = TraceLengths()
    max_tokens: MaxTokensRule = MaxTokensRule()
    gamma_shape: float | None = None
    window: Window = Window()
    tier: Tier | None = None
    tenant: str | None = None
    at_speed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rate_per_s < math.inf:
            raise ValueError(f"a rate of {self.rate_per_s} requests per second")
