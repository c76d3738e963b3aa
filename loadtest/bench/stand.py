"""Fake workers and a router before them, started on free ports and stopped for certain.

The scratch folder and the log of everything that ran are removed after success and kept after
a failure. Processes are ended by id, with all that they started.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from loadtest.bench.payloads import MODEL
from loadtest.bench.procfs import tree
from loadtest.bench.subjects import ROOT, Subject

# A router under measurement sees neither a proxy nor settings of ours that lie around.
_DROPPED: Final = ("http_proxy", "https_proxy", "all_proxy")
_DROPPED_PREFIX: Final = "LANEWAY_"
_LOG_TAIL_CHARS: Final = 1500
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RoundFailed(Exception):
    """A subject that did not start, died or could not be measured."""


@dataclass(slots=True)
class Stand:
    """What runs during a round."""

    subject: Subject
    places: dict[str, str]
    log: IO[bytes]
    workers: subprocess.Popen[bytes]
    router: subprocess.Popen[bytes]
    start_s: float = 0.0

    @property
    def url(self) -> str:
        """The router's base URL."""
        return f"http://127.0.0.1:{self.places['port']}"

    @property
    def worker_urls(self) -> list[str]:
        """The workers' base URLs."""
        return self.places["worker_urls"].split()

    @property
    def direct_url(self) -> str:
        """The first worker's base URL."""
        return self.places["b1"]

    def set_decode_step(self, interval_ms: float) -> None:
        """Set the workers' decode step; 0 writes a whole stream at once."""
        self._set(f"interval_ms={interval_ms}")

    def set_padding(self, pad_bytes: int) -> None:
        """Set the bytes of comment behind each chunk of a stream that is written at once."""
        self._set(f"pad_bytes={pad_bytes}")

    def _set(self, setting: str) -> None:
        for base in self.worker_urls:
            try:
                _get(f"{base}/_bench/set?{setting}")
            except OSError as exc:
                raise RoundFailed(f"a fake worker is gone: {exc}: {_tail(self.log)}") from exc

    def require_alive(self) -> None:
        """Raise RoundFailed if the router has ended."""
        if self.router.poll() is not None:
            code = self.router.returncode
            raise RoundFailed(f"the router ended with status {code}: {_tail(self.log)}")


@contextmanager
def standing(
    subject: Subject,
    *,
    inside: Path | None = None,
    workers: int = 2,
    worker_flags: Sequence[str] = (),
    connections: int = 4096,
) -> Iterator[Stand]:
    """Start everything, wait until a completion comes back, and stop it at the end.

    The scratch folder lies in `inside`, or where temporary files do. `connections`: how many nginx
    may have open, for each of which it reserves memory. Raises RoundFailed.
    """
    folder = Path(tempfile.mkdtemp(prefix="laneway-bench-", dir=inside))
    folder.chmod(0o755)  # nginx's worker runs as another user
    places = _places(folder, workers) | {"connections": str(connections)}
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("w+b") as log:
        try:
            command = [sys.executable, "-m", "loadtest.bench.worker"]
            command += [*places["worker_ports"].split(), *worker_flags]
            started.append(_spawn(command, log, cwd=folder, extra={"PYTHONPATH": str(ROOT)}))
            _wait_for_worker(places["b1"], started[0], log)
            began = time.monotonic()
            started.append(_spawn_subject(subject, places, log, folder))
            stand = Stand(subject, places, log, started[0], started[1])
            _wait_for_router(stand, began)
            yield stand
        finally:
            for process in reversed(started):
                stop(process)
    shutil.rmtree(folder, ignore_errors=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End `process` and what it started: politely, and after 4 s by force."""
    pids = tree(process.pid)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 4.0
        while time.monotonic() < deadline:
            process.poll()
            if not any(Path(f"/proc/{pid}").exists() for pid in pids):
                return
            time.sleep(0.05)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would change a measurement."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.lower() not in _DROPPED and not name.startswith(_DROPPED_PREFIX)
    }
    return kept | dict(extra)


def _places(folder: Path, workers: int) -> dict[str, str]:
    sockets = [socket.socket() for _ in range(2 + workers)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    port, aux, *ports = (str(each.getsockname()[1]) for each in sockets)
    for each in sockets:
        each.close()
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    return {
        "p1": ports[0],
        "p2": ports[1],
        "port": port,
        "aux": aux,
        "b1": urls[0],
        "b2": urls[1],
        "worker_ports": " ".join(ports),
        "worker_urls": " ".join(urls),
        "nginx_servers": " ".join(f"server 127.0.0.1:{each};" for each in ports),
        "worker_specs": "".join(f"\n- {{url: {url}}}" for url in urls),
        "agent_specs": "".join(f"\n- {{url: {url}, health_url: {url}/health}}" for url in urls),
        "dir": str(folder),
        "python": sys.executable,
    }


def _spawn_subject(
    subject: Subject, places: dict[str, str], log: IO[bytes], folder: Path
) -> subprocess.Popen[bytes]:
    for name, template in subject.files.items():
        (folder / name).write_text(template.format(**places))
    command = [word.format(**places) for word in subject.command]
    return _spawn(command, log, cwd=folder, extra=subject.environment)


def _spawn(
    command: list[str], log: IO[bytes], *, cwd: Path, extra: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env=child_environment(extra),
            start_new_session=True,
        )
    except OSError as exc:
        raise RoundFailed(f"{command[0]}: {exc}") from exc


def _wait_for_worker(base: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + 10.0
    while process.poll() is None and time.monotonic() < deadline:
        try:
            _get(f"{base}/health")
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RoundFailed(f"the fake workers did not start: {_tail(log)}")


def _wait_for_router(stand: Stand, began: float) -> None:
    while not _completes(stand.url):
        stand.require_alive()
        if time.monotonic() - began > stand.subject.start_s_max:
            waited_s = stand.subject.start_s_max
            raise RoundFailed(f"no completion after {waited_s:.0f} s: {_tail(stand.log)}")
        time.sleep(0.1)
    stand.start_s = round(time.monotonic() - began, 1)


def _completes(base: str) -> bool:
    question = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
    }
    request = urllib.request.Request(
        f"{base}/v1/chat/completions",
        json.dumps(question).encode(),
        {"content-type": "application/json"},
    )
    try:
        with _DIRECT.open(request, timeout=5) as answer:
            return b"quick brown fox" in answer.read()
    except (OSError, http.client.HTTPException):
        return False


def _get(url: str) -> None:
    with _DIRECT.open(url, timeout=5) as answer:
        answer.read()


def _tail(log: IO[bytes]) -> str:
    log.flush()
    text = Path(str(log.name)).read_text(errors="replace")
    return f"(log: {log.name}) {text[-_LOG_TAIL_CHARS:].strip() or 'it said nothing'}"
