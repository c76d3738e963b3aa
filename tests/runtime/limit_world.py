"""Asks, and the stores of several routers on one server, for the tests of limits."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

from router.core.bucket import Ask, Charge, Kind, Rule, Scope, Settlement, Verdict
from router.core.types import Priority
from router.limit_settings import LimitsSettings
from router.redis_settings import RedisSettings
from router.runtime.bucket_store import BucketStore
from router.runtime.redis_buckets import RedisBuckets
from router.runtime.redis_link import RedisLink

_IDS = count()


def cost(burst: float, *, rate: float = 0.0, debt_max: float = 0.0, key: str = "t:cost") -> Rule:
    return Rule(key, Scope.TENANT_COST, rate, burst, debt_max=debt_max)


def permits(most: int, key: str = "t:concurrency") -> Rule:
    return Rule(key, Scope.TENANT_CONCURRENCY, 0.0, most, Kind.PERMITS)


def ask(
    *charges: tuple[Rule, float], priority: Priority = Priority.P1, lease_s: float = 600.0
) -> Ask:
    taken = tuple(Charge(rule, amount) for rule, amount in charges)
    return Ask(f"request-{next(_IDS)}", taken, priority, lease_s)


def used(of: Ask, *amounts: float) -> Settlement:
    charges = tuple(Charge(c.rule, a) for c, a in zip(of.charges, amounts, strict=True))
    return Settlement(of.reservation_id, charges)


async def decided(store: BucketStore, *asks: Ask) -> list[Verdict]:
    """What the store says to `asks`, all asked in one turn."""
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[Verdict]] = [loop.create_future() for _ in asks]
    for each, future in zip(asks, waiting, strict=True):
        store.reserve(each, future.set_result)  # a second verdict would raise
    async with asyncio.timeout(10):
        return list(await asyncio.gather(*waiting))


async def granted(store: BucketStore, *asks: Ask) -> list[bool]:
    return [verdict.granted for verdict in await decided(store, *asks)]


async def left(store: BucketStore, rule: Rule) -> float:
    """What a bucket holds, found by asking for nothing."""
    return (await decided(store, ask((rule, 0.0))))[0].levels[0].remaining


@asynccontextmanager
async def routers(
    urls: Sequence[str],
    number: int = 1,
    *,
    mode: str = "single",
    redis: dict[str, Any] | None = None,
    **limits: Any,
) -> AsyncIterator[list[RedisBuckets]]:
    """The stores of `number` routers that share a Redis."""
    settings = RedisSettings.model_validate({"mode": mode, "urls": urls, **(redis or {})})
    # A host that runs other things besides may well be late; what time-outs do has its own tests.
    limit_settings = LimitsSettings.model_validate({"timeout_s": 1.0, **limits})
    loop = asyncio.get_running_loop()
    links = [RedisLink(settings) for _ in range(number)]
    stores = [RedisBuckets(link, limit_settings, loop=loop) for link in links]
    try:
        for store in stores:
            await store.start()
        yield stores
    finally:
        for store, link in zip(stores, links, strict=True):
            await store.aclose()
            await link.aclose()


@asynccontextmanager
async def slowed(
    port: int, delay_s: float, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """The port of a proxy that lets everything from the server arrive `delay_s` later; with `tls`
    it speaks that to its clients.
    """
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, later_s: float
    ) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(65536):
                loop.call_later(later_s, writer.write, data)
        loop.call_later(later_s, writer.close)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        tasks.add(loop.create_task(forward(reader, back, 0.0)))
        tasks.add(loop.create_task(forward(there, writer, delay_s)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(delay_s + 0.01)
