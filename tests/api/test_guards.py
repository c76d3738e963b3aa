"""Requests that go in circles, and handlers that are cut at the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.api.guards import Guards
from router.runtime.loops import is_own_address
from tests.api.cluster import cluster, worker
from tests.runtime.scripted_worker import Scripted


async def received(guards: Guards, path: bytes, *headers: tuple[bytes, bytes]) -> list[Any]:
    """What a request to `path` is answered."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "raw_path": path, "headers": list(headers)}
    await guards(scope, receive, send)
    return sent


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 200),
        ([(b"x-laneway-via", b"another")], 200),
        ([(b"x-laneway-via", b"me")], 508),
        ([(b"x-laneway-via", b"another"), (b"x-laneway-via", b"me")], 508),
        ([(b"x-laneway-via", b"another, me")], 508),
    ],
)
async def test_what_was_here_before_is_refused(
    headers: list[tuple[bytes, bytes]], status: int
) -> None:
    sent = await received(Guards(fine, router_id=b"me"), b"/", *headers)
    assert sent[0]["status"] == status
    if status == 508:
        assert (b"x-laneway-reason", b"loop_detected") in sent[0]["headers"]


async def test_a_request_that_is_cut_at_the_end_is_a_503_and_no_fault() -> None:
    begun = asyncio.Event()

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(received(Guards(hangs, router_id=b""), b"/"))
    await begun.wait()
    task.cancel()
    sent = await task
    assert sent[0]["status"] == 503
    assert (b"x-laneway-reason", b"shutting_down") in sent[0]["headers"]


async def test_side_calls_carry_the_routers_that_a_request_has_passed() -> None:
    ok = Scripted(200, {})
    async with cluster() as router, worker(model_info=ok, flush_cache=ok, abort_request=ok) as one:
        await router.add(one.url)
        headers = {"x-laneway-via": "before"}
        await router.client.get("/model_info", headers=headers)
        await router.client.post("/flush_cache", headers=headers)
        await router.client.post("/abort_request", headers=headers, json={"rid": "r"})
        assert [sent["x-laneway-via"] for _, sent in one.asked] == ["before"] * 3


@pytest.mark.parametrize(
    ("url", "host", "port", "own"),
    [
        ("http://127.0.0.1:30000", "127.0.0.1", 30_000, True),
        ("http://localhost:30000", "127.0.0.1", 30_000, True),
        ("http://127.0.0.1:30000", "localhost", 30_000, True),
        ("http://127.0.0.9:30000/x", "0.0.0.0", 30_000, True),
        ("http://[::1]:30000", "::", 30_000, True),
        ("http://10.0.0.1:30000", "10.0.0.1", 30_000, True),
        ("http://127.0.0.2:30000", "127.0.0.1", 30_000, False),
        ("http://10.0.0.2:30000", "0.0.0.0", 30_000, False),
        ("http://127.0.0.1:30001", "127.0.0.1", 30_000, False),
        ("http://127.0.0.1:80", "127.0.0.1", 0, False),
    ],
)
def test_own_addresses_are_known(url: str, host: str, port: int, own: bool) -> None:
    assert is_own_address(url, host=host, port=port) is own


async def test_the_router_is_not_registered_at_itself() -> None:
    async with cluster(server={"port": 30_000}) as router:
        for path in ("/workers", "/add_worker?url=http://localhost:30000"):
            answer = await router.client.post(path, json={"url": "http://127.0.0.1:30000"})
            assert answer.status_code == 400
            assert "this router itself" in answer.json()["error"]["message"]
