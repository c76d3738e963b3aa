"""Patches that routers share through a real server, also when it is away or forgets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.config_source import ConfigSource, Loaded, validated
from router.redis_settings import RedisSettings
from router.runtime.config_sync import ConfigSync
from router.runtime.live_config import Author, LiveConfig
from router.runtime.redis_link import RedisLink
from tests.redis_servers import Server, single

ADMIN = Author("api", "admin key-0123abcd")
FILE = Author("file", "laneway.yaml")


@asynccontextmanager
async def unstarted(
    server: Server, document: dict[str, Any] | None = None
) -> AsyncIterator[tuple[LiveConfig, ConfigSync]]:
    """A configuration that is shared through `server` whenever it is told to."""
    document = document or {}
    live = LiveConfig(Loaded(validated(document), document, ConfigSource(environment={})))
    settings = RedisSettings.model_validate(
        {"mode": "single", "urls": [server.url], "retry_s": 0.05, "retry_s_max": 0.1}
    )
    link = RedisLink(settings)
    sync = ConfigSync(live, link, prefix="laneway", interval_s=0.02)
    try:
        yield live, sync
    finally:
        await sync.aclose()
        await link.aclose()


@asynccontextmanager
async def router(
    server: Server, document: dict[str, Any] | None = None
) -> AsyncIterator[LiveConfig]:
    """A configuration that is shared through `server`."""
    async with unstarted(server, document) as (live, sync):
        await sync.start()
        yield live


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


def depth(live: LiveConfig) -> int:
    return live.config.queue.depth_max


async def test_a_patch_at_one_router_is_in_force_at_all_and_after_a_restart() -> None:
    with single() as server:
        async with router(server) as a, router(server) as b:
            a.patch({"queue": {"depth_max": 7}, "tenants": {"x": {"weight": 2}}}, ADMIN)
            await eventually(lambda: depth(b) == 7)
            assert b.version.digest == a.version.digest
            assert b.version.source == "cluster"
            assert b.version.who == "admin key-0123abcd, at another router"
            b.patch({"tenants": {"x": None}}, ADMIN)
            await eventually(lambda: not a.config.tenants)
            b.rollback(1, ADMIN)
            await eventually(lambda: depth(a) == 1_000)
            a.patch({"queue": {"depth_max": 8}}, ADMIN)
            await eventually(lambda: depth(b) == 8)
        async with router(server) as again:
            assert depth(again) == 8, "before it serves anybody"
            assert again.overlay == {"queue": {"depth_max": 8}}


async def test_patches_at_the_same_moment_are_all_kept() -> None:
    with single() as server:
        async with router(server) as a, router(server) as b, router(server) as c:
            routers = (a, b, c)
            for round_ in range(5):
                for number, live in enumerate(routers):
                    live.patch({"tenants": {f"t{number}": {"weight": round_ + 1}}}, ADMIN)
                await asyncio.sleep(0)

            def alike() -> bool:
                weights = [{n: t.weight for n, t in r.config.tenants.items()} for r in routers]
                return all(w == {"t0": 5, "t1": 5, "t2": 5} for w in weights)

            await eventually(alike)
            assert len({live.version.digest for live in routers}) == 1


async def test_who_was_too_slow_to_say_a_patch_says_no_old_words_of_others_with_it() -> None:
    with single() as server:
        async with unstarted(server) as (a, at_a), unstarted(server) as (b, at_b):
            a.patch({"tenants": {"a": {"weight": 1}}}, ADMIN)
            await at_a.exchange()
            b.patch({"tenants": {"b": {"weight": 1}}}, ADMIN)
            await at_b._take(await at_b._read())
            a.patch({"tenants": {"a": {"weight": 2}}}, ADMIN)
            await at_a.exchange()
            await at_b.exchange()
            await at_a.exchange()
            for live in (a, b):
                weights = {name: tenant.weight for name, tenant in live.config.tenants.items()}
                assert weights == {"a": 2, "b": 1}


async def test_what_was_patched_while_redis_was_away_is_said_afterwards() -> None:
    with single() as server:
        async with router(server) as a, router(server) as b:
            a.patch({"queue": {"depth_max": 7}}, ADMIN)
            await eventually(lambda: depth(b) == 7)
            server.freeze()
            a.patch({"queue": {"wait_s_max": 3}}, ADMIN)
            b.patch({"lanes": {"spill": False}}, ADMIN)
            await asyncio.sleep(0.1)
            assert b.config.queue.wait_s_max == 30
            server.thaw()
            await eventually(lambda: b.config.queue.wait_s_max == 3)
            await eventually(lambda: a.config.lanes.spill is False)
            assert (depth(a), depth(b)) == (7, 7)


async def test_the_last_word_counts_also_while_the_one_before_is_being_written() -> None:
    """A tenant, or a key, that was added and removed at once must not come back."""
    with single() as server, server.admin() as admin:
        async with router(server) as a:
            admin.client_pause(150, all=False)  # writes only
            a.patch({"tenants": {"x": {"weight": 2}}}, ADMIN)
            await asyncio.sleep(0.05)
            a.patch({"tenants": {"x": None}}, ADMIN)
            await eventually(
                lambda: b'"x"' not in (admin.hget("{laneway:config}", "overlay") or b'"x"')
            )
            await asyncio.sleep(0.1)  # five more exchanges
            assert not a.config.tenants


async def test_a_redis_that_forgot_is_told_again() -> None:
    with single() as server:
        async with router(server) as a, router(server) as b:
            a.patch({"queue": {"depth_max": 7}}, ADMIN)
            await eventually(lambda: depth(b) == 7)
            admin = server.admin()
            admin.flushall()
            await eventually(lambda: bool(admin.exists("{laneway:config}")))
            admin.close()
            assert (depth(a), depth(b)) == (7, 7)
            async with router(server) as again:
                await eventually(lambda: depth(again) == 7)


async def test_the_last_word_of_a_file_counts_for_all(caplog: pytest.LogCaptureFixture) -> None:
    with single() as server:
        async with router(server) as a, router(server) as b:
            a.patch({"queue": {"depth_max": 7}}, ADMIN)
            await eventually(lambda: depth(b) == 7)
            a.take({"queue": {"depth_max": 9}}, FILE)
            await eventually(lambda: b.overlay == {})
            b.take({"queue": {"depth_max": 9}}, FILE)
            assert (depth(a), depth(b)) == (9, 9)
        caplog.set_level(logging.WARNING)
        shares = {"p0": {"share_min": 0.1}, "p1": {"share_min": 0.1}}
        async with router(server, {"classes": shares}) as a, router(server) as b:
            a.patch({"classes": {"p2": {"share_min": 0.7}}}, ADMIN)
            await eventually(lambda: "cannot be used with this router's file" in caplog.text)
            assert b.config.classes.p2.share_min == 0.08
            b.take({"classes": shares}, FILE)  # its file is the same now
            await eventually(lambda: b.config.classes.p2.share_min == 0.7)
            assert caplog.text.count("cannot be used") == 1


SHARES = {"classes": {"p0": {"share_min": 0.1}, "p1": {"share_min": 0.1}}}


async def test_what_cannot_be_used_is_validated_again_only_when_something_changed() -> None:
    with single() as server:
        async with unstarted(server, SHARES) as (a, at_a), unstarted(server) as (b, at_b):
            a.patch({"classes": {"p2": {"share_min": 0.7}}}, ADMIN)
            await at_a.exchange()
            for _ in range(5):
                await at_b.exchange()
            assert b.counts == {("cluster", "refused"): 1}
            b.take({"queue": {"depth_max": 5}}, FILE)
            for _ in range(5):
                await at_b.exchange()
            assert b.counts["cluster", "refused"] == 2
            b.take(SHARES, FILE)
            await at_b.exchange()
            assert b.config.classes.p2.share_min == 0.7


async def test_what_is_patched_where_others_patches_are_refused_does_not_pass_for_them() -> None:
    with single() as server:
        async with unstarted(server, SHARES) as (a, at_a), unstarted(server) as (b, at_b):
            a.patch({"classes": {"p2": {"share_min": 0.7}}}, ADMIN)
            await at_a.exchange()
            await at_b.exchange()
            b.patch({"queue": {"depth_max": 7}}, ADMIN)
            await at_b.exchange()
            await at_a.exchange()
            assert (depth(a), a.config.classes.p2.share_min) == (7, 0.7)
            await at_b.exchange()
            assert (depth(b), b.config.classes.p2.share_min) == (7, 0.08)
            b.take(SHARES, FILE)
            await at_b.exchange()
            assert (depth(b), b.config.classes.p2.share_min) == (7, 0.7)
            a.patch({"queue": {"depth_max": 8}}, ADMIN)
            await at_a.exchange()
            b.patch({"queue": {"wait_s_max": 3}}, ADMIN)
            await at_b.exchange()
            await at_a.exchange()
            assert [(depth(r), r.config.queue.wait_s_max) for r in (a, b)] == [(8, 3), (8, 3)]


async def test_a_tenant_removed_at_one_router_is_not_back_by_a_patch_inside_it_at_another() -> None:
    file = {"tenants": {"acme": {"degrade": False}}}
    with single() as server:
        async with unstarted(server, file) as (a, at_a), unstarted(server, file) as (b, at_b):
            a.patch({"tenants": {"acme": None}}, ADMIN)
            b.patch({"tenants": {"acme": {"weight": 3}}}, ADMIN)
            for sync in (at_a, at_b, at_a, at_b):
                await sync.exchange()
            assert (a.config.tenants, b.config.tenants) == ({}, {})
            b.patch({"tenants": {"acme": {"weight": 3}}}, ADMIN)  # made again by who knew
            for sync in (at_b, at_a):
                await sync.exchange()
            assert [r.config.tenants["acme"].weight for r in (a, b)] == [3, 3]


async def test_a_router_that_cannot_learn_what_was_patched_begins_soon_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with single() as server:
        async with unstarted(server) as (a, at_a), unstarted(server) as (b, at_b):
            a.patch({"queue": {"depth_max": 7}}, ADMIN)
            await at_a.exchange()
            server.freeze()
            async with asyncio.timeout(5):
                await at_b.start()
            assert "may accept keys that were taken away" in caplog.text
            assert depth(b) == 1_000
            server.thaw()
            await eventually(lambda: depth(b) == 7)


async def test_it_goes_along_with_what_others_ask() -> None:
    with single() as server:
        async with router(server) as a, unstarted(server) as (b, sync):
            sync._interval_s = 1e6
            await sync.start()
            await asyncio.sleep(0)
            sync.go_along()  # so soon after the last time nothing can be new
            assert not sync._wake.is_set()
            a.patch({"queue": {"depth_max": 7}}, ADMIN)

            def went_along() -> bool:
                sync._together_at = 0.0
                sync.go_along()
                return depth(b) == 7

            await eventually(went_along)
