"""Clients that do not read: what is held for them is bounded, whatever they have asked for."""

from __future__ import annotations

import asyncio
import socket

from router.core.types import Outcome
from router.runtime.relay import Exchange
from router.runtime.server import InferenceProtocol
from tests.runtime.raw_worker import PLAIN, RawWorker, Step, answer
from tests.runtime.relay.rig import RawClient, Router, chat, eventually, post, running_router

BODY = b"x" * 600_000
BUFFER_BYTES = 65_536
SMALL_BUFFER = {"client_buffer_bytes_max": BUFFER_BYTES}


async def slow_client(router: Router) -> RawClient:
    """A client that reads nothing by itself, on a connection that holds little under way."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", router.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**14)
    router.clients.append(RawClient(reader, writer))
    await eventually(lambda: router.state.connections)
    server_side = protocol_of(router).transport.get_extra_info("socket")
    server_side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return router.clients[-1]


async def read_all(client: RawClient, answers: int, body: bytes) -> None:
    """Read so many answers of this body, and nothing else."""
    data = bytearray()
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    while data.count(b"HTTP/1.1 200") < answers or not data.endswith(body):
        piece = await client.read(2**20)
        assert piece
        data += piece
    assert data.count(body) == answers


def protocol_of(router: Router) -> InferenceProtocol:
    (made,) = router.state.connections
    assert isinstance(made, InferenceProtocol)
    return made


def is_paused(running: object) -> bool:
    """Whether a request's answer is not read on; it may have begun before its client stalled."""
    assert isinstance(running, Exchange)
    return running._connection is not None and running._connection._paused


async def test_pipelined_requests_wait_until_their_client_has_read() -> None:
    count = 40
    small = b"y" * 30_000
    async with (
        RawWorker([[answer(small)]]) as worker,
        running_router(worker, server=SMALL_BUFFER) as router,
    ):
        client = await slow_client(router)
        client.send(post(chat()) * count)
        await eventually(lambda: protocol_of(router).write_paused)
        await eventually(lambda: all(map(is_paused, router.driver.running)))
        protocol = protocol_of(router)
        assert protocol.pipeline  # they wait, and none of them is started meanwhile
        assert protocol.transport.get_write_buffer_size() < BUFFER_BYTES + len(small) + 1000
        await read_all(client, count, small)
        assert len(worker.requests) == count


def waits(router: Router) -> bool:
    """Whether a request has been read that no worker has yet."""
    return protocol_of(router)._active is not None and not router.driver.running


async def test_a_request_behind_an_unread_answer_waits_for_its_client() -> None:
    body = b"y" * 20_000
    async with (
        RawWorker([[answer(body)]]) as worker,
        running_router(worker, server={"client_buffer_bytes_max": 4096}) as router,
    ):
        client = await slow_client(router)
        sent = 0
        # Each is sent when the answer before it is complete, so its head is a known one. A full
        # buffer of the system's may take more a moment later, so the first that waits is the one.
        while len(router.records) == sent:
            client.send(post(chat()))
            sent += 1
            await eventually(lambda: len(router.records) == sent or waits(router))  # noqa: B023
        assert protocol_of(router).write_paused
        await read_all(client, sent, body)
        assert len(worker.requests) == sent


async def test_an_answer_whose_client_stalled_before_it_began_is_not_read_on() -> None:
    close = [b"content-type: application/json", b"connection: close"]
    scripts: list[list[Step]] = [[answer(b"y" * 30_000, headers=close)], [answer(BODY * 8)]]
    async with (
        RawWorker(scripts) as worker,
        running_router(worker, server={"client_buffer_bytes_max": 4096}) as router,
    ):
        client = await slow_client(router)
        client.send(post(chat()) * 2)  # the second has to make a connection first
        await eventually(lambda: protocol_of(router).write_paused)
        await eventually(lambda: all(map(is_paused, router.driver.running)))
        assert router.driver.running or protocol_of(router).pipeline
        assert protocol_of(router).transport.get_write_buffer_size() < len(BODY)
        await client.close()


async def test_a_client_that_stops_to_read_is_cut() -> None:
    settings = {"idle_chunk_timeout_s": 0.3}
    async with (
        RawWorker([[answer(BODY * 8)]]) as worker,
        running_router(worker, upstream=settings, server=SMALL_BUFFER) as router,
    ):
        client = await slow_client(router)
        client.send(post(chat()))
        await eventually(lambda: router.records)
        assert router.records[0].outcome is Outcome.ABORTED
        await eventually(lambda: not router.state.connections)


async def test_a_client_that_never_reads_the_end_of_its_answer_is_cut() -> None:
    settings = {"idle_chunk_timeout_s": 0.3}
    async with (
        RawWorker([[answer(b"y" * 30_000)]]) as worker,
        running_router(worker, upstream=settings, server=SMALL_BUFFER) as router,
    ):
        for headers in (b"", b"connection: close\r\n"):
            client = await slow_client(router)
            client.send(post(chat()) * 60 + post(chat(), headers=headers))
            await eventually(lambda: not router.state.connections)
            await client.close()


async def test_a_slow_client_has_time_to_read_an_answer_that_ends_its_connection() -> None:
    body = b"y" * 60_000
    async with (
        RawWorker([[answer(body)]]) as worker,
        running_router(worker, server={"client_buffer_bytes_max": 4096}) as router,
    ):
        client = await slow_client(router)
        client.send(post(chat(), headers=b"connection: close\r\n"))
        await eventually(lambda: protocol_of(router)._lingering)
        assert router.driver._sweeper is not None
        router.driver._sweeper.cancel()
        for now in (1000.0, 1010.0):
            protocol_of(router).sweep(now)
        await read_all(client, 1, body)
        for now in (1011.0, 1014.0):
            protocol_of(router).sweep(now)
        await eventually(lambda: not router.state.connections)


async def test_little_is_held_for_a_client_that_stalls_in_a_large_answer_and_others_go_on() -> None:
    body = b"x" * 8_000_000
    async with RawWorker([[answer(body)], [PLAIN]]) as worker, running_router(worker) as router:
        client = await slow_client(router)
        client.send(post(chat()))
        await eventually(
            lambda: router.driver.running and all(map(is_paused, router.driver.running))
        )
        # One read of at most 128 kB, and little before it. uvloop keeps a read whole until all of
        # it is sent, so more is held than this.
        assert 0 < protocol_of(router).transport.get_write_buffer_size() <= 144 * 1024
        assert (await router.post(chat())).status == 200
        (running,) = router.driver.running
        assert is_paused(running)
        assert isinstance(running, Exchange)
        assert running._connection is not None
        sock = running._connection.transport.get_extra_info("socket")
        # Linux doubles what is asked for, to have room for its own book-keeping.
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 128 * 1024
        await read_all(client, 1, body)
