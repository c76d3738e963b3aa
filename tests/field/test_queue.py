"""The hold queue: its bound is real, places of leavers are free, slots last to the end."""

from __future__ import annotations

import asyncio

from tests.field.harness import Field, assert_error
from tests.field.mock_worker import held, silent
from tests.field.wire import eventually

DEPTH_MAX = 3
CONFIG = {"queue": {"depth_max": DEPTH_MAX, "wait_s_max": 2.0}}


async def queue_is(field: Field, length: int) -> None:
    async def as_wished() -> bool:
        return await field.queued() == length

    await eventually(as_wished, what=f"{length} in the queue")


async def test_a_waiter_that_leaves_frees_its_place_and_never_runs(field: Field) -> None:
    """QU01."""
    worker, gate = await field.worker(concurrency_max=1), asyncio.Event()
    worker.answer = silent(gate)
    running = await field.open(user="A")
    await eventually(lambda: worker.calls)
    waiters = [await field.open(user=name) for name in "BCX"]
    await queue_is(field, 3)
    waiters[0].close()
    await queue_is(field, 2)
    began_at = asyncio.get_running_loop().time()
    last = await field.open(user="D")
    await queue_is(field, 3)
    assert asyncio.get_running_loop().time() - began_at < 0.3
    gate.set()
    for answer in (running, *waiters[1:], last):
        assert (await answer.head()).status == 200
        await answer.read()
    assert [call.json()["user"] for call in worker.calls] == ["A", "C", "X", "D"]


async def test_the_bound_of_the_queue_is_real(field: Field) -> None:
    """QU03."""
    worker, gate = await field.worker(concurrency_max=1), asyncio.Event()
    worker.answer = silent(gate)
    answers = [asyncio.ensure_future(field.chat()) for _ in range(20)]
    await eventually(lambda: sum(answer.done() for answer in answers) == 16, within_s=1)
    assert await field.queued() == DEPTH_MAX
    assert len(worker.calls) == 1
    for answer in answers:
        if answer.done():
            assert_error(answer.result(), 429, 503)
    gate.set()
    statuses = [answer.status for answer in await asyncio.gather(*answers)]
    assert statuses.count(200) == 4
    assert len(worker.calls) == 4


async def test_a_slot_is_held_to_the_end_of_its_stream(field: Field) -> None:
    """QU05."""
    worker = await field.worker(concurrency_max=2)
    gates = [asyncio.Event() for _ in range(3)]
    worker.script.extend(held(gate) for gate in gates)
    streams = [await field.stream() for _ in range(2)]
    for stream in streams:
        await stream.until(b"one ")
    third = await field.open()
    await queue_is(field, 1)
    await field.polled(worker)
    assert len(worker.calls) == 2
    gates[0].set()
    assert b"[DONE]" in await streams[0].read()
    assert (await third.head()).status == 200
    assert len(worker.calls) == 3
    for gate in gates:
        gate.set()
    for stream in (streams[1], third):
        assert b"[DONE]" in await stream.read()


async def test_a_wait_that_is_over_is_told(field: Field) -> None:
    """QU03: who waited too long gets an error that says when to come back."""
    worker, gate = await field.worker(concurrency_max=1), asyncio.Event()
    worker.answer = silent(gate)
    running = asyncio.ensure_future(field.chat())
    await eventually(lambda: worker.calls)
    answer = await field.chat()
    assert_error(answer, 429, 503)
    assert answer.header("x-laneway-reason") == "queue_timeout"
    gate.set()
    assert (await running).status == 200
    assert len(worker.calls) == 1
