"""The access log: what a line holds, what it never holds, and what a stalled reader costs."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from router.access_log import AccessLog, safe_json
from router.contract import Lane, WorkerId
from router.core.types import Endpoint, Outcome, Priority, RequestRecord
from router.errors import Reason
from router.records import Records

RECORD = RequestRecord(
    request_id="r-1",
    tenant="key-01234567",
    model="m",
    served_model="m",
    endpoint=Endpoint.CHAT,
    lane=Lane.SHORT,
    priority=Priority.P1,
    stream=True,
    worker_id=WorkerId("w1"),
    outcome=Outcome.SUCCESS,
    reason=None,
    attempts=1,
    spilled=False,
    arrived_at=100.0,
    dispatched_at=100.25,
    first_token_at=100.5,
    finished_at=102.0,
    prompt_tokens=10,
    cached_tokens=None,
    output_tokens=20,
    usage_known=True,
)


class Sink:
    """Remembers what was written; blocks while `gate` is closed."""

    def __init__(self) -> None:
        self.data = b""
        self.gate = threading.Event()
        self.gate.set()
        self.written = threading.Event()

    def __call__(self, data: bytes) -> None:
        assert self.gate.wait(10)
        self.data += data
        self.written.set()


def log_to(sink: Sink, *, lines_max: int = 100) -> AccessLog:
    return AccessLog(
        sink,
        Records(),
        wall_clock=lambda: 1_800_000_001.25,
        clock=lambda: RECORD.finished_at + 1.0,
        lines_max=lines_max,
    )


async def test_a_line_has_the_times_of_the_request_since_its_arrival() -> None:
    sink = Sink()
    log = log_to(sink)
    log.records.add(RECORD)
    await log.close()
    line = json.loads(sink.data)
    assert (line["queue_s"], line["ttft_s"], line["total_s"]) == (0.25, 0.5, 2.0)
    assert line["time"] == "2027-01-15T08:00:00.250Z"
    assert (line["worker"], line["outcome"], line["reason"]) == ("w1", "success", None)


async def test_times_that_never_were_are_null_and_not_zero() -> None:
    sink = Sink()
    log = log_to(sink)
    log.records.add(
        replace(
            RECORD,
            dispatched_at=None,
            first_token_at=None,
            outcome=Outcome.REFUSED,
            reason=Reason.QUEUE_FULL,
        )
    )
    await log.close()
    line = json.loads(sink.data)
    assert (line["queue_s"], line["ttft_s"], line["reason"]) == (None, None, "queue_full")


@pytest.mark.parametrize(
    "text", ["a\nb", "\x1b[31m", "\x7f", "\x9b31m", "\u2028", "\u202e", "a\x00b", "ok \u4e2d"]
)
def test_no_text_of_a_client_can_break_a_line_or_command_a_terminal(text: str) -> None:
    shown = safe_json({"model": text})
    assert json.loads(shown)["model"] == text
    assert [c for c in shown if not c.isprintable()] == []


async def test_lines_are_written_by_the_timer_without_being_asked() -> None:
    sink = Sink()
    log = log_to(sink)
    log.start()
    log.records.add(RECORD)
    async with asyncio.timeout(5):
        await asyncio.to_thread(sink.written.wait)
    await log.close()
    assert sink.data.count(b"\n") == 1


async def test_a_stalled_reader_costs_lines_and_never_the_loop() -> None:
    sink = Sink()
    sink.gate.clear()
    log = log_to(sink, lines_max=3)
    log.records.add(RECORD)
    flushing = asyncio.get_running_loop().create_task(log.flush())
    await asyncio.sleep(0)
    for _ in range(10):
        log.records.add(RECORD)
    log.records.hand_on()
    assert log.dropped == 7
    sink.gate.set()
    await flushing
    await log.close()
    assert sink.data.count(b"\n") == 4


async def test_a_closed_pipe_is_counted_and_not_raised() -> None:
    def broken(data: bytes) -> None:
        raise BrokenPipeError

    log = AccessLog(broken, Records(), wall_clock=lambda: 0.0, clock=lambda: 0.0)
    log.records.add(RECORD)
    await log.close()
    assert log.dropped == 1


async def test_what_the_edge_refused_has_a_line_too() -> None:
    sink = Sink()
    log = log_to(sink)
    log.refused_at_edge(Reason.BODY_TOO_LARGE, "r-2", b"/generate?x=\xff" + b"y" * 1_000)
    await log.close()
    line = json.loads(sink.data)
    assert (line["id"], line["reason"]) == ("r-2", "body_too_large")
    assert line["target"].startswith("/generate?x=")
    assert len(line["target"]) < 300


async def test_odd_ids_and_models_make_a_line_each_that_is_json() -> None:
    sink = Sink()
    log = log_to(sink)
    names = ('a"b', "a\\", "\u4e2d\u6587-\U0001f600", "x\ny", "")
    for name in names:
        log.records.add(replace(RECORD, request_id=name, model=name))
    await log.close()
    lines = [json.loads(line) for line in sink.data.decode().splitlines()]
    assert [(line["id"], line["model"]) for line in lines] == [(name, name) for name in names]


async def test_a_reader_that_never_comes_back_does_not_hold_up_the_end() -> None:
    sink = Sink()
    sink.gate.clear()
    log = log_to(sink)
    log.records.add(RECORD)
    await log.close(timeout_s=0.05)
    sink.gate.set()
