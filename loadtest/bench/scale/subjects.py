"""The router and nginx as `scripts/bench scale` starts them: with a configuration of their own."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Final

from loadtest.bench.subjects import NGINX, OURS, ROOT, Subject, commit, subject_makers

_SERVE: Final = "{python} -m router serve --port {port} --config {dir}/laneway.yaml"


def laneway(settings: str = "", *, agents: bool = False) -> Subject:
    """Ours with all workers of the stand, and their agents; `settings` are more lines of YAML."""
    specs = "{agent_specs}" if agents else "{worker_specs}"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Subject(
        name=OURS,
        version=f"{metadata.version(OURS)} ({commit()})",
        command=tuple(_SERVE.split()),
        files={"laneway.yaml": f"workers:{specs}\n{settings}\n"},
        environment={"PYTHONPATH": os.pathsep.join(paths)},
    )


def nginx() -> Subject:
    """Raises Unavailable where it is not installed."""
    return subject_makers([])[NGINX]()
