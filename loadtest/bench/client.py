"""Load and latency client for router benchmarks; checks every byte of every answer.

    python -m loadtest.bench.client load    http://127.0.0.1:30000 --requests 5000
    python -m loadtest.bench.client load    http://127.0.0.1:30000 --stream --tokens 64
    python -m loadtest.bench.client load    http://127.0.0.1:30000 --requests-per-s 500
    python -m loadtest.bench.client latency http://127.0.0.1:18001 http://127.0.0.1:30000

Each connection sends its next request when the last is answered. With `--requests-per-s` requests
come at random moments instead, and wait for a connection if none is free: that counts as latency.

Prints one JSON object. An answer is *bad* when its status is not 200 or its shape is not that
of a whole answer, *altered* when it is whole but not byte for byte what the worker sent, stamps
apart; stamps must ascend.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import enum
import json
import random
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from loadtest.bench.payloads import (
    MODEL,
    SSE_DONE,
    STAMP,
    STAMP_DIGITS,
    chat_bodies,
    completion,
    stamps_ascend,
    stamps_of,
    stream_parts,
)
from loadtest.bench.results import LatencyResult, LoadResult, Percentiles

PATH: Final = "/v1/chat/completions"
# Time for running answers to end after the last request was started.
GRACE_S: Final = 20.0
SAMPLES_MAX: Final = 2


class Verdict(enum.Enum):
    """What is to be said of an answer."""

    RIGHT = "right"
    ALTERED = "altered"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to send. No request starts later than `limit_s` after the first."""

    url: str
    requests: int = 5000
    connections: int = 32
    stream: bool = False
    tokens: int = 64
    body_bytes: int = 1500
    limit_s: float = 60.0
    connects_per_s: float = 0.0  # 0: as fast as they can be made
    requests_per_s: float = 0.0  # 0: as fast as they are answered
    keys: tuple[str, ...] = ()  # of the clients, one for each connection by turns


