"""Where a router's CPU goes while it is under load, by py-spy's samples."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from loadtest.bench.results import LoadResult
from loadtest.bench.rounds import Options, paced_load, plain_load, run_client
from loadtest.bench.stand import RoundFailed, Stand, standing
from loadtest.bench.subjects import Subject

SAMPLES_PER_S: Final = 200


class NoProfiler(Exception):
    """py-spy is not installed."""


def profiler() -> str:
    """The path of py-spy: beside this interpreter, or on the PATH. Raises NoProfiler."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise NoProfiler("py-spy is not installed: .venv/bin/pip install -e '.[bench]'")
    return found


def profile(subject: Subject, options: Options, *, paced: bool, seconds: int) -> Counter[str]:
    """Samples by the innermost frame, of `seconds` under load, idle threads left out."""
    program = profiler()
    with standing(subject) as stand, tempfile.TemporaryDirectory() as folder:
        stand.set_decode_step(options.step_ms if paced else 0)
        stacks = Path(folder) / "stacks.txt"
        recorder = _started(program, stand, stacks, seconds)
        try:
            arguments = paced_load(options) if paced else plain_load(options)
            while recorder.poll() is None:
                run_client("load", [stand.url], arguments, LoadResult)
                stand.require_alive()
        finally:
            recorder.terminate()
            _, said = recorder.communicate()
        if not stacks.exists():
            raise RoundFailed(f"py-spy recorded nothing: {said.decode(errors='replace')[-500:]}")
        return self_samples(stacks.read_text())


def self_samples(stacks: str) -> Counter[str]:
    """Count by innermost frame; a line is `outer;...;inner COUNT`."""
    samples: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        samples[stack.rpartition(";")[2]] += int(count)
    return samples


def profile_text(samples: Counter[str], *, lines: int) -> str:
    """The frames with the most self time, as shares of all samples."""
    total = samples.total() or 1
    return "\n".join(
        f"{count / total:6.1%}  {frame}" for frame, count in samples.most_common(lines)
    )


def _started(program: str, stand: Stand, stacks: Path, seconds: int) -> subprocess.Popen[bytes]:
    command = [program, "record", "--pid", str(stand.router.pid), "--subprocesses", "--native"]
    command += ["--rate", str(SAMPLES_PER_S), "--duration", str(seconds)]
    command += ["--format", "raw", "--output", str(stacks)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
