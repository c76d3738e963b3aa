"""A router with two relays and a brain: real processes, some of which are killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from router.tenant_settings import digest_of
from tests.e2e.router_process import (
    RouterProcess,
    client_of,
    failed_start,
    router_process,
    until_ready,
)
from tests.e2e.streaming_worker import StreamingWorker, streaming_worker

CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
RELAYS = 2


@pytest.fixture
async def worker() -> AsyncIterator[StreamingWorker]:
    async with streaming_worker() as running:
        yield running


@asynccontextmanager
async def relays(
    *workers: StreamingWorker, flags: Sequence[str] = (), grace_s: float = 30.0
) -> AsyncIterator[RouterProcess]:
    """A router whose relays and brain know of each other."""
    async with router_process(
        "--relays", str(RELAYS), "--policy", "round_robin",
        "--worker-urls", *(worker.url for worker in workers),
        "--set", "server.drain_delay_s=0", "--set", f"server.shutdown_grace_s={grace_s}",
        "--set", "probe.interval_s=0.1", "--set", "policy.slow_start_s=0", *flags,
    ) as router:  # fmt: skip
        async with client_of(router) as client:
            await until_ready(client)
        await here(router, RELAYS)
        yield router


async def here(router: RouterProcess, count: int) -> None:
    """Wait until so many relays have met a brain, since the start."""
    await router.logged_times("router.runtime.brain_link: relay", count)


def process_ids(router: RouterProcess, what: str) -> list[int]:
    """Of all processes that served as `what` since the start, the last one last."""
    return [int(found) for found in re.findall(rf"{what} as process (\d+)", router.log)]


class Stream:
    """A chat on a connection of its own, so that either relay may get it."""

    def __init__(self, router: RouterProcess) -> None:
        self._router = router
        self._begun = asyncio.Event()
        self.text = ""
        self.relay = ""  # the part of its id that is the relay's
        self.ended = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        async with (
            client_of(self._router) as client,
            client.stream("POST", PATH, json=CHAT) as answer,
        ):
            assert answer.status_code == 200
            self.relay = answer.headers["x-request-id"][:20]
            async for piece in answer.aiter_text():
                self.text += piece
                self._begun.set()

    async def begun(self) -> None:
        await asyncio.wait_for(self._begun.wait(), 10)


async def streams_on_both(router: RouterProcess) -> dict[str, list[Stream]]:
    """Running streams by relay."""
    by_relay: dict[str, list[Stream]] = {}
    for _ in range(40):  # the kernel chooses
        stream = Stream(router)
        await stream.begun()
        by_relay.setdefault(stream.relay, []).append(stream)
        if len(by_relay) == RELAYS:
            return by_relay
    raise AssertionError("all connections went to one relay")


async def series(client: httpx.AsyncClient, name: str, *labels: str) -> float:
    """The sum of a metric over the series with these labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith(name) and all(x in line for x in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def until_in_flight(client: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(10):
        while await series(client, "laneway_in_flight{") != count:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)


async def test_the_policy_is_one_over_both_relays_and_one_scrape_counts_all() -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(streaming_worker()) for _ in range(2)]
        router = await stack.enter_async_context(relays(*workers))
        client = await stack.enter_async_context(client_of(router))
        for worker in workers:
            worker.release.set()
        served, ids = [], set()
        for _ in range(20):
            async with client_of(router) as once:
                answer = await once.post(PATH, json=CHAT)
                assert answer.text.endswith("data: [DONE]\n\n")
                served.append(answer.headers["x-laneway-worker"])
                ids.add(answer.headers["x-request-id"][:20])
                assert (await once.post(PATH, content=b"{")).status_code == 400
        assert len(ids) == RELAYS
        assert len(set(served)) == 2
        assert all(one != other for one, other in pairwise(served))
        assert await series(client, "laneway_requests_total", 'outcome="success"') == 20
        assert await series(client, "laneway_refusals_total", '"bad_request"') == 20
        assert await series(client, "laneway_ttft_seconds_count") == 20
        assert await series(client, "laneway_relays ") == RELAYS
        async with asyncio.timeout(10):  # each says it once a second
            while await series(client, "laneway_relay_connections") < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for number in (1, 2):
            relay = f'relay="{number}"'
            assert await series(client, "laneway_relay_cpu_seconds_total", relay) > 0
            assert await series(client, "laneway_relay_resident_memory_bytes", relay) > 2**20


