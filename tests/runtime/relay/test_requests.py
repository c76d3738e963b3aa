"""Framing of requests: heads, pipelining, old clients, expectations."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from router.core.types import Outcome
from router.errors import Reason, Refused
from router.runtime.server import InferenceProtocol
from tests.runtime.raw_worker import (
    DONE,
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
    RawWorker,
    Step,
    Wait,
    answer,
    delta,
)
from tests.runtime.relay.rig import (
    CHAT,
    assert_error,
    chat,
    eventually,
    post,
    running_router,
)

STREAM = chat(stream=True)


@pytest.mark.parametrize("path", [CHAT, b"/other"])
@pytest.mark.parametrize("where", ["header", "url", "many"])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_heads_have_one_limit_whatever_fills_them(
    path: bytes, where: str, pieces: int
) -> None:
    filling = b"x" * 66_000
    fields = {
        "header": (path, b"x: %b\r\n" % filling),
        "url": (path + b"?" + filling, b""),
        "many": (path, b"".join(b"x-%d: y\r\n" % n for n in range(8_000))),
    }
    target, more = fields[where]
    head = b"POST %b HTTP/1.1\r\nhost: r\r\n%bcontent-length: 2\r\n\r\n{}" % (target, more)
    async with RawWorker([]) as worker, running_router(worker) as router:
        client = await router.client()
        for start in range(0, len(head), size := -(-len(head) // pieces)):
            client.send(head[start : start + size])
            await asyncio.sleep(0)
        assert_error(await client.answer(), 431, "head_too_large")
        assert await client.closed()


async def test_a_head_below_the_limit_passes() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        got = await router.post(chat(), headers=b"x: %b\r\n" % (b"y" * 64_000))
        assert got.status == 200


async def test_expect_100_continue_is_answered_before_the_body_comes() -> None:
    whole = post(chat(), headers=b"expect: 100-continue\r\n")
    head, _, body = whole.partition(b"\r\n\r\n")
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(head + b"\r\n\r\n")
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert (await client.answer()).status == 200
        assert not worker.requests[0].all(b"expect")


async def test_http_1_0_clients_are_never_told_to_continue() -> None:
    whole = post(chat(), version=b"1.0", headers=b"expect: 100-continue\r\n")
    head, _, body = whole.partition(b"\r\n\r\n")
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(head + b"\r\n\r\n")
        await eventually(lambda: router.state.connections)
        (protocol,) = router.state.connections
        assert isinstance(protocol, InferenceProtocol)
        await eventually(lambda: protocol._active)
        client.send(body)
        assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_trailers_are_no_headers_of_a_request_of_the_app() -> None:
    async def headers_of(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        text = repr(scope["headers"]).encode()
        length = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": text})

    async with RawWorker([[PLAIN]]) as worker, running_router(worker, app=headers_of) as router:
        client = await router.client()
        client.send(b"PUT /x HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
        client.send(b"0\r\nauthorization: Bearer another\r\n\r\n")
        got = await client.answer()
        assert b"host" in got.body
        assert b"authorization" not in got.body


async def test_expect_is_answered_by_the_refusal_when_there_is_one() -> None:
    def nobody(headers: Any) -> str:
        raise Refused(Reason.UNAUTHORIZED, "no key")

    head = post(chat(), headers=b"expect: 100-continue\r\n").partition(b"\r\n\r\n")[0]
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, authenticate=nobody) as router,
    ):
        client = await router.client()
        client.send(head + b"\r\n\r\n")
        got = await client.answer()
        assert_error(got, 401, "unauthorized")
        assert got.one(b"www-authenticate") == b"Bearer"
        assert await client.closed()


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"transfer-encoding: gzip\r\n",
        b"content-length: -1\r\n",
        b"content-length : 5\r\n",
        b"a: b\r\n c: folded\r\n",
    ],
)
async def test_a_request_whose_length_is_in_doubt_is_refused_and_the_connection_closed(
    head: bytes,
) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(b"POST %b HTTP/1.1\r\nhost: r\r\n%b\r\nhello" % (CHAT, head))
        got = await client.answer()
        assert_error(got, 400, "bad_request")
        assert await client.closed()
        assert not worker.requests


@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
@pytest.mark.parametrize("path", [CHAT, b"/v1/models"])
async def test_a_transfer_coding_of_http_1_0_is_refused_and_the_connection_closed(
    path: bytes, version: bytes
) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        head = b"POST %b HTTP/%b\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n"
        client.send(head % (path, version) + b"2\r\n{}\r\n0\r\n\r\n")
        assert_error(await client.answer(), 400, "bad_request")
        assert await client.closed()
        assert not worker.requests


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    gate = asyncio.Event()
    scripts: list[list[Step]] = [[Wait(gate), answer(b"1")], [answer(b"2")]]
    async with RawWorker(scripts) as worker, running_router(worker) as router:
        client = await router.client()
        other = b"GET /x HTTP/1.1\r\nhost: r\r\n\r\n"
        client.send(post(chat()) + other + post(b"nonsense") + post(chat()) + other)
        await eventually(lambda: worker.requests)
        gate.set()
        got = [await client.answer() for _ in range(5)]
        assert [a.status for a in got] == [200, 200, 400, 200, 200]
        assert [got[0].body, got[3].body] == [b"1", b"2"]
        assert got[1].body == b"asgi GET /x "


@pytest.mark.parametrize("last", [b"", b"connection: close\r\n"])
async def test_an_answer_of_the_app_waits_for_answers_that_the_outbox_still_holds(
    last: bytes,
) -> None:
    """So many writes in one turn of the loop make the outbox wait for the next, in which the app
    writes to the transport itself.
    """
    other = b"GET /x HTTP/1.1\r\nhost: r\r\n%b\r\n" % last
    async with running_router() as router:
        client = await router.client()
        client.send(post(b"nonsense") * 6 + other)
        got = [(await client.answer()).status for _ in range(7)]
        assert got == [400] * 6 + [200]


async def test_hundreds_of_pipelined_requests_that_are_refused_do_not_nest() -> None:
    async with running_router() as router:
        client = await router.client()
        client.send(post(b"nonsense") * 3000)
        for _ in range(3000):
            assert (await client.answer()).status == 400


async def test_a_broken_request_behind_a_good_one_does_not_spoil_the_good_ones_answer() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), DONE]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await client.until(b'"a"')
        client.send(b"garbage\r\n\r\n")
        await asyncio.sleep(0.05)
        gate.set()
        await client.until(LAST_CHUNK)
        assert_error(await client.answer(), 400, "bad_request")
        assert await client.closed()


async def test_http_1_0_clients_get_streams_without_chunks_and_a_closed_connection() -> None:
    steps: list[Step] = [SSE_HEAD, delta("a"), DONE]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM, version=b"1.0"))
        got = await client.answer()
        assert got.all(b"transfer-encoding") == []
        assert got.one(b"connection") == b"close"
        assert got.raw_body.startswith(b"data: {")
        assert got.raw_body.endswith(b"data: [DONE]\n\n")
        assert worker.requests[0].line.endswith(b"HTTP/1.1")
        assert router.records[0].outcome is Outcome.SUCCESS


async def test_http_1_0_clients_get_plain_answers_with_their_length() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat(), version=b"1.0", headers=b"connection: keep-alive\r\n"))
        got = await client.answer()
        assert (got.status, got.one(b"connection")) == (200, b"close")
        assert await client.closed()


async def test_a_client_that_wants_its_connection_closed_gets_that() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat(), headers=b"connection: close\r\n"))
        assert (await client.answer()).one(b"connection") == b"close"
        assert await client.closed()


async def test_what_a_client_sends_behind_its_last_request_costs_it_no_answer() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat(), headers=b"connection: close\r\n"))
        await eventually(lambda: router.records)
        for _ in range(3):  # the second of them meets what the first has done
            client.send(post(chat()))
            await asyncio.sleep(0.01)
        got = await client.answer()
        assert (got.status, got.complete) == (200, True)
        assert await client.closed()
        assert len(worker.requests) == 1
        await client.close()
        await eventually(lambda: not router.state.connections)


async def test_an_offer_to_upgrade_to_http_2_is_passed_over_and_the_body_read() -> None:
    headers = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        whole = post(chat(), headers=headers)
        for piece in (whole[:-20], whole[-20:-10], whole[-10:] + post(chat())):
            client.send(piece)
            await asyncio.sleep(0.02)
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 200
        first = worker.requests[0]
        assert first.body == orjson.dumps(chat())
        assert not first.all(b"upgrade") + first.all(b"http2-settings") + first.all(b"connection")


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_requests_may_be_split_at_every_byte(size: int) -> None:
    whole = post(chat(), headers=b"x-a: b\r\n") * 2
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        for index in range(0, len(whole), size):
            client.send(whole[index : index + size])
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 200
        assert [r.body for r in worker.requests] == [orjson.dumps(chat())] * 2


async def test_what_is_not_an_inference_post_goes_to_the_asgi_app() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        for line in (b"GET %b" % CHAT, b"POST /v1/unknown", b"PUT /generate", b"GET /v1/models"):
            body = b"" if line.startswith(b"GET") else b"{}"
            client.send(
                b"%b HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n%b" % (line, len(body), body)
            )
            got = await client.answer()
            assert got.body == b"asgi %b %b" % (line, body)
        assert not worker.requests


@pytest.mark.parametrize(
    "target", [CHAT + b"?x=a%2520b&y=a|b&z=%26&e=", b"http://r" + CHAT + b"?q"]
)
async def test_the_query_passes_byte_for_byte(target: bytes) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        assert (await router.post(chat(), path=target)).status == 200
        assert worker.requests[0].target == target.removeprefix(b"http://r")
