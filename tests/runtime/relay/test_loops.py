"""A router that is its own worker, directly or by way of another router, answers at once."""

from __future__ import annotations

import pytest

from router.contract import LoadReport, WorkerSpec
from router.errors import Reason
from router.runtime.heads import Headers
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


TENANTS = {"acme": {"ceiling": "P1"}}
BUSY = b"HTTP/1.1 429 Too Many\r\nretry-after: 60\r\ncontent-length: 0\r\n\r\n"


def acme(lines: Headers) -> str:
    return "acme"


async def test_a_router_is_told_class_and_tenant_and_an_engine_is_not() -> None:
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, tenants=TENANTS, authenticate=acme) as router,
    ):
        claim = b"x-laneway-priority: P0\r\nx-laneway-tenant: other\r\n"
        worker_id = router.driver.snapshot().workers[0].id
        for report in (LoadReport(), LoadReport(workers=2, routers=("aa",)), LoadReport()):
            router.driver.on_report(worker_id, report)
            assert (await router.post(chat(), headers=claim)).status == 200
        classes = [request.all(b"x-laneway-priority") for request in worker.requests]
        assert classes == [[], [b"P1"], []], "what was granted, not what was claimed"
        names = [request.all(b"x-laneway-tenant") for request in worker.requests]
        assert names == [[], [b"acme"], []]
        patience = [request.all(b"x-laneway-wait-s") for request in worker.requests]
        wait_s_max = router.driver.config.waits_s_max[1]
        assert patience == [[], [b"%d" % wait_s_max], []]


@pytest.mark.parametrize(
    ("said", "told"),
    [(b"7.2", b"8"), (b"1e4", b"30"), (b"0.001", b"1"), (b"9\r\nX-Laneway-Wait-S: 3", b"3")],
)
async def test_a_router_waits_no_longer_than_what_is_left(said: bytes, told: bytes) -> None:
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, queue={"wait_s_max": 30}) as router,
    ):
        worker_id = router.driver.snapshot().workers[0].id
        router.driver.on_report(worker_id, LoadReport(workers=2, routers=("aa",)))
        assert (await router.post(chat(), headers=b"x-laneway-wait-s: %b\r\n" % said)).status == 200
        assert worker.requests[0].all(b"x-laneway-wait-s") == [told]


@pytest.mark.parametrize("said", [b"", b"0", b"-1", b"soon", b"nan", b"inf", b"1e9"])
async def test_a_patience_that_is_none_is_refused(said: bytes) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        got = await router.post(chat(), headers=b"x-laneway-wait-s: %b\r\n" % said)
        assert (got.status, got.json()["error"]["param"]) == (400, "x-laneway-wait-s")
        assert worker.requests == []


async def test_a_tenant_that_no_settings_name_is_not_named_further() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        worker_id = router.driver.snapshot().workers[0].id
        router.driver.on_report(worker_id, LoadReport(workers=2, routers=("aa",)))
        assert (await router.post(chat())).status == 200
        assert not worker.requests[0].all(b"x-laneway-tenant")


async def test_a_429_of_a_router_pauses_it_for_nobody_else() -> None:
    for report, paused in ((LoadReport(workers=2, routers=("aa",)), False), (LoadReport(), True)):
        async with RawWorker([[BUSY], [PLAIN]]) as worker, running_router(worker) as router:
            worker_id = router.driver.snapshot().workers[0].id
            router.driver.on_report(worker_id, report)
            first = await router.post(chat())
            assert (first.status, first.one(b"retry-after")) == (429, b"60")
            assert (router.driver.snapshot().workers[0].out_s > 0) is paused


async def test_a_request_is_not_sent_back_to_the_router_that_sent_it() -> None:
    async with (
        RawWorker([[PLAIN]]) as neighbour,
        RawWorker([[PLAIN]]) as engine,
        running_router(neighbour, engine) as router,
    ):
        by_url = {view.spec.url: view.id for view in router.driver.snapshot().workers}
        report = LoadReport(workers=90, routers=("abcd", "ef"))
        router.driver.on_report(by_url[neighbour.url], report)
        for _ in range(4):
            assert (await router.post(chat(), headers=b"x-laneway-via: abcd\r\n")).status == 200
        assert (len(neighbour.requests), len(engine.requests)) == (0, 4)
        router.driver.on_worker_left(by_url[engine.url])
        got = await router.post(chat(), headers=b"x-laneway-via: abcd\r\n")
        assert (got.status, got.one(b"x-laneway-reason")) == (508, b"loop_detected")
        assert (await router.post(chat())).status == 200
