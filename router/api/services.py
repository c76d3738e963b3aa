"""What the handlers work with: the running router, as the composition root put it together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from router.api.auth import Authenticator
from router.config import Config
from router.core.snapshot import Snapshot
from router.metrics import Metrics
from router.runtime.driver import Driver
from router.runtime.live_config import LiveConfig
from router.runtime.registry import Registry
from router.runtime.upstream import Upstreams
from router.runtime.usage_sync import UsageSync
from router.usage import UsageTable


class ServingPhase(Enum):
    """Where the process is in its life."""

    SERVING = auto()
    DRAINING = auto()  # told to stop: not ready, still serving


@dataclass(slots=True)
class Lifecycle:
    """The phase of the process, written by the signal handler."""

    version: str
    started_at: float  # seconds on the wall clock, for people
    phase: ServingPhase = ServingPhase.SERVING
    began_at: float = field(default_factory=time.monotonic)  # the same moment, for durations

    @property
    def uptime_s(self) -> float:
        """Seconds since it began, whatever became of the wall clock."""
        return time.monotonic() - self.began_at

    @property
    def draining(self) -> bool:
        """Whether the process was told to stop."""
        return self.phase is ServingPhase.DRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything a handler may use."""

    driver: Driver
    live: LiveConfig
    upstreams: Upstreams
    metrics: Metrics
    lifecycle: Lifecycle
    authenticator: Authenticator
    registry: Registry
    usage: UsageTable
    shared_usage: UsageSync | None  # None: no other router can be asked

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.driver.config

    def snapshot(self) -> Snapshot:
        """The core as it is now."""
        return self.driver.snapshot()