async def test_a_limit_is_one_over_both_relays_and_answers_say_where_it_stands(
    worker: StreamingWorker,
) -> None:
    worker.release.set()
    limit = "limits.tenant={requests_per_minute: 0.001, requests_burst: 3}"
    async with relays(worker, flags=("--set", limit)) as router:
        statuses, left, ids = [], [], set()
        for _ in range(12):
            async with client_of(router) as once:
                answer = await once.post(PATH, json=CHAT)
            statuses.append(answer.status_code)
            left.append(answer.headers["x-ratelimit-remaining-requests"])
            ids.add(answer.headers["x-request-id"][:20])
        assert statuses == [200] * 3 + [429] * 9
        assert left == ["2", "1", "0", *["0"] * 9]
        assert len(ids) == RELAYS


async def test_what_is_not_inference_is_answered_by_the_brain(worker: StreamingWorker) -> None:
    async with relays(worker) as router, client_of(router) as client:
        assert (await client.get("/livez")).text == "OK"
        assert (await client.get("/v1/models")).status_code == 200
        forged = {"x-laneway-peer": "203.0.113.9"}
        listed = await client.get("/workers", headers=forged)
        assert listed.json()["total"] == 1
        assert "x-request-id" in listed.headers
        assert "x-laneway-peer" not in listed.headers
        proxied = await client.get("/workers", headers={"x-forwarded-for": "203.0.113.9"})
        assert proxied.status_code == 403
        async with streaming_worker() as another:
            added = await client.post("/workers", json={"url": another.url})
            assert added.status_code == 202
            another.release.set()
            worker.release.set()
            async with asyncio.timeout(10):
                while not another.heads:
                    assert (await client.post(PATH, json=CHAT)).status_code == 200
            gone = await client.delete(f"/workers/{added.json()['id']}?deadline_s=0")
            assert gone.json()["status"] == "removed"
            assert (await client.post(PATH, json=CHAT)).status_code == 200
        wrong = await client.put("/workers", content=b"x" * 100)
        assert wrong.status_code == 405
        large = await client.post("/workers", content=b"x" * (2**20 + 1))
        assert large.status_code == 413


async def test_bodies_that_never_come_take_nothing_from_others(worker: StreamingWorker) -> None:
    head = b"POST /workers HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    async with relays(worker, flags=("--set", "server.body_timeout_s=3")) as router:
        host, _, port = router.url.removeprefix("http://").rpartition(":")
        async with AsyncExitStack() as stack:
            readers = []
            for _ in range(150 * RELAYS):
                reader, writer = await asyncio.open_connection(host, int(port))
                stack.callback(writer.close)
                writer.write(head)
                await writer.drain()
                readers.append(reader)
            for path in ("/readyz", "/metrics", "/workers", "/health") * 3:
                async with client_of(router) as once:  # the kernel chooses its relay
                    answer = await once.get(path, timeout=2.5)
                assert answer.status_code == 200, (path, answer.text)
            for reader in readers:
                line = await asyncio.wait_for(reader.readline(), 10)
                assert line.startswith(b"HTTP/1.1 408 "), line


async def test_a_change_of_the_configuration_reaches_all_relays(worker: StreamingWorker) -> None:
    worker.release.set()
    large = {**CHAT, "user": "x" * 5_000}
    async with relays(worker) as router, client_of(router) as client:
        changed = await client.patch("/config", json={"server": {"body_bytes_max": 4_096}})
        assert changed.status_code == 200, changed.text
        ids: set[str] = set()
        async with asyncio.timeout(10):
            while len(ids) < RELAYS:  # each hears of it in its own time
                async with client_of(router) as once:
                    answer = await once.post(PATH, json=large)
                if answer.status_code == 413:
                    ids.add(answer.headers["x-request-id"][:20])
        async with client_of(router) as once:
            assert (await once.post(PATH, json=large)).status_code == 413
            assert (await once.post(PATH, json=CHAT)).status_code == 200


