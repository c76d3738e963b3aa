"""The course of the demo: start, wait until ready, show, stop, sum up."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any, Final

import httpx
from rich.console import Console
from rich.live import Live

from router.contract import Lane
from router.demo.children import ChildFailed, Children, free_ports, is_free
from router.demo.load import Load
from router.demo.view import Cluster, View

PORT: Final = 30_000
MODEL: Final = "sim-8b"
WORKERS_PER_LANE: Final = 3
START_TIMEOUT_S: Final = 60.0
LINE_EVERY_S: Final = 2.0
LOOK_EVERY_S: Final = 0.25
ROUTER: Final = "the router"
_PLAIN: Final[Any] = {"markup": False, "soft_wrap": True}


async def demo(*, seconds: float | None, port: int | None) -> int:
    """Run the demo for `seconds`, or until a signal; return the exit status."""
    console = Console(highlight=False)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    chosen = _port(port, console)
    url = f"http://127.0.0.1:{chosen}"
    view, failures = None, 0
    try:
        async with Children() as children, _client(url) as client:
            await _start(children, client, chosen, console, stopping)
            if not stopping.is_set():
                view = await _show(children, client, console, stopping, url=url, seconds=seconds)
    except* ChildFailed as group:
        for failure in group.exceptions:
            failures += 1
            console.print(f"laneway demo: {failure}", **_PLAIN)
    if view is not None:
        console.print("\n".join(view.summary()), **_PLAIN)
        again = "laneway demo" if chosen == PORT else f"laneway demo --port {chosen}"
        console.print(f"\nTo try it by hand, start `{again}` and:\n{_curl(url)}", **_PLAIN)
    return min(failures, 1)


def _port(port: int | None, console: Console) -> int:
    wanted = PORT if port is None else port
    if wanted and is_free(wanted):
        return wanted
    chosen = free_ports(1)[0]
    if wanted:
        console.print(
            f"Port {wanted} is taken, perhaps by another router or demo; this demo's router "
            f"listens on {chosen}. Use that port in what you try, or choose one with --port.",
            **_PLAIN,
        )
    return chosen


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as client:
        yield client


async def _start(
    children: Children,
    client: httpx.AsyncClient,
    port: int,
    console: Console,
    stopping: asyncio.Event,
) -> None:
    """Start all processes, register the workers, wait until each is ready."""
    console.print("Starting one router and six simulated workers ...")
    lanes = [lane for lane in Lane for _ in range(WORKERS_PER_LANE)]
    ports = free_ports(len(lanes))
    config = str(files("router").joinpath("data/demo.yaml"))
    serve = ["-m", "router", "--config", config, "--port", str(port)]
    await children.start(ROUTER, serve)
    for number, worker_port in enumerate(ports, start=1):
        worker = ["-m", "workers.simulated", "--port", str(worker_port), "--model", MODEL]
        # Few at once, so that a small load is enough to see a queue.
        await children.start(f"worker {number}", [*worker, "--max-running-requests", "4"])
    deadline_at = time.monotonic() + START_TIMEOUT_S
    registered = False
    while not stopping.is_set():
        children.check()
        if time.monotonic() > deadline_at:
            raise ChildFailed(f"not ready within {START_TIMEOUT_S:.0f} s")
        await asyncio.sleep(0.1)
        if not await _answers(client):
            continue
        if not registered:
            registered = await _registered(client, ports, lanes)
            continue
        cluster = await _look(children, client)
        if cluster and all(worker["status"] == "Ready" for worker in cluster.workers):
            return


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/livez")).is_success
    except httpx.TransportError:
        return False


async def _registered(client: httpx.AsyncClient, ports: list[int], lanes: list[Lane]) -> bool:
    """Register the workers; False: the router did not answer in time, so try again."""
    counts = dict.fromkeys(Lane, 0)
    for port, lane in zip(ports, lanes, strict=True):
        counts[lane] += 1
        name = f"{lane.value}-{counts[lane]}"
        body = {"url": f"http://127.0.0.1:{port}", "id": name, "lanes": [lane.value]}
        try:
            answer = await client.post("/workers", json=body)
        except httpx.TransportError:
            return False
        if answer.status_code != httpx.codes.CONFLICT:  # one that is here already
            answer.raise_for_status()
    return True


async def _look(children: Children, client: httpx.AsyncClient) -> Cluster | None:
    """What the router says; None: nothing in time, on a busy machine. Raises ChildFailed."""
    try:
        state = (await client.get("/admin/state")).json()
    except httpx.TimeoutException:
        children.check(ROUTER)
        return None
    except httpx.TransportError as exc:
        children.check(ROUTER)
        raise ChildFailed(f"the router does not answer: {str(exc) or type(exc).__name__}") from exc
    depth = {lane["lane"]: lane["queued"] for lane in state["lanes"]}
    return Cluster(workers=state["workers"], queue_depth=depth)


async def _show(
    children: Children,
    client: httpx.AsyncClient,
    console: Console,
    stopping: asyncio.Event,
    *,
    url: str,
    seconds: float | None,
) -> View:
    """Send the load and show what it does until the time is over or a signal came."""
    load = Load(url, model=MODEL)
    view = View(load.tally, url=url)
    console.print(f"To try it by hand, in another terminal:\n{_curl(url)}", **_PLAIN)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(stopping))
        try:
            async with asyncio.timeout(seconds):
                await (_show_live if console.is_terminal else _show_lines)(
                    view, partial(_look, children, client), console, stopping
                )
        except TimeoutError:
            pass  # the demo's time is over, as asked
        finally:
            view.end()
            stopping.set()
    return view


Look = Callable[[], Awaitable[Cluster | None]]


async def _show_live(view: View, look: Look, console: Console, stopping: asyncio.Event) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while not stopping.is_set():
            view.look(await look())
            live.update(view.picture(), refresh=True)
            await _pause(stopping)


async def _show_lines(view: View, look: Look, console: Console, stopping: asyncio.Event) -> None:
    line_at = time.monotonic() + LINE_EVERY_S
    while not stopping.is_set():
        view.look(await look())
        if time.monotonic() >= line_at:
            line_at += LINE_EVERY_S
            console.print(view.line(), **_PLAIN)
        await _pause(stopping)


async def _pause(stopping: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(stopping.wait(), LOOK_EVERY_S)
    except TimeoutError:
        return


def _curl(url: str) -> str:
    return (
        f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model":"{MODEL}","stream":true,"max_tokens":32,'
        '"messages":[{"role":"user","content":"hello"}]}\''
    )
