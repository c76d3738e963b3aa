"""Commands of the command line, run in this process."""

from __future__ import annotations

import pytest

from router.cli import main


class Ended:
    """How a command ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err


class Run:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> Ended:
        with pytest.raises(SystemExit) as caught:
            main(args)
        out, err = self._capsys.readouterr()
        return Ended(int(caught.value.code or 0), out, err)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)
