"""Settings of limits: which there are, how long a decision may take, what holds without Redis.

A part of `router.config`, which holds all other sections. Layer 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from router.quota_settings import (
    ClassLimits,
    ClusterLimits,
    CostSettings,
    LaneLimits,
    PoolLimits,
    TenantLimits,
)
from router.strict import Strict

AwayPolicy = Literal["local", "open", "closed"]


class AwaySettings(Strict):
    """While Redis is away, by class. local: a part of each limit on every router."""

    p0: AwayPolicy = Field("local", description="Real-time.")
    p1: AwayPolicy = Field("local", description="Normal, paid.")
    p2: AwayPolicy = Field("local", description="Batch, free.")
    p3: AwayPolicy = Field("local", description="Offline.")

    @property
    def by_priority(self) -> tuple[AwayPolicy, AwayPolicy, AwayPolicy, AwayPolicy]:
        """The policies, most urgent class first."""
        return self.p0, self.p1, self.p2, self.p3


class LimitsSettings(Strict):
    """Limits of tenants, models, lanes and classes, cluster-wide when there is a Redis."""

    cost: CostSettings = Field(CostSettings(), description="What a request costs.")
    tenant: TenantLimits = Field(
        TenantLimits(), description="Of each tenant, where its own `limits` say nothing."
    )
    models: dict[Annotated[str, StringConstraints(min_length=1, max_length=512)], PoolLimits] = (
        Field(default_factory=dict, max_length=1000, description="By model, by any of its names.")
    )
    lanes: LaneLimits = Field(LaneLimits(), description="By lane.")
    classes: ClassLimits = Field(
        ClassLimits(), description="By class: ceilings; cluster.shares has what is guaranteed."
    )
    cluster: ClusterLimits = Field(ClusterLimits(), description="All requests together.")
    warm_up_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="Seconds in which the buckets of a new store fill; 0: they begin full.",
    )
    wait_s_max: float = Field(
        0.0,
        ge=0,
        le=600,
        description="Seconds that a request may wait until its limits let it in; 0: refused at "
        "once.",
    )
    degrade: bool = Field(
        True,
        description="Before a cost limit refuses a request, its max_tokens is cut to "
        "degrade.tokens_cap.",
    )
    borrow_below: float = Field(
        0.8,
        gt=0,
        le=10,
        description="Saturation (see degrade) below which tenants may get more than cost_per_s, up "
        "to cost_ceiling_per_s; above it only when all of cluster.cost_per_s is left.",
    )
    timeout_s: float = Field(
        0.05,
        gt=0,
        le=10,
        description="Longest wait for Redis to decide on a request, in seconds; then as in away.",
    )
    batch_s: float = Field(
        0.5,
        ge=0,
        le=5,
        description="What requests will take in so many seconds is fetched from Redis ahead, while "
        "limits have plenty, and granted here; 0: Redis is asked for each.",
    )
    lease_s: float = Field(
        600.0,
        ge=10,
        le=86_400,
        description="A request of a router that died holds its permits this long, in seconds.",
    )
    away: AwaySettings = Field(
        AwaySettings(),
        description="While Redis is away: local (a part of each limit), open (all pass), closed.",
    )
