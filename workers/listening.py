"""What is said of an address that a worker or an agent cannot listen on."""

from __future__ import annotations

import os


class CannotListen(OSError):
    """An address that cannot be had; `str` says which one and why, `errno` is the system's."""

    def __init__(self, host: str, port: int, cause: OSError) -> None:
        known = cause.errno is not None and cause.errno > 0  # of names that mean nothing it is not
        why = os.strerror(cause.errno or 0) if known else cause.strerror or cause
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        super().__init__(f"cannot listen on {where}: {why}")
        self.errno = cause.errno
