"""The whole surface over a real listener: keys, CORS, TLS, targets as written."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from router.cli import main
from tests.e2e.router_process import client_of, failed_start, router_process, until_ready
from tests.e2e.streaming_worker import streaming_worker

DATA = Path(__file__).parent / "data"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PAGE = "https://app.example"
USER, ADMIN = {"authorization": "bearer sk-user"}, {"authorization": "Bearer sk-admin"}


async def test_keys_and_cors_hold_for_inference_as_for_the_rest() -> None:
    async with (
        streaming_worker() as worker,
        router_process(
            "--worker-urls", worker.url, "--api-key", "sk-user", "--admin-key", "sk-admin",
            "--set", f"server.cors_allowed_origins=[{PAGE}]", "--set", "probe.interval_s=0.1",
        ) as router,
        client_of(router) as client,
    ):  # fmt: skip
        worker.release.set()
        await until_ready(client)
        path = "/v1/chat/completions"
        asked = {"access-control-request-method": "POST",
                 "access-control-request-headers": "authorization"}  # fmt: skip
        preflight = await client.options(path, headers={"origin": PAGE, **asked})
        assert preflight.status_code == 200
        for headers, status in (({}, 401), (ADMIN, 403), (USER, 200)):
            answer = await client.post(path, json=CHAT, headers={"origin": PAGE, **headers})
            assert answer.status_code == status
            assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
            assert "x-laneway-worker" in answer.headers["access-control-expose-headers"]
        evil = await client.post(path, json=CHAT, headers={"origin": "https://evil", **USER})
        assert "access-control-allow-origin" not in evil.headers
        for head in worker.heads:
            assert b"sk-user" not in head
            assert b"origin:" not in head.lower()
        metrics = (await client.get("/metrics")).text
        assert 'laneway_refusals_total{reason="unauthorized"} 1.0' in metrics
        assert 'laneway_refusals_total{reason="forbidden"} 1.0' in metrics
        assert (await client.get("/workers", headers=USER)).status_code == 403
        assert (await client.get("/workers", headers=ADMIN)).json()["total"] == 1


async def test_targets_arrive_as_they_were_written() -> None:
    async with (
        streaming_worker() as worker,
        router_process() as router,
        client_of(router) as client,
    ):
        spec = {"url": worker.url, "models": ["org/name"], "id": "[w]:1"}
        answer = await client.post("/workers", json=spec)
        assert answer.status_code == 202
        await until_ready(client)
        for path, status in (
            (b"/v1/models/org%2Fname?x=a%2520b&y=a|b&z=%26&e=", 200),
            (b"/v1/models/org/name", 200),
            (b"/v1/models/org%252Fname", 404),
            (b"/workers/[w]:1", 200),
            (b"/workers/%5Bw%5D%3A1", 200),
            (b"/workers/%ff%00", 404),
            (b"//workers", 404),
        ):
            assert await status_of(router.url, path) == status, path


async def status_of(url: str, target: bytes) -> int:
    """The status of a GET whose target is exactly these bytes."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_a_process_that_is_full_says_that_it_lives() -> None:
    """One that did not would be killed for being busy."""
    async with router_process("--set", "server.connections_max=2") as router:
        host, _, port = router.url.removeprefix("http://").rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        assert await status_of(router.url, b"/livez?x") == 200
        assert await status_of(router.url, b"/liveness") == 200
        assert await status_of(router.url, b"/health") == 503
        for _, writer in idle:
            writer.close()


async def test_it_serves_https_when_it_has_a_certificate() -> None:
    pair = ("--set", f"server.tls.cert_path={DATA / 'tls_cert.pem'}",
            "--set", f"server.tls.key_path={DATA / 'tls_key.pem'}")  # fmt: skip
    trust = ssl.create_default_context(cafile=DATA / "tls_cert.pem")
    async with router_process(*pair) as router, client_of(router, verify=trust) as client:
        assert router.url.startswith("https://")
        assert (await client.get("/livez")).text == "OK"
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_certificate_that_is_none_is_a_message_and_status_2() -> None:
    pair = ("--set", f"server.tls.cert_path={__file__}", "--set", f"server.tls.key_path={__file__}")
    status, log = await failed_start(*pair)
    assert status == 2
    assert "server.tls: " in log
    assert "Traceback" not in log


def laneway(*args: str) -> int:
    """Run a command in this thread; return its exit status."""
    with pytest.raises(SystemExit) as caught:
        main(args)
    return int(caught.value.code or 0)


async def test_workers_are_managed_from_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with (
        streaming_worker() as worker,
        router_process("--set", "probe.interval_s=0.1") as router,
        client_of(router) as client,
    ):
        there = ("--router", router.url)
        added = ("add", worker.url, "--lanes", "long", "--id", "w1", *there)
        assert await asyncio.to_thread(laneway, "workers", *added) == 0
        await until_ready(client)
        assert await asyncio.to_thread(laneway, "workers", *added) == 1
        assert "409: w1 at" in capsys.readouterr().err
        assert await asyncio.to_thread(laneway, "workers", "list", *there) == 0
        row = next(r for r in capsys.readouterr().out.splitlines() if r.startswith("w1"))
        assert row.split() == ["w1", "active", "long", "?", "0", "?", "?", "0"]
        chat = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        async with asyncio.timeout(10):
            await worker.asked.wait()
        assert await asyncio.to_thread(laneway, "workers", "drain", worker.url, *there) == 0
        assert (await client.get("/workers/w1")).json()["status"] == "Draining"
        worker.release.set()
        assert (await chat).text.endswith("[DONE]\n\n")
        assert (await client.get("/workers")).json()["total"] == 0
        assert await asyncio.to_thread(laneway, "workers", "remove", "w1", *there) == 1


async def test_a_worker_that_hangs_holds_up_nobody() -> None:
    hung = socket.create_server(("127.0.0.1", 0))  # connects, and never says a word
    url = f"http://127.0.0.1:{hung.getsockname()[1]}"
    async with (
        streaming_worker() as worker,
        router_process() as router,
        client_of(router) as client,
    ):
        async with asyncio.timeout(5):  # one second for each
            assert (await client.post("/workers", json={"url": url, "id": "w9"})).status_code == 202
            body = {"url": worker.url, "id": "w2"}
            assert (await client.post("/workers", json=body)).status_code == 202
            assert (await client.get("/workers/w9")).json()["status"] == "Pending"
            assert (await client.delete("/workers/w2")).status_code == 202
            assert (await client.delete("/workers/w9")).status_code == 202
    hung.close()


async def test_odd_names_of_models_are_names() -> None:
    models = ["\u4e2d\u6587-\U0001f600", "org/name", "a b", "../x", 'a"b\n']
    async with (
        streaming_worker() as worker,
        router_process() as router,
        client_of(router) as client,
    ):
        worker.release.set()
        await client.post("/workers", json={"url": worker.url, "models": models})
        await until_ready(client)
        for model in models:
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": model})
            assert answer.status_code == 200
        for unknown in (*(model + "x" for model in models), "x" * 10_000):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": unknown})
            assert answer.status_code in (400, 404)
            assert answer.json()["error"]["message"]
        listed = (await client.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == sorted(models)
        assert (await client.get("/metrics")).status_code == 200
