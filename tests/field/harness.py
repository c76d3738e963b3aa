"""The router under test as a process, and the test's hold on it and on its workers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.field.mock_worker import MockWorker
from tests.field.wire import Answer, Headers, eventually, free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0

# Every duration short enough for tests, long enough for a busy machine.
CONFIG: dict[str, Any] = {
    "server": {"body_timeout_s": 1.5, "drain_delay_s": 0.3, "shutdown_grace_s": 10},
    "probe": {"interval_s": 0.05, "timeout_s": 1.0, "stale_after_s": 1.0, "failures_to_eject": 2},
    "policy": {"slow_start_s": 0, "seed": 1},
    "queue": {"wait_s_max": 1.5},
    "breaker": {"failures": 3, "open_s": 1.0},
    "retry": {"budget_ratio": 1.0, "budget_tokens_max": 1000, "backoff_s": 0.02},
    "upstream": {
        "connect_timeout_s": 1.0,
        "first_byte_timeout_s": 5.0,
        "idle_chunk_timeout_s": 5.0,
    },
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with the settings of `changes` laid over it, section by section."""
    return {
        section: {**base.get(section, {}), **changes.get(section, {})}
        for section in base.keys() | changes.keys()
    }


class RouterProcess:
    """A running router: where it listens, its process, what it has logged."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
        self.process = process
        self.port = port
        self.pid = process.pid
        self.config_path = log_path.with_name("laneway.yaml")
        self._log_path = log_path

    def log(self) -> str:
        """All it has written to standard output and error."""
        return self._log_path.read_text(errors="replace")

    def open_files(self) -> int:
        """How many file descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def status_kb(self, field: str) -> int:
        """A figure in kB of its /proc status, such as VmRSS."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(field))


@contextmanager
def router_process(
    folder: Path, config: dict[str, Any], *, python_path: Path = ROOT
) -> Iterator[RouterProcess]:
    """Run `python -m router`; it answers /livez when this yields, and is gone after it.

    Modules of `python_path` come before all others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config_path, log_path, port = folder / "laneway.yaml", folder / "router.log", free_port()
    config_path.write_text(yaml.safe_dump(merged(CONFIG, config)))
    command = [sys.executable, "-m", "router", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": f"{python_path}:{ROOT}"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--config", str(config_path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
        )
    router = RouterProcess(process, port, log_path)
    try:
        _await_live(router)
        yield router
    finally:
        process.kill()
        process.wait(timeout=10)


def _await_live(router: RouterProcess) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert router.process.poll() is None, f"the router ended at once:\n{router.log()}"
        try:
            with urlopen(f"http://127.0.0.1:{router.port}/livez", timeout=5):
                return
        except (URLError, ConnectionError):
            time.sleep(0.02)  # nothing tells when a process begins to listen
    raise AssertionError(f"not alive within {START_S} s:\n{router.log()}")


class Field:
    """One router, some workers, and the requests that a test sends through them."""

    def __init__(self, router: RouterProcess, *, key: str = "", admin_key: str = "") -> None:
        self.router = router
        self._key = key
        self._admin_key = admin_key
        self._workers: list[MockWorker] = []
        self._log_mark = len(router.log())

    # Workers.

    async def worker(
        self,
        *,
        host: str = "127.0.0.1",
        models: tuple[str, ...] = ("m",),
        figures: dict[str, Any] | None = None,
        **spec: Any,
    ) -> MockWorker:
        """Start a worker, register it with `spec` and wait until it gets requests.

        `figures` are laid over its load answer from the first poll on.
        """
        worker = await self.unregistered(host=host, models=models)
        worker.figures.update(figures or {})
        await self.register(worker, **spec)
        return worker

    async def unregistered(
        self, *, host: str = "127.0.0.1", models: tuple[str, ...] = ("m",)
    ) -> MockWorker:
        """Start a worker that the router does not know."""
        worker = MockWorker(host=host, models=models)
        await worker.start()
        self._workers.append(worker)
        return worker

    async def register(self, worker: MockWorker, **spec: Any) -> None:
        """Register a worker and wait until it is healthy and described."""
        answer = await self.admin("POST", "/workers", {"url": worker.url, **spec})
        assert answer.status == 202, answer.body

        async def usable() -> bool:
            shown = await self.shown(worker)
            known = shown.get("models_known") and shown.get("report_age_s") is not None
            return bool(shown.get("is_healthy") and known)

        await eventually(usable, within_s=5, what=f"{worker.id} gets requests")

    async def until_worker(self, worker: MockWorker, **fields: Any) -> None:
        """Wait until the router's view of a worker has these values."""

        async def as_wished() -> bool:
            shown = await self.shown(worker)
            return all(shown.get(name) == value for name, value in fields.items())

        await eventually(as_wished, within_s=5, what=f"{worker.id}: {fields}")

    async def polled(self, worker: MockWorker, *, polls: int = 2) -> None:
        """Wait until the router has read the worker's load again."""

        def loads() -> int:
            return sum(call.path == "/v1/loads" for call in worker.polls)

        before = loads()
        await eventually(lambda: loads() >= before + polls, within_s=5, what="polls")

    async def stop_workers(self) -> None:
        """Stop every worker of the test; harmless for those that are."""
        for worker in self._workers:
            await worker.stop()

    async def shown(self, worker: MockWorker) -> dict[str, Any]:
        """The router's view of a worker; empty when it knows none."""
        answer = await self.admin("GET", f"/workers/{quote(worker.id, safe='')}")
        shown: dict[str, Any] = answer.json() if answer.status == 200 else {}
        return shown

    async def remove(self, worker: MockWorker, *, deadline_s: float | None = 0) -> Answer:
        """DELETE a worker; at once unless a deadline (None: the default one) is given."""
        query = "" if deadline_s is None else f"?deadline_s={deadline_s:g}"
        return await self.admin("DELETE", f"/workers/{quote(worker.id, safe='')}{query}")

    # Requests.

    async def send(
        self,
        method: str,
        target: str,
        *,
        body: bytes | None = None,
        headers: Headers = (),
    ) -> Answer:
        """Send a request with the user's key; the answer's head is not yet read."""
        auth = [("authorization", f"Bearer {self._key}")] if self._key else []
        return await Answer.request(
            self.router.port, method, target, headers=[*auth, *headers], body=body
        )

    async def post(
        self,
        path: str,
        document: dict[str, Any] | bytes,
        *,
        headers: Headers = (),
    ) -> Answer:
        """POST JSON; the answer's head is not yet read."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        sent = [("content-type", "application/json"), *headers]
        return await self.send("POST", path, body=body, headers=sent)

    async def open(self, **fields: Any) -> Answer:
        """Send a streamed chat; the answer's head is not yet read."""
        return await self.post("/v1/chat/completions", chat_body(stream=True, **fields))

    async def stream(self, **fields: Any) -> Answer:
        """Send a streamed chat and read the head of its answer."""
        return await (await self.open(**fields)).head()

    async def chat(self, **fields: Any) -> Answer:
        """Send a plain chat and read its whole answer."""
        answer = await self.post("/v1/chat/completions", chat_body(**fields))
        await (await answer.head()).read()
        return answer

    async def chats(self, count: int, **fields: Any) -> list[Answer]:
        """Send plain chats at once and read all answers."""
        return list(await asyncio.gather(*(self.chat(**fields) for _ in range(count))))

    async def get(self, target: str) -> Answer:
        """GET with the user's key; the whole answer."""
        answer = await self.send("GET", target)
        await (await answer.head()).read()
        return answer

    async def admin(self, method: str, target: str, document: Any = None) -> Answer:
        """Send an admin request; the whole answer."""
        auth = [("authorization", f"Bearer {self._admin_key}")] if self._admin_key else []
        body = None if document is None else json.dumps(document).encode()
        answer = await Answer.request(self.router.port, method, target, headers=auth, body=body)
        await (await answer.head()).read()
        return answer

    # Looking.

    async def series(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All samples of /metrics."""
        answer = await self.get("/metrics")
        assert answer.status == 200
        families = text_string_to_metric_families(answer.body.decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of a series that have these labels."""
        wanted = set(labels.items())
        samples = await self.series()
        return sum(v for (key, has), v in samples.items() if key == name and wanted <= set(has))

    async def in_flight(self) -> float:
        """Requests that run on workers, as the router counts them."""
        return await self.metric("laneway_in_flight")

    async def queued(self) -> float:
        """Requests that wait in the router."""
        return await self.metric("laneway_queue_length")

    async def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits. Fails when any figure is negative."""
        samples = await self.series()
        negative = {key: value for key, value in samples.items() if value < 0}
        assert not negative, negative
        gauges = ("laneway_in_flight", "laneway_queue_length")
        return sum(value for (name, _), value in samples.items() if name in gauges) == 0

    # The end of every case.

    async def assert_clean(self) -> None:
        """CLEAN: serves a chat, gauges at 0, the same process, no trace logged."""
        for worker in self._workers:
            await self.remove(worker)
            await worker.stop()
        last = await self.worker()
        assert (await self.chat(model=last.models[0])).status == 200

        await eventually(self.is_idle, what="in-flight and queue gauges at 0")
        await self.remove(last)
        await last.stop()
        assert self.router.process.poll() is None
        log = self.router.log()[self._log_mark :]
        assert "Traceback" not in log, log[-6000:]


def chat_body(**fields: Any) -> dict[str, Any]:
    """A small chat request with `fields` laid over it."""
    message = {"role": "user", "content": "hi"}
    return {"model": "m", "messages": [message], **fields}


def assert_error(answer: Answer, *statuses: int) -> None:
    """ERR(c): the status, OpenAI's error shape, a request id; Retry-After where due."""
    assert answer.status in statuses, (answer.status, answer.body[:500])
    assert (answer.header("content-type") or "").startswith("application/json"), answer.headers
    error = answer.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert answer.header("x-request-id")
    if answer.status in (429, 503):
        assert int(answer.header("retry-after") or "0") >= 1, answer.headers
