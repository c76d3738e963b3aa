"""Headers of answers, and of the requests that workers see."""

from __future__ import annotations

import pytest

from router.contract import WorkerSpec
from router.runtime.heads import header_text
from tests.runtime.raw_worker import (
    DONE,
    PLAIN,
    SSE_HEAD,
    RawWorker,
    answer,
    delta,
)
from tests.runtime.relay.rig import chat, running_router

STREAM = chat(stream=True)


async def test_hop_by_hop_headers_end_here_and_others_pass_in_their_order() -> None:
    body = b"{}"
    lines = [
        b"Server: uvicorn",
        b"Date: now",
        b"Connection: keep-alive, X-Hop",
        b"Keep-Alive: timeout=5",
        b"X-Hop: 1",
        b"X-A: 1",
        b"Set-Cookie: a=1; Expires=Wed, 01 Jan 2031 00:00:00 GMT",
        b"X-Multi: 1",
        b"Set-Cookie: b=2",
        b"X-Multi: 2",
        b"Server: second",
        b"X-Request-Id: theirs",
    ]
    async with RawWorker([[answer(body, headers=lines)]]) as worker, running_router(worker) as r:
        got = await r.post(chat(), headers=b"x-request-id: mine\r\n")
        assert got.one(b"server") == b"uvicorn"
        assert got.one(b"date") == b"now"
        assert got.one(b"x-a") == b"1"
        assert got.all(b"set-cookie") == [lines[6][12:], b"b=2"]
        assert got.all(b"x-multi") == [b"1", b"2"]
        assert got.one(b"x-request-id") == b"mine"
        for hop in (b"connection", b"keep-alive", b"x-hop"):
            assert not got.all(hop)


async def test_repeated_headers_of_streams_pass_in_their_order() -> None:
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nset-cookie: a\r\nx-b: 1\r\nset-cookie: c\r\n\r\n")
    async with RawWorker([[head, delta("a"), DONE]]) as worker, running_router(worker) as router:
        assert (await router.post(STREAM)).all(b"set-cookie") == [b"a", b"c"]


async def test_the_worker_gets_its_own_key_host_and_the_way_of_the_request() -> None:
    headers = (
        b"authorization: Bearer r-key\r\nx-api-key: r-key\r\ntraceparent: 00-1-2-01\r\n"
        b"x-forwarded-for: 10.1.1.1\r\nx-request-id: id-1\r\nconnection: x-mine\r\nx-mine: 1\r\n"
        b"te: trailers\r\nx-two: 1\r\nx-two: 2\r\n"
    )
    async with RawWorker([[PLAIN]]) as worker:
        spec = WorkerSpec.model_validate({"url": worker.url, "api_key": "w-key"})
        async with running_router(spec) as router:
            assert (await router.post(chat(), headers=headers)).one(b"x-request-id") == b"id-1"
        request = worker.requests[0]
        assert request.all(b"authorization") == [b"Bearer w-key"]
        assert request.all(b"host") == [f"127.0.0.1:{worker.port}".encode()]
        assert request.all(b"traceparent") == [b"00-1-2-01"]
        assert request.all(b"x-request-id") == [b"id-1"]
        assert request.all(b"x-forwarded-for") == [b"10.1.1.1, 127.0.0.1"]
        assert request.all(b"x-two") == [b"1", b"2"]
        for gone in (b"x-api-key", b"x-mine", b"te", b"connection"):
            assert not request.all(gone)
        assert b"r-key" not in repr(request).encode()


@pytest.mark.parametrize(("key", "seen"), [(None, b"Bearer c"), ("w-key", b"Bearer w-key")])
async def test_credentials_pass_when_set_so_and_the_worker_has_no_key(
    key: str | None, seen: bytes
) -> None:
    async with RawWorker([[PLAIN]]) as worker:
        spec = WorkerSpec.model_validate({"url": worker.url, "api_key": key})
        async with running_router(spec, auth={"pass_credentials": True}) as router:
            await router.post(chat(), headers=b"authorization: Bearer c\r\n")
        assert worker.requests[0].all(b"authorization") == [seen]


async def test_request_ids_are_made_when_none_fits_and_reach_the_worker() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        ids = []
        for given_id in (b"", b"x-request-id: \xff\r\n", b"x-request-id: %b\r\n" % (b"a" * 500)):
            got = await router.post(chat(), headers=given_id)
            ids.append(got.one(b"x-request-id"))
        assert len(set(ids)) == 3
        assert {len(i) for i in ids} == {32}
        assert [r.all(b"x-request-id") for r in worker.requests] == [[i] for i in ids]
        got = await router.post(chat(), headers=b"x-correlation-id: c-1\r\n")
        assert got.one(b"x-request-id") == b"c-1"


async def test_a_model_beyond_latin_1_is_served_like_any_other() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        assert (await router.post(chat(model="中文-🙂"))).status == 200
        assert router.records[0].model == "中文-🙂"


def test_text_beyond_ascii_is_percent_encoded_in_headers() -> None:
    assert header_text("a:[::1]/中 \r\nx") == b"a:[::1]/%E4%B8%AD %0D%0Ax"
