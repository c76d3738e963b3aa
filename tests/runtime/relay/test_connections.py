"""More client connections than there may be: who is refused, and when."""

from __future__ import annotations

from tests.open_files import no_more_files
from tests.runtime.raw_worker import PLAIN, RawWorker
from tests.runtime.relay.rig import assert_error, chat, eventually, post, running_router


async def test_connections_above_the_limit_get_503() -> None:
    limits = {"connections_max": 2}
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=limits) as router:
        kept = [await router.client() for _ in range(2)]
        await eventually(lambda: len(router.state.connections) == 2)
        third = await router.client()
        third.send(post(chat()))
        refused = await third.answer()
        assert_error(refused, 503, "connections_full")
        assert refused.one(b"retry-after") == b"1"
        kept[0].send(post(chat()))
        assert (await kept[0].answer()).status == 200


async def test_connections_far_above_the_limit_get_503_before_they_ask() -> None:
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, server={"connections_max": 1}) as router,
    ):
        surplus = [await router.client() for _ in range(65)]
        await eventually(lambda: len(router.state.connections) == 65)
        last = await router.client()
        assert_error(await last.answer(), 503, "connections_full")
        assert len(surplus) == 65


async def test_a_surplus_connection_serves_once_others_have_left() -> None:
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, server={"connections_max": 1}) as router,
    ):
        first, surplus = await router.client(), await router.client()
        await eventually(lambda: len(router.state.connections) == 2)
        await first.close()
        await eventually(lambda: len(router.state.connections) == 1)
        surplus.send(post(chat()))
        assert (await surplus.answer()).status == 200


async def test_connections_for_which_there_are_no_files_are_closed_with_their_503() -> None:
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, server={"connections_max": 1}) as router,
    ):
        kept = await router.client()
        await eventually(lambda: len(router.state.connections) == 1)
        refused = [await router.client() for _ in range(200)]
        for client in refused[64:]:
            assert_error(await client.answer(), 503, "connections_full")
        await eventually(lambda: len(router.state.connections) <= 129)
        kept.send(post(chat()))
        assert (await kept.answer()).status == 200


async def test_no_file_for_a_connection_to_a_worker_is_503_and_no_fault_of_the_worker() -> None:
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, breaker={"failures": 1}) as router,
    ):
        client = await router.client()
        await eventually(lambda: len(router.state.connections) == 1)
        with no_more_files():
            client.send(post(chat()))
            refused = await client.answer()
        assert_error(refused, 503, "connections_full")
        assert refused.one(b"retry-after") == b"1"
        (record,) = router.records
        assert record.attempts == 1
        client.send(post(chat()))
        assert (await client.answer()).status == 200
