"""Starting and stopping a real router process, and one that has few files."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.e2e.router_process import (
    RouterProcess,
    client_of,
    failed_start,
    router_process,
    until_ready,
)
from tests.e2e.streaming_worker import StreamingWorker, streaming_worker

CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def worker() -> AsyncIterator[StreamingWorker]:
    async with streaming_worker() as running:
        yield running


def flags(worker: StreamingWorker, *, delay_s: float = 0.0, grace_s: float = 30.0) -> list[str]:
    return [
        "--worker-urls", worker.url, "--set", f"server.drain_delay_s={delay_s}",
        "--set", f"server.shutdown_grace_s={grace_s}", "--set", "probe.interval_s=0.1",
    ]  # fmt: skip


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


async def test_requests_that_come_before_the_workers_have_answered_wait_for_them(
    worker: StreamingWorker,
) -> None:
    worker.release.set()
    async with router_process(*flags(worker)) as router, client_of(router) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=CHAT) for _ in range(8))
        )
        assert [answer.status_code for answer in answers] == [200] * 8


async def test_a_stop_lets_streams_end_and_serves_until_the_delay_is_over(
    worker: StreamingWorker,
) -> None:
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


async def test_when_the_grace_is_over_streams_end_with_an_error_event(
    worker: StreamingWorker,
) -> None:
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


async def test_a_second_signal_ends_it_at_once(worker: StreamingWorker) -> None:
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
        status, log = await failed_start("--port", port)
        assert status == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in log
        assert "Traceback" not in log


class Caller:
    """A chat on a connection of its own, which stays open until it is closed."""

    def __init__(self, router: RouterProcess) -> None:
        self._url = httpx.URL(router.url)
        self._writer: asyncio.StreamWriter | None = None

    async def status(self) -> str:
        """The status of the answer; empty: the connection was closed without one."""
        try:
            reader, writer = await asyncio.open_connection(self._url.host, self._url.port)
            self._writer = writer
            body = json.dumps(CHAT)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\n")
            writer.write(f"content-length: {len(body)}\r\n\r\n{body}".encode())
            async with asyncio.timeout(10):
                return (await reader.readexactly(12))[9:].decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            return ""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def test_clients_beyond_what_files_do_for_are_refused_and_cost_no_stream_and_no_worker(
    worker: StreamingWorker,
) -> None:
    few = (400, 1_100)  # of which 256 are kept for others than clients and their workers
    room = ("--set", "headroom.concurrency_default=1000", "--set", "policy.slow_start_s=0")
    async with router_process(*flags(worker), *room, files=few) as router:
        few_files = (
            "server.connections_max: it is {}, and 1100 open files, the limit here, do for 422"
        )
        await router.logged(few_files.format(20_000))
        async with client_of(router) as client:
            await until_ready(client)
            for wanted, warned in ((422, False), (423, True), (20_000, True)):
                patch = {"server": {"connections_max": wanted}}
                answer = await client.patch("/config", json=patch)
                said = [
                    text.startswith(few_files.format(wanted)) for text in answer.json()["warnings"]
                ]
                assert said == [True] * warned
                shown = (await client.get("/config")).json()["warnings"]
                assert shown == answer.json()["warnings"]
            await router.logged(few_files.format(423))
            stream = Stream(client)
            await stream.begun()
            callers = [Caller(router) for _ in range(700)]
            statuses = Counter(await asyncio.gather(*(caller.status() for caller in callers)))
            assert statuses["200"] == 421
            assert set(statuses) <= {"200", "503", ""}
            for caller in callers:
                caller.close()
            worker.release.set()
            await stream.ended
            assert stream.text.endswith("data: [DONE]\n\n")
            again = Caller(router)
            assert await again.status() == "200"
            again.close()
            log = router.log
        assert "breaker" not in log
        assert "ejected" not in log
