"""A server process under test: started in a session of its own, stopped by its own id.

No process group outlives its leader: `stop_all` and `kill` end with SIGKILL to the group, and that
while the leader is still unreaped, so that its number cannot have gone to anybody else.
"""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import httpx

_STOP_GRACE_S: Final = 10.0
# Below the range from which the system takes ports of outgoing connections (32768 and up), so that
# none of those can take a server's port while it is restarted.
_PORTS: Final = range(20_000, 30_000)
# Each poll is a line, and so is each step of a server that was slowed on purpose.
_LOG_NOISE: Final = ('"GET /', "run_batch sleep")
T = TypeVar("T")


class NotInTime(AssertionError):
    """Something that should have happened did not, within its deadline."""


class Service:
    """One server process; may be started again on the same port after it was stopped."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        ready_path: str,
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._command = list(command)
        self._ready_path = ready_path
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self.has_ended(), f"{self.name} is running already"
        self.kill()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, *, within_s: float) -> None:
        """Return when the service answers 200. Raises NotInTime, at once if the process ended."""
        eventually(self._is_ready, bool, within_s=within_s, what=f"{self.name} is ready")

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the leader, which ends its own children."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the whole process group at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def has_ended(self) -> bool:
        """Whether the leader is gone. It is left unreaped, so its number stays reserved."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process is None or os.waitid(os.P_PID, self._process.pid, flags) is not None

    def log_tail(self, lines: int = 25) -> str:
        if not self.log.exists():
            return ""
        text = self.log.read_text(errors="replace").splitlines()
        telling = [line for line in text if not any(noise in line for noise in _LOG_NOISE)]
        return "\n".join(telling[-lines:])

    def _is_ready(self) -> bool:
        if self.has_ended():
            raise NotInTime(f"{self.name} ended while starting:\n{self.log_tail()}")
        try:
            return (
                httpx.get(self.url + self._ready_path, trust_env=False, verify=False).status_code
                == 200
            )
        except httpx.TransportError:
            return False


def stop_all(services: Sequence[Service]) -> None:
    """Ask all of them to stop, and after ten seconds kill what is left of their groups."""
    for service in services:
        service.ask_to_stop()
    deadline = time.monotonic() + _STOP_GRACE_S
    while time.monotonic() < deadline and not all(s.has_ended() for s in services):
        time.sleep(0.02)
    for service in services:
        service.kill()


def eventually(
    read: Callable[[], T], until: Callable[[T], bool], *, within_s: float, what: str
) -> T:
    """Read again and again until `until` holds, and return that reading.

    Raises NotInTime with `what` should have been and the last reading.
    """
    deadline = time.monotonic() + within_s
    while not until(reading := read()):
        if time.monotonic() > deadline:
            raise NotInTime(f"not within {within_s:g} s: {what}; last seen: {reading!r}")
        time.sleep(0.05)
    return reading


def free_port() -> int:
    """Return a loopback port that nobody listens on, different from call to call."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            # As servers do it: a port whose last connections linger is free all the same.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
