"""What asking a worker for its load costs the router, in Python bytecodes and calls.

The router is the real one from its timer to the answer that the worker's connection reads: prober,
driver and core. The workers are those of the benchmark, and the network is a stand-in; time is the
loop's own and passes at once. So two runs of the same code count the same, on any machine. Run it
with `python -m loadtest.poll_cost`; `--functions` tells where the bytecodes go.
"""

from __future__ import annotations

import argparse
import asyncio
import selectors
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any, Final, NamedTuple, cast

from loadtest.bench.worker import FakeWorker
from router.config import Config
from router.contract import WorkerSpec
from router.core.dispatcher import Dispatcher
from router.runtime.driver import Driver
from router.runtime.prober import Prober
from router.runtime.upstream import Upstreams

KINDS: Final = ("agent", "SGLang")
_WORKERS: Final = 100
_INTERVAL_S: Final = 1.0
_WARM_UP_S: Final = 5.0  # all that can be known of the workers is
_COUNTED_S: Final = 33.0  # the polls from one description to the next
_LIVE: Final = (b"/health", b"/v1/loads")


class Cost(NamedTuple):
    """Means of one poll, what the router does meanwhile for no poll included."""

    bytecodes: float
    calls: float  # of Python functions


class _Selector(selectors.DefaultSelector):
    """Lets time pass instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is left to wait for")
        self.now += max(0.0, timeout)
        return []


class _Wire:
    """A transport to a worker, which answers in the next turn of the loop."""

    def __init__(self, loop: _Loop, protocol: asyncio.Protocol, worker: FakeWorker) -> None:
        self._loop, self._protocol, self._worker = loop, protocol, worker

    def write(self, data: bytes) -> None:
        for request in data.split(b"\r\n\r\n")[:-1]:
            path, _, query = request.split(b" ", 2)[1].partition(b"?")
            self._loop.polls += path in _LIVE
            answer = self._worker.get(path, query)
            self._loop.call_soon(self._protocol.data_received, answer)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002
        return default

    def abort(self) -> None:
        self._loop.call_soon(self._protocol.connection_lost, None)


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose time passes at once, and whose connections end at fake workers."""

    def __init__(self, *, reports: bool) -> None:
        self._passing = _Selector()
        super().__init__(self._passing)
        self.polls = 0
        self._reports = reports
        self._workers: dict[int, FakeWorker] = {}

    def time(self) -> float:
        return self._passing.now

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        host: str,  # noqa: ARG002
        port: int,
        **_: Any,
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        protocol = protocol_factory()
        if port not in self._workers:
            self._workers[port] = FakeWorker(port, reports=self._reports)
        transport = cast("asyncio.Transport", _Wire(self, protocol, self._workers[port]))
        protocol.connection_made(transport)
        return transport, protocol


class _Trace:
    """Counts what is executed of the router's code."""

    def __init__(self) -> None:
        self.bytecodes: Counter[str] = Counter()  # by function
        self.calls = 0

    def enter(self, frame: FrameType, event: str, _: Any) -> Any:
        module = str(frame.f_globals.get("__name__"))
        if event != "call" or not module.startswith("router."):
            return None  # the stand-ins and the loop
        self.calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        where = f"{module.removeprefix('router.')}.{frame.f_code.co_qualname}"
        counted, one = self.bytecodes, where

        def step(_frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                counted[one] += 1
            return step

        return step


def measured(kind: str) -> tuple[Cost, Counter[str]]:
    """What a poll of `kind` costs, and the bytecodes of each function in one."""
    trace = _Trace()
    polls = _polled(kind, lambda: sys.settrace(trace.enter), lambda: sys.settrace(None))
    by_function = Counter({name: n / polls for name, n in trace.bytecodes.items()})
    return Cost(by_function.total(), trace.calls / polls), by_function


def _polled(kind: str, begin: Callable[[], None], end: Callable[[], None]) -> int:
    """Let workers be polled for a while; how many polls there were."""
    loop = _Loop(reports=kind == "agent")
    config = Config.model_validate({"probe": {"interval_s": _INTERVAL_S}})
    upstreams = Upstreams(config.upstream, loop=loop)
    driver = Driver(
        config, Dispatcher(config, rng=Random(1)), upstreams, loop=loop, clock=loop.time
    )
    prober = Prober(config, upstreams, driver)
    driver.probe = prober.probe
    driver.on_worker_spec.append(prober.watch)
    driver.start()
    for number in range(_WORKERS):
        spec: dict[str, Any] = {"url": f"http://127.0.0.1:{number + 1}"}
        if kind == "agent":
            spec["health_url"] = f"{spec['url']}/health"
        driver.on_worker_joined(WorkerSpec.model_validate(spec))
    loop.run_until_complete(asyncio.sleep(_WARM_UP_S))
    before = loop.polls
    begin()
    try:
        loop.run_until_complete(asyncio.sleep(_COUNTED_S))
    finally:
        end()
    polls = loop.polls - before
    loop.run_until_complete(prober.aclose())
    driver.stop()
    loop.close()
    return polls


def main() -> None:
    """Print one line for each kind of worker."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--functions", action="store_true", help="bytecodes by function")
    args = parser.parse_args()
    print(f"{'worker':8} {'bytecodes':>9} {'calls':>6}")
    for kind in KINDS:
        cost, by_function = measured(kind)
        print(f"{kind:8} {cost.bytecodes:9.0f} {cost.calls:6.1f}")
        for name, bytecodes in by_function.most_common(60) if args.functions else ():
            print(f"    {bytecodes:7.1f} {name}")


if __name__ == "__main__":
    main()
