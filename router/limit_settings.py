"""Settings of limits: how long a decision may take, and what holds while Redis is away.

A part of `router.config`, which holds all other sections. Layer 0.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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

    timeout_s: float = Field(
        0.05,
        gt=0,
        le=10,
        description="Longest wait for Redis to decide on a request, in seconds; then as in away.",
    )
    lease_s: float = Field(
        600.0,
        ge=5,
        le=86_400,
        description="A request of a router that died holds its permits this long, in seconds.",
    )
    away: AwaySettings = Field(
        AwaySettings(),
        description="While Redis is away: local (a part of each limit), open (all pass), closed.",
    )
