"""A relay's driver and a brain over a real socket, while either of them comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.config import Config, RetrySettings
from router.config_source import load_config
from router.contract import WorkerId, WorkerSpec
from router.core.types import (
    Failure,
    Outcome,
    Refusal,
    RequestSpec,
    Usage,
    WorkerState,
)
from router.errors import Reason
from router.runtime import frames, packing, remote_driver
from router.runtime.link import Link
from tests.runtime.brain_rig import (
    REPORT,
    SPEC,
    WORKER,
    Owner,
    brain,
    relay,
    settings,
    state_of,
    submitted,
)
from tests.runtime.relay.rig import eventually


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "link"


async def test_requests_wait_for_a_brain_and_are_asked_in_their_order(path: Path) -> None:
    async with relay(path, settings()) as driver:
        owners = [Owner() for _ in range(5)]
        for owner in owners:
            driver.submit(SPEC, owner)
        async with brain(path, settings()) as there:
            await eventually(lambda: all(owner.told == ["dispatch"] for owner in owners))
            assert all(owner.ticket.worker_id == WORKER.worker_id for owner in owners)
            for owner in owners:
                driver.finished(owner.ticket, Outcome.SUCCESS, None, Usage(100, None, 7))
                driver.left(owner)
            await eventually(lambda: len(there.records) == len(owners))
            assert [record.output_tokens for record in there.records] == [7] * 5
            assert there.streams == 0


async def test_without_a_brain_they_are_refused_in_time_and_it_is_counted(path: Path) -> None:
    config = settings(brain_wait_s=0.1)
    async with relay(path, config) as driver:
        owner = await submitted(driver)
        assert owner.refusal is not None
        assert owner.refusal.reason is Reason.RESTARTING
        assert owner.refusal.retry_after_s is not None
        driver.left(owner)
        async with brain(path, config) as there:
            await eventually(lambda: [r for r, *_ in there.refused] == [Reason.RESTARTING])


async def test_a_client_that_leaves_while_there_is_no_brain_is_forgotten(path: Path) -> None:
    async with relay(path, settings()) as driver:
        owner = Owner()
        driver.submit(SPEC, owner)
        driver.finished(owner.ticket, Outcome.ABORTED, None, None)
        driver.left(owner)
        async with brain(path, settings()) as there:
            await eventually(lambda: driver.ready)
            assert await submitted(driver)
            assert there.streams == 1


async def test_the_next_brain_takes_over_what_runs_and_hears_what_ended(path: Path) -> None:
    config = settings()
    async with relay(path, config) as driver:
        async with brain(path, config) as first:
            owners = [await submitted(driver) for _ in range(3)]
            for owner in owners:
                driver.first_token(owner.ticket)
                driver.tokens(owner.ticket, 4)
            await eventually(lambda: first.driver.snapshot().workers[0].waiting == 0)
        await eventually(lambda: not driver.ready)
        driver.finished(owners[0].ticket, Outcome.SUCCESS, None, None)
        driver.left(owners[0])
        waiting = Owner()
        driver.submit(SPEC, waiting)
        async with brain(path, config) as second:
            await eventually(lambda: waiting.told == ["dispatch"])
            assert second.streams == 3  # two that ran, and the one that waited
            assert second.driver.snapshot().workers[0].waiting == 1
            (record,) = second.records
            assert (record.outcome, record.output_tokens) == (Outcome.SUCCESS, 4)
            assert record.first_token_at is not None
            for owner in (*owners[1:], waiting):
                assert owner.told == ["dispatch"]
                driver.finished(owner.ticket, Outcome.SUCCESS, None, None)
                driver.left(owner)
            await eventually(lambda: len(second.records) == 4)
            assert second.streams == 0
            assert second.driver.snapshot().workers[0].kv_reserved_tokens == 0


@pytest.mark.parametrize("busy", [True, False])
async def test_a_brain_that_was_slow_or_away_hears_of_all_tokens_of_what_ended(
    path: Path, busy: bool
) -> None:
    config = settings()
    async with relay(path, config) as driver, contextlib.AsyncExitStack() as first:
        there = await first.enter_async_context(brain(path, config))
        owner = await submitted(driver)
        driver.first_token(owner.ticket)
        driver.tokens(owner.ticket, 4)
        await eventually(lambda: there.driver.tickets()[0].output_seen_tokens == 4)
        if busy:
            assert driver._link is not None
            driver._link.full = True
        else:
            await first.aclose()
            await eventually(lambda: not driver.ready)
        driver.tokens(owner.ticket, 9)
        driver.finished(owner.ticket, Outcome.ABORTED, None, None)
        driver.left(owner)
        if not busy:
            there = await first.enter_async_context(brain(path, config))
        await eventually(lambda: bool(there.records))
        assert there.records[0].output_tokens == 9


async def test_the_next_brain_gets_back_the_workers_that_came_by_the_api(path: Path) -> None:
    config = settings()
    spec = WorkerSpec(url="http://127.0.0.1:8", models=("m",), api_key="sk-worker")
    leaving = WorkerSpec(url="http://127.0.0.1:7", models=("m",))
    async with relay(path, config) as driver:
        async with brain(path, config) as first:
            await eventually(lambda: driver.ready)
            for each in (spec, leaving):
                first.driver.on_worker_joined(each)
            await eventually(lambda: driver.upstreams.get(leaving.worker_id) is not None)
            owner = Owner()
            driver.submit(SPEC, owner)
            await eventually(lambda: owner.told == ["dispatch"])
            first.driver.on_worker_described(
                spec.worker_id, models=(), kv_total_tokens=None, concurrency_max=None,
                priority_order="low_first",
            )  # fmt: skip
            first.driver.on_worker_left(leaving.worker_id)
            await eventually(lambda: driver.upstreams.get(leaving.worker_id) is None)
            pool = driver.upstreams.get(spec.worker_id)
            assert pool is not None
            assert b"sk-worker" in pool.after_target
            await eventually(lambda: pool.traits == ("low_first", None))
            first.driver.on_report(
                spec.worker_id, msgspec.structs.replace(REPORT, routers=("another",))
            )
            await eventually(lambda: pool.traits == ("low_first", "another"))
        await eventually(lambda: not driver.ready)
        async with brain(path, config) as second:
            await eventually(lambda: driver.ready)
            known = {view.id: view.spec for view in second.driver.snapshot().workers}
            assert known == {WORKER.worker_id: WORKER, spec.worker_id: spec}
        driver.finished(owner.ticket, Outcome.ABORTED, None, None)
        driver.left(owner)


async def test_an_attempt_that_fails_while_there_is_no_brain_is_the_last(path: Path) -> None:
    config = settings()
    async with relay(path, config) as driver:
        async with brain(path, config):
            owner = await submitted(driver)
        await eventually(lambda: not driver.ready)
        driver.attempt_failed(owner.ticket, Failure(reason=Reason.UPSTREAM_ERROR))
        assert owner.told == ["dispatch", "over"]
        driver.left(owner)
        async with brain(path, config) as second:
            await eventually(lambda: len(second.records) == 1)
            assert second.records[0].outcome is Outcome.FAILED
            assert second.records[0].reason is Reason.UPSTREAM_ERROR
            assert second.streams == 0


async def test_a_relay_that_is_gone_gives_back_what_it_held(path: Path) -> None:
    config = settings()
    async with brain(path, config) as there, relay(path, config) as stays:
        kept = await submitted(stays)
        async with relay(path, config) as goes:
            for _ in range(3):
                await submitted(goes)
            assert there.streams == 4
        await eventually(lambda: there.streams == 1)
        assert {record.reason for record in there.records} == {Reason.RELAY_LOST}
        assert {record.outcome for record in there.records} == {Outcome.ABORTED}
        stays.finished(kept.ticket, Outcome.SUCCESS, None, None)
        stays.left(kept)
        await eventually(lambda: there.streams == 0)
        assert not there.driver.running


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        frames.frame([(frames.HELLO, frames.VERSION + 1, 1, 1, 0)]),
        frames.frame([(frames.DISPATCH, 1, "short", "w", None, None)]),
        frames.frame([(frames.SUBMIT, 1, packing.SPEC.fields_of(SPEC))] * 2),
        frames.frame([(frames.KNOWN, "{}", None, None, False, False)]),
        b"\x02\x00\x00\x00{}",
    ],
)
async def test_whoever_talks_nonsense_is_left_and_nobody_else(path: Path, said: bytes) -> None:
    config = settings()
    async with brain(path, config) as there, relay(path, config) as driver:
        owner = await submitted(driver)
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) is not None
        writer.close()
        await eventually(lambda: len(there.hub.links) == 1 and there.streams == 1)
        driver.finished(owner.ticket, Outcome.SUCCESS, None, None)
        driver.left(owner)
        await eventually(lambda: there.streams == 0)


async def test_an_administrators_abort_reaches_the_relay(path: Path) -> None:
    config = settings()
    async with brain(path, config) as there, relay(path, config) as driver:
        owner = await submitted(driver)
        (ticket,) = there.driver.tickets()
        there.driver.abort(ticket)
        await eventually(lambda: owner.told == ["dispatch", "cut aborted"])
        driver.finished(owner.ticket, Outcome.ABORTED, Reason.ABORTED, None)
        driver.left(owner)
        await eventually(lambda: [r.reason for r in there.records] == [Reason.ABORTED])


async def test_a_configuration_crosses_with_all_that_it_says(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "laneway.yaml"
    file.write_text(
        "auth: {api_keys: [sk-of-a-client], admin_keys: [sk-of-an-admin]}\n"
        "workers: [{url: 'http://u.example:1', lanes: [short], api_key: sk-of-a-worker}]\n"
        "models: {m: {aliases: [n], context_tokens: 4096}}\n"
        "relays: {count: 2}\n"
    )
    config = load_config(file)
    taken: list[Config] = []
    async with brain(path, config) as there, relay(path, Config()) as driver:
        driver.on_config.append(taken.append)
        await driver.met(within_s=5)
        there.hub.on_config(config.model_copy(update={"retry": RetrySettings(retries_max=7)}))
        await eventually(lambda: len(taken) == 2)
    for name in type(config).model_fields:
        assert getattr(taken[0], name) == getattr(config, name), name
    assert taken[1].retry.retries_max == 7


@pytest.mark.patches
async def test_a_request_that_cannot_be_taken_in_is_ended_and_costs_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    async with brain(path, config) as there:
        take_in = there.driver.submit

        def submit(spec: RequestSpec, owner: Any) -> None:
            if spec.request_id == "odd":
                raise ZeroDivisionError
            take_in(spec, owner)

        monkeypatch.setattr(there.driver, "submit", submit)
        async with relay(path, config) as driver:
            await submitted(driver)
            odd = Owner()
            driver.submit(replace(SPEC, request_id="odd"), odd)
            await submitted(driver)
            await eventually(lambda: odd.told == ["cut internal_error"])
            assert there.streams == 2
        await eventually(lambda: there.streams == 0)
        assert not there.driver.running


@pytest.mark.patches
async def test_one_that_cannot_be_ended_leaves_no_other_of_its_relay_charged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    async with brain(path, config) as there:
        end, ended = there.driver.finished, []

        def finished(ticket: Any, *how: Any) -> None:
            ended.append(ticket)
            if len(ended) == 1:
                raise ZeroDivisionError
            end(ticket, *how)

        async with relay(path, config) as driver:
            for _ in range(3):
                await submitted(driver)
            monkeypatch.setattr(there.driver, "finished", finished)
        await eventually(lambda: len(ended) == 3)
        assert there.streams == 1


async def test_when_the_brain_is_lost_one_bad_owner_costs_no_other_its_answer(path: Path) -> None:
    @dataclass(eq=False)
    class Bad(Owner):
        def judged(self, *, again: bool) -> None:
            raise ZeroDivisionError

    config = settings()
    async with relay(path, config) as driver:
        owners = [Bad(), Owner()]
        waits = Owner()
        async with brain(path, config) as there:
            for owner in owners:
                driver.submit(SPEC, owner)
            await eventually(lambda: all(owner.told for owner in owners))
            there.driver.attempt_failed = lambda *_: None  # type: ignore[method-assign]
            for owner in owners:
                driver.attempt_failed(owner.ticket, Failure(reason=Reason.UPSTREAM_ERROR))
        await eventually(lambda: not driver.ready)
        assert [owner.told[1:] for owner in owners] == [["cut internal_error"], ["over"]]
        driver.submit(SPEC, waits)
        async with brain(path, config):
            await eventually(lambda: waits.told == ["dispatch"])


@pytest.mark.patches
async def test_of_what_ended_without_a_brain_all_is_told_or_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    monkeypatch.setattr(remote_driver, "_OWED_MAX", 3)
    async with relay(path, config) as driver:
        async with brain(path, config):
            owners = [await submitted(driver) for _ in range(2)]
        await eventually(lambda: not driver.ready)
        for owner in owners:
            driver.finished(owner.ticket, Outcome.SUCCESS, None, None)
            driver.left(owner)
        async with brain(path, config) as second:
            await eventually(lambda: driver.ready)
            assert [record.outcome for record in second.records] == [Outcome.SUCCESS]
            assert second.streams == 0


GREETING = frames.frame([(frames.HELLO, frames.VERSION, 1, 0, 7)])


@pytest.mark.parametrize("said", [b"", GREETING, GREETING + b"\xff" * 8])
async def test_a_brain_that_dies_while_it_is_met_is_looked_for_again(
    path: Path, said: bytes
) -> None:
    met = 0

    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal met
        met += 1
        writer.write(said)
        writer.close()

    server = await asyncio.start_unix_server(die, str(path))
    async with relay(path, settings()) as driver:
        async with asyncio.timeout(2):  # less than a greeting may take
            await eventually(lambda: met >= 3)
        server.close()
        owner = Owner()
        driver.submit(SPEC, owner)
        async with brain(path, settings()):
            await eventually(lambda: owner.told == ["dispatch"])


@pytest.mark.patches
async def test_a_brain_lost_by_all_that_it_is_told_is_told_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    async with relay(path, config) as driver:
        async with brain(path, config):
            runs, ends = [await submitted(driver) for _ in range(2)]
        await eventually(lambda: not driver.ready)
        driver.finished(ends.ticket, Outcome.SUCCESS, None, None)
        driver.left(ends)
        lost: list[Link] = []
        send = Link.send

        def send_once(link: Link, message: Any) -> None:
            if message[0] == frames.RUNS and not lost:
                lost.append(link)
                link.give_up("it does not read what it is sent")
            send(link, message)

        monkeypatch.setattr(Link, "send", send_once)
        async with brain(path, config) as second:
            await eventually(lambda: driver.ready)
            assert lost
            assert second.streams == 1
            assert [record.outcome for record in second.records] == [Outcome.SUCCESS]
            driver.finished(runs.ticket, Outcome.SUCCESS, None, None)
            driver.left(runs)
            await eventually(lambda: second.streams == 0)


@pytest.mark.parametrize("of_file", [True, False])
async def test_a_drain_goes_on_under_the_next_brain_until_the_streams_of_all_relays_end(
    path: Path, of_file: bool
) -> None:
    config = settings()
    later = config if of_file else config.model_copy(update={"workers": ()})
    other = WorkerSpec(url="http://127.0.0.1:8", models=("m",))
    async with relay(path, config) as one, relay(path, config) as two:
        relays = (one, two)
        async with brain(path, config) as first:
            owners = [await submitted(driver) for driver in relays]
            first.driver.on_worker_joined(other)
            first.driver.on_drain(WORKER.worker_id, deadline_s=60)
            await eventually(lambda: all(d.upstreams.get(other.worker_id) for d in relays))
            await eventually(lambda: all(d._workers[WORKER.worker_id][4] for d in relays))
        await eventually(lambda: not any(d.ready for d in relays))
        async with brain(path, later) as second:
            await eventually(lambda: all(driver.ready for driver in relays))
            await eventually(lambda: state_of(second, WORKER) is WorkerState.DRAINING)
            assert second.streams == 2
            for driver, owner in zip(relays, owners, strict=True):
                newcomer = await submitted(driver)
                assert newcomer.ticket.worker_id == other.worker_id
                assert state_of(second, WORKER) is WorkerState.DRAINING
                driver.finished(owner.ticket, Outcome.SUCCESS, None, None)
                driver.left(owner)
            await eventually(lambda: not any(d.upstreams.get(WORKER.worker_id) for d in relays))
            assert state_of(second, WORKER) is None
            assert [record.worker_id for record in second.records] == [WORKER.worker_id] * 2


async def test_a_worker_with_another_name_by_now_is_not_there_twice(path: Path) -> None:
    renamed = WORKER.model_copy(update={"id": "renamed"})
    async with relay(path, settings()) as driver:
        async with brain(path, settings()):
            await eventually(lambda: driver.ready)
        await eventually(lambda: not driver.ready)
        later = settings().model_copy(update={"workers": (renamed,)})
        async with brain(path, later) as second:
            await eventually(lambda: driver.ready)
            assert [view.id for view in second.driver.snapshot().workers] == ["renamed"]
            assert driver.upstreams.get(WORKER.worker_id) is None
            assert driver.upstreams.get(WorkerId("renamed")) is not None


async def test_an_owner_that_fails_at_the_brains_word_is_ended(path: Path) -> None:
    @dataclass(eq=False)
    class Bad(Owner):
        def refuse(self, refusal: Refusal) -> None:
            raise ZeroDivisionError

        def judged(self, *, again: bool) -> None:
            raise ZeroDivisionError

    config = settings()
    async with brain(path, config) as there, relay(path, config) as driver:
        refused, judged = Bad(), Bad()
        driver.submit(replace(SPEC, prompt_bytes=10**9), refused)
        driver.submit(SPEC, judged)
        await eventually(lambda: judged.told == ["dispatch"])
        driver.attempt_failed(judged.ticket, Failure(reason=Reason.UPSTREAM_ERROR))
        await eventually(lambda: judged.told[1:] == ["cut internal_error"])
        await eventually(lambda: refused.told == ["cut internal_error"])
        for owner in (refused, judged):
            driver.finished(owner.ticket, Outcome.ABORTED, Reason.INTERNAL, None)
            driver.left(owner)
        await eventually(lambda: not there.driver.running)


async def test_what_was_a_router_for_the_brain_before_is_none_when_it_says_so(path: Path) -> None:
    spec = WorkerSpec.model_validate({"url": "http://127.0.0.1:1", "id": "w"})
    async with brain(path, Config()) as made:
        made.hub._roster.put(spec.worker_id, spec.url, drains=False)  # as the one before had it
        made.hub.restore(spec, None, "other", draining=False, listed=False)
        pool = made.driver.upstreams.get(spec.worker_id)
        assert pool is not None
        assert pool.router_id == "other"
        made.driver.on_report(spec.worker_id, REPORT)
        assert pool.router_id is None
