"""Few open files: what a test needs to see a process run out of them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

_IN_USE = 3  # of every process, so with this limit no file more can be opened


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no file; those that are open stay so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_IN_USE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
