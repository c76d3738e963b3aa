"""Retries and the breaker: who is blamed, who is tried next, who is let back."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest

from tests.field.harness import Field
from tests.field.mock_worker import Call, good, silent, status
from tests.field.wire import Answer, eventually

FAILURES, OPEN_S, BACKOFF_S = 3, 0.8, 0.04
CONFIG = {
    "breaker": {"failures": FAILURES, "open_s": OPEN_S},
    "retry": {
        "retries_max": 2,
        "budget_ratio": 1.0,
        "budget_tokens_max": 1000,
        "backoff_s": BACKOFF_S,
        "backoff_factor": 3.0,
    },
    "queue": {"wait_s_max": 5.0},
}


async def test_a_clients_own_fault_is_not_the_workers(field: Field) -> None:
    """RT01."""
    worker, other = await field.worker(priority=10), await field.worker()
    worker.answer = status(400, message="your fault")
    for _ in range(20):
        answer = await field.chat()
        assert answer.status == 400
        assert answer.json()["message"] == "your fault"
    assert (len(worker.calls), len(other.calls)) == (20, 0)
    worker.answer = good
    assert (await field.chat()).status == 200
    assert (await field.shown(worker))["breaker"] == "closed"
    assert len(worker.calls) == 21


@pytest.mark.parametrize("code", [429, 503])
async def test_a_full_engines_refusal_is_load_and_no_failure(field: Field, code: int) -> None:
    """RT01, for refusals by a full engine."""
    worker, other = await field.worker(priority=10), await field.worker()
    worker.answer = status(code)
    assert {answer.status for answer in await field.chats(3 * FAILURES)} == {200}
    assert worker.calls
    assert len(other.calls) == 3 * FAILURES
    assert (await field.shown(worker))["breaker"] == "closed"


async def test_one_trial_closes_an_open_breaker(field: Field) -> None:
    """RT03."""
    worker, gate = await field.worker(), asyncio.Event()
    worker.answer = status(500)
    while (await field.shown(worker))["breaker"] != "open":
        assert (await field.chat()).status in (500, 502, 503)
    assert len(worker.calls) == FAILURES
    assert await field.metric("laneway_worker_breaker_state", worker=worker.id) == 2
    worker.calls.clear()
    worker.answer = silent(gate)
    await field.until_worker(worker, out_s=0.0)
    running = asyncio.ensure_future(field.chats(5))
    await eventually(lambda: worker.calls, what="the trial")
    await eventually(lambda: all_but_one_are_kept_waiting(field, running), what="four wait")
    assert len(worker.calls) == 1
    assert await field.metric("laneway_worker_breaker_state", worker=worker.id) == 1
    gate.set()
    assert {answer.status for answer in await running} == {200}
    assert await field.metric("laneway_worker_breaker_state", worker=worker.id) == 0
    assert (await field.chat()).status == 200


async def all_but_one_are_kept_waiting(field: Field, running: asyncio.Future[Any]) -> bool:
    return running.done() or await field.queued() == 4


async def test_a_failed_trial_opens_it_again(field: Field) -> None:
    """RT03."""
    worker = await field.worker()
    worker.answer = status(500)
    while (await field.shown(worker))["breaker"] != "open":
        await field.chat()
    await field.until_worker(worker, out_s=0.0)
    worker.calls.clear()
    await field.chat()
    assert len(worker.calls) == 1
    assert (await field.shown(worker))["breaker"] == "open"


async def test_a_breaker_whose_time_is_over_does_not_keep_the_router_unready(
    field: Field,
) -> None:
    """RT03: a balancer that asks for readiness must let the trial come."""
    worker = await field.worker()
    worker.answer = status(500)
    while (await field.shown(worker))["breaker"] != "open":
        await field.chat()
    await field.until_worker(worker, out_s=0.0)
    assert (await field.get("/readyz")).status == 200


async def test_failures_in_mid_stream_count(field: Field) -> None:
    """RT05."""
    worker, other = await field.worker(priority=10), await field.worker()

    async def one_chunk_and_a_reset(call: Call) -> None:
        call.head()
        call.event("one ")
        await asyncio.sleep(0.01)  # or the reset overtakes the chunk
        call.reset()

    worker.answer = one_chunk_and_a_reset
    whole = 0
    for _ in range(20):
        answer = await field.stream()
        whole += b"[DONE]" in await answer.read()
    assert len(worker.calls) <= FAILURES + 1  # a trial may fall into the time of the test
    assert whole == len(other.calls) == 20 - len(worker.calls)


async def test_attempts_are_counted_once_and_pause_between(field: Field) -> None:
    """RT07."""
    gaps: list[list[float]] = []
    attempts = await field.metric("laneway_retries_total")
    for _ in range(6):
        workers = [await field.worker() for _ in range(3)]
        for worker in workers:
            worker.answer = status(500)
        answer = await field.chat()
        assert answer.status in (500, 502)
        assert answer.complete
        assert [len(worker.calls) for worker in workers] == [1, 1, 1]
        times = sorted(worker.calls[0].arrived_at for worker in workers)
        gaps.append([later - earlier for earlier, later in pairwise(times)])
        for worker in workers:
            await field.remove(worker)
    first, second = ([pair[n] for pair in gaps] for n in (0, 1))
    assert min(first) > 0
    assert mean(second) > mean(first)
    assert len({round(gap, 3) for gap in (*first, *second)}) > 8, "pauses are random"
    assert await field.metric("laneway_retries_total") == attempts + 12


async def test_a_worker_that_cannot_be_reached_is_replaced(field: Field) -> None:
    """RT07, for connections that fail."""
    worker, other = await field.worker(priority=10), await field.worker()

    async def cut(call: Call) -> None:
        call.reset()

    worker.answer = cut
    answers = await asyncio.gather(*(field.stream() for _ in range(6)))
    bodies = await asyncio.gather(*(answer.read() for answer in answers))
    assert all(b"[DONE]" in body for body in bodies)
    assert len(other.calls) == 6


async def test_an_announced_pause_is_kept(field: Field) -> None:
    """RT09."""
    worker = await field.worker()
    worker.answer = status(429, [("retry-after", "1")])
    answer = await field.chat()
    await assert_no_call_within(worker.calls, 1.0)
    assert_told_to_wait(answer)


async def test_a_longer_pause_replaces_a_shorter_one(field: Field) -> None:
    """RT09."""
    worker, gate = await field.worker(), asyncio.Event()
    pauses = iter(("2", "1"))

    async def pausing(call: Call) -> None:
        await gate.wait()
        await status(429, [("retry-after", next(pauses))])(call)

    worker.answer = pausing
    running = asyncio.ensure_future(field.chats(2))
    await eventually(lambda: len(worker.calls) == 2)
    gate.set()
    worker.answer = good
    answers = await running
    late = asyncio.ensure_future(field.chat())
    await assert_no_call_within(worker.calls, 2.0)
    await late
    for answer in answers:
        assert_told_to_wait(answer)


def assert_told_to_wait(answer: Answer) -> None:
    """Served after the pause, or told when to come back: in the worker's words or in ours."""
    assert answer.status in (200, 429, 503)
    assert answer.status == 200 or int(answer.header("retry-after") or "0") >= 1


async def assert_no_call_within(calls: list[Call], pause_s: float) -> None:
    """No call follows the last one that was answered with a pause, before the pause is over."""
    paused = len(calls)
    until = calls[paused - 1].arrived_at + pause_s - 0.05
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        assert len(calls) == paused, calls[-1].arrived_at - calls[paused - 1].arrived_at
        await asyncio.sleep(0.01)
