"""Load answers of several releases, faults, and the command."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import uvloop
from pydantic import SecretStr

from router.contract import BOTH_LANES, Lane, WorkerSpec, decode_report
from tests.workers.conftest import OPTIONS, StartWorker, client_of, until
from tests.workers.test_simulated import CHAT, ENDLESS, events_of
from workers.profiles import BadProfiles, load_profiles
from workers.sim.http_server import Connection, Exchange
from workers.sim.server import RouterAddress, SimulatedServer, run_simulated

# The figures of one rank, as a running SGLang 0.5.23 answered with include=core.
CORE = {
    "timestamp",
    "dp_rank",
    "num_running_reqs",
    "num_waiting_reqs",
    "num_waiting_uncached_tokens",
    "num_used_tokens",
    "num_total_tokens",
    "num_active_tokens",
    "num_prealloc_ready_tokens",
    "max_total_num_tokens",
    "max_running_requests",
    "token_usage",
    "gen_throughput",
    "cache_hit_rate",
    "utilization",
    "total_prefill_uncached_tokens",
    "total_prefill_busy_us",
    "decode_moments",
}


# -- load ---------------------------------------------------------------------------------


async def test_loads_has_the_shape_of_the_current_release(http: httpx.AsyncClient) -> None:
    body = (await http.get("/v1/loads")).json()
    assert list(body) == ["timestamp", "version", "accelerator", "num_accelerators", "loads"]
    assert set(body["loads"][0]) == CORE | {"memory", "disaggregation", "queues"}
    core = (await http.get("/v1/loads?include=core")).json()
    assert set(core["loads"][0]) == CORE
    assert (await http.get("/v1/loads?dp_rank=5")).json()["loads"] == []
    bad = await http.get("/v1/loads?include=nonsense")
    assert (bad.status_code, bad.text) == (500, "Internal Server Error")
    gauges = (await http.get("/v1/loads?format=prometheus")).text
    assert 'sglang_num_running_reqs{dp_rank="0"} 0' in gauges
    assert 'sglang_queues_waiting{dp_rank="0"} 0' in gauges


@pytest.mark.parametrize(
    ("version", "answers"),
    [
        ("0.5.5", {"/v1/loads": 404, "/get_load": 200, "/ready": 404}),
        ("0.5.9", {"/v1/loads": 200, "/get_load": 200, "/ready": 404}),
        ("0.5.15", {"/v1/loads": 200, "/get_load": 200, "/ready": 404}),
        ("0.5.20", {"/v1/loads": 200, "/get_load": 200, "/ready": 200}),
        ("0.5.23", {"/v1/loads": 200, "/get_load": 404, "/ready": 200}),
    ],
)
async def test_releases_differ_in_how_they_tell_their_load(
    start_worker: StartWorker, version: str, answers: dict[str, int]
) -> None:
    async with client_of(await start_worker(sglang_version=version)) as client:
        assert {path: (await client.get(path)).status_code for path in answers} == answers
        assert ("aggregate" in (await client.get("/v1/loads")).json()) == (version == "0.5.9")


async def test_all_forms_of_the_load_agree_and_follow_the_work(start_worker: StartWorker) -> None:
    worker = await start_worker(
        engine={"max_running_requests": 1}, sglang_version="0.5.20", time_scale=1.0
    )
    async with client_of(worker) as client:
        bodies = [{**ENDLESS, "stream": False, "rid": f"r{n}"} for n in range(3)]
        tasks = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in bodies
        ]
        await until(client, lambda load: (load["running"], load["waiting"]) == (1, 2))
        report = decode_report((await client.get("/health")).content)
        assert (report.running_requests, report.queued_requests) == (1, 2)
        # Two prompts of 22 tokens, and the running one while it is being prefilled.
        assert report.queued_uncached_tokens in (44, 66)
        assert report.kv_total_tokens == 420_000
        assert report.ready is True
        old = (await client.get("/get_load")).json()[0]
        assert (old["num_reqs"], old["num_waiting_reqs"]) == (3, 2)
        metrics = (await client.get("/metrics")).text
        label = (
            '{engine_type="unified",model_name="sim-8b",tp_rank="0",pp_rank="0",moe_ep_rank="0"}'
        )
        assert f"sglang:num_queue_reqs{label} 2" in metrics
        await client.post("/abort_request", json={"abort_all": True})
        await asyncio.gather(*tasks)


async def test_the_health_body_can_be_empty_as_sglangs(start_worker: StartWorker) -> None:
    async with client_of(await start_worker(sglang_health=True)) as client:
        answer = await client.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_server_info_tells_what_a_router_learns_from_it(http: httpx.AsyncClient) -> None:
    info = (await http.get("/server_info")).json()
    assert info["max_total_num_tokens"] == 420_000
    assert info["max_running_requests"] == 2048
    assert info["context_length"] == 131_072
    assert (await http.get("/model_info")).json()["served_model_name"] == "sim-8b"


# -- faults -------------------------------------------------------------------------------


async def test_a_slow_factor_stretches_an_answer(http: httpx.AsyncClient) -> None:
    async def latency_s() -> float:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 21, "ignore_eos": True}}
        answer = (await http.post("/generate", json=body)).json()
        return float(answer["meta_info"]["e2e_latency"])

    normal = await latency_s()
    await http.post("/fault", json={"slow_factor": 20.0})
    assert await latency_s() == pytest.approx(20 * normal, rel=0.01)
    await http.delete("/fault")
    await http.post("/slow_down", json={"forward_sleep_time": 0.01})
    assert await latency_s() == pytest.approx(21 * 0.01 + normal, rel=0.05)
    assert (await http.post("/slow_down", json={"forward_sleep_time": "x"})).status_code == 400


async def test_a_hanging_worker_answers_nothing_until_it_recovers(http: httpx.AsyncClient) -> None:
    await http.post("/fault", json={"hang": True})
    ready = asyncio.create_task(http.get("/ready"))
    chat = asyncio.create_task(http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}))
    assert (await http.get("/fault")).json()["hang"] is True
    assert not ready.done()
    await http.post("/fault", json={"hang": False})
    assert (await ready).status_code == (await chat).status_code == 200


async def test_a_stalled_engine_answers_with_figures_that_age(http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=ENDLESS) as answer:
        pieces = answer.aiter_bytes()  # kept: dropping it would close the stream
        await anext(pieces)
        await http.post("/fault", json={"stall": True})
        first = (await http.get("/v1/loads")).json()
        second = (await http.get("/v1/loads")).json()
        assert second["loads"] == first["loads"]
        assert second["timestamp"] > first["timestamp"]
        assert (await http.get("/ready")).status_code == 200
        report = decode_report((await http.get("/health")).content)
        assert report.age_s is not None
        assert report.age_s > 0
        await http.delete("/fault")
        await until(http, lambda load: load["running"] == 1)


async def test_frozen_figures_do_not_stop_the_work(http: httpx.AsyncClient) -> None:
    await http.post("/fault", json={"freeze_figures": True})
    assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    loads = (await http.get("/v1/loads")).json()["loads"][0]
    assert loads["total_prefill_uncached_tokens"] == 0


async def test_injected_errors_repeat_with_the_seed(start_worker: StartWorker) -> None:
    outcomes = []
    for _ in range(2):
        worker = await start_worker(seed=3, faults={"error_rate": 0.5})
        async with client_of(worker) as client:
            codes = []
            for _ in range(12):
                answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
                codes.append(answer.status_code)
        outcomes.append(codes)
    assert outcomes[0] == outcomes[1]
    assert set(outcomes[0]) == {200, 500}


async def test_a_worker_dies_with_its_nth_request_and_comes_back(start_worker: StartWorker) -> None:
    worker = await start_worker(faults={"kill_after_requests": 2, "restart_after_s": 0.05})
    async with client_of(worker) as client:
        first = client.stream("POST", "/v1/chat/completions", json=ENDLESS)
        async with first as answer:
            pieces = answer.aiter_bytes()
            await anext(pieces)
            with pytest.raises(httpx.TransportError):
                await client.post("/v1/chat/completions", json=CHAT)
            with pytest.raises(httpx.TransportError):
                async for _ in pieces:
                    pass
        await worker.restarted()
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        await until(client, lambda load: load["used"] == 0)


async def test_a_killed_worker_refuses_connections(start_worker: StartWorker) -> None:
    worker = await start_worker()
    worker.kill()
    async with client_of(worker) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/ready")


async def test_streams_break_after_so_many_events(start_worker: StartWorker) -> None:
    worker = await start_worker(faults={"reset_after_chunks": 3})
    text = ""
    async with (
        client_of(worker) as client,
        client.stream("POST", "/v1/chat/completions", json=ENDLESS) as answer,
    ):
        try:
            async for piece in answer.aiter_text():
                text += piece
        except httpx.TransportError:
            text += "broken"
        await until(client, lambda load: load == {"running": 0, "waiting": 0, "used": 0})
    assert len(events_of(text.removesuffix("broken"))) == 3
    assert text.endswith("broken")


@pytest.mark.parametrize(
    "fault",
    [
        {"nonsense": 1},
        {"slow_factor": 0},
        {"slow_factor": "2"},
        {"error_rate": 2},
        {"hang": 1},
        {"kill_after_requests": 1.5},
        {"reset_after_chunks": True},
    ],
)
async def test_a_fault_that_does_not_exist_is_400(
    http: httpx.AsyncClient, fault: dict[str, Any]
) -> None:
    assert (await http.post("/fault", json=fault)).status_code == 400
    assert (await http.get("/fault")).json()["slow_factor"] == 1.0


# -- the command --------------------------------------------------------------------------


def test_requests_that_come_in_one_turn_of_uvloop_are_all_served() -> None:
    """The command runs on uvloop, whose timers differ; the other tests run on asyncio's loop."""

    async def burst(count: int) -> list[bytes]:
        server = SimulatedServer(OPTIONS)
        await server.start()
        sockets = [await asyncio.open_connection(server.host, server.port) for _ in range(count)]
        body = b'{"prompt":"a","max_tokens":3,"stream":true}'
        head = b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        for _, writer in sockets:
            writer.write(head % len(body) + body)
        async with asyncio.timeout(10):
            answers = [await reader.read() for reader, _ in sockets]
        for _, writer in sockets:
            writer.close()
        await server.stop()
        return answers

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(burst(10))
    assert all(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in answers)


