"""Bodies of requests: unchanged, bounded, readable, in time."""

from __future__ import annotations

import orjson
import pytest

from router.contract import WorkerSpec
from router.errors import Reason
from tests.runtime.raw_worker import (
    PLAIN,
    RawWorker,
)
from tests.runtime.relay.rig import (
    CHAT,
    assert_error,
    chat,
    post,
    running_router,
)


async def test_a_body_passes_unchanged_to_the_last_byte() -> None:
    body = (
        b'{ "model":"m","messages":[{"role":"user","content":"hi"}],"return_hidden_states":true,'
        b'"x":1.0,"y":12345678901234567890,"z":{"b":1,"a":2},"t":"\\u4f60" }\n'
    )
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        assert (await router.post(body)).status == 200
        assert worker.requests[0].body == body


async def test_a_chunked_body_is_sent_on_with_its_length() -> None:
    body = orjson.dumps(chat())
    request = (
        b"POST %b HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n"
        b"%x;ext=1\r\n%b\r\n%x\r\n%b\r\n0\r\nauthorization: Bearer smuggled\r\n\r\n"
    ) % (CHAT, 10, body[:10], len(body) - 10, body[10:])
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(request)
        assert (await client.answer()).status == 200
        assert worker.requests[0].body == body
        assert worker.requests[0].all(b"content-length") == [b"%d" % len(body)]
        assert not worker.requests[0].all(b"authorization")
        assert not worker.requests[0].all(b"transfer-encoding")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"m","messages":[{"role":"user","content":"a\x97b"}]}', None),
        (b"{", None),
        (b"", None),
        (b"[1]", None),
        (b'{"model":1,"messages":[]}', "model"),
        (b'{"model":"m","stream":"yes","messages":[]}', "stream"),
        (b'{"model":"m","messages":"hi"}', "messages"),
        (b"[" * 100_000, None),
    ],
)
async def test_a_body_that_cannot_be_read_is_400_and_reaches_no_worker(
    body: bytes, param: str | None
) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(body))
        error = assert_error(await client.answer(), 400, "bad_request")
        assert error["param"] == param
        client.send(post(chat()))
        assert (await client.answer()).status == 200
        assert len(worker.requests) == 1
        assert router.refused == [Reason.BAD_REQUEST]


@pytest.mark.parametrize("raw", ["0", "-1", "-950", "1.5", '"10"', "true", "9223372036854775808"])
async def test_a_bad_token_limit_is_400(raw: str) -> None:
    body = b'{"model":"m","messages":[],"max_tokens":%b}' % raw.encode()
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        error = assert_error(await router.post(body), 400, "bad_request")
        assert error["param"] == "max_tokens"
        assert not worker.requests


@pytest.mark.parametrize("extra", [b"", b',"max_tokens":null', b',"max_completion_tokens":null'])
async def test_a_null_token_limit_is_an_absent_one(extra: bytes) -> None:
    body = b'{"model":"m","messages":[]%b}' % extra
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        assert (await router.post(body)).status == 200


async def test_pictures_of_megabytes_pass_and_one_byte_too_many_is_413() -> None:
    picture = "data:image/png;base64," + "A" * 2_900_000
    parts = [{"type": "image_url", "image_url": {"url": picture}} for _ in range(3)]
    body = orjson.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text"}, *parts]}]}
    )
    limit = {"body_bytes_max": len(body)}
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=limit) as router:
        assert (await router.post(body)).status == 200
        assert worker.requests[0].body == body
        assert_error(await router.post(body + b" "), 413, "body_too_large")
        assert router.refused == [Reason.BODY_TOO_LARGE]
        assert len(worker.requests) == 1


async def test_a_chunked_body_above_the_limit_is_413_although_the_client_goes_on() -> None:
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, server={"body_bytes_max": 10_000}) as router,
    ):
        client = await router.client()
        client.send(b"POST %b HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT)
        for _ in range(50):
            client.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
        got = await client.answer()
        assert_error(got, 413, "body_too_large")
        assert got.one(b"connection") == b"close"
        assert await client.closed()
        assert not worker.requests


async def test_a_form_passes_without_being_read() -> None:
    form = b"--b\r\ncontent-disposition: form-data; name=file\r\n\r\n\x00\xff\r\n--b--\r\n"
    request = (
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: r\r\n"
        b"content-type: multipart/form-data; boundary=b\r\ncontent-length: %d\r\n\r\n%b"
    ) % (len(form), form)
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(request)
        assert (await client.answer()).status == 200
        assert worker.requests[0].body == form
        assert worker.requests[0].all(b"content-type") == [b"multipart/form-data; boundary=b"]


@pytest.mark.parametrize(
    "header",
    [b"content-type: application/x-www-form-urlencoded", b"content-encoding: GZip"],
)
async def test_a_body_that_cannot_be_read_is_415(header: bytes) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        for identity in (False, True):
            client = await router.client()
            body = orjson.dumps(chat())
            head = b"POST %b HTTP/1.1\r\nhost: r\r\n%b\r\ncontent-length: %d\r\n\r\n"
            shown = b"content-encoding: identity" if identity else header
            client.send(head % (CHAT, shown, len(body)) + body)
            got = await client.answer()
            if identity:
                assert got.status == 200
            else:
                assert_error(got, 415, "unsupported_media")
                assert not worker.requests


async def test_the_model_is_named_as_what_is_at_fault() -> None:
    async with RawWorker([]) as worker:
        known = WorkerSpec(url=worker.url, models=("known",))
        async with running_router(known) as router:
            error = assert_error(await router.post(chat(model="other")), 404, "model_not_found")
            assert error["param"] == "model"
            assert error["message"] == "no worker serves the model 'other'"


async def test_a_slow_body_of_an_admin_request_is_408_too() -> None:
    request = b"POST /workers HTTP/1.1\r\nhost: r\r\ncontent-length: 9\r\n\r\n{"
    async with running_router(server={"body_timeout_s": 0.1}) as router:
        client = await router.client()
        client.send(request)
        assert_error(await client.answer(), 408, "body_timeout")
        assert router.refused == [Reason.BODY_TIMEOUT]
        client.send(b"more")
        assert await client.closed()


async def test_a_slow_body_is_408() -> None:
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, server={"body_timeout_s": 0.4}) as router,
    ):
        client = await router.client()
        client.send(post(chat())[:-3])
        assert_error(await client.answer(), 408, "body_timeout")
        assert await client.closed()
        assert not worker.requests
