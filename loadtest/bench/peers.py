"""The routers that ours is measured beside, each wheel in a virtual environment of its own.

The environments live in the user's cache folder and are made when they are missing. A stamp,
written last, tells a whole one from one whose installation was interrupted.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STAMP_NAME: Final = ".laneway-complete"
INSTALL_TIMEOUT_S: Final = 900

Installer = Callable[[Path, str], None]


class Unavailable(Exception):
    """A peer that cannot be had on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A released package, pinned."""

    name: str
    version: str

    @property
    def requirement(self) -> str:
        """The package as pip wants it named."""
        return f"{self.name}=={self.version}"


SGLANG_ROUTER: Final = Wheel("sglang-router", "0.3.2")
VLLM_ROUTER: Final = Wheel("vllm-router", "0.1.17")
SMG: Final = Wheel("smg", "1.13.0")


def peers_folder() -> Path:
    """Where the environments are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "laneway" / "peers"


def pip_install(environment: Path, requirement: str) -> None:
    """Make a virtual environment at `environment` that holds `requirement`.

    Raises Unavailable with what pip said last.
    """
    make = [sys.executable, "-m", "venv", str(environment)]
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for command in (make, [*pip, "install", "--quiet", requirement]):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise Unavailable(f"{requirement}: not installed in {exc.timeout:.0f} s") from exc
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = (errors or done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Unavailable(f"{requirement}: {reason.removeprefix('ERROR: ')}")


def environment_of(
    wheel: Wheel, *, folder: Path | None = None, install: Installer = pip_install
) -> Path:
    """The environment that holds `wheel`, made now if it is missing or incomplete.

    Raises Unavailable when it cannot be made; nothing half-made is left behind.
    """
    folder = folder or peers_folder()
    folder.mkdir(parents=True, exist_ok=True)
    environment = folder / f"{wheel.name}-{wheel.version}"
    # An environment is bound to the Python that made it.
    mark = f"{wheel.requirement} python {sys.version_info[0]}.{sys.version_info[1]}\n"
    stamp = environment / STAMP_NAME
    with _locked(environment.with_name(f"{environment.name}.lock")):
        if stamp.exists() and stamp.read_text() == mark:
            return environment
        shutil.rmtree(environment, ignore_errors=True)
        print(f"installing {wheel.requirement}", file=sys.stderr, flush=True)
        try:
            install(environment, wheel.requirement)
        except Unavailable:
            shutil.rmtree(environment, ignore_errors=True)
            raise
        stamp.write_text(mark)
    return environment


def nginx_program() -> str:
    """The path of nginx. Raises Unavailable where there is none."""
    # Debian puts it where the PATH of users does not look.
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
    found = shutil.which("nginx", path=path)
    if found is None:
        raise Unavailable("nginx is not installed; on Debian: apt-get install nginx-light")
    return found


def nginx_version(program: str) -> str:
    """The version of nginx at `program`, such as 1.22.1."""
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
    return said.strip().rpartition("/")[2]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, so that two runs do not make one environment at once."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
