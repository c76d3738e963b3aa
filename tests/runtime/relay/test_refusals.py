"""Requests that a full engine refuses behind a 400, or behind events that only begin an answer."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import orjson
import pytest

from router.contract import WorkerSpec
from router.core.types import Outcome
from router.runtime.delivery import Delivery
from tests.runtime.raw_worker import (
    LAST_CHUNK,
    SSE_HEAD,
    Close,
    Hang,
    Pause,
    RawWorker,
    Step,
    Wait,
    answer,
    chunk,
)
from tests.runtime.relay.rig import Answer, chat, eventually, post, running_router
from tests.runtime.relay.test_endings import LIMITS, has_delivery, sent
from workers.engine_model import EngineSettings
from workers.profiles import load_profiles
from workers.sim.intake import WorkerOptions
from workers.sim.server import SimulatedServer

MESSAGES = b"/v1/messages"
RESPONSES = b"/v1/responses"
OPTIONS = WorkerOptions(profile=load_profiles()["h100-8b"], time_scale=10.0)
STREAM = chat(stream=True)
RESPONSE = {"model": "m", "input": "hi"}
BODIES: dict[bytes, dict[str, Any]] = {
    MESSAGES: {**chat(), "max_tokens": 8},
    RESPONSES: {"model": OPTIONS.model, "input": "hi", "max_output_tokens": 8},
}
WHY = "The request queue is full."


def named(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


CREATED = named("response.created", response={"error": None})
IN_PROGRESS = named("response.in_progress", response={"error": None})
FAILED = named("response.failed", response={"error": {"code": "server_error", "message": WHY}})
DELTA = named("response.output_text.delta", delta="a")
START = named("message_start", message={"content": []})
ERROR = named("error", error={"type": "overloaded_error", "message": WHY})
FULL_STREAMS = {
    RESPONSES: CREATED + IN_PROGRESS + FAILED,
    MESSAGES: START + named("ping") + ERROR + named("message_stop"),
}


def wrapped(message: str) -> bytes:
    """The answer by which /v1/responses says everything that is no good answer."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": 400}
    return answer(orjson.dumps({"error": error}), status=b"400 Bad Request")


def assert_full(got: Answer) -> None:
    assert (got.status, got.one(b"x-laneway-reason")) == (503, b"upstream_overloaded")
    assert int(got.one(b"retry-after")) >= 1
    assert got.json()["error"]["message"] == WHY


# -- simulated workers, one of them full --------------------------------------------------


@contextlib.asynccontextmanager
async def simulated(*, full: bool) -> AsyncIterator[SimulatedServer]:
    """Run a simulated worker; a full one has no place left, neither to run nor to wait."""
    engine = EngineSettings(max_running_requests=1, max_queued_requests=1)
    server = SimulatedServer(replace(OPTIONS, engine=engine) if full else OPTIONS)
    await server.start()
    endless = {"prompt": "a", "max_tokens": 50_000, "ignore_eos": True}
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=20, trust_env=False) as client:
            fill: list[asyncio.Task[httpx.Response]] = []
            for count in (1, 2) if full else ():
                fill.append(asyncio.create_task(client.post("/v1/completions", json=endless)))
                async with asyncio.timeout(5):
                    while await has(client) != count:
                        pass
            yield server
            await client.post("/abort_request", json={"abort_all": True})
            await asyncio.gather(*fill)
    finally:
        await server.stop()


