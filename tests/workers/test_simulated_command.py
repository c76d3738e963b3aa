"""`laneway worker --simulated` beside `laneway worker`: the same flags for the same things."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from socket import socket

import pytest
from pydantic import SecretStr

from router.contract import BOTH_LANES, Lane
from tests.cli_run import Run, run
from tests.workers.conftest import OPTIONS
from tests.workers.recorder import running_router
from workers.addresses import own_host_towards
from workers.sim.server import RouterAddress, run_simulated
from workers.simulated import public_host_from

__all__ = ["run"]  # a fixture


@asynccontextmanager
async def command(*flags: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`laneway worker FLAGS` as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from router.cli import main; main()", "worker", *flags),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextmanager
def taken_port() -> Iterator[int]:
    """A port that something listens on; nothing does on the one before it."""
    while True:
        with socket() as before, socket() as taken:
            before.bind(("127.0.0.1", 0))
            port = before.getsockname()[1] + 1
            try:
                taken.bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue  # somebody else has it, or there is none
            before.close()
            taken.listen()
            yield port
            return


async def test_the_command_registers_with_the_flags_that_an_agent_has() -> None:
    simulated = ("--simulated", "3", "--port", "0", "--lanes", "short", "long", "both")
    async with running_router(admin_key="k") as router, asyncio.timeout(30):
        async with command(*simulated, "--register", router.url, "--admin-key", "k") as process:
            await router.until(lambda: len(router.known) == 3)
            lanes = {spec.lanes for spec in router.known.values()}
            assert lanes == {frozenset({Lane.SHORT}), frozenset({Lane.LONG}), BOTH_LANES}
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        assert not router.known
        register = ("--simulated", "1", "--port", "0", "--register", router.url)
        async with command(*register, LANEWAY_ADMIN_KEY="k"):
            await router.until(lambda: len(router.known) == 1)


@pytest.mark.parametrize(
    ("count", "flags", "why"),
    [
        ("1", ("--port", "{taken}"), "Address already in use; choose another with --port"),
        (
            "2",
            ("--port", "{before}"),
            "Address already in use; choose another with --port (asked for: {before} to {taken})",
        ),
        (
            "1",
            ("--host", "203.0.113.7"),
            "Cannot assign requested address; choose another with --host",
        ),
    ],
)
def test_an_address_that_cannot_be_had_is_named_with_the_flag_that_changes_it(
    run: Run, count: str, flags: tuple[str, ...], why: str
) -> None:
    with taken_port() as taken:
        ports = {"taken": str(taken), "before": str(taken - 1)}
        ended = run("worker", "--simulated", count, *(flag.format(**ports) for flag in flags))
        host, port = ("203.0.113.7", "31000") if "--host" in flags else ("127.0.0.1", str(taken))
    assert ended.status == 1
    assert ended.err == f"error: cannot listen on {host}:{port}: {why.format(**ports)}\n"


@pytest.mark.parametrize("server", [("--agent-for", "http://127.0.0.1:1"), ("--", "sleep", "60")])
def test_a_taken_port_of_an_agent_is_named_with_its_flag(run: Run, server: tuple[str, ...]) -> None:
    with taken_port() as port:
        listen = ("--listen-host", "127.0.0.1", "--listen-port", str(port))
        args = (*server, *listen) if server[0] != "--" else (*listen, *server)
        ended = run("worker", *args)
    assert ended.status == 1
    assert ended.err == (
        f"laneway: the agent cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another with --listen-port\n"
    )


async def test_workers_register_at_every_router_with_the_key_that_they_want() -> None:
    stop = asyncio.Event()
    async with running_router() as one, running_router(admin_key="k") as other, asyncio.timeout(20):
        routers = ((one, None), (other, SecretStr("k")))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                run_simulated(
                    replace(OPTIONS, api_key="sk-worker"),
                    ports=[0, 0],
                    register=[RouterAddress(url=r.url, admin_key=k) for r, k in routers],
                    stop=stop,
                )
            )
            for router, _ in routers:
                await router.until(lambda router=router: len(router.known) == 2)  # type: ignore[misc]
            assert one.known == other.known
            told = [spec.api_key for spec in one.known.values()]
            stop.set()
        assert told == [SecretStr("sk-worker")] * 2
        assert one.known == other.known == {}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_what_listens_on_all_interfaces_registers_where_routers_see_it(host: str) -> None:
    routers = [RouterAddress(url="http://127.0.0.1:1"), RouterAddress(url="http://127.0.0.1:2")]
    assert public_host_from(host, routers) == own_host_towards(routers[0].url) == "127.0.0.1"
    assert public_host_from(host, []) is None
    with pytest.raises(ValueError, match=r"no\.invalid.*--host"):
        public_host_from(host, [RouterAddress(url="http://no.invalid:1")])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.7", "worker-1"])
def test_what_listens_on_one_address_registers_with_it(host: str) -> None:
    assert public_host_from(host, [RouterAddress(url="http://no.invalid:1")]) is None


async def test_a_public_host_is_what_routers_hear() -> None:
    stop = asyncio.Event()
    async with running_router() as router, asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        address = RouterAddress(url=router.url)
        tasks.create_task(
            run_simulated(OPTIONS, ports=[0], register=[address], public_host="10.0.0.9", stop=stop)
        )
        await router.until(lambda: len(router.known) == 1)
        (spec,) = router.known.values()
        stop.set()
    assert spec.url.startswith("http://10.0.0.9:")
