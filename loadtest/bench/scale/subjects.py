"""The router and nginx as `scripts/bench scale` starts them: with a configuration of their own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from loadtest.bench.subjects import INTERPRETED, NGINX, OURS, Subject, subject_makers

# Ours as it is deployed, and its sources as plain Python.
BUILDS: Final = (OURS, INTERPRETED)
_CONFIG: Final = "--config"


def laneway(build: str, settings: str = "", *, agents: bool = False) -> Subject:
    """Ours with all workers of the stand, and their agents; `settings` are more lines of YAML.

    Raises Unavailable where the compiled build cannot be made.
    """
    subject = subject_makers([])[build]()
    specs = "{agent_specs}" if agents else "{worker_specs}"
    serve = subject.command[: subject.command.index(_CONFIG)]
    return replace(
        subject,
        command=(*serve, _CONFIG, "{dir}/laneway.yaml"),
        files={"laneway.yaml": f"workers:{specs}\n{settings}\n"},
    )


def interpreter(build: str) -> tuple[str, Mapping[str, str]]:
    """The Python that has this build, and what its environment must hold."""
    subject = subject_makers([])[build]()
    if build == INTERPRETED:
        return sys.executable, subject.environment
    return str(Path(subject.command[0]).with_name("python")), subject.environment


def nginx() -> Subject:
    """Raises Unavailable where it is not installed."""
    return subject_makers([])[NGINX]()
