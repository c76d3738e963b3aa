"""What a router tells a router that is its worker: whose a request is, and how urgent.

Such a worker is told by its load report. It queues and paces by itself, so it gets the class that
this router granted (it may cut it further) and, of a tenant that the configuration names, the name;
it believes the name where it lists this router among its trusted proxies.
"""

from __future__ import annotations

from typing import Final

from router.config import Config
from router.core import claims
from router.core.types import Priority

PRIORITY_LINES: Final = tuple(f"{claims.HEADER}: {p.name}\r\n".encode() for p in Priority)


def tenant_line(config: Config, tenant: str) -> bytes:
    """The header that names the tenant of a request; empty for one without settings."""
    if tenant not in config.tenants:
        return b""
    return f"{config.auth.tenant_header}: {tenant}\r\n".encode()
