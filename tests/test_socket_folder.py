"""Folders of sockets: whose supervisor is dead go, all others stay."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from router.app.socket_folder import remove_left, socket_folder

HOLDER = """
from router.app.socket_folder import socket_folder
with socket_folder() as folder:
    (folder / "link").touch()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def own_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_folder_is_removed_when_its_holder_was_killed_and_not_before(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        try:
            folder = Path(holder.stdout.readline().strip())
            assert folder.parent == tmp_path
            remove_left()
            assert (folder / "link").exists()
        finally:
            holder.kill()
    assert folder.exists()
    remove_left()
    assert not folder.exists()


def test_what_is_not_a_supervisors_stays(tmp_path: Path) -> None:
    with socket_folder() as own:
        begun = tmp_path / "laneway-begun"  # another one, just before it has its lock
        begun.mkdir()
        (begun / "lock.new").touch()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "lock").touch()
        (tmp_path / "laneway-link").symlink_to(elsewhere)
        (tmp_path / "laneway-file").touch()
        remove_left()
        assert own.exists()
        assert begun.exists()
        assert (elsewhere / "lock").exists()
        assert (tmp_path / "laneway-file").exists()
    assert not own.exists()
