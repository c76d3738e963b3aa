"""From finished requests to figures: goodput, SLO attainment, tails, fairness.

The same arithmetic serves the simulator and live load tests: both make `Served` rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from loadtest.workload import TPOT_TARGET_S, TTFT_TARGET_S, Tier

NOISY_TENANT = "tenant-noisy"  # of the scenario of that name
FEASIBLE_PROMPT_TOKENS_MAX = 3_000  # longer prompts miss 100 ms by their own prefill
SHORT_PROMPT_TOKENS_MAX = 2_048
SHORT_OUTPUT_TOKENS_MAX = 256


@dataclass(slots=True, kw_only=True)
class Served:
    """One request and what its client saw; not changed. Seconds; inf where nothing came."""

    at_s: float
    tier: Tier
    tenant: str
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    outcome: str  # served, refused or lost
    retry_after_s: float | None = None
    cached_tokens: int = 0
    good: bool = field(init=False)  # it met both targets of its tier

    def __post_init__(self) -> None:
        self.good = (
            self.outcome == "served"
            and self.ttft_s <= TTFT_TARGET_S[self.tier]
            and self.tpot_s <= TPOT_TARGET_S[self.tier]
        )

    @property
    def feasible(self) -> bool:
        """Whether an idle worker could have met the target."""
        return self.tier is not Tier.PREMIUM or self.prompt_tokens <= FEASIBLE_PROMPT_TOKENS_MAX

    @property
    def short(self) -> bool:
        """Whether it counts for the tail that users of chats feel."""
        return (
            self.prompt_tokens <= SHORT_PROMPT_TOKENS_MAX
            and self.output_tokens <= SHORT_OUTPUT_TOKENS_MAX
            and self.tier in (Tier.PREMIUM, Tier.STANDARD)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run is judged by. Shares are 0 to 1; times are seconds."""

    requests: int
    goodput_per_s: float
    premium: float
    premium_feasible: float
    standard: float
    free: float
    short_ttft_p99_s: float
    tpot_p99_s: float
    refused: float
    lost: int
    victims: float  # attainment of the noisy tenant's tier, standard, without that tenant
    jain: float  # fairness over tenants of good over demanded
    hit_ratio: float

    def as_row(self) -> dict[str, float]:
        """The figures by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def quantile(values: Iterable[float], q: float) -> float:
    """The value below which a share `q` lies (nearest rank); nan without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def attainment(rows: Sequence[Served]) -> float:
    """The share of `rows` that met their targets; nan without rows."""
    return sum(row.good for row in rows) / len(rows) if rows else math.nan


def judged(rows: Sequence[Served], *, seconds: float) -> Figures:
    """Return the figures of requests that arrived during `seconds`."""
    by_tier = {tier: [row for row in rows if row.tier is tier] for tier in Tier}
    began = [row for row in rows if math.isfinite(row.tpot_s)]
    victims = [row for row in by_tier[Tier.STANDARD] if row.tenant != NOISY_TENANT]
    return Figures(
        requests=len(rows),
        goodput_per_s=sum(row.good for row in rows) / seconds,
        premium=attainment(by_tier[Tier.PREMIUM]),
        premium_feasible=attainment([r for r in by_tier[Tier.PREMIUM] if r.feasible]),
        standard=attainment(by_tier[Tier.STANDARD]),
        free=attainment(by_tier[Tier.FREE]),
        short_ttft_p99_s=quantile(
            (r.ttft_s for r in rows if r.short and math.isfinite(r.ttft_s)), 0.99
        ),
        tpot_p99_s=quantile((row.tpot_s for row in began), 0.99),
        refused=sum(row.outcome == "refused" for row in rows) / max(1, len(rows)),
        lost=sum(row.outcome == "lost" for row in rows),
        victims=attainment(victims),
        jain=jain_index(_shares(rows)),
        hit_ratio=sum(r.cached_tokens for r in rows) / max(1, sum(r.prompt_tokens for r in rows)),
    )


def _shares(rows: Sequence[Served]) -> list[float]:
    """For each tenant, the share of its requests that were good."""
    good: dict[str, int] = defaultdict(int)
    asked: dict[str, int] = defaultdict(int)
    for row in rows:
        good[row.tenant] += row.good
        asked[row.tenant] += 1
    return [good[tenant] / asked[tenant] for tenant in asked]


def jain_index(shares: Sequence[float]) -> float:
    """Jain's fairness index, 1/n to 1; nan without shares."""
    squares = sum(share * share for share in shares)
    if not shares or not squares:
        return math.nan
    return sum(shares) ** 2 / (len(shares) * squares)
