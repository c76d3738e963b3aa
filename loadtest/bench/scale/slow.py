"""Clients that read slower than their workers write: what is held for each, who else suffers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

import httptools

from loadtest.bench.payloads import MODEL, STAMP, compact_json
from loadtest.bench.procfs import memory
from loadtest.bench.results import LatencyResult
from loadtest.bench.rounds import run_client
from loadtest.bench.scale.figures import Figure, Size
from loadtest.bench.scale.subjects import laneway, nginx
from loadtest.bench.stand import RoundFailed, Stand, standing
from loadtest.bench.subjects import Subject

CLIENTS: Final = 100
# Of each, about 5 MB: far more than the kernel's buffers hold.
_TOKENS: Final = 20_000
_READ_AT_ONCE: Final = 2**16
_STEP_MS: Final = 5.0
_DEADLINE_S: Final = 120.0


def slow(size: Size) -> Iterator[Figure]:
    """Memory for each stalled stream, and the way of other streams' chunks meanwhile."""
    clients = CLIENTS // 5 if size.quick else CLIENTS
    theirs_kb, theirs_added_ms = _measured(nginx(), clients)
    for build in size.builds:
        ours_kb, ours_added_ms = _measured(laneway(build), clients)
        yield Figure(
            name=f"held for one of {clients} stalled streams",
            build=build,
            unit="kB",
            value=ours_kb,
            beside=theirs_kb,
            value_max=256.0,
        )
        yield Figure(
            name="chunks of other streams come later by (p50)",
            build=build,
            unit="ms",
            value=ours_added_ms,
            beside=theirs_added_ms,
            value_max=5.0,
        )


def _measured(subject: Subject, clients: int) -> tuple[float, float]:
    """kB held for each, and milliseconds by which they delay other streams' chunks."""
    with standing(subject) as stand:
        time.sleep(1.0)
        alone_us = _chunk_way_us(stand)
        stand.set_decode_step(0)  # their workers write all at once
        before_mb = memory(stand.router.pid).pss_mb
        with _stalled(stand, clients) as stalled:
            held_mb = memory(stand.router.pid).pss_mb - before_mb
            beside_us = _chunk_way_us(stand)
            stalled.read_all()
        return held_mb * 1024 / clients, (beside_us - alone_us) / 1e3


def _chunk_way_us(stand: Stand) -> float:
    stand.set_decode_step(_STEP_MS)
    arguments = ["--requests", "6", "--stream", "--tokens", "64"]
    result = run_client("latency", [stand.direct_url, stand.url], arguments, LatencyResult)
    if result.bad or result.altered or result.router_us is None:
        raise RoundFailed(f"{stand.subject.name}: other streams broke")
    return result.router_us.p50


class _Stalled:
    """Clients in a thread with a loop of its own: they send, wait, and read when told to."""

    def __init__(self, stand: Stand, clients: int) -> None:
        self._port = int(stand.places["port"])
        self._clients = clients
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._readers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._status_line = b""  # of all answers; read so that each has surely begun

    def start(self) -> None:
        self._thread.start()
        self._call(self._send_all())

    def read_all(self) -> None:
        """Read every answer to its end. Raises RoundFailed when one is not whole."""
        self._call(self._read_all())

    def stop(self) -> None:
        self._call(self._close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_DEADLINE_S)

    async def _send_all(self) -> None:
        body = compact_json({"model": MODEL, "prompt": "x", "stream": True, "max_tokens": _TOKENS})
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        request = head + b"content-length: %d\r\n\r\n" % len(body) + body
        for _ in range(self._clients):
            pair = await asyncio.open_connection("127.0.0.1", self._port, limit=2**10)
            self._readers.append(pair)
            pair[1].write(request)
            self._status_line = await pair[0].readexactly(12)

    async def _read_all(self) -> None:
        for reader, _ in self._readers:
            answer = _Answer()
            parser = httptools.HttpResponseParser(answer)
            parser.feed_data(self._status_line)
            while not answer.complete:
                if not (data := await reader.read(_READ_AT_ONCE)):
                    raise RoundFailed("a stalled stream was cut")
                parser.feed_data(data)
            if answer.chunks != _TOKENS:
                raise RoundFailed(f"a stalled stream had {answer.chunks} of {_TOKENS} chunks")

    async def _close_all(self) -> None:
        for _, writer in self._readers:
            writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await asyncio.sleep(0)


class _Answer:
    """Counts the stamped chunks of a stream."""

    def __init__(self) -> None:
        self.chunks = 0
        self.complete = False
        self._tail = b""

    def on_body(self, data: bytes) -> None:
        text = self._tail + data
        self._tail = text[1 - len(STAMP) :]
        self.chunks += text.count(STAMP)

    def on_message_complete(self) -> None:
        self.complete = True


@contextmanager
def _stalled(stand: Stand, clients: int) -> Iterator[_Stalled]:
    stalled = _Stalled(stand, clients)
    stalled.start()
    try:
        time.sleep(1.5)
        yield stalled
    finally:
        stalled.stop()
