"""The end of the process, for streams that run and for clients that have just connected."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import uvicorn

from router.api.services import Lifecycle
from router.app.server import Server
from router.runtime.server import protocol_for
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
    DEADLINE_S,
    RawClient,
    Router,
    chat,
    echo,
    eventually,
    post,
    running_router,
)

STREAM = chat(stream=True)
GET = b"GET /x HTTP/1.1\r\nhost: r\r\n\r\n"
NO_DELAY = {"drain_delay_s": 0, "shutdown_grace_s": 600}  # closes its listener when told to stop


@contextlib.asynccontextmanager
async def served(router: Router) -> AsyncIterator[tuple[Router, Server]]:
    """The same router behind a server that the test tells to stop, and which ends in time."""
    http = protocol_for(router.front)
    config = uvicorn.Config(echo, http=http, ws="none", lifespan="off", log_level=50)
    lifecycle = Lifecycle(version="0", started_at=0.0)
    server = Server(config, driver=router.driver, lifecycle=lifecycle)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await eventually(lambda: server.started)
            yield replace(router, port=listener.getsockname()[1]), server
            async with asyncio.timeout(DEADLINE_S):
                await serving
        finally:
            serving.cancel()
            await asyncio.wait([serving])


async def test_running_streams_end_well_within_the_grace_period() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), DONE]
    async with RawWorker([steps, [PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await client.until(b'"a"')
        drained = asyncio.create_task(router.driver.drained(grace_s=10))
        await asyncio.sleep(0)
        late = await router.post(chat())  # still served, and told to connect elsewhere
        assert (late.status, late.one(b"connection")) == (200, b"close")
        assert not drained.done()
        gate.set()
        assert b"[DONE]" in await client.until(LAST_CHUNK)
        assert await drained
        assert await client.closed()


async def test_after_the_grace_period_what_runs_is_cut_with_an_error() -> None:
    steps: list[Step] = [SSE_HEAD, delta("a"), Hang()]
    async with RawWorker([steps, [Hang()]]) as worker, running_router(worker) as router:
        streaming, waiting = await router.client(), await router.client()
        streaming.send(post(STREAM))
        await streaming.until(b'"a"')
        waiting.send(post(chat()))
        await eventually(lambda: len(worker.requests) == 2)
        assert not await router.driver.drained(grace_s=0.1)
        assert b'"code":"shutting_down"' in await streaming.until(LAST_CHUNK)
        got = await waiting.answer()
        assert (got.status, got.one(b"x-laneway-reason")) == (503, b"shutting_down")
        await eventually(lambda: len(worker.aborted) == 2)
        assert not router.driver.running


async def test_who_has_connected_when_the_listener_closes_has_a_moment_to_ask() -> None:
    gate = asyncio.Event()
    async with (
        RawWorker([[Wait(gate), PLAIN]]) as worker,
        running_router(worker, server=NO_DELAY) as unserved,
        served(unserved) as (router, server),
    ):
        asks, silent, idle = [await router.client() for _ in range(3)]
        idle.send(GET)
        assert (await idle.answer()).status == 200
        connections, (listening,) = server.server_state.connections, server.servers
        await eventually(lambda: len(connections) == 3)
        server.stop()
        while listening.is_serving():  # noqa: ASYNC110 - the turn in which it closes
            await asyncio.sleep(0)
        assert sum(not each.transport.is_closing() for each in connections) == 2
        asks.send(post(chat()))
        assert await idle.closed()
        assert await silent.closed()
        assert len(router.driver.running) == 1  # nobody else waits for it
        gate.set()
        answer = await asks.answer()
        assert (answer.status, answer.one(b"connection")) == (200, b"close")


async def test_who_waits_to_be_accepted_when_the_listener_is_to_close_is_answered() -> None:
    async with (
        RawWorker([]) as worker,
        running_router(worker, server=NO_DELAY) as unserved,
        served(unserved) as (router, server),
    ):
        sockets = [socket.create_connection(("127.0.0.1", router.port)) for _ in range(30)]
        server.stop()  # before the loop has accepted any
        for sock in sockets:
            sock.sendall(GET)
            router.clients.append(RawClient(*await asyncio.open_connection(sock=sock)))
        assert [(await client.answer()).status for client in router.clients] == [200] * 30
