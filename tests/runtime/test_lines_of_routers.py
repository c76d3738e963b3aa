"""Routers with a limit in one Redis, where one tenant is alone at one of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, cast

from router.core.types import Endpoint, Outcome, RequestSpec, Ticket
from router.limit_settings import LimitsSettings
from router.runtime.driver import Driver
from router.runtime.redis_buckets import RedisBuckets
from tests.core.line_world import PER_REQUEST, jain
from tests.redis_servers import Server
from tests.runtime.registry_world import Router, router, spec, until

PER_S = 300.0
LIMITS = {"cost": PER_REQUEST, "cluster": {"cost_per_s": PER_S}, "wait_s_max": 60, "timeout_s": 1.0}
TENANTS = ("a", "b", "c", "d")


class Insists:
    """A request whose answer is there at once, and then the next one of its tenant."""

    ticket: Ticket

    def __init__(self, driver: Driver, tenant: str, granted: Counter[str]) -> None:
        self._driver = driver
        self._tenant = tenant
        self._granted = granted

    def send(self) -> None:
        spec = RequestSpec("r", Endpoint.CHAT, tenant=self._tenant)
        self._driver.submit(spec, cast("Any", self))

    def dispatch(self) -> None:
        self._granted[self._tenant] += 1
        asyncio.get_running_loop().call_soon(self._ended)

    def _ended(self) -> None:
        self._driver.finished(self.ticket, Outcome.SUCCESS, None, None)
        self.send()

    def refuse(self, refusal: object) -> None:
        raise AssertionError(refusal)

    def sweep(self, now: float) -> None:
        """It has no deadline."""


async def limited(stack: AsyncExitStack, server: Server, name: str) -> Router:
    """A router whose limits are kept in `server`."""
    made = await stack.enter_async_context(router(server, name, sections={"limits": LIMITS}))
    store = RedisBuckets(
        made.link, LimitsSettings.model_validate(LIMITS), loop=asyncio.get_running_loop()
    )
    await store.start()
    stack.push_async_callback(store.aclose)
    made.driver.buckets = store
    return made


async def test_a_tenant_that_is_alone_at_a_router_gets_no_more_than_the_others(
    server: Server,
) -> None:
    async with AsyncExitStack() as stack:
        alone, other = [await limited(stack, server, name) for name in ("r1", "r2")]
        await alone.registry.add(spec(kv_total_tokens=10**9, concurrency_max=1000))
        await until(lambda: other.has("w"))
        for each in (alone, other):
            await until(partial(each.is_with, ("r1", "r2")))
            each.answer(kv_used_tokens=0)
        granted = Counter[str]()
        for number, tenant in enumerate(TENANTS):
            at = other if number else alone
            for _ in range(3 + 20 * (tenant == "b")):
                Insists(at.driver, tenant, granted).send()
        await until(lambda: granted.total() >= PER_S)  # until they know of each other's lines
        before = granted.copy()
        await until(lambda: granted.total() >= 3.5 * PER_S)
        parts = [granted[tenant] - before[tenant] for tenant in TENANTS]
        assert jain(parts) >= 0.98, parts
