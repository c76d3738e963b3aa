"""What a relay hands on to the brain, with a brain of our own making behind a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import pytest

from router.app import forwarding as module
from router.app.forwarding import Forwarding
from router.config import Config

Brain = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nOK"
BODY_BYTES_MAX = 2**20


@asynccontextmanager
async def forwarded(
    brain: Brain, folder: Path, *, body_timeout_s: float = 5.0, bodies_bytes_max: int = 2**25
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a relay's forwarding to `brain`."""
    server_settings = {"body_timeout_s": body_timeout_s, "bodies_bytes_max": bodies_bytes_max}
    config = Config.model_validate({"server": {**server_settings, "body_bytes_max": 2**20}})
    path = folder / "brain"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await brain(reader, writer)
            await writer.drain()

    server = await asyncio.start_unix_server(serve, path)
    forwarding = Forwarding(path, config)
    transport = httpx.ASGITransport(forwarding)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://relay") as client:
            yield client
    finally:
        await forwarding.aclose()
        server.close()


async def answers_unread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Refuse by the head alone, and close."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")


async def swallows(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read a body of 1 MiB, and answer."""
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(BODY_BYTES_MAX)
    writer.write(OK)


async def test_an_answer_before_the_end_of_the_body_is_the_answer(tmp_path: Path) -> None:
    """Larger than a socket holds, so that writing fails."""
    async with forwarded(answers_unread, tmp_path) as client:
        for _ in range(20):
            answer = await client.post("/workers", content=b"x" * BODY_BYTES_MAX)
            assert (answer.status_code, answer.text) == (401, "no")


async def test_a_body_reaches_the_brain_whole_or_not_at_all(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def brain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        assert await reader.readexactly(6) == b"abcdef"
        writer.write(OK)

    async def pieces(*, ends: bool) -> AsyncIterator[bytes]:
        yield b"abc"
        if not ends:
            await asyncio.Event().wait()
        yield b"def"

    async with forwarded(brain, tmp_path, body_timeout_s=0.1) as client:
        late = await client.post("/workers", content=pieces(ends=False))
        assert late.status_code == 408
        large = await client.post("/workers", content=b"x" * (BODY_BYTES_MAX + 1))
        assert large.status_code == 413
        assert heads == []
        whole = await client.post("/workers", content=pieces(ends=True))
        assert whole.text == "OK"
        assert b"content-length: 6\r\n" in heads[0].lower()
        assert b"transfer-encoding" not in heads[0].lower()


async def test_bodies_are_bounded_together_and_given_back(tmp_path: Path) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def held() -> AsyncIterator[bytes]:
        yield b"x" * 2**19
        entered.set()
        await leave.wait()
        yield b"x" * 2**19

    async with forwarded(swallows, tmp_path, bodies_bytes_max=2**20) as client:
        for _ in range(3):
            entered.clear()
            leave.clear()
            first = asyncio.create_task(client.post("/workers", content=held()))
            await entered.wait()
            refused = await client.post("/workers", content=b"x" * (2**19 + 1))
            assert refused.status_code == 503
            assert refused.headers["x-laneway-reason"] == "bodies_full"
            leave.set()
            assert (await first).text == "OK"


async def test_probes_are_answered_when_all_other_connections_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT", httpx.Timeout(5.0, pool=0.2))
    free, busy = asyncio.Event(), asyncio.Semaphore(0)

    async def brain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models"):
            busy.release()
            await free.wait()
        writer.write(OK)

    async with forwarded(brain, tmp_path) as client, asyncio.TaskGroup() as group:
        running = [group.create_task(client.get("/v1/models")) for _ in range(64)]
        for _ in running:
            await busy.acquire()
        for path in ("/readyz", "/readiness", "/health", "/metrics", "/livez"):
            assert (await client.get(path)).text == "OK"
        refused = await client.get("/v1/models")
        assert refused.status_code == 503
        assert refused.headers["x-laneway-reason"] == "connections_full"
        assert "restarted" not in refused.text
        assert "retry-after" in refused.headers
        free.set()
        for task in running:
            assert (await task).status_code == 200
