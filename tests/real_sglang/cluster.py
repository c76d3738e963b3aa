"""The two kinds of server under test, and what the tests ask them.

`SGLangServer` and `Router` are a `Service` each, plus the few questions that tests put to them; the
answers become small values here.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from . import kit
from .client import generate_body, get, open_stream, post
from .service import Service, eventually, free_port

# Several servers that start at once on two shared cores need a minute.
SERVER_START_S: Final = 240.0
SERVE: Final = (sys.executable, "-m", "router", "serve")
ROUTER_START_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What a server says of itself in /v1/loads, as sums over its ranks."""

    running: int
    waiting: int
    used_tokens: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What the router says of one worker in GET /workers. None: it does not know."""

    id: str
    url: str
    state: str
    lanes: frozenset[str]
    streams: int  # requests that this router has there
    running: int | None
    queued: int | None
    kv_used_tokens: int | None
    kv_total_tokens: int | None
    kv_bytes_per_token: int | None


class SGLangServer:
    """One real SGLang server; `flags` are added to the kit's own."""

    def __init__(self, name: str, *flags: str, folder: Path) -> None:
        scratch = folder / name
        kit.write_model(scratch / "model")
        port = free_port()
        self.service = Service(
            name,
            kit.command(*flags, model=scratch / "model", port=port),
            port=port,
            ready_path="/ready",
            log=scratch / "log",
            environment=kit.environment(scratch=scratch),
        )
        self.url = self.service.url

    def start(self) -> None:
        """Begin to start; `wait_ready` waits for the end of it."""
        self.service.start()

    def wait_ready(self) -> None:
        self.service.wait_ready(within_s=SERVER_START_S)

    def loads(self) -> Loads:
        ranks = get(f"{self.url}/v1/loads?include=core").json()["loads"]
        return Loads(
            running=sum(rank["num_running_reqs"] for rank in ranks),
            waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
            used_tokens=sum(rank["num_used_tokens"] for rank in ranks),
            capacity_tokens=sum(rank["max_total_num_tokens"] for rank in ranks),
        )

    def wait_requests(self, count: int, *, within_s: float = 20.0) -> None:
        """Return when exactly `count` requests run or wait in the engine."""
        eventually(
            self.loads,
            lambda loads: loads.running + loads.waiting == count,
            within_s=within_s,
            what=f"{count} requests at {self.service.name}",
        )

    @contextmanager
    def filled(self, count: int) -> Iterator[None]:
        """Keep `count` requests in the idle engine that come past the router and do not end."""
        with ExitStack() as streams:
            for number in range(1, count + 1):
                # Native streams answer with their head at once, also while the request waits.
                url, body = f"{self.url}/generate", generate_body(600)
                streams.enter_context(open_stream(url, body))
                # SGLang bounds its queue by what arrived and did not start, even when it is idle.
                if number % 8 == 0 or number == count:
                    self.wait_requests(number)
            yield

    def received(self, path: str) -> int:
        """Return how many requests to `path` the server has counted since it started."""
        return sum(
            int(float(line.rsplit(" ", 1)[1]))
            for line in get(f"{self.url}/metrics").text.splitlines()
            if line.startswith("sglang:http_requests_total{") and f'endpoint="{path}"' in line
        )

    @contextmanager
    def slowed(self, step_s: float) -> Iterator[None]:
        """Make every step of the engine `step_s` seconds longer."""
        self._slow_down(step_s)
        try:
            yield
        finally:
            # A test may have killed the server in the meantime.
            if not self.service.has_ended():
                self._slow_down(None)

    def reset(self) -> None:
        """Bring the server back to what it was at first, whatever was done to it."""
        if self.service.has_ended():
            self.start()
        self.wait_ready()
        self._slow_down(None)
        post(f"{self.url}/abort_request", {"rid": "", "abort_all": True}).raise_for_status()
        self.flush_cache()

    def flush_cache(self) -> None:
        """Forget all prompts, once the server is idle. Their answers then come about anew."""
        self.wait_requests(0)
        post(f"{self.url}/flush_cache?timeout=10", None).raise_for_status()

    def _slow_down(self, step_s: float | None) -> None:
        post(f"{self.url}/slow_down", {"forward_sleep_time": step_s}).raise_for_status()


class Router:
    """One router process in front of `worker_urls`; `flags` are those of `laneway serve`."""

    def __init__(self, *flags: str, worker_urls: Sequence[str], folder: Path) -> None:
        port = free_port()
        words = [*SERVE, "--port", str(port), *flags]
        if worker_urls:
            words += ["--worker-urls", *worker_urls]
        self.service = Service(
            f"router-{port}",
            words,
            port=port,
            # A router that knows no worker lives, but is not ready.
            ready_path="/readyz" if worker_urls or "--config" in flags else "/livez",
            log=folder / f"router-{port}.log",
            environment={
                **{k: v for k, v in os.environ.items() if not k.startswith("LANEWAY_")},
                # Nobody has to notice that it stops.
                "LANEWAY_SERVER__DRAIN_DELAY_S": "0",
            },
        )
        self.url = self.service.url

    def start(self) -> None:
        """Start, and return when it is ready and all of its workers are active."""
        self.service.start()
        self.service.wait_ready(within_s=ROUTER_START_S)
        eventually(
            self.workers,
            lambda workers: all(worker.state == "active" for worker in workers.values()),
            within_s=ROUTER_START_S,
            what="all workers are active",
        )

    def workers(self) -> dict[str, Worker]:
        """Return the workers by id."""
        found = get(f"{self.url}/workers").raise_for_status().json()["workers"]
        return {worker.id: worker for worker in map(_worker, found)}

    def worker(self, server: SGLangServer) -> Worker:
        """Return what the router says of `server`."""
        (worker,) = (w for w in self.workers().values() if w.url == server.url)
        return worker

    def add_worker(self, server: SGLangServer, **spec: object) -> None:
        """Register `server` as an operator does, and wait until it takes requests."""
        post(f"{self.url}/workers", {"url": server.url, **spec}).raise_for_status()
        self.wait_state(server, "active")

    def wait_state(self, server: SGLangServer, state: str, *, within_s: float = 20.0) -> None:
        eventually(
            lambda: self.worker(server),
            lambda worker: worker.state == state,
            within_s=within_s,
            what=f"{server.service.name} is {state}",
        )


def _worker(entry: dict[str, Any]) -> Worker:
    return Worker(
        id=entry["id"],
        url=entry["url"],
        state=entry["state"],
        lanes=frozenset(entry["lanes"]),
        streams=entry["load"],
        running=entry["running_requests"],
        queued=entry["queued_requests"],
        kv_used_tokens=entry["kv_used_tokens"],
        kv_total_tokens=entry["kv_total_tokens"],
        kv_bytes_per_token=entry["kv_bytes_per_token"],
    )
