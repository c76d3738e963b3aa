"""What a serving process needs before it serves: a safe address, a socket, a log, enough files."""

from __future__ import annotations

import logging
import resource
import socket
import sys
from typing import Final

from router.api.auth import is_loopback
from router.config import Config

_BACKLOG: Final = 4096


class CannotServe(Exception):
    """The router does not start; the message is for the person who started it."""

    def __init__(self, message: str, *, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def check_exposure(config: Config) -> None:
    """Raise CannotServe when other machines could call and nobody said that they may."""
    auth, host = config.auth, config.server.host
    if is_loopback(host) or auth.allow_open:
        return
    missing = [
        name
        for name, keys in (("auth.api_keys", auth.api_keys), ("auth.admin_keys", auth.admin_keys))
        if not keys
    ]
    if missing:
        raise CannotServe(
            f"server.host is {host}, so other machines could call, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} empty. "
            "Set keys, or auth.allow_open: true if none are needed.",
            exit_status=2,
        )


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises CannotServe when the address cannot be had."""
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as exc:
        raise CannotServe(f"server.host {host!r} is no address: {exc}", exit_status=2) from exc
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise CannotServe(
            f"cannot listen on {where}: {exc.strerror or exc}; choose another with --port",
            exit_status=1,
        ) from exc
    return listener


def set_up_log(level: str) -> None:
    """Write the log to standard error: ours from `level` on, other packages' warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("router").setLevel(level.upper())


class _OneLine(logging.Formatter):
    """Escapes what a worker's or a client's text may carry to fool a reader of the log."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        text = super().formatMessage(record)
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def use_all_files() -> None:
    """Raise the soft limit on open files to the hard one: each stream holds two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
