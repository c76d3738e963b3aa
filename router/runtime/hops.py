"""What a router tells a router that is its worker: whose a request is, how urgent, how patient.

Such a worker is told by its load report. It queues and paces by itself, so it gets the class that
this router granted (it may cut it further) and, of a tenant that the configuration names, the name;
it believes the name where it lists this router among its trusted proxies. Any client may say how
long its request may wait; in whole seconds, so that most heads of a router are the same.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from router.config import Config
from router.core import claims
from router.core.types import Priority, RequestSpec

WAIT_HEADER: Final = "x-laneway-wait-s"
_WAIT_S_MAX: Final = 86_400.0
PRIORITY_LINES: Final = tuple(f"{claims.HEADER}: {p.name}\r\n".encode() for p in Priority)


def wait_line(config: Config, spec: RequestSpec, waited_s: float) -> bytes:
    """The header that says how much longer a request may wait, by its class and its client."""
    patience_s = config.waits_s_max[spec.priority]
    if spec.wait_s_max is not None:
        patience_s = min(patience_s, spec.wait_s_max)
    return f"{WAIT_HEADER}: {max(1, ceil(patience_s - waited_s))}\r\n".encode()


def wait_s_of(text: str) -> float | None:
    """The seconds that `text` names; None when they are none, or no wait."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= _WAIT_S_MAX else None


def tenant_line(config: Config, tenant: str) -> bytes:
    """The header that names the tenant of a request; empty for one without settings."""
    if tenant not in config.tenants:
        return b""
    return f"{config.auth.tenant_header}: {tenant}\r\n".encode()
