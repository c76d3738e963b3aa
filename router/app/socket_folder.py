"""The folder of a supervisor's sockets: this user's alone, gone when its supervisor is.

A supervisor that is killed cannot remove its folder; the next one does. Whether a folder is still
in use is told by a lock that the kernel drops with its holder, whatever ended that, and which no
reuse of a process id can feign.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

_PREFIX: Final = "laneway-"
_LOCK: Final = "lock"


@contextmanager
def socket_folder() -> Generator[Path, None, None]:
    """A new folder, removed at the end. Raises OSError when there can be none."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        unready = folder / f"{_LOCK}.new"
        lock = os.open(unready, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unready.rename(folder / _LOCK)  # only now: it is never to be seen unlocked
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left() -> None:
    """Remove the folders of this user's supervisors that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
                _log.info("removed %s, which a router that was killed had left", folder)
        except OSError:
            continue  # it has no lock, so it is not ours; or it is gone by now


def _is_left(folder: Path) -> bool:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
