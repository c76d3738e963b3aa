"""Quick polls: what answers they take, how many at once, who waits, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import Config
from router.runtime.heads import HEAD_BYTES_MAX
from router.runtime.quick_polls import Bodies, Line, Question, QuickPolls, plain_length
from router.runtime.upstream import Upstreams
from tests.runtime.busy_loop import busy_loop
from tests.runtime.scripted_worker import HANG, Scripted, ScriptedWorker

Answers = asyncio.Queue[Bodies | None]
GET = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n"


class Bench:
    def __init__(self, upstreams: Upstreams, url: str) -> None:
        self.polls = QuickPolls(upstreams, most=2, within_s=5.0)
        self.answers: Answers = asyncio.Queue()
        self._url = url

    def question(self, *paths: bytes, line: Line | None = None) -> Question:
        line = line or self.polls.line(self._url)
        requests = [GET % path for path in paths]
        return Question(line, requests, self.answers.put_nowait)

    def ask(self, *paths: bytes, within_s: float = 5.0) -> Question:
        question = self.question(*paths)
        self.polls.allow(within_s)
        self.polls.ask(question)
        return question

    async def answer(self) -> Bodies | None:
        async with asyncio.timeout(5):
            return await self.answers.get()


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    script = {"/a": Scripted(200, b"a"), "/b": Scripted(200, b"b"), "/dead": HANG}
    worker = await ScriptedWorker(script).start()
    yield worker
    await worker.stop()


@pytest.fixture
async def bench(worker: ScriptedWorker) -> AsyncIterator[Bench]:
    upstreams = Upstreams(Config().upstream, loop=asyncio.get_running_loop())
    made = Bench(upstreams, worker.url)
    yield made
    made.polls.close()
    upstreams.close()


async def test_all_answers_are_told_at_once_in_their_order(bench: Bench) -> None:
    bench.ask(b"/a", b"/b", b"/a")
    assert await bench.answer() == [b"a", b"b", b"a"]


async def test_one_bad_answer_is_none_at_all(bench: Bench) -> None:
    bench.ask(b"/a", b"/missing", b"/b")
    assert await bench.answer() is None


async def test_a_question_is_asked_again_over_the_same_connection(
    bench: Bench, worker: ScriptedWorker
) -> None:
    question = bench.question(b"/a")
    for _ in range(3):
        bench.polls.ask(question)
        assert await bench.answer() == [b"a"]
    assert len(worker.connections) == 1


async def test_a_connection_that_was_closed_meanwhile_is_made_again(
    bench: Bench, worker: ScriptedWorker
) -> None:
    question = bench.question(b"/a")
    for _ in range(2):
        bench.polls.ask(question)
        assert await bench.answer() == [b"a"]
        await worker.stop()
        await worker.start()
    for connection in worker.connections:
        assert connection.transport is not None
        connection.transport.abort()
    bench.polls.ask(question)  # before the loop can learn of it
    assert await bench.answer() == [b"a"]


async def test_a_worker_that_is_gone_gives_no_answer(bench: Bench, worker: ScriptedWorker) -> None:
    await worker.stop()
    bench.ask(b"/a")
    assert await bench.answer() is None


async def test_two_questions_share_a_line_one_after_the_other(bench: Bench) -> None:
    line = bench.polls.line(bench._url)
    first, second = bench.question(b"/a", line=line), bench.question(b"/b", line=line)
    for question, body in ((first, b"a"), (second, b"b"), (first, b"a")):
        assert line.question is None
        bench.polls.ask(question)
        assert await bench.answer() == [body]


async def test_who_waited_while_another_took_its_line_gets_no_answer(bench: Bench) -> None:
    line = bench.polls.line(bench._url)
    dead = [bench.ask(b"/dead", within_s=60.0) for _ in range(2)]
    bench.polls.ask(bench.question(b"/dead", line=line))
    bench.polls.ask(bench.question(b"/a", line=line))
    bench.polls.cancel(dead[0])
    bench.polls.cancel(dead[1])
    assert await bench.answer() is None


async def test_more_than_there_is_room_for_wait_and_are_asked_too(bench: Bench) -> None:
    for _ in range(7):
        bench.ask(b"/a")
    assert len(bench.polls._new) == 2
    assert bench.polls.busy
    assert [await bench.answer() for _ in range(7)] == [[b"a"]] * 7
    assert not bench.polls.busy


async def test_those_that_take_long_hold_up_no_others(bench: Bench) -> None:
    for _ in range(2):
        bench.ask(b"/dead", within_s=60.0)
    bench.ask(b"/a")
    assert len(bench.polls._waiting) == 1
    assert await bench.answer() == [b"a"]


async def test_those_that_wait_can_be_taken_back(bench: Bench, worker: ScriptedWorker) -> None:
    bench.ask(b"/dead", within_s=60.0)
    under_way, waiting = bench.ask(b"/dead"), bench.ask(b"/dead")
    gone, asked = bench.ask(b"/b"), bench.ask(b"/a")
    for question in (gone, waiting, under_way):
        bench.polls.cancel(question)
        assert not question.under_way
    assert await bench.answer() == [b"a"]
    assert not asked.under_way
    assert worker.count("/b") == 0


async def test_silence_is_no_answer_within_its_time(bench: Bench) -> None:
    bench.ask(b"/dead", within_s=0.05)
    assert await bench.answer() is None


async def test_a_late_loop_reads_what_came_in_time(bench: Bench) -> None:
    with busy_loop(0.15):
        bench.ask(b"/a", within_s=0.3)
        assert await bench.answer() == [b"a"]


class Wire:
    """Stands for the upstreams and for the transport of the one connection they make."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.written: list[bytes] = []
        self.aborted = False
        self.protocol: Any = None

    async def open(self, url: str, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol
        protocol.connection_made(cast("asyncio.Transport", self))

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


async def heard(*reads: bytes, answers: int = 1) -> tuple[list[Bodies | None], Wire]:
    """What is said of a question whose connection brings these reads."""
    wire = Wire()
    polls = QuickPolls(wire, most=2, within_s=60.0)
    said: list[Bodies | None] = []
    line = polls.line("http://w")
    polls.ask(Question(line, [GET % b"/a"] * answers, said.append))
    while wire.protocol is None:  # noqa: ASYNC110 - it is a turn or two
        await asyncio.sleep(0)
    for read in reads:
        wire.protocol.data_received(read)
    polls.close()
    return said, wire


HEAD = b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\n%b\r\n"
LENGTH = b"Content-Length: 5\r\n"
PLAIN = HEAD % LENGTH + b"12345"
CHUNKED = b"transfer-encoding: chunked\r\n"


async def test_requests_of_a_question_go_out_in_one_write() -> None:
    _, wire = await heard(PLAIN + PLAIN, answers=2)
    assert wire.written == [2 * (GET % b"/a")]


@pytest.mark.parametrize("size", [1, 7, len(PLAIN) - 1, len(PLAIN), 2 * len(PLAIN)])
async def test_answers_are_found_however_they_come(size: int) -> None:
    data = PLAIN + PLAIN
    reads = [data[at : at + size] for at in range(0, len(data), size)]
    said, wire = await heard(*reads, answers=2)
    assert said == [[b"12345", b"12345"]]
    assert not wire.aborted


@pytest.mark.parametrize(
    "answer",
    [
        HEAD % (LENGTH + b"Connection: keep-alive\r\n") + b"12345",
        HEAD % (LENGTH + b"vary: Accept-Encoding\r\n") + b"12345",
        HEAD % b"content-length:  5 \r\n" + b"12345",
    ],
    ids=repr,
)
async def test_a_plain_answer_is_taken(answer: bytes) -> None:
    assert (await heard(answer))[0] == [[b"12345"]]


@pytest.mark.parametrize(
    "answer",
    [
        HEAD % CHUNKED + b"5\r\n12345\r\n0\r\n\r\n",
        HEAD % (LENGTH + CHUNKED) + b"12345",
        HEAD % (LENGTH + LENGTH) + b"12345",
        HEAD % (LENGTH + b"content-length: 6\r\n") + b"12345",
        HEAD % (LENGTH + b"content-encoding: gzip\r\n") + b"12345",
        HEAD % (LENGTH + b"connection: close\r\n") + b"12345",
        HEAD % b"" + b"12345",
        HEAD % b"content-length: -5\r\n" + b"12345",
        HEAD % b"content-length: +5\r\n" + b"12345",
        HEAD % b"content-length: \r\n" + b"12345",
        HEAD % b"content-length: 5 5\r\n" + b"12345",
        HEAD % b"content-length: 0x5\r\n" + b"12345",
        HEAD % b"content-length: 99999999\r\n" + b"12345",
        HEAD % b"content-length 5\r\n" + b"12345",
        HEAD % b"content-length: 1_5\r\n" + b"12345",
        HEAD % b"Content-Len7gth: 5\r\n" + b"12345",
        HEAD % b"content-l3ength: 5\r\n" + b"12345",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n12345",
        b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN,
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 5\r\n\r\n12345",
        PLAIN + PLAIN,
        PLAIN + b"\r\n",
        HEAD % (LENGTH + b"x-long: %b\r\n" % (HEAD_BYTES_MAX * b"x")) + b"12345",
        b"hello\r\n\r\n",
        bytes(5 * 2**20),
    ],
    ids=lambda answer: repr(answer[:150]),
)
async def test_any_other_answer_is_none_and_ends_the_connection(answer: bytes) -> None:
    await heard(PLAIN)  # heads of that shape are known from now on
    said, wire = await heard(answer)
    assert said == [None]
    assert wire.aborted


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    said, wire = await heard(PLAIN, b"x")
    assert said == [[b"12345"]]
    assert wire.aborted


@given(st.lists(st.sampled_from([LENGTH, CHUNKED, b"a-1: 2\r\n", b"content-length: 77\r\n"])))
def test_a_head_is_plain_or_not_whatever_came_before_it(lines: list[bytes]) -> None:
    head = (HEAD % b"".join(lines))[:-2]
    lengths = [line for line in lines if line.lower().startswith(b"content-length")]
    plain = len(lengths) == 1 and CHUNKED not in lines
    expected = int(lengths[0].split(b":")[1]) if plain else -1
    for _ in range(2):
        assert plain_length(head) == expected
