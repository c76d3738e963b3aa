"""The edges of the HTTP parsers: sequences of requests, and answers split at every byte.

A connection of requests of all kinds, good and bad, cut at random places, gets exactly the answers
that the table says, and the worker exactly the bodies: nothing is smuggled, nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import pytest

from tests.runtime.differential.cases import CASES
from tests.runtime.differential.client import Client, End
from tests.runtime.raw_worker import PLAIN, SSE_HEAD, Close, Pause, RawWorker, Step, answer
from tests.runtime.relay.rig import Router, running_router

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\n"
BODY_MAX = 4_000
SPLIT = [Pause(0)] * 3  # turns of the loop, so that each piece is read on its own
TEXT = PLAIN.partition(b"\r\n\r\n")[2]


@dataclass(frozen=True)
class Kind:
    """A request: its head's lines, how its body is framed, and what comes of it."""

    head: bytes
    status: int = 200
    chunked: bool = False
    served: bool = True  # by the worker
    ends: bool = False  # the connection, with its answer
    bodiless: bool = False
    body: bytes | None = None  # None: a chat that names its number


OFFER: Final = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"
BOTH: Final = b"content-length: 5\r\ntransfer-encoding: chunked\r\n"
KINDS: Final = {
    "length": Kind(CHAT),
    "chunked": Kind(CHAT, chunked=True),
    "expects": Kind(CHAT + b"expect: 100-continue\r\n"),
    "expects, chunked": Kind(CHAT + b"expect: 100-continue\r\n", chunked=True),
    "offers h2c": Kind(CHAT + OFFER),
    "offers h2c, chunked": Kind(CHAT + OFFER, chunked=True),
    "not JSON": Kind(CHAT, status=400, served=False, body=b"hello"),
    "asgi": Kind(b"PUT /x HTTP/1.1\r\nhost: r\r\n", served=False),
    "asgi, chunked": Kind(b"PUT /x HTTP/1.1\r\nhost: r\r\n", served=False, chunked=True),
    "get": Kind(b"GET /x HTTP/1.1\r\nhost: r\r\n", served=False, body=b""),
    "head": Kind(b"HEAD /x HTTP/1.1\r\nhost: r\r\n", served=False, body=b"", bodiless=True),
    "websocket": Kind(
        b"GET /x HTTP/1.1\r\nhost: r\r\nconnection: upgrade\r\nupgrade: websocket\r\n",
        served=False,
        body=b"",
    ),
    "closes": Kind(CHAT + b"Connection: close\r\n", ends=True),
    "HTTP/1.0": Kind(CHAT.replace(b"HTTP/1.1", b"HTTP/1.0"), ends=True),
    "HTTP/1.0, chunked": Kind(
        CHAT.replace(b"HTTP/1.1", b"HTTP/1.0"), 400, chunked=True, served=False, ends=True
    ),
    "both lengths": Kind(CHAT + BOTH, status=400, served=False, ends=True, body=b"hello"),
    "two lengths": Kind(CHAT + b"content-length: 7\r\n", status=400, served=False, ends=True),
    "gzip": Kind(CHAT + b"transfer-encoding: gzip\r\n", 400, served=False, ends=True, body=b"x"),
    "tunnel": Kind(b"CONNECT r:1 HTTP/1.1\r\nhost: r\r\n", 405, served=False, ends=True, body=b""),
    "too large": Kind(CHAT, 413, served=False, ends=True, body=b"x" * (BODY_MAX + 1)),
    "too large, chunked": Kind(
        CHAT, 413, chunked=True, served=False, ends=True, body=b"x" * (BODY_MAX + 1)
    ),
    "folded": Kind(CHAT + b"a: b\r\n c: d\r\n", status=400, served=False, ends=True),
}
# What went wrong once.
FOUND: Final = [
    ["length", "too large, chunked", "chunked"],
    ["asgi", "too large", "offers h2c"],
    ["length", "closes", "length"],
]
ANSWERS: Final = {
    "length": (PLAIN, 200, TEXT),
    "empty": (answer(b""), 200, b""),
    "chunked": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        b"1;x\r\na\r\n02\r\nbc\r\n0\r\nt: 1\r\n\r\n",
        200,
        b"abc",
    ),
    "no content": (b"HTTP/1.1 204 No Content\r\nx-a: b\r\n\r\n", 204, b""),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", 304, b""),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nx: y\r\n\r\n" + PLAIN,
        200,
        TEXT,
    ),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc", 200, b"abc"),
    "stream": (
        SSE_HEAD + b"9\r\ndata: a\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
        200,
        b"data: a\n\ndata: [DONE]\n\n",
    ),
}


