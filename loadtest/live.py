"""The simulator's trials with real processes: a router and simulated workers over HTTP.

    python -m loadtest.live --trials S2,S3,S4 --policies laneway,least_work,round_robin

Rates are scaled to the number of workers that this machine carries, windows to a minute. Each row
is measured at the client and stands beside the same workload in the simulator: what must agree is
the order of the policies and about how far they are apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from time import monotonic
from typing import Any, Final, cast

import httptools
import uvloop

from loadtest.arrivals import WorkItem, work
from loadtest.bench.stand import child_environment, stop
from loadtest.prompts import prompt_text
from loadtest.report import Figures, Served, judged
from loadtest.scenarios import Scenario
from loadtest.sim.run import simulate
from loadtest.sim.trials import TRIALS, Trial
from loadtest.streaming import StreamFailed, StreamMeter
from loadtest.workload import Flow, Tier, Window

PATH: Final = b"/v1/chat/completions"
MODEL: Final = "sim-8b"
MEASURED_FROM_S: Final = 5.0
DRAIN_S: Final = 40.0
_NO_HOLDING: Final = {
    "pacing": {"enabled": False},
    "queue": {"order": "fifo"},
    "lanes": {"spill": True},
}
# How each policy is configured; in the simulator they are baselines of the same name.
POLICIES: Final[Mapping[str, dict[str, Any]]] = {
    "laneway": {},
    **{
        name: {**_NO_HOLDING, "policy": {"name": name}}
        for name in ("least_work", "round_robin", "random", "least_in_flight", "power_of_two")
    },
}
_PRIORITY: Final = {Tier.PREMIUM: "P0", Tier.STANDARD: "P1", Tier.FREE: "P2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy in one trial: measured live, and simulated."""

    trial: str
    policy: str
    live: Figures
    simulated: Figures


def scaled(trial: Trial, *, workers: int, seconds: float) -> Trial:
    """The trial for fewer workers and a shorter time: same load per worker, same shape."""
    share = workers / len(trial.workers)
    flows = tuple(_shrunk(flow, share, seconds / trial.length_s) for flow in trial.scenario.flows)
    scenario = Scenario(name=trial.scenario.name, about=trial.scenario.about, flows=flows)
    return replace(
        trial,
        scenario=scenario,
        workers=trial.workers[:workers],
        faults=(),
        length_s=seconds,
        measured_from_s=MEASURED_FROM_S,
    )


def _shrunk(flow: Flow, share: float, pace: float) -> Flow:
    window = flow.window
    if math.isfinite(window.length_s):
        every_s = None if window.every_s is None else window.every_s * pace
        window = Window(
            start_s=window.start_s * pace, length_s=window.length_s * pace, every_s=every_s
        )
    return replace(flow, rate_per_s=flow.rate_per_s * share, window=window)


