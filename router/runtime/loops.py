"""How a router recognises itself, so that no request goes round in circles.

A router may be another router's worker. Each one adds a line with its own id, made anew at each
start, to whatever it sends to workers; lines of routers before it stay. A request that comes with
the id of the router that reads it has been here before and is refused: else it would be sent on
until all connections are taken. Addresses that surely are the router's own are refused beforehand.
A router that has nothing but what leads back here says so in its load report, and gets no request.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from router.contract import LoadReport
from router.errors import Reason, Refused

VIA_HEADER: Final = b"x-laneway-via"
LEADS_BACK: Final = "not ready: its workers all lead back to this router"
_EVERYWHERE: Final = frozenset(("0.0.0.0", "::"))
_LOCAL_NAMES: Final = frozenset(("localhost", "127.0.0.1", "::1"))


def via_line(router_id: bytes) -> bytes:
    """The header line by which a router marks what it sends; empty without an id."""
    return b"%b: %b\r\n" % (VIA_HEADER, router_id) if router_id else b""


def is_own(router_id: bytes, via: bytes) -> bool:
    """Whether the value of a via header names this router."""
    return bool(router_id) and router_id in via


def loop_refused() -> Refused:
    """What answers a request that has been here before."""
    return Refused(
        Reason.LOOP_DETECTED,
        "This request came from this very router: one of its workers is the router itself, or a "
        "router that sends requests back to it. Remove that worker.",
    )


def leads_back(router_id: bytes, report: LoadReport) -> bool:
    """Whether the report of a router says that it has no engine but what this router has."""
    return report.workers == 0 and router_id.decode() in (report.routers or ())


def is_own_address(url: str, *, host: str, port: int) -> bool:
    """Whether a worker's normalized `url` surely is where a router listens on `host`:`port`.

    False where that is unknown: a port that is yet to be picked, another name of this machine.
    """
    parts = urlsplit(url)
    worker, listening = parts.hostname or "", host.lower()
    if not port or parts.port != port:
        return False
    if listening in _EVERYWHERE or listening == "localhost":
        return worker in _LOCAL_NAMES or worker.startswith("127.") or worker == listening
    return worker == listening or (listening in _LOCAL_NAMES and worker == "localhost")
