"""Starts a brain and its relays, starts another one of each that dies, and ends them in order.

The supervisor serves nobody: it holds the port and the brain's sockets, so that both outlive any
child, and waits. Children are forked: they share what is imported, and the key of Python's hashes,
by which prefixes of prompts are told apart in all relays alike.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from router.app.brain import run_brain
from router.app.build import address_for_others, new_router_id, url_of
from router.app.children import DRAIN, END, READ_AGAIN, Sockets, fork
from router.app.preflight import live_faults
from router.app.process import (
    BACKLOG,
    CannotServe,
    bound_socket,
    check,
    say_warnings,
    set_up_log,
    use_all_files,
)
from router.app.relay import Place, run_relay
from router.app.socket_folder import remove_left, socket_folder
from router.config import BadConfig, Config
from router.config_source import ConfigSource, Loaded, load
from router.config_versions import as_running
from router.release import VERSION

_log = logging.getLogger(__name__)

_STOP: Final = frozenset((signal.SIGTERM, signal.SIGINT))
_WATCHED: Final = {*_STOP, READ_AGAIN, signal.SIGCHLD}
# A child that dies again within the first is failing: each pause doubles, until it is given up.
_STEADY_S: Final = 30.0
_PAUSE_S: Final = 0.1
_PAUSE_S_MAX: Final = 10.0
_DEATHS_MAX: Final = 8
# Beyond the time that a relay takes by its settings, until it is killed.
_LATE_S: Final = 15.0
_BRAIN_END_S: Final = 10.0
_LOOK_S: Final = 3600.0
_FAULTS_LOGGED_MAX: Final = 5
_BAD_CONFIG: Final = 2  # the status of a child that would fail again


@dataclass(slots=True, eq=False)
class Child:
    """One process, or the pause before the next one in its place."""

    name: str
    start: Callable[[], int]
    pid: int | None = None
    started_at: float = 0.0
    deaths: int = 0  # in a row
    start_at: float = 0.0

    def run(self) -> None:
        """Start it."""
        self.pid, self.started_at = self.start(), time.monotonic()

    def kill(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there. Its id is its own until it was waited for."""
        if self.pid is not None:
            os.kill(self.pid, number)


