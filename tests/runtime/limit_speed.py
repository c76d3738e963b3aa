"""What limits cost: `python -m tests.runtime.limit_speed`. CPU of this process per request.

Each request asks, hears the verdict, settles and makes the next; what the same loop costs without a
store is taken off. Only on an idle machine do the figures say something. With few requests at once
each pays for a round trip of its own, with many they share.

The first lines are the floor, which no client can be below: the same bytes sent and answered, by a
blocking socket, and by a protocol of the loop that looks at nothing.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import uvloop

from router.core.bucket import Ask, DecidedBy, Family, Rule, Scope, Settlement, Verdict
from router.core.types import Priority
from router.limit_settings import LimitsSettings
from router.runtime.bucket_store import BucketStore, Decided
from router.runtime.leased_buckets import LeasedBuckets
from router.runtime.local_buckets import LocalBuckets
from router.runtime.redis_scripts import Codec
from tests.redis_servers import single
from tests.runtime.limit_world import ask, cost, permits, routers

_REQUESTS = 6_000
_MANY = 1e9
_CLASS = Family(Rule("cluster", Scope.CLUSTER, _MANY, _MANY), (("p0", 0.6), ("p1", 0.4))).rules
_RULES = (
    cost(_MANY, rate=_MANY, key="requests"),
    _CLASS["p1"],
    cost(_MANY, rate=_MANY),
    cost(_MANY, rate=_MANY, key="model"),
    permits(1_000_000),
)


_YES: Final = Verdict(True, None, 0.0, False, (), DecidedBy.REDIS)
_NUMBERS: Final = count(10**9)  # of the same length, all of them


class Call:
    """The command for an ask that takes a settlement along, and what changes in it each time."""

    def __init__(self, limits: int) -> None:
        charges = ask(*((rule, 1.0) for rule in _RULES[:limits])).charges
        names = "e" * 10, "a" * 10
        settlement, one = Settlement(names[0], charges), Ask(names[1], charges, Priority.P1, 600.0)
        packed = Codec("laneway").call([one], [settlement])
        self._head, rest = packed.split(names[0].encode())
        self._middle, self._tail = rest.split(names[1].encode())
        self._last = next(_NUMBERS)

    def next(self) -> bytes:
        """Ask anew, and settle the last one."""
        last, self._last = self._last, next(_NUMBERS)
        return b"%b%d%b%d%b" % (self._head, last, self._middle, self._last, self._tail)


class Bare(LocalBuckets):
    """The round trip of an ask without what a store does with it: kernel, loop and server."""

    def __init__(self, limits: int) -> None:
        super().__init__()
        self._call = Call(limits)
        self._waiting: deque[Decided] = deque()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for _ in range(data.count(b"$")):
            self._waiting.popleft()(_YES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits any more."""

    def reserve(self, ask: Ask, decided: Decided) -> None:
        self._waiting.append(decided)
        self._transport.write(self._call.next())

    def settle(self, settlement: Settlement) -> None:
        """It went with the next ask."""


@asynccontextmanager
async def bare(url: str, limits: int) -> AsyncIterator[Bare]:
    """One that is connected to a server which knows the script."""
    loop, made = asyncio.get_running_loop(), Bare(limits)
    if url.startswith("unix://"):
        transport, _ = await loop.create_unix_connection(lambda: made, url.removeprefix("unix://"))  # type: ignore[type-var]
    else:
        port = int(url.rpartition(":")[2])
        transport, _ = await loop.create_connection(lambda: made, "127.0.0.1", port)  # type: ignore[type-var]
    yield made
    transport.abort()


def blocking_us(url: str, limits: int) -> float:
    """Microseconds of CPU for the same round trip by a socket, without a loop."""
    if url.startswith("unix://"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(url.removeprefix("unix://"))
    else:
        connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    call = Call(limits)
    with connection:
        before = time.process_time()
        for _ in range(_REQUESTS):
            connection.send(call.next())
            connection.recv(65536)
        return (time.process_time() - before) / _REQUESTS * 1e6


async def measure(
    store: BucketStore | None, limits: int, at_once: int
) -> tuple[float, list[float]]:
    """Microseconds of CPU per request, and how long each waited."""
    loop, waits, done = asyncio.get_running_loop(), list[float](), asyncio.Event()
    rules, begun = _RULES[:limits], 0

    def request() -> None:
        nonlocal begun
        begun += 1
        one, began = ask(*((rule, 1.0) for rule in rules)), time.perf_counter()
        if store is None:
            loop.call_soon(decided, one, began, None)
        else:
            store.reserve(one, partial(decided, one, began))

    def decided(one: Ask, began: float, verdict: Verdict | None) -> None:
        assert verdict is None or verdict.granted
        waits.append(time.perf_counter() - began)
        settlement = Settlement(one.reservation_id, one.charges)
        if store is not None:
            store.settle(settlement)
        if begun < _REQUESTS:
            loop.call_soon(request)
        elif len(waits) == _REQUESTS:
            done.set()

    before = time.process_time()
    for _ in range(at_once):
        loop.call_soon(request)
    await done.wait()
    return (time.process_time() - before) / _REQUESTS * 1e6, sorted(waits)


async def report(name: str, store: BucketStore, limits: int, at_once: int) -> None:
    cost_us, waits = await measure(store, limits, at_once)
    without_us, _ = await measure(None, limits, at_once)
    print(
        f"{name:12} {limits} limits, {at_once:2} at once: "
        f"{cost_us - without_us:5.1f} us of CPU a request, "
        f"p99 {waits[int(len(waits) * 0.99)] * 1e3:.2f} ms"
    )


async def main() -> None:
    """Print a line for each store and each number of requests at once."""
    settings = LimitsSettings.model_validate({"batch_s": 0.5})
    with tempfile.TemporaryDirectory() as folder, single(f"unixsocket {folder}/redis") as server:
        urls = {"tcp": server.url, "unix": f"unix://{Path(folder)}/redis"}
        async with (
            routers([urls["tcp"]]) as (redis,),
            routers([urls["unix"]]) as (by_unix,),
            bare(urls["tcp"], 3) as bare_tcp,
            bare(urls["unix"], 3) as bare_unix,
        ):
            for name, url in urls.items():
                print(f"socket, {name:4}                    : {blocking_us(url, 3):5.1f} us of CPU")
            for name, one in (("bare, tcp", bare_tcp), ("bare, unix", bare_unix)):
                await report(name, one, 3, 1)
            leased = LeasedBuckets(redis, settings, name="r", loop=asyncio.get_running_loop())
            for name, store in (
                ("redis, tcp", redis), ("redis, unix", by_unix), ("leases", leased),
                ("memory", LocalBuckets()),
            ):  # fmt: skip
                for limits in (1, 3, 5):
                    for at_once in (1, 8, 64):
                        await report(name, store, limits, at_once)


if __name__ == "__main__":
    uvloop.run(main())
