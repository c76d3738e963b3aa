"""A configuration with every feature on: keys, tenants, and limits of each kind, all ample."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from loadtest.bench.payloads import MODEL

KEYS: Final = ("lw-a", "lw-b", "lw-c", "lw-d")  # of a tenant each
TENANTS: Final = "auth:\n  allow_anonymous: true\ntenants:\n" + "".join(
    f"  {key}:\n    keys: ['sha256:{sha256(key.encode()).hexdigest()}']\n" for key in KEYS
)


def limits(*, requests_per_minute: int, tenant_cost_per_s: int, cost_per_s: int) -> str:
    """A tenant's requests and cost; the cost of the model and the cluster, its permits."""
    return f"""
limits:
  tenant:
    requests_per_minute: {requests_per_minute}
    cost_per_s: {tenant_cost_per_s}
  models:
    {MODEL}:
      cost_per_s: {cost_per_s}
  cluster:
    cost_per_s: {cost_per_s}
    concurrency: 10000
"""


EVERY_FEATURE: Final = TENANTS + limits(
    requests_per_minute=10_000_000, tenant_cost_per_s=1_000_000, cost_per_s=1_000_000
)
