"""All bodies together are bounded: while they come, while they wait, until they are answered."""

from __future__ import annotations

import asyncio

import pytest

from router.errors import Reason
from tests.runtime.raw_worker import LAST_CHUNK, PLAIN, SSE_HEAD, Hang, RawWorker, Step, Wait, delta
from tests.runtime.relay.rig import Answer, chat, eventually, post, running_router

HALF = chat(user="x" * 500_000)
LIMITS = {"bodies_bytes_max": 2**20, "body_bytes_max": 2**20}


def assert_full(got: Answer) -> None:
    assert (got.status, got.one(b"x-laneway-reason")) == (503, b"bodies_full")
    assert int(got.one(b"retry-after")) >= 1


@pytest.mark.parametrize("queued", [False, True])
async def test_bodies_that_wait_or_run_are_bounded_and_leave_room_when_they_end(
    queued: bool,
) -> None:
    headroom = {"concurrency_default": 1 if queued else 100}
    async with (
        RawWorker([[Hang()], [Hang()], [PLAIN]]) as worker,
        running_router(worker, server=LIMITS, headroom=headroom) as router,
    ):
        clients = [await router.client() for _ in range(2)]
        for number, client in enumerate(clients, start=1):
            client.send(post(HALF))
            await eventually(lambda: len(router.driver.running) == number)  # noqa: B023
        for _ in range(2):
            assert_full(await router.post(HALF))
        for client in clients:
            await client.close()
        await eventually(lambda: router.driver.bodies_bytes == 0)
        await eventually(lambda: not router.driver.running)
        worker.scripts = [[PLAIN]]
        assert (await router.post(HALF)).status == 200
        assert router.refused == [Reason.BODIES_FULL] * 2


async def test_a_small_body_that_does_not_fit_leaves_its_connection_open() -> None:
    limits = {"bodies_bytes_max": 2048, "body_bytes_max": 2048}
    async with (
        RawWorker([[PLAIN], [Hang()]]) as worker,
        running_router(worker, server=limits) as router,
    ):
        client, other = await router.client(), await router.client()
        small = chat(user="x" * 1000)
        client.send(post(small))
        assert (await client.answer()).status == 200
        other.send(post(small))
        await eventually(lambda: router.driver.running)
        for _ in range(3):
            client.send(post(small))
            assert_full(await client.answer())


async def test_a_body_counts_no_more_once_its_answer_began() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), LAST_CHUNK]
    async with RawWorker([steps]) as worker, running_router(worker, server=LIMITS) as router:
        clients = [await router.client() for _ in range(4)]
        for client in clients:
            client.send(post({**HALF, "stream": True}))
            await client.until(b'"a"')
            assert router.driver.bodies_bytes == 0
        gate.set()
        for client in clients:
            await client.until(LAST_CHUNK)


async def test_parts_of_bodies_count_also_on_connections_that_repeat_their_heads() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=LIMITS) as router:
        clients = [await router.client() for _ in range(3)]
        whole = post(HALF)
        for client in clients:  # whose heads are known from now on
            client.send(whole)
            assert (await client.answer()).status == 200
        seen = 0
        for client in clients[:2]:
            client.send(whole[:-10])
            seen += len(whole) - 300
            await eventually(lambda: router.driver.bodies_bytes > seen)  # noqa: B023
        clients[2].send(whole[:-10])
        got = await clients[2].answer()
        assert_full(got)
        assert got.one(b"connection") == b"close"
        clients[0].send(whole[-10:])
        assert (await clients[0].answer()).status == 200
        await clients[1].close()
        await eventually(lambda: router.driver.bodies_bytes == 0)


async def test_pipelined_bodies_count() -> None:
    async with RawWorker([[Hang()]]) as worker, running_router(worker, server=LIMITS) as router:
        client = await router.client()
        client.send(post(HALF) * 3)
        await eventually(lambda: "bodies_full" in repr(protocol_refusals(router.state.connections)))
        assert router.driver.bodies_bytes <= 2**20
        await eventually(lambda: len(worker.requests) == 1)


def protocol_refusals(connections: object) -> list[str]:
    """The reasons of the requests that are refused when it is their turn."""
    assert isinstance(connections, set)
    refused = [cycle.refused for made in connections for cycle, _ in made.pipeline]
    return [each.reason.value for each in refused if each is not None]