async def has(client: httpx.AsyncClient) -> int:
    """Return how many requests run or wait."""
    (rank,) = (await client.get("/v1/loads?include=core")).json()["loads"]
    return int(rank["num_running_reqs"] + rank["num_waiting_reqs"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_what_a_full_engine_refuses_is_served_by_another(path: bytes, stream: bool) -> None:
    body = {**BODIES[path], "stream": stream}
    async with (
        simulated(full=True) as busy,
        simulated(full=False) as free,
        running_router(
            WorkerSpec(url=busy.url), WorkerSpec(url=free.url), policy={"name": "round_robin"}
        ) as router,
    ):
        for _ in range(4):
            got = await router.post(body, path=path)
            assert (got.status, got.complete) == (200, True)
            assert got.one(b"x-laneway-worker") == free.url.removeprefix("http://").encode()
            assert b"overloaded" not in got.body
            assert WHY.encode() not in got.body
        await eventually(lambda: len(router.records) == 4)
        assert any(record.attempts > 1 for record in router.records), "the full one was tried"
        assert {record.outcome for record in router.records} == {Outcome.SUCCESS}
        assert all(worker.breaker == "closed" for worker in router.driver.snapshot().workers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_full_engine_alone_is_503_with_retry_after(path: bytes, stream: bool) -> None:
    async with (
        simulated(full=True) as busy,
        running_router(WorkerSpec(url=busy.url), breaker={"failures": 2}) as router,
    ):
        for _ in range(3):
            got = await router.post({**BODIES[path], "stream": stream}, path=path)
            assert (got.status, got.one(b"x-laneway-reason")) == (503, b"upstream_overloaded")
            assert int(got.one(b"retry-after")) >= 1
        (worker,) = router.driver.snapshot().workers
        assert worker.breaker == "closed", "a full queue is no ill health"
        assert {record.outcome for record in router.records} == {Outcome.FAILED}


# -- streams that begin with frames -------------------------------------------------------

UNTIL_CLOSE = SSE_HEAD.replace(b"transfer-encoding: chunked\r\n", b"")
GZIPPED = SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "until close"])
@pytest.mark.parametrize("path", FULL_STREAMS)
async def test_a_late_refusal_split_at_any_byte_is_found(path: bytes, chunked: bool) -> None:
    events = [event + b"\n\n" for event in FULL_STREAMS[path].split(b"\n\n")[:-1]]
    if chunked:
        head, body, end = SSE_HEAD, b"".join(map(chunk, events)) + LAST_CHUNK, []
    else:
        head, body, end = UNTIL_CLOSE, b"".join(events), [Close()]
    cuts = range(1, len(body))
    scripts: list[list[Step]] = [[head, body[:cut], Pause(0), body[cut:], *end] for cut in cuts]
    async with RawWorker(scripts) as worker, running_router(worker) as router:
        for _ in cuts:
            assert_full(await router.post(STREAM, path=path))
        assert len(worker.requests) == len(cuts)


async def test_a_late_refusal_is_found_in_what_is_decoded_for_the_client() -> None:
    packer = zlib.compressobj(wbits=31)
    body = packer.compress(FULL_STREAMS[RESPONSES]) + packer.flush()
    steps: list[Step] = [GZIPPED, chunk(body[:30]), Pause(0), chunk(body[30:]), LAST_CHUNK]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        assert_full(await router.post(STREAM, path=RESPONSES))


@pytest.mark.parametrize(
    "begun",
    [
        CREATED + b": keep-alive\n\n",
        CREATED + IN_PROGRESS + DELTA,
        CREATED + b"data: {",
        b"data: " + DELTA,
    ],
    ids=["a comment", "output", "a growing event", "no frame"],
)
async def test_what_is_held_back_goes_on_with_anything_else(begun: bytes) -> None:
    gate = asyncio.Event()
    rest = b"}\n\n" + FAILED
    steps: list[Step] = [SSE_HEAD, chunk(begun), Wait(gate), chunk(rest), LAST_CHUNK]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM, path=RESPONSES))
        await client.until(chunk(begun))
        gate.set()
        await client.until(chunk(rest) + LAST_CHUNK)


@pytest.mark.parametrize("frame", [named("ping"), named("ping", x="y" * 4_000)])
async def test_frames_without_end_are_not_held_back_for_ever(frame: bytes) -> None:
    steps: list[Step] = [SSE_HEAD]
    for _ in range(300):
        steps += [chunk(frame), Pause(0)]
    async with RawWorker([[*steps, Hang()]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM, path=MESSAGES))
        await client.until(chunk(frame) * 300)


@pytest.mark.parametrize("end", [[LAST_CHUNK], [Close()]], ids=["whole", "broken off"])
async def test_a_stream_of_frames_alone(end: list[Step]) -> None:
    """Whole, it passes as it is; broken off, nothing was lost that another worker can't bring."""
    steps: list[Step] = [SSE_HEAD, chunk(CREATED), *end]
    served: list[Step] = [SSE_HEAD, chunk(CREATED), chunk(DELTA), LAST_CHUNK]
    async with RawWorker([steps, served]) as worker, running_router(worker) as router:
        got = await router.post(STREAM, path=RESPONSES)
        if end == [LAST_CHUNK]:
            assert (got.status, got.body) == (200, CREATED)
        else:
            assert (got.status, got.one(b"x-laneway-reason")) == (502, b"upstream_error")


async def test_an_error_of_the_client_passes_as_sglang_sends_it() -> None:
    error = {"type": "invalid_request_error", "message": "The input is too long."}
    body = chunk(START) + chunk(named("error", error=error)) + LAST_CHUNK
    async with RawWorker([[SSE_HEAD, body]]) as worker, running_router(worker) as router:
        got = await router.post(STREAM, path=MESSAGES)
        assert (got.status, got.raw_body) == (200, body)
        assert router.records[0].outcome is Outcome.CLIENT_ERROR


