"""Settings of a router with several processes on one host. Layer 0."""

from __future__ import annotations

from pydantic import Field

from router.strict import Strict as _Section


class RelaySettings(_Section):
    """Several processes on one host: relays hold the connections, one brain decides for all."""

    count: int = Field(
        0, ge=0, le=64, description="Relay processes; 0: one process does everything."
    )
    brain_wait_s: float = Field(
        5.0,
        ge=0,
        le=60,
        description="Seconds that requests wait for a brain that is being restarted; then 503.",
    )
