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
from loadtest.bench.procfs import cpu_between, cpu_snapshot, memory
from loadtest.bench.results import LatencyResult
from loadtest.bench.rounds import run_client
from loadtest.bench.scale.figures import Figure, Size
from loadtest.bench.scale.subjects import laneway, nginx
from loadtest.bench.stand import RoundFailed, Stand, standing
from loadtest.bench.subjects import Subject

CLIENTS: Final = 100
# Of each, about 5 MB: far more than the kernel's buffers hold.
_TOKENS: Final = 20_000
# The same for workers that write large events as fast as they can: reads are as large as they get.
_FLOOD_TOKENS: Final = 512
_FLOOD_PAD_BYTES: Final = 16_384
_HELD_KB_MAX: Final = 256.0
# Less, for a read more or less is held by chance: where reads end, by the sizes of events.
_FLOODED_KB_MAX: Final = 200.0
_READ_AT_ONCE: Final = 2**16
_STEP_MS: Final = 5.0
_DEADLINE_S: Final = 120.0
# A router of which all streams stall still polls its workers.
_QUIET_S: Final = 1.0
_QUIET_RATIO_MAX: Final = 0.05


def slow(size: Size) -> Iterator[Figure]:
    """Memory for each stalled stream, and the way of other streams' chunks meanwhile."""
    clients = CLIENTS // 5 if size.quick else CLIENTS
    theirs_kb, theirs_added_ms = _measured(nginx(), clients)
    theirs_flooded_kb = _flooded_kb(nginx(), clients)
    for build in size.builds:
        ours_kb, ours_added_ms = _measured(laneway(build), clients)
        ours_flooded_kb = _flooded_kb(laneway(build), clients)
        yield Figure(
            name=f"held for one of {clients} stalled streams",
            build=build,
            unit="kB",
            value=ours_kb,
            beside=theirs_kb,
            value_max=_HELD_KB_MAX,
        )
        yield Figure(
            name=f"held for one of {clients} whose workers flood",
            build=build,
            unit="kB",
            value=ours_flooded_kb,
            beside=theirs_flooded_kb,
            value_max=_FLOODED_KB_MAX,
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
        with _stalled(stand, clients, _TOKENS) as stalled:
            held_mb = memory(stand.router.pid).pss_mb - before_mb
            beside_us = _chunk_way_us(stand)
            stalled.read_all()
        return held_mb * 1024 / clients, (beside_us - alone_us) / 1e3


def _flooded_kb(subject: Subject, clients: int) -> float:
    """kB held for each, where workers write large events as fast as they can."""
    with standing(subject) as stand:
        stand.set_padding(_FLOOD_PAD_BYTES)
        time.sleep(1.0)
        before_mb = memory(stand.router.pid).pss_mb
        with _stalled(stand, clients, _FLOOD_TOKENS) as stalled:
            held_mb = memory(stand.router.pid).pss_mb - before_mb
            stalled.read_all()
        return held_mb * 1024 / clients


def _chunk_way_us(stand: Stand) -> float:
    stand.set_decode_step(_STEP_MS)
    arguments = ["--requests", "6", "--stream", "--tokens", "64"]
    result = run_client("latency", [stand.direct_url, stand.url], arguments, LatencyResult)
    if result.bad or result.altered or result.router_us is None:
        raise RoundFailed(f"{stand.subject.name}: other streams broke")
    return result.router_us.p50


class _Stalled:
    """Clients in a thread with a loop of its own: they send, wait, and read when told to."""

    def __init__(self, stand: Stand, clients: int, tokens: int) -> None:
        self._port = int(stand.places["port"])
        self._clients = clients
        self._tokens = tokens
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
        asked = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": self._tokens}
        body = compact_json(asked)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        request = head + b"content-length: %d\r\n\r\n" % len(body) + body
        for _ in range(self._clients):
            pair = await asyncio.open_connection("127.0.0.1", self._port, limit=2**10)
            self._readers.append(pair)
        for _, writer in self._readers:
            writer.write(request)  # together: what is read for many at once is written together
        for reader, _ in self._readers:
            self._status_line = await reader.readexactly(12)

    async def _read_all(self) -> None:
        for reader, _ in self._readers:
            answer = _Answer()
            parser = httptools.HttpResponseParser(answer)
            parser.feed_data(self._status_line)
            while not answer.complete:
                if not (data := await reader.read(_READ_AT_ONCE)):
                    raise RoundFailed("a stalled stream was cut")
                parser.feed_data(data)
            if answer.chunks != self._tokens:
                raise RoundFailed(f"a stalled stream had {answer.chunks} of {self._tokens} chunks")

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
def _stalled(stand: Stand, clients: int, tokens: int) -> Iterator[_Stalled]:
    stalled = _Stalled(stand, clients, tokens)
    stalled.start()
    try:
        _wait_until_quiet(stand)
        yield stalled
    finally:
        stalled.stop()


def _wait_until_quiet(stand: Stand) -> None:
    """Wait until nothing moves any more: before that, some streams are still on their way."""
    deadline_at = time.monotonic() + _DEADLINE_S
    before = cpu_snapshot(stand.router.pid)
    while time.monotonic() < deadline_at:
        time.sleep(_QUIET_S)
        after = cpu_snapshot(stand.router.pid)
        if cpu_between(before, after).cpu_us < _QUIET_RATIO_MAX * _QUIET_S * 1e6:
            return
        before = after
    raise RoundFailed(f"{stand.subject.name}: not all streams stalled in {_DEADLINE_S:g} s")
