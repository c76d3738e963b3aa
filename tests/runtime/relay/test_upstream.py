"""Connections to workers: kept, stale, bounded, over TLS and below a path."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from router.contract import WorkerSpec
from tests.runtime.raw_worker import (
    DONE,
    PLAIN,
    SSE_HEAD,
    Close,
    Pause,
    RawWorker,
    Step,
    Wait,
    delta,
)
from tests.runtime.relay.rig import CHAT, chat, eventually, pool_of, post, running_router

STREAM = chat(stream=True)


async def test_both_sides_send_small_writes_at_once() -> None:
    async with RawWorker([[PLAIN]]) as worker, running_router(worker) as router:
        client = await router.client()
        client.send(post(chat()))
        await client.answer()
        (served,) = router.state.connections
        idle = pool_of(router, worker).idle[0]  # type: ignore[attr-defined]
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
