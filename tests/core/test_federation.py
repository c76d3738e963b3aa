"""Workers that are routers: what their reports mean, and requests that came through them."""

from __future__ import annotations

from typing import Any

import pytest

from router.contract import LoadReport, WorkerId
from router.core.types import Failure
from router.errors import Reason
from tests.core.builders import Bench, bench, waits

W1, W2 = WorkerId("w1"), WorkerId("w2")


REGION: dict[str, Any] = {
    "workers": 4,
    "routers": ("aa",),
    "running_requests": 0,
    "queued_requests": 0,
    "kv_used_tokens": 0,
    "max_running_requests": 100,
    "kv_total_tokens": 400_000,
}
PACED: dict[str, Any] = {"pacing": {"enabled": True}}


def region(**figures: Any) -> LoadReport:
    return LoadReport(**(REGION | figures))


def two(**sections: Any) -> Bench:
    """A region w1 and an idle engine w2."""
    b = bench(**sections)
    b.join("w1", report=region(), kv_total_tokens=None)
    b.join("w2")
    return b


def test_a_region_is_as_large_as_it_says_and_not_as_one_of_its_engines() -> None:
    b = bench()
    b.join("w1", report=region(kv_total_tokens=9_000), kv_total_tokens=None)
    b.core.on_worker_described(
        W1, models=("m",), kv_total_tokens=50, concurrency_max=3, kv_bytes_per_token=1e6, now=b.now
    )  # fmt: skip
    view = b.view("w1")
    assert (view.concurrency_max, view.kv_total_tokens) == (100, 9_000)
    assert (view.kv_bytes_per_token, view.kv_usable_tokens) == (None, 8_280)  # engines keep margins
    b.report("w1", **(REGION | {"kv_total_tokens": None}))
    assert b.view("w1").kv_total_tokens is None


def test_work_goes_where_it_is_least_for_each_engine() -> None:
    b = two()
    for _ in range(50):
        b.ask()
    by_worker = [ticket.worker_id for ticket in b.dispatched]
    assert by_worker.count(W1) == 40, "four engines to one"


def test_a_region_paces_itself() -> None:
    for report, held in ((region(), False), (LoadReport(running_requests=0), True)):
        b = bench(**PACED)
        b.join("w1", report=report)
        assert any(waits(b.ask(prompt_bytes=40_000)) for _ in range(6)) is held


@pytest.mark.parametrize(("queued", "taken"), [(200, True), (300, False)])
def test_its_queue_may_be_as_long_as_those_of_all_its_engines(queued: int, taken: bool) -> None:
    b = bench(headroom={"queued_requests_max": 64})
    b.join("w1", report=region(queued_requests=queued), kv_total_tokens=None)
    assert waits(b.ask()) is not taken


def test_a_request_never_goes_back_to_a_router_that_it_came_through() -> None:
    b = two(headroom={"concurrency_default": 2})
    assert {b.ask(avoid=(W1,)).worker_id for _ in range(2)} == {W2}
    held = b.ask(avoid=(W1,))
    assert waits(held), "w1 has room, but is where it came from"
    b.end(b.dispatched[0])
    assert held.worker_id == W2


def test_with_nowhere_else_to_go_it_is_refused_as_a_loop() -> None:
    b = two()
    assert b.refusal(b.ask(avoid=(W1, W2))).reason is Reason.LOOP_DETECTED
    held = two(headroom={"concurrency_default": 1})
    held.ask(avoid=(W1,))
    waiting = held.ask(avoid=(W1,))
    assert waits(waiting)
    held.core.on_worker_left(W2, now=held.now)
    held.take()
    assert held.refusal(waiting).reason is Reason.LOOP_DETECTED


def test_a_retry_spares_where_it_came_from_too() -> None:
    b = two()
    ticket = b.ask(avoid=(W1,))
    failure = Failure(reason=Reason.UPSTREAM_ERROR)
    assert b.core.on_attempt_failed(ticket, failure, now=b.now) is False
