"""What a request costs in the whole path, in Python bytecodes and calls: figures without noise.

The router is the real one, from the bytes that a client's connection reads to those that it writes,
with the default configuration, access log and metrics; a `limited` one is a plain one with keys,
tenants and limits of each kind, kept in the process. Only the transports are stand-ins that take
what is written, and the clock moves by fixed steps; so two runs of the same code count the same, on
any machine. Run it with `python -m loadtest.relay_cost`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from random import Random
from types import FrameType
from typing import Any, Final, NamedTuple, cast

import yaml
from uvicorn import Config as UvicornConfig
from uvicorn.server import ServerState

from loadtest.bench.features import EVERY_FEATURE, KEYS
from loadtest.bench.payloads import MODEL, SSE_DONE, chat_bodies, completion, stream_parts
from router.access_log import AccessLog
from router.config import Config
from router.contract import LoadReport, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.metrics import Metrics
from router.records import Records
from router.runtime.connection import Connection
from router.runtime.driver import Driver
from router.runtime.front import Front
from router.runtime.heads import Headers
from router.runtime.local_buckets import LocalBuckets
from router.runtime.server import InferenceProtocol, protocol_for
from router.runtime.upstream import Upstreams

KINDS: Final = ("plain", "limited", "large", "stream", "burst")
CHUNKS: Final = 64
_STREAMS: Final = ("stream", "burst")  # a read for each chunk, and one for all of them
_BODY_BYTES: Final = dict.fromkeys(KINDS, 1_500) | {"large": 20_000}
_WORKERS: Final = 2
_CLIENTS: Final = 2  # one for each worker, so that nobody waits for room
_STEP_S: Final = 2e-5  # of the clock, each time it is read
_TURN_S: Final = 0.02  # the same, from turn to turn
_REQUESTS: Final = 100
_WARM_UP: Final = 100  # caches fill
_REPORT: Final = LoadReport(kv_used_tokens=20_000, running_requests=0, queued_requests=0)
_REQUEST_HEAD: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    b"authorization: Bearer %b\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_PLAIN_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


class Cost(NamedTuple):
    """Means of one request."""

    bytecodes: float
    calls: float  # of Python functions


class _Wire:
    """Takes what is written, as a transport that never has to wait."""

    written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        """Never be full."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default


class Path:
    """A router with `_CLIENTS` connections to clients and as many to each of its workers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: Config) -> None:
        self._now = 1.0
        upstreams = Upstreams(config.upstream, loop=loop)
        driver = Driver(
            config,
            Dispatcher(config, rng=Random(1)),
            upstreams,
            loop=loop,
            clock=self._clock,
        )
        driver.probe = lambda _: None
        driver.buckets = LocalBuckets(clock=self._clock)
        records = Records()
        driver.on_record.append(records.add)
        AccessLog(
            lambda _: None,
            records,
            wall_clock=lambda: 1e9 + self._now,
            clock=lambda: self._now,
            lines_max=1_000_000,
        )
        Metrics(records, version="0", snapshot=driver.snapshot, log_lines_dropped=lambda: 0)
        self._flush = upstreams.outbox.flush
        self._connections = [
            connection for n in range(_WORKERS) for connection in _worker(driver, n)
        ]
        front = Front(config=config, driver=driver, authenticate=_tenant)
        protocol = protocol_for(front)
        self._clients = [_client(protocol) for _ in range(_CLIENTS)]
        self._numbers = count(10**11)
        self._bodies = {
            kind: chat_bodies(MODEL, stream=kind in _STREAMS, tokens=CHUNKS, body_bytes=size)
            for kind, size in _BODY_BYTES.items()
        }
        plain, stream = _plain(), _streamed()
        burst = [b"".join(stream)]
        self._answers = dict.fromkeys(KINDS, plain) | {"stream": stream, "burst": burst}

    def serve(self, kind: str, requests: int) -> None:
        """Bring `requests` to their end, in turns of `_CLIENTS`."""
        for _ in range(0, requests, _CLIENTS):
            self._now += _TURN_S
            for client, key in zip(self._clients, KEYS, strict=False):
                client.data_received(self._request(kind, key))
            self._flush()
            while busy := [one for one in self._connections if one._receiver is not None]:
                for read in self._answers[kind]:
                    for connection in busy:
                        connection.data_received(read)
                    self._flush()

    def _clock(self) -> float:
        self._now += _STEP_S
        return self._now

    def _request(self, kind: str, key: str) -> bytes:
        number = next(self._numbers)
        before, after = self._bodies[kind][number % 64]
        body = before + b"%d" % number + after
        return _REQUEST_HEAD % (key.encode(), len(body)) + body


def _tenant(headers: Headers) -> str:
    """The tenant of a key: here both have one name."""
    return dict(headers)[b"authorization"].removeprefix(b"Bearer ").decode()


def _worker(driver: Driver, number: int) -> list[Connection]:
    """Join a worker, and return connections that are idle in its pool."""
    spec = WorkerSpec(url=f"http://127.0.0.1:{number + 1}", models=(MODEL,), kv_total_tokens=10**6)
    driver.on_worker_joined(spec)
    driver.on_report(spec.worker_id, _REPORT)
    pool = driver.upstreams.get(spec.worker_id)
    assert pool is not None
    connections = [Connection(pool) for _ in range(_CLIENTS)]
    for connection in connections:
        connection.connection_made(cast("asyncio.Transport", _Wire()))
        pool.give_back(connection)
    return connections


def _client(protocol: type[InferenceProtocol]) -> InferenceProtocol:
    config = UvicornConfig(_no_app, ws="none", lifespan="off", log_config=None)
    config.load()
    client = protocol(config=config, server_state=ServerState(), app_state={})
    client.connection_made(cast("asyncio.Transport", _Wire()))
    return client


async def _no_app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - an ASGI app
    raise AssertionError("inference never becomes ASGI")


def _plain() -> list[bytes]:
    body = completion(MODEL)
    return [_PLAIN_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body]


def _streamed() -> list[bytes]:
    """The reads of a stream, a chunk each."""
    parts = stream_parts(MODEL)
    token = parts.before_stamp + b"0" * 19 + parts.after_stamp
    first, *rest = (
        b"%x\r\n%b\r\n" % (len(event), event)
        for event in (parts.first, *[token] * CHUNKS, parts.finish, SSE_DONE)
    )
    return [_STREAM_HEAD + first, *rest[:-1], rest[-1] + b"0\r\n\r\n"]


def counted(run: Callable[[], None]) -> Cost:
    """Count what `run` executes of the router's code, for each of `_REQUESTS`."""
    totals: Counter[str] = Counter()

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if not str(frame.f_globals.get("__name__")).startswith("router."):
            return None  # the stand-ins and the loop
        totals[event] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def step(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ARG001 - as traced
        totals[event] += 1
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return Cost(totals["opcode"] / _REQUESTS, totals["call"] / _REQUESTS)


async def measured(kind: str) -> Cost:
    """What one request of `kind` costs, once everything is warm."""
    settings = yaml.safe_load(EVERY_FEATURE) if kind == "limited" else {}
    path = Path(asyncio.get_running_loop(), Config.model_validate(settings))
    path.serve(kind, _WARM_UP)
    return counted(lambda: path.serve(kind, _REQUESTS))


async def main() -> None:
    """Print one line for each kind of request."""
    print(f"{'request':8} {'bytecodes':>9} {'calls':>6}")
    for kind in KINDS:
        cost = await measured(kind)
        print(f"{kind:8} {cost.bytecodes:9.0f} {cost.calls:6.0f}")


if __name__ == "__main__":
    asyncio.run(main())