class Job:
    """A plan being carried out: sends requests, checks and times the answers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stamp_ages_ns: list[int] | None = [] if plan.stream else None
        self.latencies_ns: list[int] = []
        self.bad = self.altered = 0
        self._first_bytes_ns: list[int] = []
        self._started = self._ended = self._reads = self._reconnects = 0
        self._samples: list[str] = []
        split = urlsplit(plan.url)
        self._host, self._port = split.hostname or "127.0.0.1", split.port or 80
        self._requests = [self._prepared(key) for key in plan.keys or ("",)]
        self._connections = 0  # so far
        self._number = random.randrange(10**11)
        self._right_plain = completion(MODEL)
        self._parts = stream_parts(MODEL)
        self._deadline = self._began = self._finished_at = 0.0
        self._finished: asyncio.Future[None] | None = None
        self._connects: set[asyncio.Task[None]] = set()
        self._open: set[ClientConnection] = set()
        self._idle: deque[ClientConnection] = deque()  # longest first
        self._came_ns: deque[int] = deque()  # when those came that wait for a connection

    async def run(self) -> LoadResult:
        """Send everything; return when all answers are in, or failed."""
        self._finished = asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()
        self._deadline = self._began + self.plan.limit_s
        for number in range(min(self.plan.connections, self.plan.requests)):
            if self.plan.connects_per_s:
                due_s = self._began + number / self.plan.connects_per_s - time.perf_counter()
                await asyncio.sleep(max(0.0, due_s))
            await self._connect()
        arrivals = asyncio.ensure_future(self._arrive()) if self.plan.requests_per_s else None
        try:
            await asyncio.wait_for(self._finished, self.plan.limit_s + GRACE_S)
        except TimeoutError:
            self.bad += self._started - self._ended
            self._samples.append(f"{self._started - self._ended} answers never ended")
            self._finished_at = time.perf_counter()
            self._finished.cancel()
        if arrivals is not None:
            arrivals.cancel()
        for connection in self._open:
            connection.close()
        return self._result()

    def connection_free(self, connection: ClientConnection) -> None:
        """Send the next request, if there is one."""
        self._open.add(connection)
        if self._done:
            connection.close()
        elif self._may_start():
            came_ns = self._came_ns.popleft() if self._came_ns else time.perf_counter_ns()
            connection.send(self._next_request(connection.number), came_ns)
        elif self._is_over():
            self._finish()
        else:
            self._idle.append(connection)

    def connection_lost(self, connection: ClientConnection, *, unanswered: bool) -> None:
        """Count the answer that was cut; open another connection while there is work left."""
        self._open.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)
        if self._done:
            return
        if unanswered:
            self._count(connection, complete=False)
        if self._may_start() and self._reconnects < 10 * self.plan.requests:
            self._reconnects += 1
            task = asyncio.get_running_loop().create_task(self._connect())
            self._connects.add(task)
            task.add_done_callback(self._connects.discard)
        elif self._is_over():
            self._finish()

    def answered(self, connection: ClientConnection, *, reusable: bool) -> None:
        """Count a complete answer and go on."""
        self._count(connection, complete=True)
        if reusable:
            self.connection_free(connection)
        else:
            connection.close()

    @property
    def _done(self) -> bool:
        return self._finished is None or self._finished.done()

    def _may_start(self) -> bool:
        return self._more_may_come() and bool(self._came_ns or not self.plan.requests_per_s)

    def _more_may_come(self) -> bool:
        return self._started < self.plan.requests and time.perf_counter() < self._deadline

    def _is_over(self) -> bool:
        open_loop = self.plan.requests_per_s > 0
        return self._ended >= self._started and not (open_loop and self._more_may_come())

    async def _arrive(self) -> None:
        """Let requests come, whether or not others have been answered."""
        at, rng = time.perf_counter(), random.Random(self.plan.requests)
        for _ in range(self.plan.requests):
            at += rng.expovariate(self.plan.requests_per_s)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            self._came_ns.append(time.perf_counter_ns())
            if self._idle:
                self.connection_free(self._idle.popleft())

    def _finish(self) -> None:
        self._finished_at = time.perf_counter()
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    async def _connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: ClientConnection(self), self._host, self._port
            )
        except OSError as exc:
            self.bad += 1
            self._samples.append(f"no connection: {exc}")
            self._finish()

    def next_number(self) -> int:
        """The number of a new connection, from 0."""
        self._connections += 1
        return self._connections - 1

    def _prepared(self, key: str) -> list[tuple[bytes, bytes]]:
        prepared = []
        bodies = chat_bodies(
            MODEL,
            stream=self.plan.stream,
            tokens=self.plan.tokens,
            body_bytes=self.plan.body_bytes,
        )
        key_line = f"authorization: Bearer {key}\r\n" if key else ""
        for before, after in bodies:
            head = (
                f"POST {PATH} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n{key_line}"
                "content-type: application/json\r\naccept: */*\r\nuser-agent: bench/1\r\n"
                f"content-length: {len(before) + 12 + len(after)}\r\n\r\n"
            )
            prepared.append((head.encode() + before, after))
        return prepared

    def _next_request(self, connection: int) -> bytes:
        requests = self._requests[connection % len(self._requests)]
        before, after = requests[self._started % len(requests)]
        request = b"%b%012d%b" % (before, self._number + self._started, after)
        self._started += 1
        return request

    def _count(self, connection: ClientConnection, *, complete: bool) -> None:
        self._ended += 1
        self._reads += connection.reads
        body = b"".join(connection.parts)
        verdict = self.verdict(body) if complete and connection.status == 200 else Verdict.BAD
        if verdict is Verdict.BAD:
            self.bad += 1
        else:
            self.altered += verdict is Verdict.ALTERED
            self.latencies_ns.append(time.perf_counter_ns() - connection.came_ns)
            self._first_bytes_ns.append(connection.first_byte_ns - connection.came_ns)
        if verdict is not Verdict.RIGHT and len(self._samples) < SAMPLES_MAX:
            self._samples.append(
                f"{verdict.value}: status {connection.status}, {len(body)} bytes: {body[:300]!r}"
            )

    def verdict(self, body: bytes) -> Verdict:
        """Compare the body of a 200 answer with the one that the worker sent."""
        if not self.plan.stream:
            if body == self._right_plain:
                return Verdict.RIGHT
            whole = b"The quick brown fox" in body and b'"completion_tokens"' in body
            return Verdict.ALTERED if whole and body.endswith(b"}") else Verdict.BAD
        whole = (
            body.count(STAMP) == self.plan.tokens
            and body.count(SSE_DONE.rstrip()) == 1
            and (b'"finish_reason":"length"' in body or b'"finish_reason": "length"' in body)
        )
        if not whole:
            return Verdict.BAD
        stamps = stamps_of(body)
        same = body == self._parts.whole(stamps) and stamps_ascend(stamps)
        return Verdict.RIGHT if same else Verdict.ALTERED

    def _result(self) -> LoadResult:
        wall_s = self._finished_at - self._began
        chunks = len(self.latencies_ns) * self.plan.tokens if self.plan.stream else 0
        return LoadResult(
            started=self._started,
            ended=self._ended,
            bad=self.bad,
            altered=self.altered,
            wall_s=round(wall_s, 3),
            requests_per_s=round(self._ended / wall_s, 1),
            reads=self._reads,
            reconnects=self._reconnects,
            latency_us=percentiles(self.latencies_ns),
            first_byte_us=percentiles(self._first_bytes_ns),
            chunks=chunks,
            chunks_per_s=round(chunks / wall_s),
            reads_per_chunk=round(self._reads / chunks, 3) if chunks else None,
            chunk_way_us=percentiles(self.stamp_ages_ns or []),
            samples=self._samples,
        )


class ClientConnection(asyncio.Protocol):
    """A keep-alive connection that carries one request at a time."""

    def __init__(self, job: Job) -> None:
        self.parts: list[bytes] = []
        self.reads = 0
        self.came_ns = self.first_byte_ns = 0
        self.status = 0
        self.number = job.next_number()
        self._job = job
        self._busy = False
        self._read_at_ns = 0
        self._answers_in_read = 0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def send(self, request: bytes, came_ns: int) -> None:
        """Send a request that came then; the answer is told to the job."""
        assert self._transport is not None
        self._busy = True
        self.parts = []
        self.reads = self.first_byte_ns = self.status = 0
        self.came_ns = came_ns
        self._transport.write(request)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Report for work."""
        # Not an isinstance check: uvloop's transports only look like asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._job.connection_free(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Report the loss, and whether an answer is lost with it."""
        unanswered, self._busy = self._busy, False
        self._job.connection_lost(self, unanswered=unanswered)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; an answer that is no HTTP is lost with its connection."""
        self.reads += 1
        self._answers_in_read = 0
        self._read_at_ns = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body, and the age of the newest stamp in it."""
        self.parts.append(body)
        ages = self._job.stamp_ages_ns
        if ages is not None:
            start = body.rfind(STAMP) + len(STAMP)
            stamp = body[start : start + STAMP_DIGITS]
            if start >= len(STAMP) and len(stamp) == STAMP_DIGITS and stamp.isdigit():
                ages.append(self._read_at_ns - int(stamp))
        if not self.first_byte_ns:
            self.first_byte_ns = time.perf_counter_ns()

    def on_message_complete(self) -> None:
        """Hand the answer over; informational ones are no answers."""
        status = self._parser.get_status_code()
        if status < 200:
            return
        # One request at a time is out, so a second answer in one read is one too many.
        self._answers_in_read += 1
        surplus = self._answers_in_read > 1 or not self._busy
        self.status = 0 if surplus else status
        self._busy = False
        self._job.answered(self, reusable=self._parser.should_keep_alive())


