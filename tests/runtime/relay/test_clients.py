"""Clients: who may call, who is silent for too long, who leaves."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import orjson
import pytest

from router.core.types import Outcome
from router.errors import Reason, Refused
from tests.runtime.raw_worker import (
    DONE,
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
    Hang,
    RawWorker,
    Step,
    Wait,
    delta,
)
from tests.runtime.relay.rig import (
    CHAT,
    RawClient,
    assert_error,
    chat,
    eventually,
    post,
    running_router,
)

STREAM = chat(stream=True)


async def test_callers_without_a_key_are_refused_before_their_body_is_kept() -> None:
    def check(headers: Any) -> str:
        if (b"authorization", b"Bearer good") not in headers:
            raise Refused(Reason.UNAUTHORIZED, "no key")
        return "tenant-1"

    async with RawWorker([[PLAIN]]) as worker, running_router(worker, authenticate=check) as router:
        client = await router.client()
        client.send(post(chat()))
        assert_error(await client.answer(), 401, "unauthorized")
        client.send(post(chat(), headers=b"authorization: Bearer good\r\n"))
        assert (await client.answer()).status == 200
        assert router.records[0].tenant == "tenant-1"
        assert router.refused == [Reason.UNAUTHORIZED]


@pytest.mark.parametrize("sent", [b"", b"POST / HT", post(chat())[:-1], b"\r\n"])
async def test_sockets_that_say_too_little_are_closed(sent: bytes) -> None:
    limits = {"body_timeout_s": 0.3, "keep_alive_s": 60}
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=limits) as router:
        clients = [await router.client() for _ in range(20)]
        for client in clients:
            client.send(sent)
        for client in clients:
            got = await client.answer()
            assert got.status in (0, 408)
            assert await client.closed()
        await eventually(lambda: not router.state.connections)
        assert (await router.post(chat())).status == 200


async def test_an_idle_connection_is_kept_for_its_time_and_then_closed() -> None:
    limits = {"body_timeout_s": 0.1, "keep_alive_s": 1}
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=limits) as router:
        client = await router.client()
        client.send(post(chat()))
        await client.answer()
        await asyncio.sleep(0.6)
        client.send(post(chat()))
        assert (await client.answer()).status == 200
        assert await client.closed()


async def test_a_head_without_end_is_refused() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(b"POST %b HTTP/1.1\r\nx: " % CHAT + b"y" * 400_000)
        assert_error(await client.answer(), 431, "head_too_large")


async def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    gate = asyncio.Event()
    async with (
        RawWorker([[Wait(gate), PLAIN], [PLAIN]]) as worker,
        running_router(
            worker, headroom={"concurrency_default": 1}, queue={"depth_max": 2}
        ) as router,
    ):
        clients: list[RawClient] = [await router.client() for _ in range(5)]
        for number, client in enumerate(clients[:3]):
            client.send(post(chat(user=str(number))))
            await eventually(lambda n=number: len(router.driver.running) == n + 1)  # type: ignore[misc]
        clients[3].send(post(chat(user="3")))
        assert_error(await clients[3].answer(), 429, "queue_full")
        await clients[1].close()
        await eventually(lambda: len(router.driver.running) == 2)
        clients[4].send(post(chat(user="4")))
        await eventually(lambda: len(router.driver.running) == 3)
        gate.set()
        for index in (0, 2, 4):
            assert (await clients[index].answer()).status == 200
        assert [orjson.loads(r.body)["user"] for r in worker.requests] == ["0", "2", "4"]


async def test_a_client_that_leaves_while_its_body_comes_reaches_no_worker() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat())[:-5])
        await eventually(lambda: router.state.connections)
        await client.close()
        await eventually(lambda: not router.state.connections)
        assert not worker.requests
        assert not router.driver.running


async def test_without_a_worker_the_answer_is_503_at_once() -> None:
    async with running_router() as router:
        for body in (chat(), STREAM):
            answer = await router.post(body)
            assert_error(answer, 503, "no_workers")
            assert b"no worker is registered: add one by `laneway workers add URL`" in answer.body


async def test_requests_run_side_by_side_without_a_hidden_cap() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), DONE]
    async with (
        RawWorker([steps]) as worker,
        running_router(worker, headroom={"concurrency_default": 1000}) as router,
    ):
        clients = [await router.client() for _ in range(300)]
        for client in clients:
            client.send(post(STREAM))
        await eventually(lambda: len(worker.requests) == 300, 30.0)
        gate.set()
        for client in clients:
            await client.until(LAST_CHUNK)
        assert worker.connections == 300


async def test_abort_by_request_ends_a_stream_with_an_error() -> None:
    steps: list[Step] = [SSE_HEAD, delta("a"), Hang()]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat(stream=True, rid="r-1")))
        await client.until(b'"a"')
        (ticket,) = router.driver.tickets()
        assert ticket.spec.rid == "r-1"
        router.driver.abort(ticket)
        assert b'"code":"aborted"' in await client.until(LAST_CHUNK)
        await eventually(lambda: worker.aborted)
        assert router.records[0].outcome is Outcome.ABORTED


@pytest.mark.parametrize(
    "request_",
    [
        b"POST %b HTTP/1.1\r\nx: " % CHAT + b"y" * 70_000 + b"\r\n\r\n",
        b"POST %b HTTP/1.1\r\nno colon\r\n\r\n" % CHAT,
        post(chat(), headers=b"x-laneway-priority: P9\r\n"),
        post(chat(), headers=b"content-encoding: br\r\n"),
        post({"messages": 1}),
        post(chat()),
    ],
)
async def test_a_connection_that_ended_leaves_nothing_to_the_collector(request_: bytes) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        gc.collect()
        gc.disable()
        try:
            client = await router.client()
            client.send(request_)
            await client.answer()
            connections = [weakref.ref(each) for each in router.state.connections]
            assert connections
            await client.close()
            await eventually(lambda: not any(ref() for ref in connections))
        finally:
            gc.enable()
