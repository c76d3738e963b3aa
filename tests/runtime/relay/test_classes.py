"""The class of a request on the wire: what a client may claim and hears, what a worker is told."""

from __future__ import annotations

from typing import Any

import pytest

from router.contract import WorkerId, WorkerSpec
from router.core.types import Priority
from router.load_formats import PriorityOrder
from router.runtime.heads import Headers
from tests.runtime.raw_worker import DONE, PLAIN, SSE_HEAD, RawWorker, delta
from tests.runtime.relay.rig import chat, eventually, post, running_router

P0, P1, P2, P3 = Priority


def claiming(text: str) -> bytes:
    return f"X-Laneway-Priority: {text}\r\n".encode()


@pytest.mark.parametrize(
    ("headers", "priority", "said"),
    [
        (b"", P1, []),
        (claiming("P1"), P1, []),
        (claiming("p0"), P0, [b"P0"]),
        (claiming("Offline"), P3, [b"P3"]),
        (claiming("P2") + claiming("free"), P2, [b"P2"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_claim_is_the_class_of_the_request(
    headers: bytes, priority: Priority, said: list[bytes], stream: bool
) -> None:
    answer = [SSE_HEAD, delta("a") + DONE] if stream else [PLAIN]
    async with RawWorker([answer]) as worker, running_router(worker) as router:
        got = await router.post(chat(stream=stream), headers=headers)
        assert got.status == 200
        assert got.all(b"x-laneway-priority") == said
        assert router.records[0].priority is priority
        assert not worker.requests[0].all(b"x-laneway-priority")


@pytest.mark.parametrize("headers", [claiming("P4"), claiming(""), claiming("P0") + claiming("P1")])
async def test_a_claim_that_names_no_class_is_refused(headers: bytes) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat(), headers=headers) + post(chat()))
        got = await client.answer()
        assert (got.status, got.one(b"x-laneway-reason")) == (400, b"bad_request")
        error = got.json()["error"]
        assert error["param"] == "x-laneway-priority"
        assert "p0, p1, p2, p3" in error["message"]
        assert (await client.answer()).status == 200  # the connection is as good as before
        assert len(worker.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_claim_above_the_ceiling_is_cut_and_the_answer_says_so(stream: bool) -> None:
    answer = [SSE_HEAD, delta("a") + DONE] if stream else [PLAIN]
    async with (
        RawWorker([answer]) as worker,
        running_router(worker, classes={"ceiling": "P1"}) as router,
    ):
        got = await router.post(chat(stream=stream), headers=claiming("premium"))
        assert got.one(b"x-laneway-priority") == b"P1; claimed=P0"
        assert router.records[0].priority is P1


async def test_errors_say_it_too() -> None:
    async with running_router(classes={"ceiling": "P2", "default": "P2"}) as router:
        got = await router.post(chat(), headers=claiming("P0"))
        assert got.status == 503
        assert got.one(b"x-laneway-priority") == b"P2; claimed=P0"


def by_key(headers: Headers) -> str:
    return dict(headers).get(b"authorization", b"nobody").decode()


async def test_each_tenant_has_its_own_ceiling_also_on_a_connection_that_is_reused() -> None:
    tenants = {"low": {"ceiling": "P3", "priority": "P3"}, "high": {"ceiling": "P0"}}
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(
            worker, authenticate=by_key, tenants=tenants, classes={"ceiling": "P1"}
        ) as router,
    ):
        client = await router.client()
        for key, claim, said in (
            ("low", "P0", [b"P3; claimed=P0"]),
            ("low", "P0", [b"P3; claimed=P0"]),
            ("high", "P0", [b"P0"]),
            ("high", "P1", []),
            ("other", "P0", [b"P1; claimed=P0"]),
        ):
            headers = f"authorization: {key}\r\n".encode() + claiming(claim)
            client.send(post(chat(), headers=headers))
            assert (await client.answer()).all(b"x-laneway-priority") == said
        client.send(post(chat(), headers=b"authorization: low\r\n"))
        assert (await client.answer()).all(b"x-laneway-priority") == [b"P3"]
        assert [r.priority for r in router.records] == [P3, P3, P0, P1, P1, P3]


async def test_a_priority_in_the_body_is_the_engines_business() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        await router.post(b'{"model":"m","messages":[],"priority": 7}')
        assert router.records[0].priority is P1
        assert b'"priority": 7' in worker.requests[0].body


# What a worker is told.


@pytest.mark.parametrize(
    ("setting", "order", "told"),
    [
        ("header", "high_first", [b"30", b"20", b"10", b"0"]),
        ("header", "low_first", [b"0", b"10", b"20", b"30"]),
        ("header", None, []),  # it does not go by priorities, or does not say how
        ("off", "high_first", []),
    ],
)
async def test_a_worker_that_goes_by_priorities_is_told_the_class(
    setting: Any, order: PriorityOrder | None, told: list[bytes]
) -> None:
    async with RawWorker([[PLAIN]]) as worker:
        spec = WorkerSpec(url=worker.url, id="w", pass_priority=setting)
        async with running_router(spec) as router:
            router.driver.on_worker_described(
                WorkerId("w"), models=(), kv_total_tokens=None, concurrency_max=None,
                priority_order=order,
            )  # fmt: skip
            for name in ("P0", "P1", "P2", "P3"):
                await router.post(chat(), headers=claiming(name))
            got = [request.all(b"x-override-priority") for request in worker.requests]
            assert got == ([[value] for value in told] if told else [[]] * 4)


async def test_a_client_cannot_tell_a_worker_itself() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        await router.post(chat(), headers=b"x-override-priority: 1000\r\n")
        await eventually(lambda: worker.requests)
        assert not worker.requests[0].all(b"x-override-priority")


def test_a_bare_off_is_off() -> None:
    spec = WorkerSpec.model_validate({"url": "http://w:1", "pass_priority": False})
    assert spec.pass_priority == "off"
