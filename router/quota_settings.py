"""Settings of quotas: what a request costs, and how much tenants, models, lanes, classes may use.

Each is off until it is set. A part of `router.limit_settings`. Layer 0.
"""

from __future__ import annotations

from typing import Final

from pydantic import Field, model_validator

from router.strict import Strict

_RATE_MAX: Final = 1e9
BURST_S: Final = 3.0  # what a rate saves up by default
CLUSTER_BURST_S: Final = 0.5


class CostSettings(Strict):
    """What a request costs: its model's factor x (request + prompt + output), in cost units."""

    request_units: float = Field(
        0.0, ge=0, le=1e6, description="Units of any request, however small it is."
    )
    prompt_token_units: float = Field(
        0.001, ge=0, le=1e3, description="Units of a prompt token; cached ones are refunded."
    )
    output_token_units: float = Field(
        0.002,
        ge=0,
        le=1e3,
        description="Units of an output token: decoding takes an engine longer.",
    )
    output_quantile: float = Field(
        0.75,
        ge=0.5,
        le=0.999,
        description="Charged beforehand: max_tokens, or this quantile of the model's answers if "
        "that is less.",
    )


class PoolLimits(Strict):
    """What all requests of a model, a lane or a class may use together."""

    cost_per_s: float | None = Field(
        None, gt=0, le=_RATE_MAX, description="Cost units per second; empty: no limit."
    )
    cost_burst: float | None = Field(
        None,
        gt=0,
        le=_RATE_MAX,
        description="Cost units that can be saved up, and so the most one request may cost; empty: "
        f"{BURST_S:g} s of cost_per_s.",
    )
    concurrency: int | None = Field(
        None, ge=1, le=1_000_000, description="Requests at once; empty: no limit."
    )

    @model_validator(mode="after")
    def _bursts_have_rates(self) -> PoolLimits:
        if self.cost_burst is not None and self.cost_per_s is None:
            raise ValueError("cost_burst needs cost_per_s: what is saved up of no rate?")
        return self


class TenantLimits(PoolLimits):
    """What a tenant may use."""

    cost_ceiling_per_s: float | None = Field(
        None,
        gt=0,
        le=_RATE_MAX,
        description="Cost units per second that it gets while there is room, cost_per_s being "
        "guaranteed; empty: cost_per_s is all it gets.",
    )
    requests_per_minute: float | None = Field(
        None, gt=0, le=_RATE_MAX, description="Requests per minute; empty: no limit."
    )
    requests_burst: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="Requests that can be saved up; empty: those of a minute.",
    )

    @model_validator(mode="after")
    def _ceilings_are_above(self) -> TenantLimits:
        if self.cost_ceiling_per_s is not None:
            if self.cost_per_s is None:
                raise ValueError("cost_ceiling_per_s needs cost_per_s: above which guarantee?")
            if self.cost_ceiling_per_s <= self.cost_per_s:
                raise ValueError("cost_ceiling_per_s must be above cost_per_s")
        return self

    @model_validator(mode="after")
    def _request_bursts_have_rates(self) -> TenantLimits:
        if self.requests_burst is not None and self.requests_per_minute is None:
            raise ValueError("requests_burst needs requests_per_minute")
        return self


class OwnTenantLimits(TenantLimits):
    """What one tenant may use."""

    inherit: bool = Field(
        True, description="An empty limit is that of limits.tenant; false: it is none."
    )


class LaneLimits(Strict):
    """Limits of the two lanes."""

    short: PoolLimits = Field(PoolLimits(), description="The short lane.")
    long: PoolLimits = Field(PoolLimits(), description="The long lane.")


class ClassLimits(Strict):
    """The most that each class gets, whatever the others leave."""

    p0: PoolLimits = Field(PoolLimits(), description="Real-time.")
    p1: PoolLimits = Field(PoolLimits(), description="Normal, paid.")
    p2: PoolLimits = Field(PoolLimits(), description="Batch, free.")
    p3: PoolLimits = Field(PoolLimits(), description="Offline.")

    @property
    def by_priority(self) -> tuple[PoolLimits, PoolLimits, PoolLimits, PoolLimits]:
        """The limits, most urgent class first."""
        return self.p0, self.p1, self.p2, self.p3


class ShareSettings(Strict):
    """What is guaranteed to each class of cluster.cost_per_s."""

    p0: float = Field(0.6, gt=0, le=1, description="Share of P0.")
    p1: float = Field(0.35, gt=0, le=1, description="Share of P1.")
    p2: float = Field(0.05, gt=0, le=1, description="Share of P2.")
    p3: float | None = Field(
        None, gt=0, le=1, description="Share of P3; empty: it is served from P2's."
    )
    borrow: bool = Field(
        True, description="A class may use what others leave; false: its share is all it gets."
    )

    @model_validator(mode="after")
    def _fit(self) -> ShareSettings:
        total = self.p0 + self.p1 + self.p2 + (self.p3 or 0)
        if total > 1 + 1e-9:
            raise ValueError(f"the shares add up to {total:.0%}, more than there is")
        return self

    @property
    def by_priority(self) -> tuple[float, float, float, float | None]:
        """The shares, most urgent class first."""
        return self.p0, self.p1, self.p2, self.p3


class ClusterLimits(PoolLimits):
    """What all requests may use together."""

    cost_burst: float | None = Field(
        None,
        gt=0,
        le=_RATE_MAX,
        description="Cost units that can be saved up, and so the most one request may cost; empty: "
        f"{CLUSTER_BURST_S:g} s of cost_per_s.",
    )
    shares: ShareSettings = Field(
        ShareSettings(), description="What the classes are guaranteed of cost_per_s."
    )
