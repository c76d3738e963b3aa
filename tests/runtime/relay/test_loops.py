"""A router that is its own worker, directly or by way of another router, answers at once."""

from __future__ import annotations

from router.contract import WorkerSpec
from router.errors import Reason
from tests.runtime.raw_worker import PLAIN, RawWorker
from tests.runtime.relay.rig import ROUTER_ID, chat, eventually, running_router


async def test_a_worker_learns_through_which_routers_a_request_came() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        assert (await router.post(chat(), headers=b"x-laneway-via: outer\r\n")).status == 200
        assert worker.requests[0].all(b"x-laneway-via") == [ROUTER_ID, b"outer"]


async def test_a_request_that_was_here_before_is_refused() -> None:
    async with RawWorker([]) as worker, running_router(worker) as router:
        got = await router.post(chat(), headers=b"x-laneway-via: outer, the-rig\r\n")
        assert got.status == 508
        assert got.one(b"x-laneway-reason") == b"loop_detected"
        assert router.refused == [Reason.LOOP_DETECTED]
        assert not worker.requests


async def test_a_router_as_its_own_worker_answers_once_with_the_cause() -> None:
    async with running_router() as router:
        router.driver.on_worker_joined(WorkerSpec(url=f"http://127.0.0.1:{router.port}"))
        await eventually(lambda: router.driver.snapshot().workers[0].state == "active")
        got = await router.post(chat())
        assert got.status == 508
        assert got.json()["error"]["code"] == "loop_detected"
        assert len(router.refused) == 1