async def test_the_first_token_is_what_follows_the_frames() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, chunk(CREATED + IN_PROGRESS), Wait(gate)]
    async with (
        RawWorker([[*steps, chunk(DELTA), LAST_CHUNK]]) as worker,
        running_router(worker) as router,
    ):
        client, exchange = await sent(router, worker, STREAM, path=RESPONSES)
        await eventually(lambda: exchange._delivery is not None and exchange._delivery._held)
        held_at = asyncio.get_running_loop().time()
        gate.set()
        await client.until(LAST_CHUNK)
        await eventually(lambda: router.records)
        first_token_at = router.records[0].first_token_at
        assert first_token_at is not None
        assert first_token_at >= held_at


def holds_reads(delivery: Delivery, count: int) -> bool:
    return len(delivery._held or ()) == count


async def test_frames_do_not_extend_the_wait_for_the_first_event() -> None:
    second = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, chunk(START), Wait(second), chunk(named("ping")), Hang()]
    async with (
        RawWorker([steps]) as worker,
        running_router(worker, upstream=LIMITS) as router,
    ):
        client, exchange = await sent(router, worker, STREAM, path=MESSAGES)
        exchange.sweep(1000.0)
        await eventually(has_delivery(exchange))
        delivery = exchange._delivery
        assert delivery is not None
        for reads, now in ((1, 1300.0), (2, 1599.0)):
            await eventually(partial(holds_reads, delivery, reads))
            exchange.sweep(now)
            exchange.sweep(now + 0.25)  # it is not released with age, as a part of an event is
            assert holds_reads(delivery, reads)
            second.set()
        exchange.sweep(1601.0)
        got = await client.answer()
        assert (got.status, got.one(b"x-laneway-reason")) == (504, b"upstream_timeout")


# -- a status that only the body tells ----------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
async def test_a_wrapped_503_is_a_503(cut: int) -> None:
    head, body = wrapped(f"503: {WHY}").split(b"\r\n\r\n")
    steps: list[Step] = [head + b"\r\n\r\n" + body[:cut], Pause(0), body[cut:]]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        assert_full(await router.post(RESPONSE, path=RESPONSES))


async def test_a_wrapped_500_is_a_failure_of_the_worker() -> None:
    async with (
        RawWorker([[wrapped("500: Decode transfer failed")]]) as worker,
        running_router(worker, breaker={"failures": 1, "open_s": 60}) as router,
    ):
        got = await router.post(RESPONSE, path=RESPONSES)
        assert (got.status, got.one(b"x-laneway-reason")) == (502, b"upstream_error")
        assert got.json()["error"]["message"] == "Decode transfer failed"
        (seen,) = router.driver.snapshot().workers
        assert seen.breaker == "open"


ACCEPT = b"accept-encoding: gzip\r\n"
PACKED = [b"content-type: application/json", b"content-encoding: gzip"]


@pytest.mark.parametrize(
    ("path", "refusal"),
    [
        (RESPONSES, wrapped("The input is longer than the model's context length.")),
        (RESPONSES, wrapped("404: No such thing")),
        (RESPONSES, wrapped("The model '503: x' does not exist")),
        (RESPONSES, wrapped("503: " + "x" * 4_096)),
        (RESPONSES, answer(b"", status=b"400 Bad Request")),
        (RESPONSES, answer(b"503: no JSON", status=b"400 Bad Request")),
        (RESPONSES, answer(b"packed", status=b"400 Bad Request", headers=PACKED)),
        (b"/v1/chat/completions", wrapped(f"503: {WHY}")),
    ],
)
async def test_every_other_400_is_the_clients(path: bytes, refusal: bytes) -> None:
    async with (
        RawWorker([[refusal]]) as worker,
        RawWorker([[refusal]]) as other,
        running_router(worker, other) as router,
    ):
        got = await router.post({**RESPONSE, **chat()}, path=path, headers=ACCEPT)
        assert (got.status, got.complete) == (400, True)
        assert got.body == refusal.partition(b"\r\n\r\n")[2]
        assert len(worker.requests) + len(other.requests) == 1
        await eventually(lambda: router.records)
        assert router.records[0].outcome is Outcome.CLIENT_ERROR
        for _ in range(4):
            await router.post({**RESPONSE, **chat()}, path=path, headers=ACCEPT)
        assert worker.connections + other.connections <= 2, "they are used again"