class _Answer(asyncio.Protocol):
    """One request on its own connection."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self.meter = StreamMeter()
        self.retry_after_s: float | None = None
        self.status = 0
        self._request = request
        self._ended = ended
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, StreamFailed) as exc:
            self._end(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the connection was closed"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status != 200:
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        now = monotonic()
        for line in lines:
            self.meter.line(line, now=now)

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, exc: BaseException | None) -> None:
        if not self._ended.done():
            self._transport.close()
            if exc is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(exc)


class Client:
    """Sends a workload in open loop and keeps a row per request."""

    def __init__(self, port: int, *, seed: int) -> None:
        self._port = port
        self._seed = seed
        self.rows: list[Served] = []
        self.lag_s_max = 0.0

    async def play(self, items: Iterator[WorkItem], *, length_s: float) -> None:
        """Send every item at its time until `length_s`, then wait for the answers."""
        began_at = monotonic()
        async with asyncio.timeout(length_s + DRAIN_S), asyncio.TaskGroup() as group:
            for item in items:
                if item.at_s >= length_s:
                    break
                due_at = began_at + item.at_s
                await asyncio.sleep(max(0.0, due_at - monotonic()))
                self.lag_s_max = max(self.lag_s_max, monotonic() - due_at)
                group.create_task(self._ask(item))

    async def _ask(self, item: WorkItem) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        request = self._request(item)
        sent_at = monotonic()
        outcome = "served"
        answer = _Answer(request, ended)
        try:
            await loop.create_connection(lambda: answer, "127.0.0.1", self._port)
            await ended
            if answer.status == 200:
                answer.meter.check_ended()
            else:
                outcome = "refused" if answer.status in (429, 503) else "lost"
        except (OSError, StreamFailed, httptools.HttpParserError):
            outcome = "lost"
        meter = answer.meter
        first_at = meter.first_token_at
        served = outcome == "served" and first_at is not None
        self.rows.append(
            Served(
                at_s=item.at_s,
                tier=item.tier,
                tenant=item.tenant,
                prompt_tokens=item.prompt_tokens,
                output_tokens=item.output_tokens,
                ttft_s=math.inf if first_at is None else first_at - sent_at,
                tpot_s=(meter.inter_token_s or 0.0) if served else math.inf,
                outcome=outcome,
                retry_after_s=answer.retry_after_s,
            )
        )

    def _request(self, item: WorkItem) -> bytes:
        body = json.dumps(
            {
                "model": MODEL,
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": item.max_tokens,
                "min_tokens": item.output_tokens,  # workers draw 1, so this is what they make
                "messages": [{"role": "user", "content": prompt_text(item, seed=self._seed)}],
            }
        ).encode()
        head = (
            f"POST {PATH.decode()} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {item.tenant}\r\n"
            f"x-laneway-priority: {_PRIORITY[item.tier]}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@contextmanager
def cluster(policy: str, tenants: Sequence[str], *, workers: int, port: int) -> Iterator[None]:
    """A router at `port` and its simulated workers at the ports that follow."""
    config = {
        **POLICIES[policy],
        "server": {"port": port},
        "auth": {"api_keys": list(tenants), "admin_keys": ["admin"]},
        "workers": [{"url": f"http://127.0.0.1:{port + 1 + n}"} for n in range(workers)],
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="laneway-live-")))
        path = folder / "config.yaml"
        path.write_text(json.dumps(config))
        log = stack.enter_context((folder / "log").open("w+b"))
        simulated = ("--simulated", str(workers), "--port", str(port + 1))
        lengths = ("--output-median", "1", "--output-sigma", "0.01")
        for command in (
            ("workers.simulated", *simulated, *lengths),
            ("router", "serve", "--config", str(path)),
        ):
            process = Popen(
                (sys.executable, "-m", *command),
                stdout=log,
                stderr=log,
                env=child_environment({}),
                start_new_session=True,
            )
            stack.callback(stop, process)
        yield


async def _ready(port: int, *, workers: int) -> None:
    """Wait until every worker is ready."""
    request = b"GET /workers HTTP/1.1\r\nhost: r\r\nauthorization: Bearer admin\r\n\r\n"
    async with asyncio.timeout(30):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.write(request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            answer = await reader.read()
            writer.close()
            if answer.count(b'"is_healthy":true') == workers:
                return
            await asyncio.sleep(0.2)


async def _measured(trial: Trial, policy: str, *, seed: int, port: int) -> Figures:
    items = list(_until(work(trial.scenario.flows, seed=seed), trial.length_s))
    tenants = sorted({item.tenant for item in items})
    workers = len(trial.workers)
    with cluster(policy, tenants, workers=workers, port=port):
        await _ready(port, workers=workers)
        await asyncio.sleep(11)  # slow start is over
        client = Client(port, seed=seed)
        await client.play(iter(items), length_s=trial.length_s)
    if client.lag_s_max > 0.05:
        print(f"the client was late by up to {client.lag_s_max * 1e3:.0f} ms", file=sys.stderr)
    rows = [row for row in client.rows if row.at_s >= trial.measured_from_s]
    return judged(rows, seconds=trial.length_s - trial.measured_from_s)


def _until(items: Iterator[WorkItem], length_s: float) -> Iterator[WorkItem]:
    for item in items:
        if item.at_s >= length_s:
            return
        yield item


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, `live / simulated`."""
    lines = [
        "| trial | policy | goodput/s | feasible premium % | standard % | free % | short P99 ms "
        "| TPOT P99 ms | refused % |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [
            f"{_figure(row.live, name, factor)} / {_figure(row.simulated, name, factor)}"
            for name, factor in (
                ("goodput_per_s", 1),
                ("premium_feasible", 100),
                ("standard", 100),
                ("free", 100),
                ("short_ttft_p99_s", 1000),
                ("tpot_p99_s", 1000),
                ("refused", 100),
            )
        ]
        lines.append(f"| {row.trial} | {row.policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(figures: Figures, name: str, factor: float) -> str:
    value = getattr(figures, name) * factor
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def main() -> int:
    """Run the trials one after the other and print the table."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.live", description=__doc__)
    parser.add_argument("--trials", default="S2,S3,S4")
    parser.add_argument("--policies", default="laneway,least_work,round_robin")
    parser.add_argument("--workers", type=int, default=2, help="as many as the machine carries")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=32100, help="the first of the ports used")
    args = parser.parse_args()
    trials, policies = args.trials.split(","), args.policies.split(",")
    for unknown in [t for t in trials if t not in TRIALS] + [
        p for p in policies if p not in POLICIES
    ]:
        parser.error(f"{unknown!r}: trials are {', '.join(TRIALS)}; policies {', '.join(POLICIES)}")
    rows = []
    for name in trials:
        trial = scaled(TRIALS[name], workers=args.workers, seconds=args.seconds)
        for policy in policies:
            live = uvloop.run(_measured(trial, policy, seed=args.seed, port=args.port))
            simulated = simulate(trial, policy, seed=args.seed).figures
            rows.append(Row(trial=name, policy=policy, live=live, simulated=simulated))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
