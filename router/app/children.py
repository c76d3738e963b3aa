"""What the processes of a router with relays share: how they begin, and how they are told to end.

A child is forked from the supervisor, dies with it, and is in a process group of its own, so that
a terminal's Ctrl-C reaches the supervisor alone. SIGTERM tells a child to drain, however often it
comes, as some managers of services send it to every process; SIGINT, to end at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from router.app.process import CannotServe

DRAIN: Final = signal.SIGTERM
END: Final = signal.SIGINT
READ_AGAIN: Final = signal.SIGHUP  # the file of the configuration
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_FAULT_STATUS: Final = 70  # an exception that nobody expected


@dataclass(frozen=True, slots=True)
class Sockets:
    """Where a brain listens. They are the supervisor's, and so outlive any brain."""

    link: socket.socket  # for messages
    link_path: Path
    surface: socket.socket  # for HTTP that is not inference
    surface_path: Path


def fork(name: str, run: Callable[[], None], watched: set[signal.Signals]) -> int:
    """Run `run` in a new process and return its id here; `top` shows it as laneway-`name`.

    `watched` are the signals that the supervisor blocks, to wait for them. They stay blocked in
    the child until it is ready for them (`hear`), so that none is lost.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _be_child(name, run, parent, watched)
    return pid


def hear(
    drain: Callable[[], None], end: Callable[[], None], again: Callable[[], None] | None = None
) -> None:
    """Call these in the running loop when the supervisor says DRAIN, END or READ_AGAIN."""
    handlers = {DRAIN: drain, END: end, READ_AGAIN: again or _nothing}
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*handlers, signal.SIGCHLD})


def _nothing() -> None:
    """Hear of a signal and do nothing."""


def _be_child(
    name: str, run: Callable[[], None], parent: int, watched: set[signal.Signals]
) -> NoReturn:
    status = _FAULT_STATUS
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, f"laneway-{name}".encode())
        if os.getppid() != parent:
            os._exit(_FAULT_STATUS)  # it died before this could be said
        os.setpgid(0, 0)
        for number in watched:
            signal.signal(number, signal.SIG_DFL)
        run()
        status = 0
    except CannotServe as exc:
        print(f"laneway: {exc}", file=sys.stderr)
        status = exc.exit_status
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
