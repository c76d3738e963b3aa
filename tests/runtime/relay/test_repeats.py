"""Heads that a client repeats: known by their bytes, and never taken for others."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import Config, PrefixSettings
from router.core.types import Endpoint, RequestSpec
from router.errors import Reason, Refused
from router.runtime.front import Standing
from router.runtime.heads import RequestHead
from router.runtime.repeats import KnownHead, length_of
from router.wire import BodyReader
from tests.runtime.raw_worker import PLAIN, RawWorker
from tests.runtime.relay.rig import CHAT, chat, eventually, post, running_router

REQUEST = post(chat(), headers=b"x-a: 1\r\nContent-Type2:  y \r\n")


def known(request: bytes) -> KnownHead:
    found = length_of(request, whole=True)
    assert found is not None
    return KnownHead(*found, head=RequestHead(), tenant="acme", standing=Standing())


@given(number=st.integers(0, 10**9 - 1), zeros=st.integers(0, 2))
def test_a_head_is_known_whatever_its_length_says(number: int, zeros: int) -> None:
    digits = b"0" * zeros + b"%d" % number
    head = REQUEST.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    start = head.index(b"content-length: ") + len(b"content-length: ")
    end = head.index(b"\r\n", start)
    other = head[:start] + digits + head[end:]
    expected = (len(other), number) if len(digits) <= 9 else None
    assert known(REQUEST).matched(other + b"body") == expected


@given(data=st.data())
def test_a_head_with_any_other_byte_is_not_known(data: st.DataObject) -> None:
    head = REQUEST.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    at = data.draw(st.integers(0, len(head) - 1))
    byte = data.draw(st.integers(0, 255).map(lambda b: bytes([b])))
    changed = head[:at] + byte + head[at + 1 :]
    digits = head.index(b"content-length: ") + len(b"content-length: ")
    in_digits = digits <= at < head.index(b"\r\n", digits) and byte.isdigit()
    if changed == head or in_digits:
        return
    assert known(REQUEST).matched(changed) is None


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST[:-1],
        REQUEST + b"x",
        b"GET / HTTP/1.1\r\nhost: r\r\n\r\n",
        post(chat(), headers=b"x: " + b"y" * 5000 + b"\r\n"),
        b"\r\n\r\n" + REQUEST,
    ],
)
def test_only_one_whole_request_with_a_length_is_worth_knowing(request_: bytes) -> None:
    assert length_of(request_, whole=True) is None


def test_a_request_of_which_more_is_to_come_is_worth_knowing_too() -> None:
    head = REQUEST.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    for beginning in (head, REQUEST[:-1]):
        found = length_of(beginning, whole=False)
        assert found is not None
        assert found[0] == head
    for other in (head[:-1], REQUEST, REQUEST + b"x"):
        assert length_of(other, whole=False) is None


bodies = st.lists(st.text(max_size=60), min_size=1, max_size=7)
headers = st.sampled_from([b"", b"x-a: 1\r\n", b"x-a: 2\r\nx-b: 3\r\n", b"X-A: 1\r\n"])


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.text(max_size=60), headers), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 3000), max_size=10),
    wait=st.booleans(),
    times=st.sampled_from([1, 1, 5_000]),
)
def test_any_sequence_of_requests_reaches_the_worker_as_it_was_sent(
    requests: list[tuple[str, bytes]], cuts: list[int], wait: bool, times: int
) -> None:
    requests = [(text * times, lines) for text, lines in requests]  # more than one read brings
    asyncio.run(_sent_and_seen(requests, cuts, wait=wait))


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 600_000), min_size=2, max_size=4), data=st.data())
def test_a_head_is_known_after_one_request_whose_body_came_later(
    sizes: list[int], data: st.DataObject
) -> None:
    cuts = [data.draw(st.lists(st.integers(0, size), max_size=3)) for size in sizes]
    asyncio.run(_heads_then_bodies(sizes, cuts))


async def _heads_then_bodies(sizes: list[int], cuts: list[list[int]]) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()

        def served() -> Any:
            (connection,) = router.driver.clients
            return connection

        await eventually(lambda: router.driver.clients)
        for size, edges in zip(sizes, cuts, strict=True):
            request = post(chat(user="x" * size))
            start = request.index(b"\r\n\r\n") + 4
            client.send(request[:start])
            await eventually(lambda: served()._active is not None)
            for begin, end in pairwise(sorted({0, *edges, len(request) - start})):
                client.send(request[start + begin : start + end])
                await asyncio.sleep(0)
            assert (await client.answer()).status == 200
            assert served()._known is not None
        assert [len(orjson.loads(r.body)["user"]) for r in worker.requests] == sizes


async def _sent_and_seen(requests: list[tuple[str, bytes]], cuts: list[int], *, wait: bool) -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        raw = [post(chat(user=text), headers=lines) for text, lines in requests]
        if wait:
            for request in raw:
                client.send(request)
                assert (await client.answer()).status == 200
        else:
            whole = b"".join(raw)
            edges = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
            for start, end in pairwise(edges):
                client.send(whole[start:end])
                await asyncio.sleep(0.001)
            for _ in raw:
                assert (await client.answer()).status == 200
        assert [orjson.loads(r.body)["user"] for r in worker.requests] == [t for t, _ in requests]
        for seen, (_, lines) in zip(worker.requests, requests, strict=True):
            for name in (b"x-a", b"x-b"):
                expected = [
                    line.partition(b": ")[2]
                    for line in lines.split(b"\r\n")
                    if line.lower().startswith(name + b":")
                ]
                assert seen.all(name) == expected


async def test_a_key_that_is_taken_back_no_longer_opens_although_the_head_is_known() -> None:
    valid = {b"Bearer k"}

    def check(lines: Any) -> str:
        if dict(lines).get(b"authorization") not in valid:
            raise Refused(Reason.UNAUTHORIZED, "no key")
        return "t"

    async with RawWorker([[PLAIN]]) as worker, running_router(worker, authenticate=check) as router:
        client = await router.client()
        for expected in (200, 200, 401):
            client.send(post(chat(), headers=b"authorization: Bearer k\r\n"))
            assert (await client.answer()).status == expected
            if len(worker.requests) == 2:
                valid.clear()
                router.front.on_config(router.front.config)


async def test_other_settings_hold_for_the_next_request_although_the_head_is_known() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        lines = b"x-my-id: one\r\nauthorization: Bearer k\r\n"
        for _ in range(2):
            client.send(post(chat(), headers=lines))
            assert (await client.answer()).one(b"x-request-id") != b"one"
        settings = {
            "server": {"request_id_headers": ["x-my-id"], "body_bytes_max": 2000},
            "auth": {"pass_credentials": True},
        }
        router.front.on_config(Config.model_validate(settings))
        client.send(post(chat(), headers=lines))
        assert (await client.answer()).one(b"x-request-id") == b"one"
        passed = [(b"authorization", b"Bearer k") in request.headers for request in worker.requests]
        assert passed == [False, False, True]
        client.send(post(chat(user="x" * 3000), headers=lines))
        assert (await client.answer()).status == 413


async def test_a_known_head_with_too_long_a_body_is_413() -> None:
    limits = {"body_bytes_max": 2000}
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=limits) as router:
        client = await router.client()
        for size, expected in ((1, 200), (100, 200), (3000, 413)):
            client.send(post(chat(user="x" * size)))
            assert (await client.answer()).status == expected
        assert await client.closed()
        assert len(worker.requests) == 2


async def test_a_known_head_whose_body_does_not_come_is_408() -> None:
    limits = {"body_timeout_s": 0.4}
    async with RawWorker([[PLAIN]]) as worker, running_router(worker, server=limits) as router:
        client = await router.client()
        client.send(post(chat()))
        assert (await client.answer()).status == 200
        client.send(post(chat())[:-1])
        assert (await client.answer()).status == 408
        assert len(worker.requests) == 1


@pytest.mark.patches
async def test_a_fault_of_the_router_is_500_and_tells_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(BodyReader):
        def read(self, *args: object, **kwargs: object) -> RequestSpec:
            raise ZeroDivisionError("a secret")

    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        router.front.readers[CHAT] = Broken(Endpoint.CHAT, PrefixSettings())
        client = await router.client()
        client.send(post(chat()))
        got = await client.answer()
        assert (got.status, got.one(b"x-laneway-reason")) == (500, b"internal_error")
        assert b"secret" not in got.raw
        assert "ZeroDivisionError" in caplog.text
        client.send(post({"text": "hi"}, path=b"/generate"))
        assert (await client.answer()).status == 200
