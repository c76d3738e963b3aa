"""Under which address this host is seen from outside."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit


def means_any(host: str) -> bool:
    """Whether `host` stands for all interfaces, which is no address to be reached at."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def means_here(host: str) -> bool:
    """Whether `host` means this host to itself only."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def own_host_towards(url: str) -> str:
    """This host's address as the host of `url` sees it, as a URL has it. Sends nothing.

    Raises ValueError when there is no way to that host.
    """
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, peer = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(peer)
            address = str(probe.getsockname()[0])
    except OSError as exc:
        raise ValueError(f"cannot tell this host's address towards {url} ({exc})") from exc
    return f"[{address}]" if ":" in address else address
