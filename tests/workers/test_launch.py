"""The launcher with small programs in SGLang's place."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.contract import Lane, WorkerSpec
from tests.workers.recorder import Router, running_router
from workers.agent_settings import AgentSettings
from workers.launch import LaunchSettings, run_worker, served_url, sglang_command
from workers.registration import RegistrationSettings

# Serves /ready and an idle /v1/loads, and ends on SIGTERM with its second argument, unless it is
# "never". Its third is a file that gets the id of a child of its own.
SERVER = """
import http.server, os, signal, subprocess, sys
port, code, child_file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
on_term = (lambda *_: None) if code == "never" else (lambda *_: os._exit(int(code)))
signal.signal(signal.SIGTERM, on_term)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(child_file, "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def free_ports() -> tuple[int, int]:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        return one.getsockname()[1], two.getsockname()[1]


def settings(router: Router, child_file: Path, code: str) -> LaunchSettings:
    port, agent_port = free_ports()
    url, health_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{agent_port}"
    agent = AgentSettings(
        server_url=url,
        spec=WorkerSpec(url=url, health_url=health_url),
        router_urls=(router.url,),
        listen_host="127.0.0.1",
        listen_port=agent_port,
        poll_interval_s=0.02,
        drain_grace_s=5,
        registration=RegistrationSettings(check_s=0.05, retry_s=0.02, retry_s_max=0.1),
    )
    command = (sys.executable, "-c", SERVER, str(port), code, str(child_file))
    return LaunchSettings(command=command, agent=agent, stop_grace_s=0.5)


@asynccontextmanager
async def launched(
    router: Router, with_settings: LaunchSettings
) -> AsyncIterator[asyncio.Task[int]]:
    """The launcher, once its worker is registered."""
    task = asyncio.get_running_loop().create_task(run_worker(with_settings))
    try:
        await router.until(lambda: bool(router.known))
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def status_of(pid: int) -> list[str]:
    """State, parent and so on of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


async def gone(pid: int) -> None:
    """Wait until a process that is not our child has ended, or is only not yet reaped."""
    async with asyncio.timeout(5):
        while True:
            try:
                if status_of(pid)[0] == "Z":
                    return
            except FileNotFoundError:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("7", 7), ("never", 137)])
async def test_sigterm_drains_then_ends_the_server_and_gives_its_code(
    tmp_path: Path, code: str, expected: int
) -> None:
    child_file = tmp_path / "child"
    async with (
        running_router() as router,
        launched(router, settings(router, child_file, code)) as task,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == expected
        assert not router.known
        await gone(int(child_file.read_text()))


async def test_a_server_that_dies_takes_the_launcher_with_it(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    async with (
        running_router() as router,
        launched(router, settings(router, child_file, "0")) as task,
    ):
        child = int(child_file.read_text())
        server = int(status_of(child)[1])
        os.kill(server, signal.SIGSEGV)
        assert await task == 128 + signal.SIGSEGV
        assert not router.known, "the routers are told at once"
        await gone(child)


async def test_a_launcher_that_is_cancelled_leaves_no_server_behind(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    async with (
        running_router() as router,
        launched(router, settings(router, child_file, "0")) as task,
    ):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await gone(int(child_file.read_text()))


async def test_a_command_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    async with running_router() as router:
        wrong = settings(router, tmp_path / "child", "0")
        with pytest.raises(OSError, match="no-such-program"):
            await run_worker(LaunchSettings(command=("no-such-program",), agent=wrong.agent))


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ("", "http://127.0.0.1:30000"),
        ("--port 8000", "http://127.0.0.1:8000"),
        ("--port=8000 --host=0.0.0.0", "http://127.0.0.1:8000"),
        ("--host 10.0.0.7 --port 1 --port 2", "http://10.0.0.7:2"),
        ("--host fd00::7", "http://[fd00::7]:30000"),
        ("--port", "http://127.0.0.1:30000"),
    ],
)
def test_the_servers_address_is_read_from_its_command(flags: str, url: str) -> None:
    assert served_url(("python", "-m", "sglang.launch_server", *flags.split())) == url


async def test_the_command_line_runs_a_server_as_a_worker(tmp_path: Path) -> None:
    (port, agent_port), child_file = free_ports(), tmp_path / "child"
    async with running_router() as router:
        words = ["worker", "--register", router.url, "--lanes", "short", "--drain-grace-s", "5"]
        words += ["--agent-for", f"http://127.0.0.1:{port}", "--listen-port", str(agent_port)]
        command = [sys.executable, "-c", SERVER, str(port), "7", str(child_file)]
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", *words, "--", *command
        )
        try:
            await router.until(lambda: bool(router.known))
            (spec,) = router.known.values()
            assert spec.lanes == {Lane.SHORT}
            worker.terminate()
            async with asyncio.timeout(10):
                assert await worker.wait() == 7, "the server's own status"
            assert not router.known
            await gone(int(child_file.read_text()))
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


async def test_a_command_line_that_names_no_program_is_a_message(
    capfd: pytest.CaptureFixture[str],
) -> None:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "worker", "--", "no-such-program"
    )
    assert await worker.wait() == 1
    said = capfd.readouterr().err
    assert "no-such-program" in said
    assert "Traceback" not in said


def test_a_lane_has_its_flags_and_own_flags_win() -> None:
    short = sglang_command("m", host="0.0.0.0", port=1, lane=Lane.SHORT)
    long = sglang_command(
        "m", host="0.0.0.0", port=1, lane=Lane.LONG, flags=["--max-running-requests", "8"]
    )
    running = "--max-running-requests"
    assert int(short[short.index(running) + 1]) > 64
    assert long[-2:] == (running, "8")
    assert running not in sglang_command("m", host="0.0.0.0", port=1, lane=None)