async def test_the_command_serves_many_workers_and_drains_on_sigterm() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.simulated", "--simulated", "3", "--port", "0"),
        *("--max-running-requests", "5"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        lines = [(await process.stdout.readline()).decode() for _ in range(3)]
        urls = [line.split()[-1] for line in lines]
        assert len(set(urls)) == 3
        async with httpx.AsyncClient(base_url=urls[1], trust_env=False) as client:
            info = (await client.get("/server_info")).json()
            body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(client, lambda load: load["running"] == 1)
            process.send_signal(signal.SIGTERM)
            assert (await running).json()["usage"]["completion_tokens"] == 50
        assert info["max_running_requests"] == 5
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile", "nope"], "no profile 'nope'"),
        (["--error-rate", "3"], "error_rate"),
        (["--lanes", "middle"], "middle"),
        (["--register", "router:30000"], "http://"),
        (["--profiles", "/nonexistent.yaml"], "/nonexistent.yaml"),
    ],
)
async def test_a_flag_that_cannot_be_used_is_status_2(flags: list[str], message: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.simulated", *flags), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert message in errors.decode()


async def test_workers_register_with_their_lanes_and_withdraw() -> None:
    """At a router that is not ready for the first of them."""
    seen: list[tuple[str, str, Any, str | None]] = []
    done, stop = asyncio.Event(), asyncio.Event()

    def route(exchange: Exchange) -> None:
        body = orjson.loads(exchange.body) if exchange.body else None
        seen.append((exchange.method, exchange.path, body, exchange.headers.get("authorization")))
        if len(seen) == 1:
            exchange.respond(503, b"")
            return
        exchange.respond(202, b"{}")
        if sum(method == "POST" for method, *_ in seen) == 3:
            done.set()

    listener = await asyncio.get_running_loop().create_server(
        lambda: Connection(route, set()), "127.0.0.1", 0
    )
    port = listener.sockets[0].getsockname()[1]
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(
            run_simulated(
                OPTIONS,
                ports=[0, 0],
                lanes=[frozenset({Lane.SHORT}), BOTH_LANES],
                register=[
                    RouterAddress(url=f"http://127.0.0.1:{port}", admin_key=SecretStr("admin"))
                ],
                stop=stop,
            )
        )
        await done.wait()
        stop.set()
    listener.close()
    specs = [WorkerSpec(**body) for method, _, body, _ in seen if method == "POST"]
    posts = {spec.url: spec.lanes for spec in specs}
    assert set(posts.values()) == {frozenset({Lane.SHORT}), BOTH_LANES}
    deleted = {path for method, path, *_ in seen if method == "DELETE"}
    assert deleted == {f"/workers/{url}" for url in posts}
    assert {key for *_, key in seen} == {"Bearer admin"}


# -- profiles -----------------------------------------------------------------------------


def test_the_documented_place_of_the_profiles_is_the_packaged_file() -> None:
    root = Path(__file__).resolve().parents[2]
    assert load_profiles(root / "configs" / "engine_profiles.yaml") == load_profiles()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected profiles by name"),
        ("a: 5", "a: expected fields"),
        ("a: {nope: 1}", "a.nope: unknown"),
        ("a: {base_ms: fast}", "a.base_ms: expected a number"),
        ("a: {kv_total_tokens: 0}", "a.kv_total_tokens: 0 is out of range"),
        ("a: {base_ms: 1}", "missing"),
        ("a: [", "while parsing"),
    ],
)
def test_a_bad_profiles_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profiles.yaml"
    path.write_text(text)
    with pytest.raises(BadProfiles, match=message.replace("[", r"\[")):
        load_profiles(path)


async def test_a_taken_port_is_said_and_nothing_stays_open() -> None:
    first = SimulatedServer(OPTIONS)
    await first.start()
    try:
        with pytest.raises(OSError, match=f"{first.port}: Address already in use"):
            await run_simulated(OPTIONS, ports=[0, first.port])
    finally:
        await first.stop()
