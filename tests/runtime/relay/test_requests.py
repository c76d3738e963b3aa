"""The listening side: bodies, limits, framing, pipelining, old clients, silent sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from router.contract import WorkerSpec
from router.core.types import Outcome
from router.errors import Reason, Refused
from tests.runtime.raw_worker import (
    DONE,
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
    Hang,
    RawWorker,
    Step,
    Wait,
    answer,
    delta,
)
from tests.runtime.relay.rig import CHAT, RawClient, chat, eventually, post, running_router

STREAM = chat(stream=True)


def assert_error(got: Any, status: int, reason: str) -> dict[str, Any]:
    assert got.status == status
    assert got.one(b"content-type") == b"application/json"
    assert got.one(b"x-laneway-reason") == reason.encode()
    assert got.one(b"x-request-id")
    error = got.json()["error"]
    assert error["code"] == reason
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    if status in (429, 503):
        assert int(got.one(b"retry-after")) >= 1
    assert isinstance(error, dict)
    return error


# Bodies.


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


# Framing of requests.


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


# Who may call, and for how long a socket may be idle.


async def test_callers_without_a_key_are_refused_before_their_body_is_kept() -> None:
    def check(headers: Any) -> str:
        if (b"authorization", b"Bearer good") not in headers:
            raise Refused(Reason.UNAUTHORIZED, "no key")
        return "tenant-1"

    async with RawWorker([[PLAIN]]) as worker, running_router(worker, authenticate=check) as router:
        client = await router.client()
        client.send(post(chat()))
        assert_error(await client.answer(), 401, "unauthorized")
        client.send(post(chat(), headers=b"authorization: Bearer good\r\n"))
        assert (await client.answer()).status == 200
        assert router.records[0].tenant == "tenant-1"
        assert router.refused == [Reason.UNAUTHORIZED]


@pytest.mark.parametrize("sent", [b"", b"POST / HT", post(chat())[:-1], b"\r\n"])
async def test_sockets_that_say_too_little_are_closed(sent: bytes) -> None:
    limits = {"body_timeout_s": 0.3, "keep_alive_s": 60}
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=limits) as router:
        clients = [await router.client() for _ in range(20)]
        for client in clients:
            client.send(sent)
        for client in clients:
            got = await client.answer()
            assert got.status in (0, 408)
            assert await client.closed()
        await eventually(lambda: not router.state.connections)
        assert (await router.post(chat())).status == 200


async def test_an_idle_connection_is_kept_for_its_time_and_then_closed() -> None:
    limits = {"body_timeout_s": 0.1, "keep_alive_s": 1}
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=limits) as router:
        client = await router.client()
        client.send(post(chat()))
        await client.answer()
        await asyncio.sleep(0.6)
        client.send(post(chat()))
        assert (await client.answer()).status == 200
        assert await client.closed()


async def test_a_head_without_end_is_refused() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(b"POST %b HTTP/1.1\r\nx: " % CHAT + b"y" * 400_000)
        assert_error(await client.answer(), 431, "head_too_large")


# Leaving, at stages before an answer.


async def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    gate = asyncio.Event()
    async with (
        RawWorker([[Wait(gate), PLAIN], [PLAIN]]) as worker,
        running_router(
            worker, headroom={"concurrency_default": 1}, queue={"depth_max": 2}
        ) as router,
    ):
        clients: list[RawClient] = [await router.client() for _ in range(5)]
        for number, client in enumerate(clients[:3]):
            client.send(post(chat(user=str(number))))
            await eventually(lambda n=number: len(router.driver.running) == n + 1)  # type: ignore[misc]
        clients[3].send(post(chat(user="3")))
        assert_error(await clients[3].answer(), 429, "queue_full")
        await clients[1].close()
        await eventually(lambda: len(router.driver.running) == 2)
        clients[4].send(post(chat(user="4")))
        await eventually(lambda: len(router.driver.running) == 3)
        gate.set()
        for index in (0, 2, 4):
            assert (await clients[index].answer()).status == 200
        assert [orjson.loads(r.body)["user"] for r in worker.requests] == ["0", "2", "4"]


async def test_a_client_that_leaves_while_its_body_comes_reaches_no_worker() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat())[:-5])
        await eventually(lambda: router.state.connections)
        await client.close()
        await eventually(lambda: not router.state.connections)
        assert not worker.requests
        assert not router.driver.running


async def test_without_a_worker_the_answer_is_503_at_once() -> None:
    async with running_router() as router:
        for body in (chat(), STREAM):
            assert_error(await router.post(body), 503, "no_workers")


async def test_requests_run_side_by_side_without_a_hidden_cap() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), DONE]
    async with (
        RawWorker([steps]) as worker,
        running_router(worker, headroom={"concurrency_default": 1000}) as router,
    ):
        clients = [await router.client() for _ in range(300)]
        for client in clients:
            client.send(post(STREAM))
        await eventually(lambda: len(worker.requests) == 300)
        gate.set()
        for client in clients:
            await client.until(LAST_CHUNK)
        assert worker.connections == 300


async def test_abort_by_request_ends_a_stream_with_an_error() -> None:
    steps: list[Step] = [SSE_HEAD, delta("a"), Hang()]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat(stream=True, rid="r-1")))
        await client.until(b'"a"')
        (ticket,) = router.driver.tickets()
        assert ticket.spec.rid == "r-1"
        router.driver.abort(ticket)
        assert b'"code":"aborted"' in await client.until(LAST_CHUNK)
        await eventually(lambda: worker.aborted)
        assert router.records[0].outcome is Outcome.ABORTED
