"""Everything needed to run the real, unmodified SGLang on two CPU cores.

`install` makes a virtual environment with pinned packages under the user's cache folder, and
`write_model` a tiny random-weight Llama; `command` and `environment` say how to start a server.
No GPU, no model download; about 3 GB on disk and 1.6 GB of memory per server.

`stubs/` holds two stand-ins that go on the server's PYTHONPATH: an empty `sgl_kernel` (its wheels
are CUDA-only, and nothing on this path calls it) and a `sitecustomize` that declares two
torchvision operators. They are test equipment; no file of SGLang is changed.

By hand: `python -m tests.real_sglang.kit` installs, `python -m tests.real_sglang.kit PORT [FLAGS]`
installs and then serves in the foreground.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .model import write_model

__all__ = [
    "MODEL_NAME",
    "InstallFailed",
    "command",
    "environment",
    "home",
    "install",
    "write_model",
]

MODEL_NAME: Final = "tiny"
_HERE: Final = Path(__file__).parent
# Installed in this order; the second file lists what would otherwise pull in CUDA packages.
_STEPS: Final = (
    ("--requirement", str(_HERE / "requirements.txt")),
    ("--no-deps", "--requirement", str(_HERE / "requirements-no-deps.txt")),
)


class InstallFailed(Exception):
    """The virtual environment could not be made; carries the end of pip's output."""


def home() -> Path:
    """Return the folder of the installation that belongs to the pins and to this Python."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    identity = hashlib.sha256(f"{platform.python_version()} {platform.machine()}".encode())
    for *_, requirements in _STEPS:
        identity.update(Path(requirements).read_bytes())
    return cache / "laneway" / f"sglang-cpu-{identity.hexdigest()[:12]}"


def is_installed() -> bool:
    return _marker().exists()


def install() -> Path:
    """Make the installation unless it is complete, and return its folder.

    The marker file is written last: what an interrupted run left behind has none and is made
    again from the start. Two runs at once take turns. Raises InstallFailed.
    """
    folder = home()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_name(f"{folder.name}.lock")) as lock:
        if not is_installed():
            shutil.rmtree(folder, ignore_errors=True)
            _run(sys.executable, "-m", "venv", str(folder), holding=lock)
            for step in _STEPS:
                _run(str(_python()), "-m", "pip", "install", *step, holding=lock)
            _marker().touch()
    return folder


def command(*flags: str, model: Path, port: int) -> list[str]:
    """Return the command that serves `model` on the loopback `port`; `flags` come last and win."""
    return [
        *(str(_python()), "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--served-model-name", MODEL_NAME, "--load-format", "dummy"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native"),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
        *("--mem-fraction-static", "0.1", "--max-total-tokens", "20000"),
        *("--context-length", "2048"),
        # An idle scheduler would otherwise spin on a whole core, and publish loads too rarely.
        *("--sleep-on-idle", "--load-snapshot-publish-interval", "1", "--enable-metrics"),
        *flags,
    ]


def environment(*, scratch: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a server whose temporary files shall go to `scratch`."""
    return {
        **{name: value for name, value in base.items() if not name.startswith("PYTHON")},
        "PYTHONPATH": str(_HERE / "stubs"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(scratch),
    }


def _python() -> Path:
    return home() / "bin" / "python"


def _marker() -> Path:
    return home() / "complete"


def _run(*words: str, holding: int) -> None:
    """Run a command that inherits the descriptor `holding`, so that the lock outlives our death."""
    done = subprocess.run(
        words,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(holding,),
    )
    if done.returncode != 0:
        tail = done.stdout.decode(errors="replace")[-2_000:]
        raise InstallFailed(f"{' '.join(words)} exited with {done.returncode}:\n{tail}")


@contextmanager
def _exclusive(path: Path) -> Iterator[int]:
    """Hold the lock file at `path` and yield its descriptor.

    The system frees the lock when the last process that has the descriptor is gone.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
