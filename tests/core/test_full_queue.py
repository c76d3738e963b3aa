"""A lane whose queue is full: what needs no place in it, and who gives way."""

from __future__ import annotations

from router.contract import Lane
from router.core.pools import Pool
from router.core.types import Priority
from router.errors import Reason
from tests.core.builders import Bench, bench, runs, waits
from tests.core.flow_rig import Queue

P0, P1, P2, P3 = Priority


def full_of_m(depth_max: int = 5, *, of_s: int = 1) -> Bench:
    """Two workers, of models that share none; the lane is full of requests for the first."""
    made = bench(queue={"depth_max": depth_max})
    made.join("w1", models=("m",), concurrency_max=1)
    made.join("w2", models=("s",), concurrency_max=of_s)
    for _ in range(depth_max + 1):
        made.ask(model="m", priority=P2)
    return made


def test_an_idle_worker_serves_its_model_however_many_wait_for_others() -> None:
    made = full_of_m(of_s=2)
    for priority in (P3, P0):
        assert runs(made.ask(model="s", priority=priority))
    assert not made.records, "nobody had to give way"
    late = made.ask(model="s", priority=P2)
    assert made.refusal(late).reason is Reason.QUEUE_FULL


def test_who_has_room_but_not_the_turn_needs_a_place() -> None:
    """One that was skipped too often keeps its pool closed, also when the queue is full."""
    made = bench(queue={"depth_max": 2, "skips_max": 1}, headroom={"kv_ratio_max": 1.0})
    made.join("w1", kv_total_tokens=1_000)
    made.ask(prompt_bytes=2_000)
    large = made.ask(prompt_bytes=3_200)
    made.ask(prompt_bytes=3_200)
    assert runs(made.ask()), "the first that passes"
    small = made.ask()
    assert waits(large)
    assert made.refusal(small).reason is Reason.QUEUE_FULL
    assert made.core.queued == 2


def test_who_competes_for_the_same_workers_gives_way_before_others() -> None:
    made = full_of_m()
    running = made.ask(model="s", priority=P1)
    assert runs(running)
    first = made.ask(model="s", priority=P1)
    assert waits(first), "the place is that of the lane, and P2 of m is below"
    urgent = made.ask(model="s", priority=P0)
    assert waits(urgent)
    assert made.refusal(first).reason is Reason.QUEUE_FULL
    assert [record.model for record in made.records] == ["m", "s"]


def test_a_request_of_the_other_lane_of_its_workers_gives_no_way() -> None:
    queue, long = Queue(), Pool("m", Lane.LONG)
    queue.push(P3, pool=long)
    elsewhere = queue.push(P2, pool=Pool("s", Lane.SHORT))
    assert queue.flow.victim(queue.make(P0), now=0.0) is elsewhere