def _bytes(kind: Kind, number: int, rng: Random) -> tuple[bytes, bytes]:
    """The request's bytes and its body."""
    body = b'{"model":"m","prompt":"%d"}' % number if kind.body is None else kind.body
    if not kind.chunked:
        return kind.head + b"content-length: %d\r\n\r\n%b" % (len(body), body), body
    at = rng.randrange(1, len(body))
    chunks = b"".join(b"%x;e=1\r\n%b\r\n" % (len(part), part) for part in (body[:at], body[at:]))
    head = kind.head + b"transfer-encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\nx-trailer: 1\r\n\r\n", body


async def _send(client: Client, data: bytes, rng: Random) -> None:
    cuts = sorted(rng.randrange(len(data)) for _ in range(rng.choice((0, 1, 4, 12))))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    await client.send(pieces, gap_s=0)


async def _check(router: Router, worker: RawWorker, names: Sequence[str], rng: Random) -> None:
    worker.requests.clear()
    made = [_bytes(KINDS[name], number, rng) for number, name in enumerate(names)]
    client = await Client.connected(router.port)
    bodies = []
    try:
        await _send(client, b"".join(data for data, _ in made), rng)
        for name, (_, body) in zip(names, made, strict=True):
            kind = KINDS[name]
            got = await client.answer(head_only=kind.bodiless)
            assert got.status == kind.status, name
            assert got.end is End.COMPLETE, name
            if kind.served:
                assert got.body == TEXT, name
                bodies.append(body)
            if kind.ends:
                assert not got.keeps, name
                assert await client.silent(), name
                break
    finally:
        client.close()
    assert [request.body for request in worker.requests] == bodies, names


async def test_a_connection_of_requests_of_all_kinds_gets_exactly_their_answers() -> None:
    lines = [[name] for name in KINDS] + FOUND
    for number in CASES:
        rng = Random(number)
        lines.append(rng.choices(list(KINDS), k=rng.randrange(2, 7)))
    server = {"body_bytes_max": BODY_MAX}
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=server) as router:
        for number, names in enumerate(lines):
            try:
                await _check(router, worker, names, Random(number))
            except BaseException as exc:
                exc.add_note(f"requests: {names}, behind {lines[number - 1]}")
                raise


async def test_requests_split_at_every_byte_are_the_same_requests() -> None:
    rng = Random(12)
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        for name in ("length", "chunked", "expects, chunked", "offers h2c, chunked"):
            data, body = _bytes(KINDS[name], 1, rng)
            for at in range(1, len(data)):
                worker.requests.clear()
                client = await Client.connected(router.port)
                await client.send([data[:at], data[at:]], gap_s=0)
                got = await client.answer()
                client.close()
                assert (got.status, got.body, got.end) == (200, TEXT, End.COMPLETE), (name, at)
                assert [request.body for request in worker.requests] == [body], (name, at)


@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_split_at_every_byte_are_the_same_answers(name: str) -> None:
    raw, status, body = ANSWERS[name]
    request = CHAT + b"content-length: 13\r\n\r\n" + b'{"model":"m"}'
    async with RawWorker([[]]) as worker, running_router(worker) as router:
        client = await Client.connected(router.port)
        for at in range(1, len(raw)):
            end: list[Step] = [Close()] if name == "HTTP/1.0" else []
            worker.scripts = [[raw[:at], *SPLIT, raw[at:], *end]]
            await client.send([request], gap_s=0)
            got = await client.answer()
            assert (got.status, got.body, got.end) == (status, body, End.COMPLETE), at
        client.close()


async def test_an_answer_that_comes_before_the_body_was_sent_ends_the_exchange() -> None:
    big = b'{"model":"m","prompt":"%b"}' % (b"x" * 4_000_000)
    request = CHAT + b"content-length: %d\r\n\r\n" % len(big)
    async with (
        RawWorker([[answer(b"{}", status=b"422 Early")]], read_body=False) as worker,
        running_router(worker) as router,
    ):
        client = await Client.connected(router.port)
        sending = asyncio.create_task(client.send([request, big]))
        for _ in range(2):  # the second time on the same connection of the client
            got = await client.answer()
            assert (got.status, got.body, got.end) == (422, b"{}", End.COMPLETE)
            await sending
            sending = asyncio.create_task(client.send([request, big]))
        assert (await client.answer()).status == 422
        await sending
        client.close()
        assert worker.connections == 3, "a connection with half a request is not used again"
