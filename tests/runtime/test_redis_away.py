"""Redis away in every way: nobody waits long, policies hold, and soon after all is right again."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import pytest

from router.config import Config
from router.core.bucket import Ask, Charge, DecidedBy, Verdict
from router.core.types import Priority
from router.runtime.redis_buckets import RedisBuckets
from router.runtime.redis_errors import RedisAway
from router.runtime.redis_scripts import script_text
from router.runtime.resp import RespConnection
from router.runtime.settling import Held, Unsettled
from tests.redis_servers import BINARIES, Server, single
from tests.runtime.limit_world import (
    ask,
    cost,
    decided,
    granted,
    left,
    permits,
    routers,
    slowed,
    used,
)

# Requests are asked for at this rate while something happens.
_EVERY_S = 0.02
_TIMEOUT_S = 0.1
ANY = cost(1e6, key="any")


async def drive(store: RedisBuckets, seconds: float) -> list[tuple[float, Verdict]]:
    """Ask at a steady rate; how long each took, and what was said."""
    loop, found = asyncio.get_running_loop(), list[tuple[float, Verdict]]()
    ends_at = loop.time() + seconds
    while loop.time() < ends_at:
        began = loop.time()
        one = ask((ANY, 1.0))
        store.reserve(one, lambda v, t=began: found.append((loop.time() - t, v)))  # type: ignore[misc]
        store.settle(used(one, 1.0)) if found and found[-1][1].granted else None
        await asyncio.sleep(_EVERY_S)
    await asyncio.sleep(_TIMEOUT_S)
    return found


async def by_redis(store: RedisBuckets, within_s: float = 5.0) -> float:
    """Wait until Redis decides again; how long that took."""
    began = time.monotonic()
    while True:
        (verdict,) = await decided(store, ask((ANY, 1.0)))
        if verdict.by is DecidedBy.REDIS:
            return time.monotonic() - began
        assert time.monotonic() - began < within_s, "limits are not right again"
        await asyncio.sleep(_EVERY_S)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]


async def test_a_frozen_server_lm11(caplog: pytest.LogCaptureFixture) -> None:
    """LM11: the time-out at first, nothing once the guard is open, right again soon after."""
    caplog.set_level(logging.INFO)
    with single() as server:
        async with routers([server.url], timeout_s=_TIMEOUT_S) as (store,):
            await by_redis(store)
            tasks = len(asyncio.all_tasks())
            server.freeze()
            answers = await drive(store, 1.5)
            waits = [wait_s for wait_s, _ in answers]
            assert len(answers) > 40
            assert max(waits) < _TIMEOUT_S + 0.15
            slow = [wait_s for wait_s in waits if wait_s > 0.02]
            assert len(slow) <= 3 + _TIMEOUT_S / _EVERY_S
            assert {v.by for _, v in answers} == {DecidedBy.LOCAL}
            assert all(v.granted for _, v in answers)
            assert store.view().away in (1, 2)
            assert len(asyncio.all_tasks()) <= tasks + 1
            assert len(lines(caplog)) <= 3
            server.thaw()
            assert await by_redis(store) < 3.0
            assert store.view().away == 0
    assert len(lines(caplog)) <= 4


@pytest.mark.parametrize("binary", BINARIES)
async def test_flushed_scripts_and_a_restart_lm09(binary: str) -> None:
    """LM09: an ask after each is decided by Redis, without a manual step."""
    server = Server(binary=binary)
    try:
        server.start()
        async with routers([server.url]) as (store,):
            rule = cost(100.0)
            one = ask((rule, 60.0))
            assert await granted(store, one) == [True]
            with server.admin() as admin:
                admin.script_flush()
            (verdict,) = await decided(store, ask((rule, 10.0)))
            assert (verdict.by, verdict.granted) == (DecidedBy.REDIS, True)
            with server.admin() as admin:
                admin.script_flush()
            store.settle(used(one, 0.0))
            assert await left(store, rule) == 90.0
            server.kill()
            await decided(store, ask((rule, 10.0)))
            server.start()
            assert await by_redis(store) < 3.0
            assert await granted(store, ask((rule, 100.0))) == [True]
    finally:
        server.remove()


async def test_a_slow_server_is_used_and_a_too_slow_one_is_not() -> None:
    with single() as server:
        async with slowed(server.port, 0.02) as port:
            async with routers([f"redis://127.0.0.1:{port}"]) as (store,):
                assert await by_redis(store) < 0.5
            async with routers([f"redis://127.0.0.1:{port}"], timeout_s=0.01) as (store,):
                answers = await drive(store, 0.5)
                assert {v.by for _, v in answers} == {DecidedBy.LOCAL}
                assert max(wait_s for wait_s, _ in answers) < 0.1


async def test_a_trial_may_take_as_long_as_an_ask_not_less() -> None:
    """One round trip is within the time-out, three are not."""
    with single() as server:
        async with (
            slowed(server.port, 0.1) as port,
            routers(
                [f"redis://127.0.0.1:{port}"], redis={"connect_timeout_s": 2.0}, timeout_s=0.25
            ) as (store,),
        ):
            assert await by_redis(store) < 2.0


@pytest.mark.patches
async def test_who_looks_after_the_connection_survives_a_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with single() as server:
        async with routers([server.url], timeout_s=_TIMEOUT_S) as (store,):
            await by_redis(store)

            def fails(now: float, most: int) -> list[Ask]:
                raise RuntimeError("planted")

            with monkeypatch.context() as planted:
                planted.setattr(store._held, "to_renew", fails)
                for _ in range(300):
                    if "planted" in caplog.text:
                        break
                    await asyncio.sleep(0.01)
            assert "planted" in caplog.text
            server.freeze()
            (verdict,) = await decided(store, ask((ANY, 1.0)))
            assert verdict.by is DecidedBy.LOCAL
            server.thaw()
            await by_redis(store)


async def test_what_is_away_from_the_start_is_found_later() -> None:
    server = Server()
    try:
        async with routers([server.url]) as (store,):
            (verdict,) = await decided(store, ask((cost(10.0), 1.0)))
            assert verdict.by is DecidedBy.LOCAL
            server.start()
            assert await by_redis(store) < 3.0
    finally:
        server.remove()


async def test_a_replica_is_no_place_for_limits_until_it_takes_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever it holds: the script itself may have nothing to write when it is tried."""
    caplog.set_level(logging.INFO)
    with single() as master:
        async with routers([master.url]) as (store,):
            await by_redis(store)
        with (
            single(f"replicaof 127.0.0.1 {master.port}") as replica,
            replica.admin(decode_responses=True) as admin,
        ):
            async with asyncio.timeout(10):
                while not admin.exists("{laneway}:born"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            caplog.clear()
            async with routers([replica.url]) as (store,):
                (verdict,) = await decided(store, ask((ANY, 1.0)))
                assert verdict.by is DecidedBy.LOCAL
                assert "READONLY" in caplog.text
                assert "limits are kept in redis" not in caplog.text
                admin.execute_command("REPLICAOF NO ONE")
                assert await by_redis(store) < 3.0
                admin.execute_command("REPLICAOF", "127.0.0.1", master.port)
                (verdict,) = await decided(store, ask((ANY, 1.0)))
                assert verdict.by is DecidedBy.LOCAL
                assert store.view().away, "it is not there, and no script failed"


async def test_what_says_nothing_is_told_from_what_is_not_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a server that speaks TLS does, where TLS is not asked for, and the other way round."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with routers([f"redis://{address}"]):
            pass
    assert f"redis is away: {address}: no answer in time" in caplog.text


async def test_what_speaks_another_protocol_is_said_to_be_no_redis(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the limits' own connection and by the client of everything else."""

    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(web, "127.0.0.1", 0)
    async with server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with routers([url]) as (store,):
            with pytest.raises(RedisAway, match="no Redis"):
                await store._link.ask("PING")
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 2
    assert all("what answers there is no Redis" in each for each in said)


async def test_policies_by_class() -> None:
    rule = cost(10.0)

    async def verdicts_of(
        store: RedisBuckets, priority: Priority, *amounts: float
    ) -> list[tuple[bool, DecidedBy]]:
        found = await decided(store, *(ask((rule, a), priority=priority) for a in amounts))
        return [(verdict.granted, verdict.by) for verdict in found]

    nobody = ["redis://127.0.0.1:1"]
    policy = {"p0": "open", "p1": "local", "p2": "closed"}
    async with routers(nobody, away=policy) as (store,):
        store.away.replicas = 2
        assert await verdicts_of(store, Priority.P0, 10.0, 10.0) == [(True, DecidedBy.OPEN)] * 2
        found = await verdicts_of(store, Priority.P1, 2.0, 2.0, 2.0)
        assert found == [(fits, DecidedBy.LOCAL) for fits in (True, True, False)]
        assert await verdicts_of(store, Priority.P2, 1.0) == [(False, DecidedBy.CLOSED)]


async def test_policies_and_the_time_out_change_while_it_runs() -> None:
    async with routers(["redis://127.0.0.1:1"]) as (store,):
        assert await granted(store, ask((cost(10.0), 11.0))) == [False]
        store.on_config(Config.model_validate({"limits": {"away": {"p1": "open"}}}))
        assert await granted(store, ask((cost(10.0), 11.0))) == [True]


async def test_local_parts_add_up_to_the_limit() -> None:
    rule = cost(100.0)
    async with routers(["redis://127.0.0.1:1"], 4) as stores:
        total = 0
        for store in stores:
            store.away.replicas = 4
            total += sum(await granted(store, *(ask((rule, 5.0)) for _ in range(40))))
        assert total == 20


async def test_settlements_are_told_when_it_is_back() -> None:
    rule = cost(1000.0)
    with single() as server:
        async with routers([server.url], timeout_s=_TIMEOUT_S) as (store,):
            asks = [ask((rule, 10.0), (permits(100), 1.0)) for _ in range(100)]
            assert all(await granted(store, *asks))
            server.freeze()
            for one in asks[:50]:
                store.settle(used(one, 4.0, 1.0))
            await asyncio.sleep(_TIMEOUT_S / 2)  # these are under way
            await decided(store, ask((rule, 0.0)))
            for one in asks[50:]:
                store.settle(used(one, 4.0, 1.0))
            assert store.view().unsettled >= 100
            server.thaw()
            await by_redis(store)
            await _until_told(store)
            assert await left(store, rule) == 600.0
            assert (
                await granted(store, *(ask((permits(100), 1.0)) for _ in range(100)))
                == [True] * 100
            )


async def test_asks_whose_answer_was_lost_take_nothing() -> None:
    """A frozen server may still take what was asked of it; it is given back, in either order."""
    rule = cost(100.0)
    with single() as server:
        async with routers([server.url], timeout_s=_TIMEOUT_S) as (store,):
            await by_redis(store)
            server.freeze()
            (verdict,) = await decided(store, ask((rule, 80.0), (permits(1), 1.0)))
            assert verdict.by is DecidedBy.LOCAL
            server.thaw()
            await by_redis(store)
            await _until_told(store)
            await asyncio.sleep(0.1)
            assert await left(store, rule) == 100.0
            assert await granted(store, ask((permits(1), 1.0))) == [True]


async def test_a_reservation_that_was_given_up_cannot_come_late() -> None:
    rule = cost(100.0)
    with single() as server:
        async with routers([server.url], 2) as (early, late):
            one = ask((rule, 80.0))
            early._unsettled.add(used(one, 0.0))
            early._tell()
            await _until_told(early)
            (verdict,) = await decided(late, one)
            assert (verdict.granted, verdict.wait_s) == (False, None)
            assert await left(late, rule) == 100.0


async def test_after_a_long_outage_asks_do_not_wait_behind_all_that_is_to_be_told() -> None:
    rule = cost(1e6)
    with single() as server:
        async with routers([server.url], timeout_s=_TIMEOUT_S) as (store,):
            store._unsettled.put_back(used(ask((rule, 1.0)), 0.0) for _ in range(10_000))
            answers = await drive(store, 0.5)
            assert {v.by for _, v in answers} == {DecidedBy.REDIS}
            await _until_told(store)


def test_what_is_remembered_has_a_bound() -> None:
    unsettled, one = Unsettled(most=3), [used(ask((cost(1.0), 1.0)), 0.0) for _ in range(5)]
    unsettled.put_back(one)
    assert (len(unsettled), unsettled.lost) == (3, 2)
    assert unsettled.take(2) == one[2:4]


def test_what_leases_give_back_is_told_before_what_is_over() -> None:
    over = [used(ask((cost(1.0), 1.0)), 0.0) for _ in range(3)]
    changed = [replace(used(ask((cost(1.0), 1.0)), 0.0), ends=False) for _ in range(2)]
    unsettled = Unsettled()
    for settlement in (*over, *changed):
        unsettled.add(settlement)
    ended = replace(changed[0], ends=True)
    unsettled.add(ended)  # before its change was told: it makes the same room
    assert (unsettled.first, len(unsettled)) == (2, 5)
    assert unsettled.take(1) == [ended]
    assert unsettled.take(3) == [changed[1], *over[:2]]


def test_what_is_over_is_given_up_before_what_leases_give_back() -> None:
    over, changed = (used(ask((cost(1.0), 1.0)), 0.0) for _ in range(2))
    changed.ends = False
    unsettled = Unsettled(most=1)
    unsettled.add(changed)
    unsettled.add(over)
    assert (unsettled.take(2), unsettled.lost) == ([changed], 1)


def test_of_what_was_under_way_the_last_word_on_a_reservation_is_told() -> None:
    one = ask((cost(10.0), 5.0))
    first, last = replace(used(one, 3.0), ends=False), used(one, 2.0)
    unsettled = Unsettled()
    unsettled.put_back([first, last])
    assert unsettled.take(64) == [last]


@pytest.mark.patches
async def test_the_last_word_of_several_calls_that_were_lost_is_told() -> None:
    rule = cost(100.0)
    with single() as server:
        async with routers([server.url]) as (store,):
            one = ask((rule, 50.0), (permits(1), 1.0))
            assert await granted(store, one) == [True]
            assert store._connection is not None
            with pytest.MonkeyPatch.context() as planted:
                planted.setattr(RespConnection, "send", lambda *_: None)
                for word in (replace(used(one, 40.0, 1.0), ends=False), used(one, 30.0, 1.0)):
                    store.settle(word)
                    store._tell()
            store._lose("what was sent is lost")
            await by_redis(store)
            await _until_told(store)
            assert await left(store, rule) == 70.0
            assert await granted(store, ask((permits(1), 1.0))) == [True]


async def test_a_word_that_a_flushed_script_delayed_does_not_undo_a_later_one() -> None:
    """The server did not know the script, then had it from somebody else, and only then was told
    the first word again.
    """
    rule = cost(100.0)
    with single() as server, server.admin() as admin:
        async with routers([server.url]) as (store,):
            one = ask((rule, 50.0))
            assert await granted(store, one) == [True]
            admin.script_flush()
            for amount in (40.0, 30.0):
                store.settle(replace(used(one, amount), ends=False))
                store._tell()
                while "errorstat_NOSCRIPT" not in admin.info("errorstats"):
                    pass  # the first one is refused, and its refusal waits to be read
                admin.script_load(script_text())
            await _until_told(store)
            assert await left(store, rule) == 70.0


def test_an_extension_does_not_put_off_the_renewal() -> None:
    """One that is extended all the time would never be renewed else."""
    held, one = Held(), ask((permits(9), 1.0), lease_s=30.0)
    more = replace(one, charges=(Charge(permits(9), 3.0),), extends=True)
    held.add(one, 0.0)
    held.add(more, 9.0)
    assert held.to_renew(9.9, 10) == []
    assert held.to_renew(10.0, 10) == [more]
    assert held.to_renew(19.9, 10) == []
    assert held.to_renew(20.0, 10) == [more]


async def test_a_caller_that_fails_does_not_keep_the_others_from_their_verdicts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(_: Verdict) -> None:
        raise RuntimeError("planted")

    with single() as server:
        async with routers([server.url]) as (store,):
            store.reserve(ask((cost(10.0), 1.0)), fails)
            assert await granted(store, ask((cost(10.0), 1.0))) == [True]
    assert "planted" in caplog.text


async def _until_told(store: RedisBuckets) -> None:
    for _ in range(500):
        if not store.view().unsettled:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("settlements are still to be told")
