"""Answers and connections: headers, framing, odd statuses, stale connections, retries, shutdown."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.contract import WorkerId, WorkerSpec
from router.core.types import Outcome
from router.errors import Reason
from router.runtime.heads import header_text
from tests.runtime.raw_worker import (
    DONE,
    LAST_CHUNK,
    PLAIN,
    SSE_HEAD,
    Close,
    Hang,
    Pause,
    RawWorker,
    Reset,
    Step,
    Wait,
    answer,
    chunk,
    delta,
)
from tests.runtime.relay.rig import CHAT, chat, eventually, post, running_router

STREAM = chat(stream=True)
FAST_RETRIES = {"retries_max": 2, "backoff_s": 0.02, "budget_tokens_max": 100}


# Headers.


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


# Framing of answers.


@pytest.mark.parametrize("head", [b"204 No Content", b"304 Not Modified"])
async def test_answers_without_a_body_end_with_their_head(head: bytes) -> None:
    bare = b"HTTP/1.1 " + head + b"\r\nx-a: 1\r\n\r\n"
    async with RawWorker([[bare], [PLAIN]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.body) == (int(head[:3]), b"")
        assert (await router.post(chat())).status == 200
        assert worker.connections == 1


async def test_an_empty_body_is_an_answer() -> None:
    async with RawWorker([[answer(b"")], [PLAIN]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.one(b"content-length")) == (200, b"0")


async def test_interim_answers_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with RawWorker([[interim + PLAIN]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.raw.count(b"HTTP/1.1")) == (200, 1)


async def test_an_answer_that_ends_with_its_connection_is_framed_for_the_client() -> None:
    bare = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\ndata: [DONE]\n\n"
    async with RawWorker([[bare, Close()]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        got = await client.answer()
        assert got.one(b"transfer-encoding") == b"chunked"
        assert got.body == b"data: 1\n\ndata: [DONE]\n\n"
        client.send(post(STREAM))
        assert (await client.answer()).status == 200


async def test_an_answer_that_should_end_with_its_connection_but_is_reset_is_no_success() -> None:
    bare = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhalf"
    steps: list[Step] = [bare, Pause(0.1), Reset()]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        assert not (await router.post(chat())).complete
        assert router.records[0].outcome is Outcome.FAILED


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 600 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 099 Odd\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_an_answer_is_502(raw: bytes) -> None:
    async with RawWorker([[raw, Hang()]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.one(b"x-laneway-reason")) == (502, b"upstream_protocol")


async def test_bytes_behind_an_answer_are_not_passed_and_its_connection_not_used_again() -> None:
    extra = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    async with RawWorker([[PLAIN + extra], [PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat()))
        assert (await client.answer()).raw_body == PLAIN.partition(b"\r\n\r\n")[2]
        client.send(post(chat()))
        got = await client.answer()
        assert b"evil" not in got.raw
        assert worker.connections == 2


SECOND = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize("extra", [b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"x", SECOND])
async def test_bytes_behind_a_chunked_answer_are_a_fault_and_never_passed(extra: bytes) -> None:
    scripts: list[list[Step]] = [
        [SSE_HEAD, delta("a"), Pause(0.05), LAST_CHUNK + extra],
        [SSE_HEAD, delta("a") + b"0\r\n", Pause(0.05), b"\r\n" + extra],
        [SSE_HEAD, delta("a") + b"0\r\n\r", Pause(0.05), b"\n" + extra],
    ]
    for script in scripts:
        async with RawWorker([script]) as worker, running_router(worker) as router:
            got = await router.post(STREAM)
            assert SECOND not in got.raw_body
            assert router.records[0].reason is Reason.UPSTREAM_PROTOCOL


@pytest.mark.parametrize("extra", [b"x", SECOND, b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_no_error_event_is_put_inside_a_chunk(extra: bytes) -> None:
    half = b"data: 1\n\n"
    last = half + b"\r\n" + LAST_CHUNK + extra  # a fault, and nothing of this read is passed on
    first = SSE_HEAD + b"%x\r\n" % (2 * len(half)) + half
    script: list[Step] = [first, Pause(0.05), last]
    async with RawWorker([script]) as worker, running_router(worker) as router:
        got = await router.post(STREAM)
        assert not got.complete
        assert got.raw_body == b"%x\r\n" % (2 * len(half)) + half


async def test_bytes_on_an_idle_connection_close_it() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [PLAIN, Wait(gate), b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"]
    async with RawWorker([steps, [PLAIN]]) as worker, running_router(worker) as router:
        assert (await router.post(chat())).status == 200
        gate.set()
        await eventually(lambda: "idle=0" in repr(pool_of(router, worker)))
        got = await router.post(chat())
        assert b"evil" not in got.raw
        assert worker.connections == 2


def pool_of(router: object, worker: RawWorker) -> object:
    upstreams = router.driver.upstreams  # type: ignore[attr-defined]
    return upstreams.get(WorkerId(f"127.0.0.1:{worker.port}"))


async def test_an_answer_may_begin_while_the_request_is_still_being_sent() -> None:
    big = chat(messages=[{"role": "user", "content": "x" * 8_000_000}])
    early = answer(b"{}", status=b"422 No", headers=[b"content-type: application/json"])
    async with (
        RawWorker([[early, Hang()]], read_body=False) as worker,
        running_router(worker) as router,
    ):
        got = await router.post(big)
        assert (got.status, got.body) == (422, b"{}")
        assert router.records[0].outcome is Outcome.CLIENT_ERROR
        await eventually(lambda: "open=0" in repr(pool_of(router, worker)))


TRICKY = [b"data: 1\n\n", b"\r\n0\r\n\r\n", LAST_CHUNK, b"\r\n", b"data:\r\n\r\n"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_the_cuts_the_client_gets_the_workers_bytes(data: st.DataObject) -> None:
    payloads = data.draw(
        st.lists(
            st.binary(min_size=1, max_size=60) | st.sampled_from(TRICKY),
            min_size=1,
            max_size=12,
        )
    )
    whole = SSE_HEAD + b"".join(map(chunk, payloads)) + LAST_CHUNK
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    asyncio.run(_relayed_equals_sent(whole, cuts))


async def _relayed_equals_sent(whole: bytes, cuts: list[int]) -> None:
    steps: list[Step] = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        steps += [whole[start:end], Pause(0.001)]
    limits = {"first_byte_timeout_s": 60}
    async with RawWorker([steps]) as worker, running_router(worker, upstream=limits) as router:
        got = await router.post(STREAM)
        assert got.raw_body == whole.partition(b"\r\n\r\n")[2]
        await eventually(lambda: router.records)
        assert router.records[0].outcome is Outcome.SUCCESS


# Connections.


async def test_both_sides_send_small_writes_at_once() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat()))
        await client.answer()
        (served,) = router.state.connections
        idle = pool_of(router, worker)._idle[0]  # type: ignore[attr-defined]
        for transport in (served.transport, idle.transport):
            sock = transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_connections_are_kept_and_used_again() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        for _ in range(5):
            client.send(post(chat()))
            assert (await client.answer()).status == 200
        assert worker.connections == 1


async def test_idle_connections_are_closed_before_the_worker_would() -> None:
    async with (
        RawWorker([[PLAIN]]) as worker,
        running_router(worker, upstream={"idle_s": 0.3}) as router,
    ):
        await router.post(chat())
        await eventually(lambda: "open=0" in repr(pool_of(router, worker)))


async def test_a_stale_connection_is_replaced_once_and_for_free() -> None:
    scripts: list[list[Step]] = [[PLAIN], [Close()], [PLAIN]]
    async with (
        RawWorker(scripts) as worker,
        running_router(worker, retry={"retries_max": 0}) as router,
    ):
        await router.post(chat())
        assert (await router.post(chat())).status == 200
        assert [r.connection for r in worker.requests] == [0, 0, 1]
        assert [r.attempts for r in router.records] == [1, 1]


async def test_a_connection_that_is_closed_while_its_worker_works_is_a_failed_attempt() -> None:
    scripts: list[list[Step]] = [[PLAIN], [Pause(0.15), Close()], [PLAIN]]
    async with (
        RawWorker(scripts) as worker,
        running_router(worker, retry={"retries_max": 0}) as router,
    ):
        await router.post(chat())
        got = await router.post(chat())
        assert (got.status, got.one(b"x-laneway-reason")) == (502, b"upstream_error")
        assert [r.connection for r in worker.requests] == [0, 0]
        assert router.driver.snapshot().workers[0].failures == 1


async def test_a_fresh_connection_that_closes_is_a_failure() -> None:
    scripts: list[list[Step]] = [[PLAIN], [Close()]]
    async with (
        RawWorker(scripts) as worker,
        running_router(worker, retry={"retries_max": 0}) as router,
    ):
        await router.post(chat())
        got = await router.post(chat())
        assert (got.status, got.one(b"x-laneway-reason")) == (502, b"upstream_error")
        assert len(worker.requests) == 3


async def test_a_connection_that_breaks_after_the_first_byte_is_not_stale() -> None:
    scripts: list[list[Step]] = [[PLAIN], [b"HTTP/1.1 2", Close()]]
    async with (
        RawWorker(scripts) as worker,
        running_router(worker, retry={"retries_max": 0}) as router,
    ):
        await router.post(chat())
        assert (await router.post(chat())).status == 502
        assert len(worker.requests) == 2


async def test_no_more_connections_than_allowed_are_made() -> None:
    gate = asyncio.Event()
    async with (
        RawWorker([[Wait(gate), PLAIN]]) as worker,
        running_router(worker, upstream={"connections_max": 2}) as router,
    ):
        clients = [await router.client() for _ in range(6)]
        for client in clients:
            client.send(post(chat()))
        await eventually(lambda: len(worker.requests) == 2)
        gate.set()
        for client in clients:
            assert (await client.answer()).status == 200
        assert (worker.connections, len(worker.requests)) == (2, 6)


async def test_workers_are_reached_over_ipv6() -> None:
    async with RawWorker([[PLAIN]], host="::1") as worker, running_router(worker) as router:
        assert (await router.post(chat())).status == 200
        assert worker.requests[0].all(b"host") == [f"[::1]:{worker.port}".encode()]


async def test_workers_below_a_path_are_reached_there() -> None:
    async with RawWorker([[PLAIN]]) as worker:
        async with running_router(WorkerSpec(url=f"{worker.url}/a/b/")) as router:
            await router.post(chat())
        assert worker.requests[0].target == b"/a/b" + CHAT


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    address = ipaddress.ip_address("127.0.0.1")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=worker -addext subjectAltName=IP:{address} -keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return cert, key


async def test_workers_are_reached_over_tls_and_only_with_a_trusted_certificate(
    certificate: tuple[Path, Path],
) -> None:
    cert, key = certificate
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    body = delta("a") + DONE
    async with RawWorker([[SSE_HEAD, body]], tls=tls) as worker:
        async with running_router(worker, upstream={"ca_path": cert}) as router:
            for _ in range(2):
                assert (await router.post(STREAM)).raw_body == body
        async with running_router(worker) as router:
            got = await router.post(STREAM)
            assert (got.status, got.one(b"x-laneway-reason")) == (502, b"upstream_unreachable")


# Retries.


async def test_an_unreachable_worker_is_replaced_by_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        dead = WorkerSpec(url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        async with (
            RawWorker([[PLAIN]]) as worker,
            running_router(dead, worker, retry=FAST_RETRIES) as router,
        ):
            for _ in range(4):
                assert (await router.post(chat())).status == 200


async def test_an_unreachable_worker_alone_is_502() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = WorkerSpec(url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        async with running_router(dead, retry=FAST_RETRIES) as router:
            got = await router.post(chat())
            assert (got.status, got.one(b"x-laneway-reason")) == (502, b"upstream_unreachable")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_an_attempt_that_failed_is_repeated_elsewhere(status: int) -> None:
    failing = answer(b'{"n":1}', status=b"%d X" % status)
    async with (
        RawWorker([[failing]]) as bad,
        RawWorker([[PLAIN]]) as good,
        running_router(bad, good, retry=FAST_RETRIES) as router,
    ):
        for _ in range(3):
            assert (await router.post(chat())).status == 200
        assert len(good.requests) == 3
        assert bad.requests


async def test_the_last_failure_is_passed_on_after_every_worker_was_tried_once() -> None:
    failing = answer(b'{"said":"no"}', status=b"500 X")
    async with (
        RawWorker([[failing]]) as one,
        RawWorker([[failing]]) as two,
        RawWorker([[failing]]) as three,
        running_router(one, two, three, retry=FAST_RETRIES) as router,
    ):
        got = await router.post(chat())
        assert (got.status, got.json()) == (500, {"said": "no"})
        assert [len(w.requests) for w in (one, two, three)] == [1, 1, 1]
        assert router.records[0].attempts == 3
        assert len(router.records) == 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (408, b"upstream_timeout"),
        (429, b"upstream_overloaded"),
        (500, b"upstream_error"),
        (501, b"upstream_error"),
        (503, b"upstream_overloaded"),
        (504, b"upstream_timeout"),
    ],
)
async def test_a_failure_that_is_passed_on_has_its_reason_beside_it(
    status: int, reason: bytes
) -> None:
    failing = answer(b"oh no", status=b"%d X" % status, headers=[b"content-type: text/plain"])
    async with RawWorker([[failing]]) as worker, running_router(worker) as router:
        got = await router.post(chat())
        assert (got.status, got.body) == (status, b"oh no")
        assert got.one(b"content-type") == b"text/plain"
        assert got.one(b"x-laneway-reason") == reason


async def test_the_reason_of_a_router_behind_this_one_stays() -> None:
    theirs = answer(b"{}", status=b"503 X", headers=[b"x-laneway-reason: no_workers"])
    async with RawWorker([[theirs]]) as worker, running_router(worker) as router:
        assert (await router.post(chat())).one(b"x-laneway-reason") == b"no_workers"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 501])
async def test_other_statuses_are_passed_on_and_not_repeated(status: int) -> None:
    refusal = answer(b'{"said":"no"}', status=b"%d X" % status)
    async with (
        RawWorker([[refusal]]) as one,
        RawWorker([[refusal]]) as two,
        running_router(one, two, retry=FAST_RETRIES) as router,
    ):
        got = await router.post(chat())
        assert (got.status, got.json()) == (status, {"said": "no"})
        assert bool(got.all(b"x-laneway-reason")) is (status >= 500)
        assert len(one.requests) + len(two.requests) == 1


async def test_a_worker_that_dies_before_its_body_is_replaced() -> None:
    half: list[Step] = [b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", Pause(0.1), Reset()]
    async with (
        RawWorker([half]) as bad,
        RawWorker([[PLAIN]]) as good,
        running_router(bad, good, retry=FAST_RETRIES) as router,
    ):
        for _ in range(3):
            assert (await router.post(chat())).status == 200
        assert bad.requests


async def test_a_full_worker_without_retry_after_gets_one() -> None:
    async with (
        RawWorker([[answer(b"{}", status=b"503 Busy")]]) as worker,
        running_router(worker, retry=FAST_RETRIES) as router,
    ):
        got = await router.post(chat())
        assert (got.status, got.one(b"retry-after")) == (503, b"1")
        assert router.driver.snapshot().workers[0].breaker == "closed"


async def test_a_worker_that_is_removed_finishes_what_it_runs() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), DONE]
    async with RawWorker([steps]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await client.until(b'"a"')
        router.driver.on_worker_left(WorkerId(f"127.0.0.1:{worker.port}"))
        gate.set()
        assert b"[DONE]" in await client.until(LAST_CHUNK)
        assert (await router.post(STREAM)).status == 503
        await eventually(lambda: not router.driver.running)


# Shutdown.


async def test_running_streams_end_well_within_the_grace_period() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [SSE_HEAD, delta("a"), Wait(gate), DONE]
    async with RawWorker([steps, [PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(STREAM))
        await client.until(b'"a"')
        drained = asyncio.create_task(router.driver.drained(grace_s=10))
        await asyncio.sleep(0)
        late = await router.post(chat())  # still served, and told to connect elsewhere
        assert (late.status, late.one(b"connection")) == (200, b"close")
        assert not drained.done()
        gate.set()
        assert b"[DONE]" in await client.until(LAST_CHUNK)
        assert await drained
        assert await client.closed()


async def test_after_the_grace_period_what_runs_is_cut_with_an_error() -> None:
    steps: list[Step] = [SSE_HEAD, delta("a"), Hang()]
    async with RawWorker([steps, [Hang()]]) as worker, running_router(worker) as router:
        streaming, waiting = await router.client(), await router.client()
        streaming.send(post(STREAM))
        await streaming.until(b'"a"')
        waiting.send(post(chat()))
        await eventually(lambda: len(worker.requests) == 2)
        assert not await router.driver.drained(grace_s=0.1)
        assert b'"code":"shutting_down"' in await streaming.until(LAST_CHUNK)
        got = await waiting.answer()
        assert (got.status, got.one(b"x-laneway-reason")) == (503, b"shutting_down")
        await eventually(lambda: len(worker.aborted) == 2)
        assert not router.driver.running
