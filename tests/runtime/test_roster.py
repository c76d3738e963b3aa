"""What a brain knows of the workers of the one before it, whatever has become of the file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

import pytest

from router.core.types import WorkerState
from router.runtime.roster import Roster
from tests.core.builders import worker_spec
from tests.runtime.brain_rig import WORKER, brain, relay, settings, state_of
from tests.runtime.relay.rig import eventually

ONE, TWO = worker_spec("w1"), worker_spec("w2")


async def _roster(path: Path) -> Roster:
    return Roster(path, loop=asyncio.get_running_loop())


async def _here(roster: Roster) -> None:
    for spec in (ONE, TWO):
        roster.put(spec.worker_id, spec.url, drains=False)
    await _turn()


async def _turn() -> None:
    """What changed in a turn of the loop is written at its end."""
    await asyncio.sleep(0)


async def test_who_left_is_known_to_the_next_one_and_who_drains(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    roster = await _roster(path)
    await _here(roster)
    roster.drop(ONE.worker_id)
    roster.put(TWO.worker_id, TWO.url, drains=True)
    await _turn()
    after = await _roster(path)
    assert (after.has(ONE), after.has(TWO)) == (False, True)
    assert after.drained(TWO.worker_id)
    assert not after.has(TWO.model_copy(update={"url": "http://elsewhere:1"}))
    after.keep(set())
    await _turn()
    assert not (await _roster(path)).has(TWO)


async def test_thousands_that_leave_at_once_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "workers"
    roster, writes = await _roster(path), list[Path]()
    replace = os.replace

    def counted(new: Path, old: Path) -> None:
        writes.append(old)
        replace(new, old)

    monkeypatch.setattr(os, "replace", counted)
    specs = [worker_spec(f"w{number}") for number in range(1000)]
    for drains in (False, True):
        for spec in specs:
            roster.put(spec.worker_id, spec.url, drains=drains)
        await _turn()
    for spec in specs:
        roster.drop(spec.worker_id)
    await _turn()
    assert writes == [path] * 3
    assert json.loads(path.read_bytes()) == {}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"w1": 3}', '{"w1": ["http://w1:1"]}', '{"w1": null}', "\xff"]
)
async def test_a_file_that_cannot_be_read_is_as_none(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers"
    assert (await _roster(path)).has(ONE), "relays are believed"
    path.write_bytes(text.encode("latin-1"))
    roster = await _roster(path)
    assert roster.has(ONE)
    assert "can't be read" in caplog.text
    await _here(roster)
    assert set(json.loads(path.read_bytes())) == {"w1", "w2"}


async def test_what_cannot_be_written_is_no_file_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers"
    roster = await _roster(path)
    await _here(roster)
    (tmp_path / "workers.new").mkdir()  # as good as a full disk
    roster.put(TWO.worker_id, TWO.url, drains=True)
    await _turn()
    roster.drop(ONE.worker_id)
    await _turn()
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert not path.exists(), "one that says that the first is here would be wrong"
    (tmp_path / "workers.new").rmdir()
    roster.put(TWO.worker_id, TWO.url, drains=False)
    await _turn()
    assert not (await _roster(path)).has(ONE)


async def test_relays_hear_who_left_though_nothing_can_be_written_down(tmp_path: Path) -> None:
    (tmp_path / "workers.new").mkdir()
    path, config = tmp_path / "link", settings(count=1)
    async with relay(path, config) as driver:
        async with brain(path, config) as first:
            first.driver.on_worker_joined(ONE)
            await eventually(lambda: driver.ready and driver.upstreams.get(ONE.worker_id))
            first.driver.on_worker_left(WORKER.worker_id)
            await eventually(lambda: driver.upstreams.get(WORKER.worker_id) is None)
            assert first.driver.upstreams.get(WORKER.worker_id) is None
        async with brain(path, config.model_copy(update={"workers": ()})) as second:
            await eventually(lambda: state_of(second, ONE) is WorkerState.ACTIVE)
