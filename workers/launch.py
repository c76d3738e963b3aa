"""Starts an SGLang server together with its agent, as one process to a supervisor.

SIGTERM drains the worker first (the agent has it withdrawn at the routers and waits until it is
idle), then goes on to the server. A server that ends on its own takes the launcher with it, and
the launcher's exit code is the server's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from router.contract import Lane
from workers.agent import Agent, set_up_log, stopping_on_signals
from workers.agent_settings import AgentSettings
from workers.gpu import find_gpus

_log = logging.getLogger(__name__)

# Flags by lane. The long lane runs fewer requests at once, so that each keeps its KV memory and
# its pace; the short lane takes many, and small prefill chunks keep their first tokens quick.
# Routers read the limit back from the server.
LANE_FLAGS: Final[Mapping[Lane, tuple[str, ...]]] = {
    Lane.SHORT: ("--max-running-requests", "256", "--chunked-prefill-size", "2048"),
    Lane.LONG: ("--max-running-requests", "64", "--chunked-prefill-size", "8192"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What is started. `stop_grace_s` is how long a server may take to end after SIGTERM."""

    command: tuple[str, ...]
    agent: AgentSettings
    stop_grace_s: float = 30.0


def sglang_command(
    model_path: str, *, host: str, port: int, lane: Lane | None, flags: Sequence[str] = ()
) -> tuple[str, ...]:
    """The command line of a server for one lane; `flags` come last and so win."""
    profile = LANE_FLAGS[lane] if lane is not None else ()
    base = (sys.executable, "-m", "sglang.launch_server", "--model-path", model_path)
    return (*base, "--host", host, "--port", str(port), *profile, *flags)


def served_url(command: Sequence[str]) -> str:
    """Where the server that `command` starts can be reached from here, by SGLang's flags."""
    host, port = _flag(command, "--host") or "", _flag(command, "--port") or "30000"
    if host in ("", "0.0.0.0", "::", "localhost"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _flag(command: Sequence[str], name: str) -> str | None:
    """The last value of a flag, given as `--flag value` or `--flag=value`."""
    found = None
    for word, following in zip(command, (*command[1:], None), strict=True):
        if word == name:
            found = following
        elif word.startswith(name + "="):
            found = word.partition("=")[2]
    return found


async def run_worker(settings: LaunchSettings) -> int:
    """Run server and agent until either ends; returns the exit code.

    Raises CannotListen when the agent's port is taken, and another OSError when the command cannot
    be started.
    """
    set_up_log()
    # A session of its own: a Ctrl-C in the terminal reaches us alone, and we drain first.
    server = await asyncio.create_subprocess_exec(*settings.command, start_new_session=True)
    agent = Agent(settings.agent, find_gpus(os.environ))
    loop = asyncio.get_running_loop()
    ended = loop.create_task(server.wait())
    serving = loop.create_task(agent.run())
    try:
        with stopping_on_signals(agent):
            await asyncio.wait((ended, serving), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                _log.warning("the server has ended with %s", server.returncode)
                agent.hurry.set()
            agent.stop.set()
            await serving
            return await _stopped(server, settings.stop_grace_s)
    finally:
        _kill(server)
        serving.cancel()
        await asyncio.gather(ended, serving, return_exceptions=True)


async def _stopped(server: asyncio.subprocess.Process, grace_s: float) -> int:
    """End the server, if it has not ended, and return its exit code as a shell tells it."""
    if server.returncode is None:
        server.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await server.wait()
        except TimeoutError:
            _log.warning("the server did not end within %g s: killing it", grace_s)
            _kill(server)
    code = await server.wait()
    return code if code >= 0 else 128 - code


def _kill(server: asyncio.subprocess.Process) -> None:
    """Kill the server's whole session: its schedulers are processes of their own."""
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of it has ended