class Supervisor:
    """The parent of a router's processes."""

    def __init__(
        self, config: Config, loaded: Loaded | None, sockets: Sockets, port: socket.socket
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._sockets = sockets
        self._port = port
        self._router_id = new_router_id()
        self._brain = Child("brain", self._fork_brain)
        self._relays = [
            Child(f"relay-{number}", partial(self._fork_relay, number))
            for number in range(1, config.relays.count + 1)
        ]
        self._children = [self._brain, *self._relays]
        self._stopping = False

    def run(self) -> None:
        """Serve until a signal ends it. Raises CannotServe when it can't go on, or is cut short."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            for child in self._children:
                child.run()
            config = self._config
            _log.info(
                "laneway %s listens on %s (policy %s, %d workers, %d relays)",
                VERSION, url_of(config, self._port), config.policy.name, len(config.workers),
                len(self._relays),
            )  # fmt: skip
            while (found := self._signal(self._pause_s())) not in _STOP:
                if found == READ_AGAIN:
                    self._brain.kill(READ_AGAIN)
                self._mend()
            self._stop()
        finally:
            for child in self._children:
                child.kill(signal.SIGKILL)
                if child.pid is not None:
                    os.waitpid(child.pid, 0)
        _log.info("stopped")

    # Children.

    def _fork_brain(self) -> int:
        if self._brain.deaths and self._loaded is not None:
            self._load_again(self._loaded)
        address = address_for_others(self._config, self._port)

        def run() -> None:
            self._port.close()
            run_brain(
                self._config,
                self._loaded,
                self._sockets,
                router_id=self._router_id,
                address=address,
            )

        return fork(self._brain.name, run, _WATCHED)

    def _load_again(self, loaded: Loaded) -> None:
        """The next brain begins with what the sources say now; if that is faulty, as the last."""
        try:
            self._loaded = _loaded_again(loaded.source, self._config)
            self._config = self._loaded.config
        except BadConfig as exc:
            _log.warning(
                "the configuration file is refused, the brain begins with the last good one: %s",
                "; ".join(exc.faults[:_FAULTS_LOGGED_MAX]),
            )
        except Exception:
            _log.exception("the configuration can't be read again")

    def _fork_relay(self, number: int) -> int:
        listener = relay_socket(self._port)
        sockets = self._sockets
        place = Place(number, sockets.link_path, sockets.surface_path, self._router_id)

        def run() -> None:
            for sock in (self._port, sockets.link, sockets.surface):
                sock.close()
            run_relay(self._config, listener, place)

        with listener:  # here; the child has its own
            return fork(f"relay-{number}", run, _WATCHED)

    def _signal(self, timeout_s: float) -> int | None:
        """Wait for a signal; for a child that ended, take note of that."""
        found = signal.sigtimedwait(_WATCHED, timeout_s)
        self._reap()
        return None if found is None else found.si_signo

    def _reap(self) -> None:
        for child in self._children:
            if child.pid is None:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.pid = None
                if not self._stopping:
                    self._died(child, os.waitstatus_to_exitcode(status))

    def _died(self, child: Child, status: int) -> None:
        now = time.monotonic()
        child.deaths = child.deaths + 1 if now - child.started_at < _STEADY_S else 1
        said = f"signal {-status}" if status < 0 else f"status {status}"
        if status == _BAD_CONFIG or child.deaths > _DEATHS_MAX:
            why = f"{child.name} ended with {said}, {child.deaths} times in a row"
            raise CannotServe(why, exit_status=status if status > 0 else 1)
        pause_s = min(_PAUSE_S_MAX, _PAUSE_S * 2 ** (child.deaths - 1))
        child.start_at = now + pause_s
        _log.error("%s ended with %s; another one starts in %g s", child.name, said, pause_s)

    def _pause_s(self) -> float:
        due = [child.start_at for child in self._children if child.pid is None]
        return max(0.0, min(due, default=time.monotonic() + _LOOK_S) - time.monotonic())

    def _mend(self) -> None:
        for child in self._children:
            if child.pid is None and child.start_at <= time.monotonic():
                child.run()

    # The end.

    def _stop(self) -> None:
        """Let relays drain, then end the brain, which they need until then."""
        _log.info("told to stop: relays drain")
        self._stopping = True
        for child in self._children:
            child.kill(DRAIN)
        server = self._config.server
        drained = self._ended(
            self._relays, server.drain_delay_s + server.shutdown_grace_s + _LATE_S
        )
        if not drained:
            _log.warning("told to stop again, or relays do not end: ending at once")
            for child in self._relays:
                child.kill(END)
            self._ended(self._relays, _BRAIN_END_S, again=True)
        self._brain.kill(END)
        self._ended([self._brain], _BRAIN_END_S, again=True)
        if not drained:
            raise CannotServe("ended before all answers did", exit_status=1)

    def _ended(self, children: list[Child], within_s: float, *, again: bool = False) -> bool:
        """Wait until `children` have ended. False: not in time, or told to stop `again`."""
        until = time.monotonic() + within_s
        while any(child.pid is not None for child in children):
            left_s = until - time.monotonic()
            if left_s <= 0 or (self._signal(left_s) in _STOP and not again):
                return False
        return True


def run_relays(config: Config, loaded: Loaded | None = None) -> None:
    """Serve with several processes until a signal. Raises CannotServe."""
    check(config)
    set_up_log(config.server.log_level, process="supervisor")
    use_all_files()
    say_warnings(config)
    server = config.server
    with reserved_port(server.host, server.port) as port:
        remove_left()
        with _private_folder() as folder:
            sockets = Sockets(*_listening(folder / "link"), *_listening(folder / "surface"))
            gc.collect()
            gc.freeze()  # so that no child copies what all of them share, only to collect it
            Supervisor(config, loaded, sockets, port).run()


def _loaded_again(source: ConfigSource, running: Config) -> Loaded:
    """What the sources say now, but for what cannot change while `running` is. Raises BadConfig."""
    loaded = load(source)
    if source.path is not None and not loaded.text.strip():
        raise BadConfig([f"{source.path}: it is empty"])  # somebody is writing it
    config = as_running(loaded.config, running)
    if faults := list(live_faults(config)):
        raise BadConfig(faults)
    return replace(loaded, config=config)


def reserved_port(host: str, port: int) -> socket.socket:
    """Return a socket that holds an address without listening, for relays to share.

    Raises CannotServe when the address cannot be had: another process that shares ports would not
    be noticed otherwise.
    """
    with bound_socket(host, port) as alone:
        family, address = alone.family, alone.getsockname()
    return _shared(family, address)


def relay_socket(port: socket.socket) -> socket.socket:
    """Return a listening socket of one more process behind a reserved port."""
    listener = _shared(port.family, port.getsockname())
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _shared(family: int, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)  # type: ignore[arg-type]
    except OSError as exc:
        sock.close()
        raise CannotServe(
            f"cannot listen on {address}: {exc.strerror or exc}", exit_status=1
        ) from exc
    return sock


@contextmanager
def _private_folder() -> Generator[Path, None, None]:
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(socket_folder())
        except OSError as exc:
            raise CannotServe(f"no folder for sockets: {exc}; set TMPDIR", exit_status=1) from exc
        yield folder


def _listening(path: Path) -> tuple[socket.socket, Path]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
    except OSError as exc:
        sock.close()
        raise CannotServe(f"cannot listen on {path}: {exc}; set TMPDIR", exit_status=1) from exc
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock, path
