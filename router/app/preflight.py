"""What is asked of a configuration before a router serves by it, on the machine that will.

`laneway check-config` asks the same, so that what it calls good can be served. Only whether the
port is free shows when it is taken.
"""

from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Iterator
from typing import Final

from router.api.auth import is_loopback
from router.config import Config
from router.core.limits import guaranteed_per_s
from router.core.types import Priority
from router.runtime.loops import is_own_address

# What is not a client's: polls, Redis, refused clients who read their answer, the log.
_OTHER_FILES: Final = 256
_ROUNDED: Final = 1 + 1e-9
Address = tuple[
    socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
]


def faults(config: Config) -> Iterator[str]:
    """Why a router cannot serve by `config` here, one line each with the path first."""
    server = config.server
    try:
        address_of(server.host, server.port)
    except ValueError as exc:
        yield f"server.host: {exc}"
    else:
        yield from _exposure(config)
    yield from _loops(config)


def live_faults(config: Config) -> Iterator[str]:
    """Why a router that serves cannot go on by `config`: its address is what it was."""
    yield from _exposure(config)
    yield from _loops(config)


def warnings(config: Config) -> Iterator[str]:
    """What a router serves by all the same, though not as it reads; lines as of `faults`."""
    yield from _few_files(config)
    yield from _overpromised(config)


def connections_possible() -> int:
    """How many clients a process may serve at once with the open files that it may have.

    Each takes two: its own connection, and one to a worker.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # a router uses all of them
    if files == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (files - min(_OTHER_FILES, files // 4)) // 2)


def _few_files(config: Config) -> Iterator[str]:
    """Whether more clients are allowed than there are open files for."""
    wanted, possible = config.server.connections_max, connections_possible()
    possible *= max(1, config.relays.count)
    if possible < wanted:
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield (
            f"server.connections_max: it is {wanted}, and {files} open files, the limit here, do "
            f"for {possible} clients at once: more get 503; raise the limit (ulimit -Hn, "
            "LimitNOFILE)"
        )


def _overpromised(config: Config) -> Iterator[str]:
    """Whether tenants are guaranteed more than the cluster, or a class, has."""
    cluster, by_class = config.limits.cluster, guaranteed_per_s(config)
    whole, total = cluster.cost_per_s, sum(by_class.values())
    if whole is None:
        return
    if total > whole * _ROUNDED:
        yield (
            f"limits.cluster.cost_per_s: it is {whole:g}, and tenants are guaranteed {total:g} "
            "together (cost_per_s, where there is a cost_ceiling_per_s): not all can have theirs"
        )
        return
    shares = dict(zip(Priority, cluster.shares.by_priority, strict=True))
    if shares[Priority.P3] is None:  # it is served from P2's
        by_class[Priority.P2] += by_class.pop(Priority.P3)
    over = [
        f"{priority.name} has {part:g} and its tenants are guaranteed {units:g}"
        for priority, units in by_class.items()
        if units > (part := (shares[priority] or 0.0) * whole) * _ROUNDED
    ]
    if over:
        lent = "get the rest only when other classes leave it"
        then = lent if cluster.shares.borrow else "never get the rest"
        yield f"limits.cluster.shares: of cost_per_s {', '.join(over)}: they {then}"


def _loops(config: Config) -> Iterator[str]:
    server = config.server
    for index, worker in enumerate(config.workers):
        if is_own_address(worker.url, host=server.host, port=server.port):
            yield f"workers.{index}.url: {worker.url} is this router itself"


def _exposure(config: Config) -> Iterator[str]:
    """Whether other machines could call although nobody said that they may."""
    auth, host = config.auth, config.server.host
    if is_loopback(host) or auth.allow_open:
        return
    keys = (("auth.api_keys", config.has_user_keys), ("auth.admin_keys", auth.admin_keys))
    if missing := [name for name, values in keys if not values]:
        yield (
            f"server.host: it is {host}, so other machines could call, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} empty. "
            "Set keys, or auth.allow_open: true if none are needed."
        )


def address_of(host: str, port: int) -> Address:
    """The address to listen on. Raises ValueError, saying why, when there is none."""
    if not host.strip():
        raise ValueError("it is empty; 0.0.0.0 listens on all addresses")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise ValueError(f"no address is known for {host!r:.200}: {exc.strerror}") from exc
    except (OSError, UnicodeError) as exc:
        raise ValueError(f"{host!r:.200} is no address: {exc}") from exc
    return found[0][0], found[0][4]