async def test_a_key_that_is_taken_back_opens_no_connection_that_showed_it_before(
    worker: StreamingWorker,
) -> None:
    worker.release.set()
    key = {"authorization": "Bearer lw-acme"}
    tenants = {"acme": {"keys": [digest_of("lw-acme")]}}
    async with relays(worker) as router, AsyncExitStack() as stack, client_of(router) as admin:
        changed = await admin.patch("/config", json={"tenants": tenants})
        assert changed.status_code == 200, changed.text
        kept = [await stack.enter_async_context(client_of(router)) for _ in range(8)]
        for client in kept:  # a head that is repeated is judged once
            async with asyncio.timeout(5):
                while (await client.post(PATH, json=CHAT)).status_code != 401:
                    pass
            for _ in range(3):
                assert (await client.post(PATH, json=CHAT, headers=key)).status_code == 200
        tenants["acme"]["keys"] = [digest_of("lw-another")]
        changed = await admin.patch("/config", json={"tenants": tenants})
        assert changed.status_code == 200, changed.text
        async with asyncio.timeout(2):
            for client in kept:
                while (await client.post(PATH, json=CHAT, headers=key)).status_code != 401:
                    pass
        for client in kept:
            assert (await client.post(PATH, json=CHAT, headers=key)).status_code == 401


async def test_a_relay_that_dies_loses_its_own_streams_only(worker: StreamingWorker) -> None:
    async with relays(worker) as router, client_of(router) as client:
        by_relay = await streams_on_both(router)
        running = sum(map(len, by_relay.values()))
        await until_in_flight(client, running)
        victim = process_ids(router, "relay serves")[0]
        os.kill(victim, signal.SIGKILL)
        await router.logged("ended with signal 9")
        lost: list[list[Stream]] = []
        kept: list[list[Stream]] = []
        await asyncio.wait(
            [s.ended for streams in by_relay.values() for s in streams],
            timeout=10,
            return_when=asyncio.FIRST_EXCEPTION,
        )
        for streams in by_relay.values():
            (lost if any(s.ended.done() for s in streams) else kept).append(streams)
        assert (len(lost), len(kept)) == (1, 1)
        for stream in lost[0]:
            with pytest.raises(httpx.TransportError):
                await stream.ended
        async with client_of(router) as fresh:
            await until_in_flight(fresh, len(kept[0]))
            worker.release.set()
            for stream in kept[0]:
                await stream.ended
                assert stream.text.endswith("data: [DONE]\n\n")
            await until_in_flight(fresh, 0)
            aborted = await series(fresh, "laneway_requests_total", 'reason="relay_lost"')
            assert aborted == len(lost[0])
            await here(router, RELAYS + 1)
            state = (await fresh.get("/admin/state")).json()
            assert all(each["load"] == 0 for each in state["workers"])


async def test_a_brain_that_dies_cuts_no_stream_and_costs_no_request(
    worker: StreamingWorker,
) -> None:
    async with relays(worker) as router:
        by_relay = await streams_on_both(router)
        running = [stream for streams in by_relay.values() for stream in streams]
        os.kill(process_ids(router, "the brain decides")[0], signal.SIGKILL)
        await router.logged("brain ended with signal 9")
        late = Stream(router)  # waits for the next brain
        await late.begun()
        async with client_of(router) as client:
            await until_in_flight(client, len(running) + 1)
            worker.release.set()
            for stream in (*running, late):
                await stream.ended
                assert stream.text.endswith("data: [DONE]\n\n")
            await until_in_flight(client, 0)
            succeeded = await series(client, "laneway_requests_total", 'outcome="success"')
            assert succeeded == len(running) + 1
            state = (await client.get("/admin/state")).json()
            assert all(each["kv_reserved_tokens"] == 0 for each in state["workers"])


async def test_a_stop_lets_streams_of_all_relays_end(worker: StreamingWorker) -> None:
    async with relays(worker) as router:
        by_relay = await streams_on_both(router)
        router.signal(signal.SIGTERM)
        for relay in process_ids(router, "relay serves"):
            os.kill(relay, signal.SIGTERM)  # as a manager of services may do besides
        await router.logged_times("listener closed", RELAYS)
        with pytest.raises(httpx.ConnectError):
            async with client_of(router) as newcomer:
                await newcomer.get("/livez")
        worker.release.set()
        for streams in by_relay.values():
            for stream in streams:
                await stream.ended
                assert stream.text.endswith("data: [DONE]\n\n")
        assert await router.exit_status() == 0
        assert "Traceback" not in router.log