def percentiles(values_ns: list[int]) -> Percentiles | None:
    """The distribution of `values_ns`, in microseconds; None of nothing."""
    if not values_ns:
        return None
    ordered = sorted(values_ns)

    def at(ratio: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(ratio * len(ordered)))] / 1000, 1)

    return Percentiles(p50=at(0.5), p90=at(0.9), p99=at(0.99), max=at(1.0))


async def latency(direct: Plan, routed: Plan) -> LatencyResult:
    """Run both plans by turns, one request at a time, in blocks.

    The first request of a block of plain completions pays for the connection and is left out.
    """
    block = 1 if direct.stream else 20
    plans = [
        dataclasses.replace(plan, requests=block, connections=1, limit_s=30.0)
        for plan in (direct, routed)
    ]
    values_ns: list[list[int]] = [[], []]
    bad = altered = 0
    for _ in range(max(1, direct.requests // block)):
        for values, plan in zip(values_ns, plans, strict=True):
            job = Job(plan)
            await job.run()
            bad += job.bad
            altered += job.altered
            values.extend(job.latencies_ns[1:] if job.stamp_ages_ns is None else job.stamp_ages_ns)
    direct_us, router_us = map(percentiles, values_ns)

    def added(name: str) -> float | None:
        if direct_us is None or router_us is None:
            return None
        return round(float(getattr(router_us, name)) - float(getattr(direct_us, name)), 1)

    return LatencyResult(
        bad=bad,
        altered=altered,
        count=len(values_ns[1]),
        direct_us=direct_us,
        router_us=router_us,
        added_p50_us=added("p50"),
        added_p90_us=added("p90"),
        added_p99_us=added("p99"),
    )


def main() -> None:
    """Run one plan from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Plan(url="")
    parser.add_argument("mode", choices=("load", "latency"))
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--requests", type=int, default=defaults.requests)
    parser.add_argument("--connections", type=int, default=defaults.connections)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--tokens", type=int, default=defaults.tokens)
    parser.add_argument("--body-bytes", type=int, default=defaults.body_bytes)
    parser.add_argument("--limit-s", type=float, default=defaults.limit_s)
    parser.add_argument("--connects-per-s", type=float, default=defaults.connects_per_s)
    parser.add_argument("--requests-per-s", type=float, default=defaults.requests_per_s)
    parser.add_argument("--keys", nargs="*", default=defaults.keys)
    options = vars(parser.parse_args())
    mode, urls = options.pop("mode"), options.pop("urls")
    if mode == "latency" and len(urls) != 2:
        parser.error("latency needs two URLs: direct, router")
    plans = [Plan(url=url, **options) for url in urls]
    result = uvloop.run(_carried_out(mode, plans))
    json.dump(dataclasses.asdict(result), sys.stdout)


async def _carried_out(mode: str, plans: list[Plan]) -> LoadResult | LatencyResult:
    if mode == "latency":
        return await latency(plans[0], plans[1])
    return await Job(plans[0]).run()


if __name__ == "__main__":
    main()
