"""What routers tell each other of usage, through a real server that also forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from router.config import Config
from router.core.cost import CostModel
from router.core.limits import Limits
from router.core.types import Outcome
from router.errors import Reason
from router.records import Records
from router.redis_settings import RedisSettings
from router.runtime.redis_errors import RedisAway, RedisRefused
from router.runtime.redis_link import RedisLink
from router.runtime.usage_sync import UsageSync
from router.usage import Amounts, TenantUsage, UsageTable
from tests.redis_servers import Server, single

ONE = Amounts(1, 0, 100, 10, 5, 0.25)
NOW_S = 6000.0


def table() -> UsageTable:
    limits = Limits(Config(), CostModel({}))
    return UsageTable(Records(), known=lambda: frozenset(("acme", "tiny")), limits=lambda: limits)


def entry(of: UsageTable, tenant: str = "acme") -> TenantUsage:
    return of._entry(tenant, of._known())


async def requests_at_a(reader: UsageSync) -> int:
    told = await reader.of("acme", ["a"])
    return told_by(told, "a").total.requests if told else 0


def told_by(told: Mapping[str, TenantUsage | str], name: str) -> TenantUsage:
    used = told[name]
    assert isinstance(used, TenantUsage)
    return used


@asynccontextmanager
async def sharing(
    server: Server, name: str, *, clock: Callable[[], float] = lambda: NOW_S, started: bool = False
) -> AsyncIterator[tuple[UsageTable, UsageSync]]:
    settings = RedisSettings.model_validate({"mode": "single", "urls": [server.url]})
    link, used = RedisLink(settings), table()
    sync = UsageSync(used, link, name=name, time_ms=lambda: 1_000_000, interval_s=0.05, clock=clock)
    try:
        if started:
            sync.start()
        yield used, sync
    finally:
        await sync.aclose()
        await link.aclose()


async def test_one_router_reads_what_another_told_whatever_its_clock() -> None:
    with single() as server:
        async with (
            sharing(server, "a") as (used, a),
            sharing(server, "b", clock=lambda: 90.0 * 60) as (_, b),
        ):
            assert await b.of("acme", ["a"]) == {}, "nothing is told: it is not known"
            for minute in (100 - 60, 100 - 3, 100):
                entry(used).add(minute, ONE, Outcome.SUCCESS)
            entry(used).add(100, Amounts(1, 1), Outcome.REFUSED)
            entry(used).refusals[Reason.RATE_LIMITED] += 1
            await a.tell()
            found = told_by(await b.of("acme", ["a"]), "a")
            assert found.total == ONE + ONE + ONE + Amounts(1, 1)
            assert found.outcomes == {Outcome.SUCCESS: 3, Outcome.REFUSED: 1}
            assert found.refusals == {Reason.RATE_LIMITED: 1}
            assert found.recent(90.0 * 60, 2) == ONE + Amounts(1, 1)
            assert found.recent(90.0 * 60, 3) == ONE + ONE + Amounts(1, 1)
            assert told_by(await b.of("tiny", ["a"]), "a").total == Amounts()
            assert await b.of("acme", []) == {}


async def test_only_what_changed_is_told_and_all_of_it_to_a_server_that_forgot() -> None:
    with single() as server, server.admin() as admin:
        async with sharing(server, "a") as (used, a):
            entry(used).add(100, ONE, Outcome.SUCCESS)
            await a.tell()
            entry(used, "tiny").add(100, ONE, Outcome.SUCCESS)
            key = "{laneway:usage}:a"
            admin.hset(key, "acme", "as it was")
            await a.tell()
            assert admin.hget(key, "acme") == b"as it was"
            assert admin.hget(key, "tiny") is not None
            admin.flushall()
            await a.tell()
            assert set(admin.hkeys(key)) == {b"", b"acme", b"tiny"}
            assert 0 < admin.pttl(key) <= 300
            used._tenants.pop("tiny")
            await a.tell()
            assert set(admin.hkeys(key)) == {b"", b"acme"}


async def test_all_is_told_when_tenants_go_and_the_server_forgot() -> None:
    with single() as server, server.admin() as admin:
        async with sharing(server, "a") as (used, a):
            for tenant in ("acme", "tiny"):
                entry(used, tenant).add(100, ONE, Outcome.SUCCESS)
            await a.tell()
            used._tenants.pop("tiny")
            admin.flushall()  # as a deletion whose answer was lost would leave it
            await a.tell()
            assert set(admin.hkeys("{laneway:usage}:a")) == {b"", b"acme"}


async def test_what_was_told_in_part_is_said_to_be_whole_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lost(_key: str, _ttl_ms: int, _fields: list[Any]) -> None:
        raise RedisAway("it is gone")

    with single() as server:
        async with sharing(server, "a") as (used, a):
            entry(used).add(100, ONE, Outcome.SUCCESS)
            say, calls = a._say, count()

            async def once(key: str, ttl_ms: int, fields: list[Any]) -> None:
                await (lost if next(calls) else say)(key, ttl_ms, fields)

            with monkeypatch.context() as patch:
                patch.setattr(a, "_say", once)
                with pytest.raises(RedisAway):
                    await a.tell()
            assert await a.of("tiny", ["a"]) == {}, "there may be more"
            await a.tell()
            assert told_by(await a.of("tiny", ["a"]), "a").total == Amounts()


async def test_what_cannot_be_read_is_refused_and_what_is_gone_is_unknown() -> None:
    with single() as server, server.admin() as admin:
        async with sharing(server, "a") as (_, a):
            admin.hset("{laneway:usage}:c", "", "1")
            for body in ("x", "[1]", '[1, {"total": [1]}]', '[1, {"total": "abcdef"}]'):
                admin.hset("{laneway:usage}:b", "acme", body)
                told = await a.of("acme", ["b", "c"])
                assert "what it told can't be read" in str(told["b"])
                assert told_by(told, "c").total == Amounts(), "only its own part is missing"
            admin.set("{laneway:usage}:b", "no hash")
            with pytest.raises(RedisRefused):
                await a.of("acme", ["b", "c"])
            server.kill()
            with pytest.raises(RedisAway):
                await a.of("acme", ["b"])


async def test_it_is_told_again_and_again() -> None:
    with single() as server:
        async with (
            sharing(server, "a", started=True) as (used, _),
            sharing(server, "b") as (_, b),
        ):
            for count in (1, 2):
                entry(used).add(100, ONE, Outcome.SUCCESS)
                async with asyncio.timeout(10):
                    while await requests_at_a(b) < count:  # noqa: ASYNC110 - no event tells
                        await asyncio.sleep(0.01)
