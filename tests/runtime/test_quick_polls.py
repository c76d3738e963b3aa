"""Quick polls: how many at once, who waits, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.config import Config
from router.runtime.quick_polls import Bodies, QuickPolls
from router.runtime.upstream import UpstreamPool, Upstreams
from tests.runtime.busy_loop import busy_loop
from tests.runtime.scripted_worker import HANG, Scripted, ScriptedWorker

Answers = asyncio.Queue[Bodies | None]
GET = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n"


class Bench:
    def __init__(self, pool: UpstreamPool, worker: ScriptedWorker) -> None:
        self.polls = QuickPolls(asyncio.get_running_loop(), most=2)
        self.answers: Answers = asyncio.Queue()
        self.worker = worker
        self._pool = pool

    def ask(self, *paths: bytes, within_s: float = 5.0) -> object:
        requests = [GET % path for path in paths]
        return self.polls.begin(self._pool, requests, self.answers.put_nowait, within_s=within_s)

    async def answer(self) -> Bodies | None:
        async with asyncio.timeout(5):
            return await self.answers.get()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    upstreams = Upstreams(Config().upstream, loop=asyncio.get_running_loop())
    script = {"/a": Scripted(200, b"a"), "/b": Scripted(200, b"b"), "/dead": HANG}
    worker = await ScriptedWorker(script).start()
    made = Bench(upstreams.origin(worker.url), worker)
    yield made
    made.polls.close()
    upstreams.close()
    await worker.stop()


async def test_all_answers_are_told_at_once_in_their_order(bench: Bench) -> None:
    bench.ask(b"/a", b"/b", b"/a")
    assert await bench.answer() == [b"a", b"b", b"a"]


async def test_one_bad_answer_is_none_at_all(bench: Bench) -> None:
    bench.ask(b"/a", b"/missing", b"/b")
    assert await bench.answer() is None
    assert bench.worker.count("/b") == 0


async def test_more_than_there_is_room_for_wait_and_are_asked_too(bench: Bench) -> None:
    for _ in range(7):
        bench.ask(b"/a")
    assert len(bench.polls._under_way) == 2
    assert bench.polls.busy
    assert [await bench.answer() for _ in range(7)] == [[b"a"]] * 7
    assert not bench.polls.busy


async def test_those_that_take_long_hold_up_no_others(bench: Bench) -> None:
    for _ in range(2):
        bench.ask(b"/dead", within_s=60.0)
    bench.ask(b"/a")
    assert len(bench.polls._waiting) == 1
    assert await bench.answer() == [b"a"]


async def test_those_that_wait_can_be_taken_back(bench: Bench) -> None:
    under_way, waiting = bench.ask(b"/dead"), bench.ask(b"/dead")
    gone, asked = bench.ask(b"/b"), bench.ask(b"/a")
    bench.polls.cancel(gone)  # type: ignore[arg-type]
    bench.polls.cancel(waiting)  # type: ignore[arg-type]
    assert await bench.answer() == [b"a"]
    assert bench.worker.count("/b") == 0
    assert under_way is not asked


async def test_silence_is_no_answer_within_its_time(bench: Bench) -> None:
    bench.ask(b"/dead", within_s=0.05)
    assert await bench.answer() is None


async def test_a_late_loop_reads_what_came_in_time(bench: Bench) -> None:
    with busy_loop(0.15):
        bench.ask(b"/a", within_s=0.3)
        assert await bench.answer() == [b"a"]