async def test_a_second_signal_ends_all_at_once(worker: StreamingWorker) -> None:
    async with relays(worker, grace_s=600) as router:
        by_relay = await streams_on_both(router)
        router.signal(signal.SIGTERM)
        await router.logged_times("listener closed", RELAYS)
        router.signal(signal.SIGINT)
        assert await asyncio.wait_for(router.exit_status(), 15) == 1
        ended = [stream.ended for streams in by_relay.values() for stream in streams]
        await asyncio.gather(*ended, return_exceptions=True)
        assert "Traceback" not in router.log


async def test_no_process_outlives_the_supervisor(worker: StreamingWorker) -> None:
    async with relays(worker) as router:
        router.signal(signal.SIGKILL)
        await router.exit_status()
        await asyncio.wait_for(router.log_ended(), 10)  # whoever lives would hold it open


async def test_a_taken_port_is_a_message_and_status_1(worker: StreamingWorker) -> None:
    async with relays(worker) as router:
        port = router.url.rpartition(":")[2]
        status, log = await failed_start("--relays", "2", "--port", port)
        assert status == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in log


async def test_the_next_brain_begins_with_what_the_file_says_now(
    worker: StreamingWorker, tmp_path: Path
) -> None:
    file = tmp_path / "laneway.yaml"

    def write(url: str) -> None:
        file.write_text(
            f"relays: {{count: {RELAYS}}}\nlive: {{poll_s: 0}}\nprobe: {{interval_s: 0.1}}\n"
            f"workers: [{{url: '{url}'}}]\n"
        )

    async def known(router: RouterProcess) -> list[str]:
        async with client_of(router) as client:
            return [each["url"] for each in (await client.get("/workers")).json()["workers"]]

    async def brain_dies(router: RouterProcess, deaths: int) -> None:
        os.kill(process_ids(router, "the brain decides")[-1], signal.SIGKILL)
        await router.logged_times("the brain decides as process", deaths + 1)
        await here(router, RELAYS * (deaths + 1))

    async with streaming_worker() as other:
        write(worker.url)
        async with router_process("--config", str(file)) as router:
            await here(router, RELAYS)
            assert await known(router) == [worker.url]
            write(other.url)
            router.signal(signal.SIGHUP)
            async with asyncio.timeout(10):
                while await known(router) != [other.url]:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.05)
            await brain_dies(router, 1)
            assert await known(router) == [other.url]
            file.write_text("workers: [{url: 7}]\n")
            await brain_dies(router, 2)
            assert await known(router) == [other.url]
            assert "the brain begins with the last good one" in router.log


async def hang_another(router: RouterProcess, client: httpx.AsyncClient) -> int:
    """Stop the first relay, once the connection of `client` is to another one; its process id."""
    first = process_ids(router, "relay serves")[0]
    for _ in range(20):  # the kernel chooses where it connects to
        os.kill(first, signal.SIGSTOP)
        try:
            await client.get("/livez", timeout=0.5)
        except httpx.TimeoutException:
            os.kill(first, signal.SIGCONT)
        else:
            return first
    raise AssertionError("all connections went to one relay")


async def test_a_worker_removed_while_a_relay_hung_stays_removed_under_the_next_brain(
    worker: StreamingWorker,
) -> None:
    async with (
        streaming_worker() as other,
        relays(worker) as router,
        client_of(router) as client,  # one connection, so one relay
    ):
        answer = await client.post("/workers", json={"url": other.url, "models": ["m"]})
        assert answer.status_code == 202
        hung = await hang_another(router, client)
        assert len((await client.get("/workers")).json()["workers"]) == 2
        worker_id = answer.json()["id"]
        assert (await client.delete(f"/workers/{worker_id}")).status_code in (200, 202)
        async with asyncio.timeout(10):
            while len((await client.get("/workers")).json()["workers"]) == 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        os.kill(process_ids(router, "the brain decides")[0], signal.SIGKILL)
        await here(router, RELAYS + 1)
        os.kill(hung, signal.SIGCONT)
        await here(router, RELAYS + 2)
        await until_ready(client)
        urls = [each["url"] for each in (await client.get("/workers")).json()["workers"]]
        assert urls == [worker.url]
