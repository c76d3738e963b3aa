"""Premium requests beside a flood of offline ones, on two real SGLang servers.

    python -m tests.real_sglang.flood

Prints the time to the first token of P0 requests without and with a P3 flood. Not a test: it
measures time, so it wants a quiet machine.
"""

import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from time import monotonic

import httpx

from .client import CHAT, TIMEOUT_S, chat_body
from .cluster import Router, SGLangServer
from .service import stop_all

STEP_S = 0.05
REQUESTS = 60
FLOOD_CLIENTS = 24


def ttft_s(client: httpx.Client, priority: str, tokens: int) -> float:
    """Send one streamed chat, read it to its end, return the seconds to its first token."""
    began = monotonic()
    first: float | None = None
    headers = {"x-laneway-priority": priority}
    body = chat_body(tokens) | {"stream": True}
    with client.stream("POST", CHAT, json=body, headers=headers) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if first is None and '"content":"' in line and '"content":""' not in line:
                first = monotonic() - began
    assert first is not None
    return first


def measured(base_url: str) -> list[float]:
    """The first-token times of P0 requests, one after the other."""
    with httpx.Client(base_url=base_url, trust_env=False, timeout=TIMEOUT_S) as client:
        return [ttft_s(client, "P0", 8) for _ in range(REQUESTS)]


def flood(base_url: str, stopping: threading.Event) -> None:
    """One client of the flood."""
    with httpx.Client(base_url=base_url, trust_env=False, timeout=TIMEOUT_S) as client:
        while not stopping.is_set():
            try:
                ttft_s(client, "P3", 64)
            except httpx.HTTPStatusError:
                stopping.wait(0.5)


def line(name: str, seconds: list[float]) -> tuple[str, float]:
    cuts = quantiles(seconds, n=100, method="inclusive")
    return f"{name:14} P50 {cuts[49] * 1e3:5.0f} ms   P99 {cuts[98] * 1e3:5.0f} ms", cuts[98]


def main() -> int:
    """Start everything, measure twice, print."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pair = [SGLangServer(name, folder=folder) for name in ("a", "b")]
        for server in pair:
            stack.callback(stop_all, [server.service])
            server.start()
        for server in pair:
            server.wait_ready()
        router = Router(worker_urls=[server.url for server in pair], folder=folder)
        stack.callback(stop_all, [router.service])
        router.start()
        for server in pair:
            stack.enter_context(server.slowed(STEP_S))
        measured(router.url)  # warm
        alone, p99_alone = line("P0 alone", measured(router.url))
        stopping = threading.Event()
        clients = [
            threading.Thread(target=flood, args=(router.url, stopping))
            for _ in range(FLOOD_CLIENTS)
        ]
        for thread in clients:
            thread.start()
        stopping.wait(5)
        beside, p99_beside = line("P0 beside P3", measured(router.url))
        stopping.set()
        for thread in clients:
            thread.join()
    print(alone, beside, f"ratio of P99: {p99_beside / p99_alone:.2f}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
