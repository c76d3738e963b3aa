"""Starting and stopping a real router process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.router_process import RouterProcess, router_process, spawned

DATA = Path(__file__).parent / "data"
CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


class Worker:
    """Streams one chunk to each chat, and the rest when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the router closed its connection
        finally:
            writer.close()

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not head.startswith(b"POST"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        writer.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
        await self.release.wait()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


@asynccontextmanager
async def streaming_worker() -> AsyncIterator[Worker]:
    worker = Worker()
    server = await asyncio.start_server(worker, "127.0.0.1", 0)
    worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield worker
    finally:
        worker.release.set()
        server.close()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with streaming_worker() as running:
        yield running


def flags(worker: Worker, *, delay_s: float = 0.0, grace_s: float = 30.0) -> list[str]:
    return [
        "--worker-urls", worker.url, "--set", f"server.drain_delay_s={delay_s}",
        "--set", f"server.shutdown_grace_s={grace_s}", "--set", "probe.interval_s=0.1",
    ]  # fmt: skip


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - no event there
            await asyncio.sleep(0.02)


@asynccontextmanager
async def client_of(router: RouterProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=router.url, timeout=20, trust_env=False) as client:
        yield client


class Stream:
    """A chat whose first chunk has arrived, and which is still running."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.text = ""
        self._begun = asyncio.Event()
        self.ended = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        async with self._client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_text():
                self.text += piece
                self._begun.set()

    async def begun(self) -> None:
        await asyncio.wait_for(self._begun.wait(), 10)


async def test_a_stop_lets_streams_end_and_serves_until_the_delay_is_over(worker: Worker) -> None:
    async with (
        router_process(*flags(worker, delay_s=1.5)) as router,
        client_of(router) as client,
    ):
        await until_ready(client)
        streams = [Stream(client) for _ in range(3)]
        for stream in streams:
            await stream.begun()
        router.signal(signal.SIGTERM)
        await router.logged("told to stop")
        assert (await client.get("/readyz")).json()["status"] == "draining"
        late = Stream(client)
        await late.begun()
        await router.logged("listener closed")
        with pytest.raises(httpx.ConnectError):
            async with client_of(router) as newcomer:
                await newcomer.get("/livez")
        worker.release.set()
        for stream in (*streams, late):
            await stream.ended
            assert stream.text.endswith("data: [DONE]\n\n")
        assert await router.exit_status() == 0


async def test_when_the_grace_is_over_streams_end_with_an_error_event(worker: Worker) -> None:
    async with (
        router_process(*flags(worker, grace_s=0.3)) as router,
        client_of(router) as client,
    ):
        await until_ready(client)
        stream = Stream(client)
        await stream.begun()
        router.signal(signal.SIGTERM)
        await stream.ended
        assert '"code":"shutting_down"' in stream.text
        assert "[DONE]" not in stream.text
        assert await router.exit_status() == 0


async def test_a_second_signal_ends_it_at_once(worker: Worker) -> None:
    async with (
        router_process(*flags(worker, grace_s=600)) as router,
        client_of(router) as client,
    ):
        await until_ready(client)
        stream = Stream(client)
        await stream.begun()
        router.signal(signal.SIGTERM)
        await router.logged("waiting for 1 running answers")
        router.signal(signal.SIGINT)
        assert await asyncio.wait_for(router.exit_status(), 5) == 1
        assert "Traceback" not in router.log
        await asyncio.gather(stream.ended, return_exceptions=True)
        assert "[DONE]" not in stream.text


async def test_a_taken_port_is_a_message_and_status_1() -> None:
    async with router_process() as router:
        port = router.url.rpartition(":")[2]
        second = await spawned("--port", port)
        with pytest.raises(AssertionError):
            await second.started()
        assert await second.exit_status() == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in second.log
        assert "Traceback" not in second.log
        await second.stop()
