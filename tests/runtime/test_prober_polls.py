"""Polls side by side: slow hosts, no overlap, forgotten workers."""

from __future__ import annotations

import orjson

from router.contract import WorkerId
from tests.runtime.prober_bench import (
    CONFIG,
    WORKER,
    Bench,
    bench,
    loads,
    running,
    sglang,
    spec,
)
from tests.runtime.scripted_worker import HANG, Scripted

__all__ = ["bench"]  # a fixture


async def test_a_slow_host_never_delays_the_others(bench: Bench) -> None:
    """Twice as many hanging hosts as there may be polls at once, and one good one."""
    async with running({"/ready": HANG}) as slow, running(sglang()) as good:
        hanging = [WorkerId(f"slow{n}") for n in range(4)]
        for worker_id in hanging:
            bench.prober.watch(spec(slow, id=worker_id))
        bench.prober.watch(spec(good))
        for _ in range(2):
            before = len(bench.heard.events)
            for worker_id in hanging:
                bench.prober.probe(worker_id)
            bench.prober.probe(WORKER)
            await bench.heard.until(lambda: len(bench.heard.events) >= before + 5)  # noqa: B023
            assert bench.heard.events[before][:2] == ("report", WORKER)
            assert {kind for kind, who, _ in bench.heard.events if who in hanging} == {"failed"}


async def test_two_polls_of_one_worker_never_overlap(bench: Bench) -> None:
    async with running(sglang(ready=HANG)) as worker:
        bench.prober.watch(spec(worker))
        for _ in range(5):
            bench.prober.probe(WORKER)
        await bench.heard.until(lambda: bool(bench.heard.events))
        assert worker.count("/ready") == 1
        assert (await bench.poll())[0] == "failed", "the next one is not held back"


async def test_a_worker_can_be_polled_again_from_within_the_event_of_its_last_poll(
    bench: Bench,
) -> None:
    """The core does so when an ejected worker answers."""
    async with running(sglang()) as worker:
        bench.prober.watch(spec(worker))
        bench.heard.on_next_event = lambda: bench.prober.probe(WORKER)
        bench.prober.probe(WORKER)
        await bench.heard.until(lambda: len(bench.heard.events) == 2)


async def test_nothing_is_heard_of_a_worker_that_was_forgotten(bench: Bench) -> None:
    async with running(sglang()) as other, running(sglang(ready=HANG)) as worker:
        bench.prober.watch(spec(worker))
        bench.prober.probe(WORKER)
        bench.prober.watch(spec(other, id="other"))
        await bench.poll(WorkerId("other"))
        bench.prober.forget(WORKER)
        bench.prober.probe(WORKER)
        await bench.prober.aclose()
        assert all(who != WORKER for _, who, _ in bench.heard.events)


class Chunked(Scripted):
    """An answer that no quick poll takes."""

    def encode(self) -> bytes:
        body = orjson.dumps(self.body)
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


async def test_a_worker_whose_answers_no_quick_poll_takes_is_asked_so_ever_less_often(
    bench: Bench,
) -> None:
    async with running(sglang(v1__loads=Chunked(200, loads(3).body))) as worker:
        bench.prober.watch(spec(worker))
        for _ in range(40):
            kind, report = await bench.poll()
            assert (kind, report.running_requests) == ("report", 3)
        assert 40 < worker.count("/v1/loads") <= 46
        worker.script["/v1/loads"] = loads(4)
        for _ in range(33):
            await bench.poll()
        worker.asked.clear()
        before = len(worker.connections)
        assert (await bench.poll())[1].running_requests == 4
        assert worker.count("/v1/loads") == 1
        assert len(worker.connections) == before


async def test_a_shorter_deadline_is_that_of_the_next_poll(bench: Bench) -> None:
    long = CONFIG.model_copy(update={"probe": CONFIG.probe.model_copy(update={"timeout_s": 60.0})})
    async with running(sglang()) as worker:
        bench.prober.on_config(long)
        bench.prober.watch(spec(worker))
        for _ in range(2):
            await bench.poll()
        worker.script["/v1/loads"] = HANG
        bench.prober.on_config(CONFIG)
        assert (await bench.poll())[0] == "missing"
