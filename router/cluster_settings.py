"""Settings of several routers that act as one. A part of `router.config`. Layer 0."""

from __future__ import annotations

from pydantic import Field

from router.strict import Strict


class ClusterSettings(Strict):
    """Several routers over the same workers, which know of each other through `redis`."""

    sync_interval_s: float = Field(
        0.2, ge=0.02, le=5, description="Seconds between two exchanges with the others."
    )
    ttl_s: float = Field(
        3.0, ge=0.5, le=60, description="A router that was not heard of for so long is gone."
    )
    borrow_wait_s: float = Field(
        0.08,
        ge=0,
        le=60,
        description="Predicted wait on a router's own workers above which it looks at others'; "
        "prompts that take longer to prefill wait for an own one first.",
    )
