"""Requests easily read in two ways: offers to upgrade, spellings, bodies answered early."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.runtime.raw_worker import PLAIN, RawWorker
from tests.runtime.relay.rig import CHAT, Router, chat, echo, eventually, post, running_router

H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
WEBSOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
MODELS = b"/v1/models"
CHUNKED = b"transfer-encoding: chunked\r\n"


def request(
    path: bytes, body: bytes, offer: bytes, *, chunked: bool, method: bytes = b"POST"
) -> bytes:
    framing = CHUNKED if chunked else b"content-length: %d\r\n" % len(body)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    return b"%b %b HTTP/1.1\r\nhost: r\r\n%b%b\r\n%b" % (method, path, offer, framing, sent)


async def send_cut(router: Router, data: bytes, size: int) -> Any:
    client = await router.client()
    for start in range(0, len(data), size):
        client.send(data[start : start + size])
        await asyncio.sleep(0)
    return client


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [7, 10_000])
async def test_who_offers_another_protocol_is_served_in_this_one(
    offer: bytes, chunked: bool, size: int
) -> None:
    body = orjson.dumps(chat())
    whole = request(CHAT, body, offer, chunked=chunked)
    whole += request(MODELS, b"one", offer, chunked=chunked)
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await send_cut(router, whole * 2, size)
        for _ in range(2):
            assert (await client.answer()).status == 200
            assert (await client.answer()).body == b"asgi POST /v1/models one"
        assert [seen.body for seen in worker.requests] == [body, body]
        seen = worker.requests[0]
        assert not seen.all(b"upgrade") + seen.all(b"http2-settings") + seen.all(b"connection")


@pytest.mark.parametrize("path", [MODELS, CHAT])
@pytest.mark.parametrize("together", [False, True])
async def test_a_body_behind_an_offer_is_never_taken_for_a_request(
    path: bytes, together: bool
) -> None:
    inner = b"GET /inner HTTP/1.1\r\nhost: r\r\n\r\n"
    whole = request(path, inner, H2C, chunked=False)
    head = whole.removesuffix(inner)
    after = b"GET /after HTTP/1.1\r\nhost: r\r\n\r\n"
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        for piece in [whole + after] if together else [head, inner, after]:
            client.send(piece)
            await asyncio.sleep(0)
        first = await client.answer()
        if path is MODELS:
            assert first.body == b"asgi POST /v1/models " + inner
        else:
            assert (first.status, first.one(b"x-laneway-reason")) == (400, b"bad_request")
        assert (await client.answer()).body == b"asgi GET /after "


async def test_hundreds_of_offers_in_one_read_do_not_nest() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(request(b"/a", b"", H2C, chunked=False, method=b"GET") * 2000)
        for _ in range(2000):
            assert b"200" in await client.until(b"asgi GET /a ")


async def test_a_tunnel_is_refused_and_what_follows_not_read() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(b"CONNECT h:80 HTTP/1.1\r\nhost: h:80\r\n\r\n" + post(chat()))
        got = await client.answer()
        assert (got.status, got.one(b"connection")) == (405, b"close")
        assert await client.closed()
        assert not worker.requests


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://h", b"/"),
        (b"HTTP://h:80?a=b", b"/"),
        (b"http://h/", b"/"),
        (b"http://h/livez?a=b", b"/livez"),
        (b"/livez", b"/livez"),
        (b"*", b"*"),
    ],
)
async def test_a_target_in_absolute_form_is_its_path(target: bytes, path: bytes) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(b"OPTIONS %b HTTP/1.1\r\nhost: h\r\n\r\n" % target)
        assert (await client.answer()).body == b"asgi OPTIONS %b " % path


@pytest.mark.parametrize("path", [CHAT, MODELS])
@pytest.mark.parametrize("offer", [b"", H2C])
@pytest.mark.parametrize(
    ("version", "lines", "good"),
    [
        (b"1.1", b"host: h\r\n", True),
        (b"1.1", b"Host:\r\n", True),
        (b"1.0", b"", True),
        (b"1.1", b"", False),
        (b"1.1", b"host: h\r\nHost: h\r\n", False),
        (b"1.0", b"host: h\r\nhost: i\r\n", False),
        (b"1.1", b"host: h\r\nTransfer-Encoding: Chunked\r\n", True),
        (b"1.1", b"host: h\r\ntransfer-encoding: gzip, chunked\r\n", False),
        (b"1.1", b"host: h\r\ntransfer-encoding: chunked, chunked\r\n", False),
    ],
)
async def test_heads_that_http_forbids_are_refused(
    path: bytes, offer: bytes, version: bytes, lines: bytes, *, good: bool
) -> None:
    body = orjson.dumps(chat())
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    if b"ransfer" not in lines:
        lines += b"content-length: %d\r\n" % len(body)
        framed = body
    head = b"POST %b HTTP/%b\r\n%b%b\r\n" % (path, version, lines, offer)
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(head + framed)
        got = await client.answer()
        if good:
            assert got.status == 200
            return
        assert (got.status, got.one(b"x-laneway-reason")) == (400, b"bad_request")
        assert b"callback" not in got.body
        assert await client.closed()
        assert not worker.requests


async def test_an_encoded_path_is_the_path() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        odd = b"/v1/%63hat/%63%6fmpletions?a=%41"
        assert (await router.post(chat(), path=odd)).status == 200
        assert worker.requests[0].target == CHAT + b"?a=%41"
        for other in (CHAT + b"%0a", CHAT + b"%", b"/v1%2fchat"):
            got = await router.post(b"", path=other)
            assert got.body == b"asgi POST %b " % other


@pytest.mark.parametrize(
    ("path", "field"),
    [(b"/v1/completions", "prompt"), (b"/v1/embeddings", "input"), (b"/generate", "input_ids")],
)
async def test_ids_that_are_nested_too_deeply_are_400(path: bytes, field: str) -> None:
    deep = "[" * 300 + "1" + "]" * 300
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        for value in (f"[1,{deep}]", f"[{deep}]"):
            got = await router.post(f'{{"model":"m","{field}":{value}}}'.encode(), path=path)
            assert (got.status, got.one(b"x-laneway-reason")) == (400, b"bad_request")


async def test_every_expect_is_answered_also_on_a_connection_that_repeats_itself() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        whole = post(chat(), headers=b"expect: 100-continue\r\n")
        body = orjson.dumps(chat())
        client = await router.client()
        client.send(whole)  # it need not wait
        assert (await client.answer()).status == 200
        for _ in range(3):
            client.send(whole.removesuffix(body))
            assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(body)
            assert (await client.answer()).status == 200


async def early(scope: Any, receive: Any, send: Any) -> None:
    """Answers before it has read anything of the body."""
    if scope["method"] == "GET":
        await echo(scope, receive, send)
        return
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


async def test_the_rest_of_a_body_that_was_answered_early_is_no_part_of_a_head() -> None:
    rest = b"GET /inner HTTP/1.1\r\nx: "
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, app=early) as router:
        client = await router.client()
        length = b"content-length: %d\r\n\r\n" % (len(rest) + 2)
        client.send(b"POST /x HTTP/1.1\r\nhost: r\r\n" + length + b"ab")
        assert (await client.answer()).status == 200
        client.send(rest + post(chat()))
        assert (await client.answer()).status == 200
        (protocol,) = router.state.connections
        assert protocol._known is None  # type: ignore[union-attr]
        client.send(rest + b"\r\nhost: r\r\n\r\n" + post(chat()))
        assert (await client.answer()).body == b"asgi GET /inner "
        assert (await client.answer()).status == 200
        await eventually(lambda: len(worker.requests) == 2)
