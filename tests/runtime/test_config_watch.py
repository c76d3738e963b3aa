"""The watch of the configuration file: what it takes, what it refuses, and that it goes on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from router.config import LiveSettings
from router.config_source import ConfigSource, load
from router.runtime import config_watch
from router.runtime.config_watch import ConfigWatch
from router.runtime.live_config import Author, LiveConfig

SETTLE_S = config_watch._SETTLE_S


@pytest.fixture(autouse=True)
def settled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_watch, "_SETTLE_S", 0.01)


def watched(path: Path) -> tuple[LiveConfig, ConfigWatch]:
    loaded = load(ConfigSource(path=path, environment={}))
    live = LiveConfig(loaded)
    return live, ConfigWatch(live, loaded)


def depth(live: LiveConfig) -> int:
    return live.config.queue.depth_max


def test_by_default_a_changed_file_is_in_force_within_two_seconds() -> None:
    """So soon a key that was taken away is refused: one look, and another one to be sure."""
    assert LiveSettings().poll_s + SETTLE_S <= 1.5


async def test_a_bad_file_changes_nothing_and_a_mended_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Field case CF01."""
    path = tmp_path / "laneway.yaml"
    path.write_text("queue: {depth_max: 5}")
    live, watch = watched(path)
    for text, fault in (
        ("queue: {depth_max: [", "laneway.yaml: not YAML"),
        ("queue: {depth_max: -1}", "queue.depth_max: must be 0 or more"),
        ("", "laneway.yaml: it is empty"),
        ("- a", "laneway.yaml: the top level"),
        ("queue: {depth_max: 6}\nlanes: {spil: false}", "lanes.spil: there is no such setting"),
    ):
        caplog.clear()
        path.write_text(text)
        for _ in range(3):
            await watch.look()
        assert depth(live) == 5
        (line,) = [record.getMessage() for record in caplog.records]
        assert fault in line
        assert fault in live.file_faults[0]
    path.write_text("queue: {depth_max: 7}")
    await watch.look()
    assert (depth(live), live.file_faults) == (7, ())
    assert (live.version.source, live.version.who) == ("file", str(path))
    assert live.counts == {("file", "refused"): 5, ("file", "applied"): 1}


async def test_a_fault_that_is_taken_back_is_over(tmp_path: Path) -> None:
    path = tmp_path / "laneway.yaml"
    path.write_text("queue: {depth_max: 5}")
    live, watch = watched(path)
    path.write_text("queue: [")
    await watch.look()
    assert live.file_faults
    path.write_text("queue: {depth_max: 5}")
    await watch.look()
    assert (live.file_faults, live.version.number) == ((), 1)


async def test_a_file_that_is_gone_is_said_once_and_taken_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "laneway.yaml"
    path.write_text("queue: {depth_max: 5}")
    live, watch = watched(path)
    path.unlink()
    for _ in range(3):
        await watch.look()
    assert [r.getMessage() for r in caplog.records if "No such file" in r.getMessage()] != []
    assert len(caplog.records) == 1
    assert live.file_faults == (f"{path}: No such file or directory",)
    path.write_text("queue: {depth_max: 5}")
    await watch.look()
    assert live.file_faults == ()
    path.write_text("queue: {depth_max: 6}")
    await watch.look()
    assert depth(live) == 6


async def test_a_pipe_in_the_place_of_the_file_is_refused_and_waited_for_by_nobody(
    tmp_path: Path,
) -> None:
    path = tmp_path / "laneway.yaml"
    path.write_text("queue: {depth_max: 5}")
    live, watch = watched(path)
    path.unlink()
    os.mkfifo(path)
    looking = asyncio.create_task(watch.look())
    try:
        async with asyncio.timeout(5):
            await asyncio.shield(looking)
    finally:
        if not looking.done():  # the thread would never end, nor then the loop
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    assert live.file_faults == (f"{path}: it is not a regular file",)
    path.unlink()
    path.write_text("queue: {depth_max: 6}")
    await watch.look()
    assert (depth(live), live.file_faults) == (6, ())


async def test_a_swapped_symbolic_link_is_seen_and_a_new_time_alone_is_not(tmp_path: Path) -> None:
    for name, value in (("..1", 5), ("..2", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "laneway.yaml").write_text(f"queue: {{depth_max: {value}}}")
    data = tmp_path / "..data"
    data.symlink_to("..1")
    path = tmp_path / "laneway.yaml"
    path.symlink_to("..data/laneway.yaml")
    live, watch = watched(path)
    (tmp_path / "..1" / "laneway.yaml").touch()
    await watch.look()
    assert live.version.number == 1
    swapped = tmp_path / "..data_tmp"
    swapped.symlink_to("..2")
    swapped.replace(data)
    await watch.look()
    assert depth(live) == 6


async def test_what_is_being_written_is_not_taken_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "laneway.yaml"
    path.write_text("queue: {depth_max: 5}\nlanes: {spill: false}\n")
    live, watch = watched(path)
    path.write_text("queue: {depth_max: 6}\n")  # the first half: valid by itself
    wait = asyncio.sleep

    async def write_on(seconds: float) -> None:
        with path.open("a") as file:
            file.write("lanes: {spill: false}\n")
        await wait(seconds)

    monkeypatch.setattr(asyncio, "sleep", write_on)
    await watch.look()
    assert (depth(live), live.config.lanes.spill) == (5, False)
    monkeypatch.undo()
    monkeypatch.setattr(config_watch, "_SETTLE_S", 0.01)
    await watch.look()
    assert (depth(live), live.config.lanes.spill) == (6, False)


async def test_told_by_a_signal_it_says_what_came_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "laneway.yaml"
    path.write_text("live: {poll_s: 0}")
    live, watch = watched(path)
    caplog.set_level(logging.INFO)
    watch.start()
    try:

        async def told(said: str) -> None:
            watch.read_again()
            await eventually(lambda: said in caplog.text)

        await told("nothing changed")
        path.write_text("live: {poll_s: 0}\npolicy: {seed: 7}")
        await told("a restart is needed for policy.seed")
        await told("nothing changed; a restart is still needed for policy.seed")
        path.write_text("live: {poll_s: 0}\nqueue: {depth_max: 4}")
        await told("configuration version 2")
        assert live.version.who == "SIGHUP"
        path.write_text("queue: [")
        await told("is refused, version 2 stays in force")
        caplog.clear()
        await told("is refused, version 2 stays in force")
    finally:
        await watch.aclose()
    assert depth(live) == 4


async def test_a_patch_can_begin_the_looking(tmp_path: Path) -> None:
    path = tmp_path / "laneway.yaml"
    path.write_text("live: {poll_s: 0}")
    live, watch = watched(path)
    watch.start()
    try:
        await asyncio.sleep(0)
        live.patch({"live": {"poll_s": 0.01}}, Author("api", "admin"))
        await asyncio.sleep(0.05)
        path.write_text("live: {poll_s: 0}\nqueue: {depth_max: 4}")
        await eventually(lambda: depth(live) == 4)
    finally:
        await watch.aclose()


async def test_it_looks_by_itself_and_survives_a_patch_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "laneway.yaml"
    path.write_text("live: {poll_s: 0.01}")
    live, watch = watched(path)
    watch.start()
    try:
        live.patch({"lanes": {"spill": False}}, Author("api", "admin"))
        path.write_text("live: {poll_s: 0.01}\nqueue: {depth_max: 4}")
        await eventually(lambda: depth(live) == 4)
    finally:
        await watch.aclose()
    assert live.config.lanes.spill is False


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
