"""Connections to Redis as people run it: each mode, each way in which it can be away."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import ValidationError

from router.core.bucket import DecidedBy
from router.redis_settings import RedisSettings
from router.runtime.redis_errors import RedisAway, RedisRefused
from router.runtime.redis_link import Guard, GuardState, RedisLink
from tests.redis_servers import BINARIES, Server, cluster, documented_user, single
from tests.runtime.limit_world import ask, cost, decided, routers, slowed


def settings_of(mode: str, *servers: Server, **other: Any) -> RedisSettings:
    urls = [server.url for server in servers]
    return RedisSettings.model_validate({"mode": mode, "urls": urls, **other})


async def again(link: RedisLink, within_s: float = 5.0) -> None:
    """Wait until the link takes writes again."""
    ends_at = time.monotonic() + within_s
    while True:
        try:
            await link.ask("SET", "k", "v")
        except RedisAway:
            assert time.monotonic() < ends_at, "it did not come back in time"
            await asyncio.sleep(0.02)
        else:
            return


@pytest.mark.parametrize("binary", BINARIES)
async def test_a_user_with_a_password_gets_in(binary: str) -> None:
    acl = ("user default off", "user lane on >secret ~laneway:* +@all")
    server = Server(*acl, binary=binary)
    try:
        server.start(username="lane", password="secret")
        link = RedisLink(settings_of("single", server, user="lane", password="secret"))
        await link.ask("SET", "laneway:a", "1")
        with pytest.raises(RedisRefused):
            await link.ask("SET", "other", "1")
        assert link.guard.state is GuardState.CLOSED
        assert (await link.endpoint("a")).port == server.port
        await link.aclose()
        wrong = RedisLink(settings_of("single", server, user="lane", password="wrong"))
        with pytest.raises(RedisAway, match=r"invalid username|WRONGPASS"):
            await wrong.ask("GET", "a")
        await wrong.aclose()
    finally:
        server.remove()


async def test_the_documented_user_may_do_what_a_cluster_takes() -> None:
    with cluster() as servers:
        for each in servers:
            with each.admin() as admin:
                admin.execute_command("ACL SETUSER", *documented_user())
        user = {"user": "laneway", "password": "PASSWORD"}
        urls = [each.url for each in servers]
        async with routers(urls, mode="cluster", redis=user) as (store,):
            (verdict,) = await decided(store, ask((cost(10.0), 1.0)))
            assert verdict.by is DecidedBy.REDIS
            for key in ("{laneway:a}", "{laneway:b}:c", "{laneway:d}:e"):
                await store._link.ask("HGETALL", key)
        assert [each.refusals() for each in servers] == [[], [], []]


async def test_a_unix_socket_serves_limits_and_all_else(tmp_path: Path) -> None:
    path = tmp_path / "a socket"
    with single(f'unixsocket "{path}"'):
        url = f"unix://{quote(str(path))}"
        async with routers([url]) as (store,):
            (verdict,) = await decided(store, ask((cost(10.0), 1.0)))
            assert verdict.by is DecidedBy.REDIS
            assert await store._link.ask("PING")
            assert str(store._endpoint) == str(path)


async def test_a_frozen_server_costs_one_timeout_and_then_nothing() -> None:
    with single() as server:
        link = RedisLink(settings_of("single", server, timeout_s=0.1))
        await link.ask("SET", "k", "v")
        server.freeze()
        began = time.monotonic()
        with pytest.raises(RedisAway):
            await link.ask("GET", "k")
        assert 0.09 < time.monotonic() - began < 0.3
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(RedisAway):
                await link.ask("GET", "k")
        assert time.monotonic() - began < 0.09
        server.thaw()
        await again(link)
        await link.aclose()


async def test_those_who_wait_for_one_connection_wait_for_one_trial() -> None:
    with single() as server:
        link = RedisLink(settings_of("single", server, connect_timeout_s=0.2))
        server.freeze()
        began = time.monotonic()
        answers = await asyncio.gather(
            *(link.ask("GET", "a") for _ in range(10)), return_exceptions=True
        )
        assert time.monotonic() - began < 1.0
        assert [type(answer) for answer in answers] == [RedisAway] * 10
        server.thaw()
        await again(link)
        await link.aclose()


async def test_a_cancelled_command_leaves_no_reply_behind() -> None:
    with single() as server:
        link = RedisLink(settings_of("single", server, timeout_s=2.0, connections_max=2))
        await link.ask("SET", "k", "right")
        server.freeze()
        task = asyncio.ensure_future(link.ask("ECHO", "wrong"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.thaw()
        for _ in range(5):
            assert await link.ask("GET", "k") == b"right"
        await link.aclose()


async def test_a_command_that_cannot_be_sent_takes_no_reply() -> None:
    with single() as server:
        link = RedisLink(settings_of("single", server))
        await link.ask("SET", "k", "right")
        with pytest.raises(UnicodeEncodeError):
            await link.ask("ECHO", "\ud800")
        answers = await asyncio.gather(link.ask("GET", "k"), link.ask("ECHO", "wrong"))
        assert answers == [b"right", b"wrong"]
        await link.aclose()


async def test_a_server_that_only_reads_is_told_of_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    with single() as master, single(f"replicaof 127.0.0.1 {master.port}") as replica:
        link = RedisLink(settings_of("single", replica), clock=lambda: now[0])
        for at in (0.0, 10.0, 20.0, 61.0, 70.0):
            now[0] = at
            with pytest.raises(RedisAway, match="read only"):
                await link.ask("SET", "k", "v")
            now[0] = at + 5.0
            await link.ask("GET", "k")
        await link.aclose()
    said = [record.getMessage() for record in caplog.records]
    assert sum("is away" in each for each in said) == 2
    assert sum("answers again" in each for each in said) == 2


async def test_what_is_not_told_at_once_is_told_when_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    with single() as master, single(f"replicaof 127.0.0.1 {master.port}") as replica:
        link = RedisLink(settings_of("single", replica), clock=lambda: now[0])
        for at in (0.0, 30.0, 45.0, 61.0, 75.0):
            now[0] = at
            with pytest.raises(RedisAway):
                await link.ask("SET", "k", "v")
            if at == 0.0:
                now[0] = 5.0
                await link.ask("GET", "k")
        await link.aclose()
    said = [record.getMessage() for record in caplog.records]
    assert sum("is away" in each for each in said) == 2


async def test_a_restarted_server_is_found_again() -> None:
    server = Server()
    try:
        server.start()
        link = RedisLink(settings_of("single", server))
        await again(link)
        server.kill()
        with pytest.raises(RedisAway):
            await link.ask("GET", "k")
        server.start()
        await again(link)
        await link.aclose()
    finally:
        server.remove()


async def test_tls_is_spoken_and_certificates_are_verified_on_both_sides(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(  # noqa: ASYNC221 - nothing else runs yet
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cert)
    with single() as server:
        async with slowed(server.port, 0.0, tls=context) as port:
            url = f"rediss://localhost:{port}"
            patient = {"connect_timeout_s": 2.0, "timeout_s": 2.0}
            own = {"ca_path": cert, "cert_path": cert, "key_path": key}
            async with routers([url], redis={"tls": own, **patient}) as (store,):
                (verdict,) = await decided(store, ask((cost(10.0), 1.0)))
                assert verdict.by is DecidedBy.REDIS
                await store._link.ask("SET", "k", "v")
            async with routers([url], redis={"tls": {"ca_path": cert}, **patient}) as (store,):
                (verdict,) = await decided(store, ask((cost(10.0), 1.0)))
                assert verdict.by is DecidedBy.LOCAL, "it showed no certificate"
            async with routers([url], redis={"connect_timeout_s": 2.0}) as (store,):
                (verdict,) = await decided(store, ask((cost(10.0), 1.0)))
                assert verdict.by is DecidedBy.LOCAL
                with pytest.raises(RedisAway, match=r"CERTIFICATE_VERIFY_FAILED|certificate"):
                    await store._link.ask("GET", "k", timeout_s=2.0)


def test_a_guard_lets_one_trial_through_and_pauses_longer_each_time() -> None:
    guard, sent = Guard(0.1, 1.0), []
    guard.failed(0.0)
    guard.failed(0.0)
    for tick in range(500):
        now = tick / 100
        if guard.allows(now):
            sent.append(now)
            guard.failed(now)
    assert len(sent) < 10
    assert max(b - a for a, b in pairwise(sent)) <= 1.02
    now = sent[-1] + 1.0
    assert guard.allows(now)
    assert guard.succeeded()
    assert guard.state is GuardState.CLOSED
    assert guard.allows(now)


def test_a_trial_that_nobody_reports_on_ends_by_itself() -> None:
    guard = Guard(0.1, 1.0)
    guard.failed(0.0)
    assert guard.allows(0.2)
    assert not guard.allows(0.25)
    assert guard.allows(0.4)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"mode": "single"}, "needs urls"),
        ({"mode": "none", "urls": ["redis://a"]}, "mode is none"),
        ({"mode": "single", "urls": ["http://a"]}, "begins with redis"),
        ({"mode": "single", "urls": ["redis://u:p@a"]}, "settings of their own"),
        ({"mode": "single", "urls": ["redis://a/3"]}, "database has a setting"),
        ({"mode": "single", "urls": ["redis://a:99999"]}, "not an address"),
        ({"mode": "cluster", "urls": ["redis://a"], "database": 1}, "only database 0"),
        ({"mode": "sentinel", "urls": ["unix:///a"]}, "no unix"),
        ({"mode": "cluster", "urls": ["redis://a", "rediss://b"]}, "all redis"),
        ({"mode": "single", "urls": ["redis://a"], "user": "x"}, "needs a password"),
        ({"key_prefix": "a{b}"}, "key_prefix"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        RedisSettings.model_validate(settings)


async def test_sentinels_may_have_users_of_their_own() -> None:
    acl = (
        "user default off", "user root on >secret +@all",
        "user watcher on >word +sentinel|masters +client",
    )  # fmt: skip
    with single() as master:
        watch = f"sentinel monitor mymaster 127.0.0.1 {master.port} 1"
        sentinel = Server(watch, *acl, sentinel=True)
        try:
            sentinel.start(username="root", password="secret")
            known, unknown = (
                RedisLink(
                    settings_of(
                        "sentinel", sentinel, sentinel_user="watcher", sentinel_password=password
                    )
                )
                for password in ("word", "wrong")
            )
            assert (await known.endpoint("k")).port == master.port
            await known.ask("SET", "k", "v")
            with pytest.raises(RedisAway, match="Authentication"):
                await unknown.endpoint("k")
            for link in (known, unknown):
                await link.aclose()
        finally:
            sentinel.remove()


async def test_sentinels_that_name_no_master_are_told_of_in_a_line() -> None:
    urls = ("redis://127.0.0.1:1", "redis://127.0.0.1:2")
    link = RedisLink(RedisSettings(mode="sentinel", urls=urls))
    for call in (lambda: link.endpoint("a"), lambda: link.ask("GET", "a")):
        with pytest.raises(RedisAway, match=r"'mymaster'.*ConnectionError, .*ConnectionError") as e:
            await call()
        assert len(str(e.value)) < 300, e.value
    await link.aclose()


async def test_a_cluster_without_nodes_is_away_and_no_other_error() -> None:
    link = RedisLink(RedisSettings(mode="cluster", urls=("redis://127.0.0.1:1",)))
    with pytest.raises(RedisAway):
        await link.ask("GET", "k")
    with pytest.raises(RedisAway):
        await link.endpoint("k")
    await link.aclose()


@pytest.mark.parametrize("servers", [single, cluster])
async def test_whoever_is_cancelled_stops_at_whatever_moment(
    servers: Callable[[], AbstractContextManager[Server | list[Server]]],
) -> None:
    """redis-py swallows a cancellation that comes when a write has just ended."""

    async def ask_for_ever(link: RedisLink) -> None:
        while True:
            await link.ask("GET", "k")

    with servers() as made:
        each = made if isinstance(made, list) else [made]
        link = RedisLink(settings_of(servers.__name__, *each, timeout_s=5))
        await link.ask("GET", "k")
        for turns in range(150):
            asking = asyncio.create_task(ask_for_ever(link))
            for _ in range(20 + turns % 50):
                await asyncio.sleep(0)
            asking.cancel()
            _, alive = await asyncio.wait([asking], timeout=5)
            assert not alive, f"goes on although cancelled after {turns % 50} turns"
        await link.aclose()
