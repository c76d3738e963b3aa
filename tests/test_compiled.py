"""The compiled build does what the sources say. Most of this runs under scripts/test --compiled."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest

import router
from loadtest.sim.trials import TRIALS
from router.config import Config
from router.core.dispatcher import Dispatcher
from router.core.types import Ticket
from router.release import COMPILED

HERE = Path(__file__).resolve().parent.parent
INSTALLED = Path(router.__file__).parent.parent

only_compiled = pytest.mark.skipif(not COMPILED, reason="of the compiled build")


def modules() -> list[str]:
    """Every module that the compiled build compiles."""
    document = tomllib.loads((HERE / "pyproject.toml").read_text())
    groups = document["tool"]["laneway"]["compiled"].values()
    patterns = [pattern for group in groups for pattern in group]
    paths = [sorted(glob.glob(pattern, root_dir=INSTALLED)) for pattern in patterns]
    assert all(paths), "a pattern that matches nothing"
    return [path.removesuffix(".py").replace("/", ".") for found in paths for path in found]


@pytest.mark.parametrize("name", modules())
def test_the_modules_of_the_hot_path_are_compiled_all_or_none(name: str) -> None:
    module = import_module(name)
    assert str(module.__file__).endswith(".so" if COMPILED else ".py")
    # mypyc takes a Final tuple that begins with a float for one that was never set.
    text = (INSTALLED / (name.replace(".", "/") + ".py")).read_text()
    for constant, value in vars(module).items():
        if isinstance(value, tuple) and value and isinstance(value[0], float):
            assert f"\n{constant}: Final = (" not in text, constant
    # What it makes of an exception with attributes ends the process when they are read.
    own = [one for one in vars(module).values() if getattr(one, "__module__", "") == name]
    assert [one for one in own if isinstance(one, type) and issubclass(one, BaseException)] == []


DIGESTS = """
from dataclasses import replace
from loadtest.sim.run import simulate
from loadtest.sim.trials import TRIALS
from router.release import BUILD
print(BUILD)
for name, trial in TRIALS.items():
    faults = tuple(replace(fault, at_s=fault.at_s // 20) for fault in trial.faults)
    trial = replace(trial, length_s=5.0, measured_from_s=0.0, faults=faults)
    print(name, simulate(trial, "laneway", seed=3).digest)
"""


def digests(sources: Path) -> list[str]:
    """The build in `sources`, then a digest of each trial."""
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS],
        env={**os.environ, "PYTHONPATH": str(sources)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout.splitlines()


@only_compiled
def test_simulations_go_the_same_way_in_both_builds(tmp_path: Path) -> None:
    for package in ("router", "workers", "loadtest"):
        shutil.copytree(
            INSTALLED / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so")
        )
    (compiled, *ours), (interpreted, *theirs) = digests(INSTALLED), digests(tmp_path)
    assert (compiled, interpreted) == ("compiled", "interpreted")
    assert len(ours) == len(TRIALS)
    assert ours == theirs


class Wrong:
    """Of no type that anything expects."""


def entries() -> list[str]:
    """The public methods of the core."""
    names = (name for name in dir(Dispatcher) if not name.startswith("_"))
    return [name for name in names if callable(getattr(Dispatcher, name))]


@only_compiled
@pytest.mark.parametrize("name", entries())
def test_wrong_types_are_refused_at_the_door_of_the_core(name: str) -> None:
    core = Dispatcher(Config(), rng=Random(1))
    parameters = signature_of(getattr(Dispatcher, name))
    if not parameters:
        getattr(core, name)()
        return
    with pytest.raises(TypeError):
        getattr(core, name)(
            *(Wrong() for kind in parameters.values() if not kind),
            **{one: Wrong() for one, named in parameters.items() if named},
        )


def signature_of(method: Any) -> dict[str, bool]:
    """The parameters that a method needs beside itself, and whether they have to be named."""
    text = str(method.__text_signature__)
    found: dict[str, bool] = {}
    named = False
    for part in text.strip("()").split(", "):
        if part == "*":
            named = True
        elif not part.startswith("$") and part != "/" and "=" not in part:
            found[part] = named
    return found


@only_compiled
def test_an_attribute_of_the_core_takes_its_type_only() -> None:
    ticket: Any = Ticket
    with pytest.raises(TypeError):
        ticket(Wrong(), 1, Wrong(), 1, 1, 1, 0.0, 0.0, Wrong())
