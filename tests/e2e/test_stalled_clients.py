"""Clients that stop reading in the middle of a stream: what a router holds for each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest

from tests.e2e.router_process import RouterProcess, client_of, router_process, until_ready

DATA = Path(__file__).parent / "data"
CLIENTS = 30
BODY = orjson.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]})
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY), BODY,
)  # fmt: skip


class Flood:
    """A worker that writes events as fast as they are taken."""

    def __init__(self, event_bytes: int) -> None:
        self.url = ""
        self.sent_bytes = 0
        event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (
            b"x" * event_bytes
        )
        self._chunk = b"%x\r\n%b\r\n" % (len(event), event)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            while True:
                writer.write(self._chunk)
                await writer.drain()
                self.sent_bytes += len(self._chunk)
        writer.close()


@asynccontextmanager
async def flooding(event_bytes: int) -> AsyncIterator[Flood]:
    worker = Flood(event_bytes)
    server = await asyncio.start_server(worker, "127.0.0.1", 0)
    worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield worker


def stalling(port: int, trust: ssl.SSLContext | None) -> socket.socket:
    """A client that asks, reads the beginning of the answer and then nothing more."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", port))
    if trust is not None:
        sock = trust.wrap_socket(sock, server_hostname="localhost")
    sock.sendall(REQUEST)
    assert sock.recv(12) == b"HTTP/1.1 200"
    return sock


async def stalled(router: RouterProcess, worker: Flood) -> int:
    """Bytes that the process has when nothing moves any more."""
    before = -1
    while before != (before := worker.sent_bytes):  # noqa: ASYNC110 - no event there
        await asyncio.sleep(0.5)
    return router.resident_bytes()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("event_bytes", [400, 16_000, 60_000])
async def test_a_stalled_client_is_held_in_256_kb(tls: bool, event_bytes: int) -> None:
    flags: tuple[str, ...] = ("--set", f"server.tls.cert_path={DATA / 'tls_cert.pem'}",
             "--set", f"server.tls.key_path={DATA / 'tls_key.pem'}") if tls else ()  # fmt: skip
    trust = ssl.create_default_context(cafile=DATA / "tls_cert.pem") if tls else None
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(flooding(event_bytes))
        flags += ("--worker-urls", worker.url, "--set", "policy.slow_start_s=0")
        router = await stack.enter_async_context(router_process(*flags))
        client = await stack.enter_async_context(client_of(router, verify=trust or True))
        await until_ready(client)
        port = int(router.url.rpartition(":")[2])
        sizes = list[int]()
        for count in (3, CLIENTS):  # what is made once is made for the first
            for _ in range(count):
                made = await asyncio.to_thread(stalling, port, trust)
                stack.callback(made.close)
            sizes.append(await stalled(router, worker))
        assert (sizes[1] - sizes[0]) / CLIENTS <= 256 * 1024
