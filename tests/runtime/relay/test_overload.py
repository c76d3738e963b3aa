"""Overload on the wire: bodies that were cut, headers that say so, refusals, and preemption."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from router.config import Config
from router.contract import WorkerSpec
from router.core.degrade import Act
from router.core.types import Outcome, Priority
from tests.runtime.raw_worker import (
    DONE,
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
    Hang,
    RawWorker,
    Step,
    Wait,
    chunk,
    delta,
)
from tests.runtime.relay.rig import Answer, Router, chat, eventually, post, running_router

CUT = {"rise_s": 0.0, "shed_p3_above": 9.0, "shed_p2_above": 10.0}
SHED = {"rise_s": 0.0, "cut_above": 0.1, "shed_p3_above": 0.2, "shed_p2_above": 0.3}
STREAM: list[Step] = [SSE_HEAD, delta("a") + DONE]
P2_HEADER = b"x-laneway-priority: P2\r\n"
HASTY_P2 = P2_HEADER + b"x-laneway-wait-s: 0.2\r\n"


@contextlib.asynccontextmanager
async def crowded(
    degrade: dict[str, Any], *answers: list[Step], **settings: Any
) -> AsyncIterator[tuple[Router, RawWorker, asyncio.Event]]:
    """A router whose only place is taken until the event is set, and at a level because of that."""
    release = asyncio.Event()
    scripts: list[list[Step]] = [[Wait(release), PLAIN], [PLAIN], *answers]
    async with RawWorker(scripts) as worker:
        spec = WorkerSpec(url=worker.url, id="w", concurrency_max=1, models=("m",))
        async with running_router(
            spec, degrade=degrade, queue={"relegate_ratio": 0}, **settings
        ) as router:
            for _ in range(2):
                client = await router.client()
                client.send(post(chat()))
            await eventually(lambda: level(router) > 0)
            yield router, worker, release


def level(router: Router) -> int:
    return max(ladder.level for ladder in router.driver.snapshot().degrade.ladders)


async def answered(
    router: Router, release: asyncio.Event, body: Any, *, path: bytes = b"/v1/chat/completions",
    headers: bytes = P2_HEADER,
) -> Answer:  # fmt: skip
    """Send a request that has to wait, then let it have its turn."""
    client = await router.client()
    client.send(post(body, path=path, headers=headers))
    await eventually(lambda: len(router.driver.running) >= 3)
    release.set()
    return await client.answer()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_cut_and_its_answer_says_so(stream: bool) -> None:
    body = chat(stream=stream, max_tokens=2_000, temperature=0.5, seed=2**60)
    answer: list[Step] = STREAM if stream else [PLAIN]
    async with crowded(CUT, answer) as (router, worker, release):
        got = await answered(router, release, body)
        assert got.status == 200
        assert got.one(b"x-laneway-degraded") == b"max_tokens=256; level=1"
        request = worker.requests[2]
        assert orjson.loads(request.body) == {**body, "max_tokens": 256}
        assert request.all(b"content-length") == [b"%d" % len(request.body)]
        await eventually(lambda: len(router.records) == 3)
        assert [record.degraded for record in router.records] == [None, None, Act.CUT]
        assert router.driver.bodies_bytes == 0


@pytest.mark.parametrize(
    ("path", "asked", "made"),
    [
        (
            b"/generate",
            {"text": "x", "sampling_params": {"max_new_tokens": 900, "top_k": 3}},
            {"text": "x", "sampling_params": {"max_new_tokens": 256, "top_k": 3}},
        ),
        (
            b"/v1/responses",
            {"model": "m", "input": "x"},
            {"model": "m", "input": "x", "max_output_tokens": 256},
        ),
    ],
)
async def test_each_route_is_cut_by_its_own_field(path: bytes, asked: Any, made: Any) -> None:
    async with crowded(CUT, [PLAIN]) as (router, worker, release):
        await answered(router, release, asked, path=path)
        assert orjson.loads(worker.requests[2].body) == made


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (chat(max_tokens=2_000, response_format={"type": "json_object"}), P2_HEADER),
        (chat(max_tokens=2_000, tools=[{"type": "function"}]), P2_HEADER),
        (chat(max_tokens=2_000), b""),
        (chat(max_tokens=200), P2_HEADER),
    ],
)
async def test_others_pass_byte_for_byte(body: Any, headers: bytes) -> None:
    raw = orjson.dumps(body).replace(b'"model":', b'"model" : ')
    async with crowded(CUT, [PLAIN]) as (router, worker, release):
        got = await answered(router, release, raw, headers=headers)
        assert not got.all(b"x-laneway-degraded")
        assert worker.requests[2].body == raw


async def test_a_tenant_may_be_spared() -> None:
    spared = {"tenants": {"anonymous": {"degrade": False}}}
    async with crowded(CUT, [PLAIN], **spared) as (router, worker, release):
        got = await answered(router, release, chat(max_tokens=2_000))
        assert not got.all(b"x-laneway-degraded")
        assert orjson.loads(worker.requests[2].body)["max_tokens"] == 2_000


async def test_the_floor_is_respected() -> None:
    settings = {**CUT, "tokens_cap": 100, "tokens_floor": 100}
    async with crowded(settings, [PLAIN]) as (router, worker, release):
        await answered(router, release, chat(max_tokens=2_000))
        assert orjson.loads(worker.requests[2].body)["max_tokens"] == 100


async def test_the_body_is_cut_once_though_it_is_tried_twice() -> None:
    bad: list[Step] = [b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"]
    async with crowded(CUT) as (router, worker, release), RawWorker([[PLAIN], bad]) as other:
        client = await router.client()
        client.send(post(chat(max_tokens=2_000), headers=P2_HEADER))
        await eventually(lambda: len(router.driver.running) == 3)
        spec = WorkerSpec(url=other.url, models=("m",), concurrency_max=1)
        router.driver.on_worker_joined(spec)
        await eventually(lambda: len(other.requests) == 2)  # the one who waited, then this one
        release.set()
        got = await client.answer()
        assert got.one(b"x-laneway-degraded") == b"max_tokens=256; level=1"
        assert orjson.loads(worker.requests[1].body)["max_tokens"] == 256
        assert worker.requests[1].body == other.requests[1].body
        assert router.records[-1].attempts == 2


async def test_a_request_goes_to_the_smaller_model() -> None:
    models = {"models": {"m": {"fallback": "small"}}}
    async with (
        crowded(SHED, **models) as (router, _, _),
        RawWorker([[PLAIN]]) as other,
    ):
        router.driver.on_worker_joined(WorkerSpec(url=other.url, id="s", models=("small",)))
        await eventually(lambda: router.driver.dispatcher.models().get("small"))
        await eventually(lambda: all(w.state == "active" for w in router.driver.snapshot().workers))
        await eventually(lambda: level(router) == 3)
        got = await router.post(chat(max_tokens=2_000), headers=P2_HEADER)
        assert got.one(b"x-laneway-degraded") == b"model=small; max_tokens=64; level=3"
        assert got.one(b"x-laneway-worker") == b"s"
        made = orjson.loads(other.requests[0].body)
        assert made == {**chat(), "model": "small", "max_tokens": 64}


async def test_the_lowest_classes_are_refused_with_a_time_to_come_back() -> None:
    """Once one of the class has waited for most of its patience; until then they are held."""
    p2 = Config().classes.p2.model_copy(update={"wait_s_max": 3.0})
    async with crowded(SHED, classes={"p2": p2}) as (router, _, _):
        await eventually(lambda: level(router) == 3)
        held = 0
        got = await router.post(chat(), headers=HASTY_P2)
        while got.one(b"x-laneway-reason") == b"queue_timeout":
            held += 1
            assert held < 100
            patient = await router.client()
            patient.send(post(chat(), headers=P2_HEADER))
            got = await router.post(chat(), headers=HASTY_P2)
        assert held > 1
        assert (got.status, got.one(b"x-laneway-reason")) == (429, b"shed")
        assert int(got.one(b"retry-after")) >= 1
        assert Outcome.REFUSED in {record.outcome for record in router.records}


async def test_a_body_that_cannot_be_written_again_is_refused() -> None:
    deep = b'{"model":"m","max_tokens":2000,"x":' + b"[" * 600 + b"]" * 600 + b"}"
    async with crowded(CUT, [PLAIN]) as (router, _, release):
        got = await answered(router, release, deep)
        assert (got.status, got.one(b"x-laneway-reason")) == (400, b"bad_request")
        await eventually(lambda: len(router.records) == 3)
        assert router.records[-1].outcome is Outcome.CLIENT_ERROR


# Preemption.

P3_HEADER = b"x-laneway-priority: P3\r\n"
P0_HEADER = b"x-laneway-priority: P0\r\n"
ON = {"preempt": {"enabled": True}, "degrade": {"enabled": False}}
LONG = chat(messages=[{"role": "user", "content": "x" * 100_000}])


@contextlib.asynccontextmanager
async def one_place(
    *answers: list[Step], **settings: Any
) -> AsyncIterator[tuple[Router, RawWorker]]:
    async with RawWorker(answers) as worker:
        spec = WorkerSpec(url=worker.url, id="w", concurrency_max=1, models=("m",))
        async with running_router(spec, **{**ON, **settings}) as router:
            yield router, worker


@pytest.mark.parametrize("stream", [False, True])
async def test_a_victim_is_stopped_and_served_later_without_noticing(stream: bool) -> None:
    final: list[Step] = STREAM if stream else [PLAIN]
    async with one_place([Hang()], [PLAIN], final) as (router, worker):
        victim = await router.client()
        victim.send(post({**LONG, "stream": stream}, headers=P3_HEADER))
        await eventually(lambda: worker.requests)
        urgent = await router.post(chat(), headers=P0_HEADER)
        assert urgent.status == 200
        got = await victim.answer()
        assert (got.status, got.complete) == (200, True)
        assert [request.body for request in worker.aborted] == [worker.requests[0].body]
        assert worker.requests[2].body == worker.requests[0].body
        await eventually(lambda: len(router.records) == 2)
        assert [(r.priority, r.preempted) for r in router.records] == [
            (Priority.P0, 0),
            (Priority.P3, 1),
        ]
        assert router.records[1].attempts == 1
        assert router.driver.snapshot().counters.preemptions == 1


async def test_an_answer_that_has_begun_is_never_stopped() -> None:
    more = asyncio.Event()
    rest = chunk(b"data: [DONE]\n\n") + LAST_CHUNK
    async with one_place([SSE_HEAD, delta("a"), Wait(more), rest], [PLAIN]) as (router, worker):
        running = await router.client()
        running.send(post({**LONG, "stream": True}, headers=P3_HEADER))
        await running.until(b"a")
        urgent = await router.client()
        urgent.send(post(chat(), headers=P0_HEADER))
        await eventually(lambda: len(router.driver.running) == 2)
        assert router.driver.snapshot().counters.preemptions == 0
        more.set()
        assert (await urgent.answer()).status == 200
        assert not worker.aborted


async def test_a_plain_answer_that_has_begun_is_never_stopped_though_the_core_cannot_know() -> None:
    """Of an answer that is no stream the core hears at its end; the relay knows better."""
    more = asyncio.Event()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\n"
    async with one_place([head + b"ab", Wait(more), b"cd"], [PLAIN]) as (router, worker):
        running = await router.client()
        running.send(post(LONG, headers=P3_HEADER))
        await running.until(b"\r\n\r\nab")
        urgent = await router.client()
        urgent.send(post(chat(), headers=P0_HEADER))
        await eventually(lambda: len(router.driver.running) == 2)
        more.set()
        assert (await running.until(b"cd")) == b"cd"
        assert (await urgent.answer()).status == 200
        assert not worker.aborted
        await eventually(lambda: len(router.records) == 2)
        assert [record.preempted for record in router.records] == [0, 0]
        assert router.driver.snapshot().counters.preemptions == 0


async def test_a_victim_whose_client_leaves_while_it_waits_again_is_forgotten() -> None:
    release = asyncio.Event()
    async with one_place([Hang()], [Wait(release), PLAIN], [PLAIN]) as (router, worker):
        victim = await router.client()
        victim.send(post(LONG, headers=P3_HEADER))
        await eventually(lambda: worker.requests)
        urgent = await router.client()
        urgent.send(post(chat(), headers=P0_HEADER))
        await eventually(lambda: len(worker.requests) == 2)
        await victim.close()
        await eventually(lambda: router.records)
        assert router.records[0].outcome is Outcome.ABORTED
        release.set()
        assert (await urgent.answer()).status == 200
        assert len(worker.requests) == 2
        assert router.driver.bodies_bytes == 0


async def test_it_is_off_by_default() -> None:
    release = asyncio.Event()
    async with one_place(
        [Wait(release), PLAIN], [PLAIN], preempt={"enabled": False}
    ) as (router, worker):  # fmt: skip
        first = await router.client()
        first.send(post(LONG, headers=P3_HEADER))
        await eventually(lambda: worker.requests)
        urgent = await router.client()
        urgent.send(post(chat(), headers=P0_HEADER))
        await eventually(lambda: len(router.driver.running) == 2)
        release.set()
        assert (await first.answer()).status == 200
        assert (await urgent.answer()).status == 200
        assert not worker.aborted
