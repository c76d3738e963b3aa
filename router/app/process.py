"""What a serving process needs before it serves: a safe address, a socket, a log, enough files."""

from __future__ import annotations

import logging
import resource
import socket
import sys
from typing import Final

from router.app.preflight import address_of, faults, warnings
from router.config import Config

BACKLOG: Final = 4096

_log = logging.getLogger(__name__)


class CannotServe(Exception):
    """The router does not start; the message is for the person who started it."""

    def __init__(self, message: str, *, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def check(config: Config) -> None:
    """Raise CannotServe when a router must not or cannot serve by `config` here."""
    if found := list(faults(config)):
        listed = "".join(f"\n  {fault}" for fault in found)
        raise CannotServe(f"the configuration cannot be used:{listed}", exit_status=2)


def say_warnings(config: Config) -> None:
    """Log what may not be meant of `config`."""
    for text in warnings(config):
        _log.warning("%s", text)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises CannotServe when the address cannot be had."""
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    family, address = address_of(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise CannotServe(
            f"cannot listen on {where}: {exc.strerror or exc}; choose another with --port",
            exit_status=1,
        ) from exc
    return listener


def set_up_log(level: str, *, process: str = "") -> None:
    """Write the log to standard error: ours from `level` on, other packages' warnings.

    `process` names this one among the processes of one router.
    """
    handler = logging.StreamHandler(sys.stderr)
    named = f"{process} " if process else ""
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname)s {named}%(name)s: %(message)s"))
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
    """Raise the soft limit on open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
