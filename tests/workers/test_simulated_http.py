"""HTTP as such: framing, keep-alive, pipelining, old clients, slow clients, broken bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import orjson
import pytest

from tests.workers.conftest import OPTIONS, StartWorker, until
from workers.sim.server import SimulatedServer

SHORT = orjson.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True})
STREAM = orjson.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True, "stream": True})


def post(body: bytes, *, path: str = "/v1/completions", more: str = "", http: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{http}\r\nhost: x\r\n{more}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def talk(worker: SimulatedServer, data: bytes) -> bytes:
    """Send `data`, read until the worker closes."""
    reader, writer = await asyncio.open_connection(worker.host, worker.port)
    writer.write(data)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def test_pipelined_requests_are_answered_in_order(worker: SimulatedServer) -> None:
    close = post(b"", path="/abort_request", more="connection: close\r\n")
    answer = await talk(worker, post(SHORT) + b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n" + close)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b"text_completion") < answer.index(b"content-length: 0")


async def test_a_head_split_anywhere_is_read(worker: SimulatedServer) -> None:
    reader, writer = await asyncio.open_connection(worker.host, worker.port)
    for byte in post(SHORT, more="connection: close\r\n"):
        writer.write(bytes([byte]))
        await writer.drain()
    assert b"text_completion" in await reader.read()
    writer.close()


async def test_a_chunked_body_is_read(http: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(SHORT), 7):
            yield SHORT[start : start + 7]

    assert (await http.post("/v1/completions", content=pieces())).status_code == 200


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(
    worker: SimulatedServer,
) -> None:
    reader, writer = await asyncio.open_connection(worker.host, worker.port)
    head, body = post(SHORT, more="expect: 100-continue\r\nconnection: close\r\n").split(
        b"\r\n\r\n", 1
    )
    writer.write(head + b"\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert b"text_completion" in await reader.read()
    writer.close()


async def test_an_http_1_0_client_gets_an_unframed_stream_and_the_end(
    worker: SimulatedServer,
) -> None:
    answer = await talk(worker, post(STREAM, http="1.0"))
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"chunked" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_idle_connections_are_closed_after_the_keep_alive_time(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker()
    assert worker.keep_alive_s == 5.0
    quick = SimulatedServer(OPTIONS, keep_alive_s=0.05)
    await quick.start()
    try:
        answer = await talk(quick, post(SHORT))  # returns because the worker closes
    finally:
        await quick.stop()
    assert answer.count(b"HTTP/1.1 200 OK") == 1


@pytest.mark.parametrize("data", [b"nonsense\r\n\r\n", b"GET\x00/ HTTP/1.1\r\n\r\n"])
async def test_bytes_that_are_not_http_are_400(worker: SimulatedServer, data: bytes) -> None:
    assert (await talk(worker, data)).startswith(b"HTTP/1.1 400 Bad Request")


async def test_a_slow_client_gets_everything_and_holds_no_memory_for_it(
    worker: SimulatedServer, http: httpx.AsyncClient
) -> None:
    """/generate repeats the text so far, so an answer of 3,000 tokens is some 100 MB of events."""
    body = orjson.dumps(
        {
            "text": "a",
            "sampling_params": {"max_new_tokens": 3_000, "ignore_eos": True},
            "stream": True,
        }
    )
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (worker.host, worker.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
    writer.write(post(body, path="/generate", more="connection: close\r\n"))
    await until(http, lambda load: load["running"] == 1)
    await until(http, lambda load: load["running"] == 0)  # done, though nobody has read yet
    received = await reader.read()
    writer.close()
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b'"completion_tokens":3000' in received
    assert len(received) < 20 * 2**20  # what the client did not take was folded into later events
