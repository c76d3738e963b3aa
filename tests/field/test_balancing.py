"""Choosing the worker: what is unknown is not idle, what was just sent counts at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import pytest

from tests.field.harness import Field, assert_error
from tests.field.mock_worker import MockWorker, good, held, silent
from tests.field.wire import Answer, eventually

CONFIG = {
    "probe": {
        "interval_s": 0.05,
        "timeout_s": 0.5,
        "stale_after_s": 0.25,
        "failures_to_eject": 2,
    },
    "queue": {"wait_s_max": 0.6},
}


def used(ratio: float) -> dict[str, float]:
    """Figures of a worker that has this share of its KV pool in use."""
    return {"num_used_tokens": int(100_000 * ratio), "token_usage": ratio}


def counts(workers: Iterable[MockWorker]) -> list[int]:
    return [len(worker.calls) for worker in workers]


async def test_get_routes_avoid_a_worker_that_refuses_connections(field: Field) -> None:
    """LB01."""
    dead, _ = await field.worker(), await field.worker()
    await dead.stop()
    for path in ("/v1/models", "/get_model_info", "/get_server_info"):
        answers = await asyncio.gather(*(field.get(path) for _ in range(10)))
        assert {answer.status for answer in answers} == {200}, path


async def test_a_worker_that_comes_back_gets_traffic_again(field: Field) -> None:
    """LB03: on the same port, without an admin call."""
    worker, other = await field.worker(), await field.worker()
    await worker.stop()
    await field.until_worker(worker, is_healthy=False)
    assert {answer.status for answer in await field.chats(4)} == {200}
    assert counts((worker, other)) == [0, 4]
    await worker.start()
    await field.until_worker(worker, is_healthy=True)
    gate = asyncio.Event()
    worker.answer = other.answer = silent(gate)
    running = asyncio.ensure_future(field.chats(20))
    await eventually(lambda: sum(counts((worker, other))) == 24)
    gate.set()
    assert {answer.status for answer in await running} == {200}
    assert len(worker.calls) >= 5


BROKEN_LOADS = {
    "404": (404, b'{"detail":"Not Found"}'),
    "500": (500, b"oops"),
    "empty object": (200, b"{}"),
    "-1": (200, b'{"loads":[{"num_running_reqs":-1,"num_waiting_reqs":-1,"token_usage":-1}]}'),
    "NaN": (200, b'{"loads":[{"num_running_reqs":"NaN","token_usage":"NaN"}]}'),
    "HTML": (200, b"<html><body>Service Unavailable</body></html>"),
    "huge": (200, b'{"loads":[{"num_running_reqs":1e300,"num_used_tokens":1e300}]}'),
    "bare -1": (200, b"-1"),
}


async def test_a_broken_load_answer_does_not_look_idle(field: Field) -> None:
    """LB05."""
    broken, other = await field.worker(), await field.worker(figures=used(0.3))
    shares: dict[str, float] = {}
    for kind, answer in BROKEN_LOADS.items():
        before = await field.metric("laneway_failed_polls_total")
        broken.load_answer = answer
        await field.polled(broken)
        await eventually(lambda: is_stale(field, broken), what="the old figures are unknown")
        assert await field.metric("laneway_failed_polls_total") > before, kind
        shares[kind] = await share_of(field, broken, other)
        assert (await field.shown(broken))["is_healthy"], kind
    assert max(shares.values()) <= 0.55, shares


async def share_of(field: Field, worker: MockWorker, other: MockWorker) -> float:
    """The share of `worker` in sixty chats that run at once on two workers."""
    gate = asyncio.Event()
    worker.answer = other.answer = silent(gate)
    worker.calls.clear()
    other.calls.clear()
    running = asyncio.ensure_future(field.chats(60))
    await eventually(lambda: sum(counts((worker, other))) == 60)
    gate.set()
    assert {answer.status for answer in await running} == {200}
    return len(worker.calls) / 60


async def is_stale(field: Field, worker: MockWorker) -> bool:
    return await field.metric("laneway_worker_stale", worker=worker.id) == 1


async def test_what_was_sent_since_the_last_poll_counts(field: Field) -> None:
    """LB07."""
    workers = [await field.worker() for _ in range(3)]
    gate = asyncio.Event()
    for worker in workers:
        worker.answer = silent(gate)
    running = asyncio.ensure_future(field.chats(60))
    await eventually(lambda: sum(counts(workers)) == 60)
    assert all(15 <= count <= 25 for count in counts(workers)), counts(workers)
    gate.set()
    assert {answer.status for answer in await running} == {200}


async def test_full_workers_are_skipped_while_one_has_room(field: Field) -> None:
    """LB09."""
    full = [await field.worker(figures=used(1.0)) for _ in range(3)]
    roomy = await field.worker(figures=used(0.5))
    assert {answer.status for answer in await field.chats(20)} == {200}
    assert counts((*full, roomy)) == [0, 0, 0, 20]
    roomy.figures = used(1.0)
    await field.polled(roomy, polls=10)
    answer = await field.chat()
    assert_error(answer, 429, 503)
    assert sum(counts((*full, roomy))) == 20


async def test_a_full_pool_that_empties_serves_who_waited(field: Field) -> None:
    """LB09."""
    worker = await field.worker(figures=used(1.0))
    waiting = asyncio.ensure_future(field.chat())
    await eventually(lambda: some_wait(field))
    worker.figures = {}
    assert (await waiting).status == 200


async def some_wait(field: Field) -> bool:
    return await field.queued() > 0


@pytest.mark.parametrize("way", ["health", "delete and register"])
async def test_counters_survive_a_worker_that_flaps(field: Field, way: str) -> None:
    """LB11."""
    worker, gate = await field.worker(), asyncio.Event()
    worker.answer = held(gate)
    streams = await asyncio.gather(*(field.stream() for _ in range(10)))
    assert await field.in_flight() == 10
    if way == "health":
        worker.hang.set()
        await field.until_worker(worker, is_healthy=False)
        worker.hang.clear()
        await field.until_worker(worker, is_healthy=True)
    else:
        await field.remove(worker)
        await eventually(lambda: is_gone(field, worker))
        await field.register(worker)
    other = await field.worker()
    assert await field.in_flight() == 10
    gate.set()
    bodies = await asyncio.gather(*(stream.read() for stream in streams))
    assert all(b"[DONE]" in body for body in bodies)
    await eventually(field.is_idle)
    again = asyncio.Event()
    worker.answer = other.answer = silent(again)
    await field.polled(worker, polls=4)
    worker.calls.clear()
    running = asyncio.ensure_future(field.chats(30))
    await eventually(lambda: sum(counts((worker, other))) == 30)
    assert all(10 <= count <= 20 for count in counts((worker, other))), counts((worker, other))
    again.set()
    await running


async def is_gone(field: Field, worker: MockWorker) -> bool:
    return await field.shown(worker) == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_no_worker_at_all_is_said_at_once(field: Field, *, stream: bool) -> None:
    """LB13."""
    began_at = asyncio.get_running_loop().time()
    answer = await (field.stream() if stream else field.chat())
    assert asyncio.get_running_loop().time() - began_at < 0.5
    await answer.read()
    assert_error(answer, 503)


@pytest.mark.parametrize("stream", [True, False])
async def test_only_dead_workers_is_said_at_once(field: Field, *, stream: bool) -> None:
    """LB13, with workers that are all ejected."""
    worker = await field.worker()
    await worker.stop()
    await field.until_worker(worker, is_healthy=False)
    began_at = asyncio.get_running_loop().time()
    answer = await (field.stream() if stream else field.chat())
    assert asyncio.get_running_loop().time() - began_at < 0.5
    await answer.read()
    assert_error(answer, 503)


async def test_what_a_worker_says_of_its_memory_is_believed(field: Field) -> None:
    """KV01."""
    full, other = await field.worker(figures=used(0.99)), await field.worker(figures=used(0.3))
    answers = await field.chats(10, max_tokens=1000)
    assert {answer.status for answer in answers} == {200}
    assert counts((full, other)) == [0, 10]
    other.figures = used(0.99)
    await field.polled(other, polls=10)
    answer = await field.chat(max_tokens=1000)
    assert full.calls == []
    if answer.status != 200:
        assert_error(answer, 429, 503)


async def test_a_missing_memory_gauge_is_unknown_and_not_empty(field: Field) -> None:
    """KV03."""
    silent_one, other = await field.unregistered(), await field.worker(figures=used(0.4))
    answer = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
    silent_one.load_answer = (200, json.dumps(answer).encode())
    await field.register(silent_one)
    gate = asyncio.Event()
    silent_one.answer = other.answer = silent(gate)
    content = [{"role": "user", "content": "x" * 400}]
    running = asyncio.ensure_future(field.chats(50, messages=content, max_tokens=400))
    await eventually(lambda: sum(counts((silent_one, other))) == 50)
    gate.set()
    assert {answer.status for answer in await running} == {200}
    assert len(silent_one.calls) <= 28, counts((silent_one, other))


async def test_requests_by_short_and_long_answers_have_workers_of_their_own(field: Field) -> None:
    """LB09, for lanes: a worker for long answers gets no short one while its own lane has room."""
    short, long = await field.worker(lanes=["short"]), await field.worker(lanes=["long"])
    await field.chats(10, max_tokens=16)
    assert counts((short, long)) == [10, 0]
    await field.chats(10, max_tokens=1000)
    assert counts((short, long)) == [10, 10]
    answer: Answer = await field.chat(max_tokens=16)
    assert answer.header("x-laneway-lane") == "short"
    assert short.answer is good
