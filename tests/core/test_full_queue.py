"""A lane whose queue is full: what needs no place in it, and who gives way."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract import Lane
from router.core.pools import Pool
from router.core.types import Priority, Ticket
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
    assert waits(first), "m has all places of the lane"
    second = made.ask(model="s", priority=P1)
    assert waits(second), "m has three of them, and one now"
    urgent = made.ask(model="s", priority=P0)
    assert waits(urgent)
    assert made.refusal(second).reason is Reason.QUEUE_FULL
    assert [record.model for record in made.records] == ["m", "m", "s"]


def test_a_request_of_the_other_lane_of_its_workers_gives_no_way() -> None:
    queue, long = Queue(), Pool("m", Lane.LONG)
    queue.push(P3, pool=long)
    elsewhere = queue.push(P2, pool=Pool("s", Lane.SHORT))
    assert queue.flow.victim(queue.make(P0), now=0.0) is elsewhere
    assert queue.flow.victim(queue.make(P2), now=0.0) is None, "nothing is won by a change"


@pytest.mark.parametrize("priority", Priority)
def test_a_flood_of_one_model_shuts_out_no_other(priority: Priority) -> None:
    """Whatever the classes: what waits for other workers has no more claim to a place."""
    made = bench(queue={"depth_max": 9}, degrade={"enabled": False})
    for model in ("m", "s", "t"):
        made.join(model, models=(model,), concurrency_max=1)
        assert runs(made.ask(model=model))
    flood = [made.ask(model="m", priority=P1) for _ in range(30)]
    for model in ("s", "t"):
        assert all(waits(made.ask(model=model, priority=priority)) for _ in range(3))
    assert made.core.queued == 9
    assert [waits(one) for one in flood[:3]] == [True] * 3, "the last of the flood gave way"
    assert {record.model for record in made.records} == {"m"}


def test_of_a_flood_the_tenant_with_the_longest_line_gives_way_and_the_late_before() -> None:
    queue, lines = lines_of({"noisy": 5, "quiet": 1, "third": 2})
    other = Pool("s", Lane.SHORT)
    assert queue.flow.victim(queue.make(P3, pool=other), now=0.0) is lines["noisy"][-1]
    late = Queue(queue={})
    waiting = [late.push(P1, late_at=5.0 if n == 1 else 50.0) for n in range(4)]
    assert late.flow.expired(6.0) is None
    assert late.flow.victim(late.make(P3, pool=other), now=6.0) is waiting[1]


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(Priority)), max_size=60),
    st.integers(1, 9),
)
def test_every_model_is_sure_of_its_part_of_the_places(
    came: list[tuple[str, Priority]], depth_max: int
) -> None:
    made = bench(queue={"depth_max": depth_max}, degrade={"enabled": False})
    for model in "abcd":
        made.join(model, models=(model,), concurrency_max=1)
        assert runs(made.ask(model=model))
    tickets = [made.ask(model=model, priority=priority) for model, priority in came]
    waiting = Counter(one.pool.model for one in tickets if waits(one))
    asked = Counter(model for model, _ in came)
    assert sum(waiting.values()) == min(depth_max, len(came))
    for model, count in asked.items():
        assert waiting[model] >= min(count, depth_max // len(asked))


def lines_of(lengths: dict[str, int], **weights: float) -> tuple[Queue, dict[str, list[Ticket]]]:
    """Tenants' lines in P3, one after the other."""
    queue = Queue(tenants={name: {"weight": weight} for name, weight in weights.items()})
    return queue, {
        name: [queue.push(P3, tenant=name) for _ in range(n)] for name, n in lengths.items()
    }


def test_who_has_a_longer_line_gives_way_to_another_tenant() -> None:
    queue, lines = lines_of({"a": 3, "b": 5, "c": 4})
    for newcomer in ("a", "quiet"):
        victim = queue.flow.victim(queue.make(P3, tenant=newcomer), now=0.0)
        assert victim is lines["b"][-1]
    assert queue.flow.victim(queue.make(P3, tenant="b"), now=0.0) is None
    # One more would make both as long: nothing is won by a change.
    assert queue.flow.victim(queue.make(P3, tenant="c"), now=0.0) is None


def test_lines_are_as_long_as_their_tenants_weight_allows() -> None:
    queue, lines = lines_of({"heavy": 8, "light": 4}, heavy=4.0)
    assert queue.flow.victim(queue.make(P3, tenant="quiet"), now=0.0) is lines["light"][-1]
    assert queue.flow.victim(queue.make(P3, tenant="heavy"), now=0.0) is lines["light"][-1]
    assert queue.flow.victim(queue.make(P3, tenant="light"), now=0.0) is None


def test_a_longer_line_is_safe_from_other_classes_and_lanes() -> None:
    queue, lines = lines_of({"noisy": 9})
    long = queue.make(P3, tenant="quiet", pool=Pool("m", Lane.LONG))
    assert queue.flow.victim(long, now=0.0) is None
    low = queue.push(P3, tenant="quiet")
    for _ in range(5):
        queue.push(P2, tenant="noisy")
    assert queue.flow.victim(queue.make(P2, tenant="quiet"), now=0.0) is low
    assert lines["noisy"][-1].number < low.number


@pytest.mark.parametrize("order", ["fair", "dynamic"])
def test_a_flood_of_one_tenant_shuts_out_nobody_else(order: str) -> None:
    made = bench(queue={"depth_max": 20, "order": order}, degrade={"enabled": False})
    made.join("w1", concurrency_max=1)
    running = made.ask(priority=P3, tenant="noisy")
    quiet: list[Ticket] = []
    for step in range(400):
        made.pass_to(made.now + 0.01)
        made.ask(priority=P3, tenant="noisy")
        if step % 50 == 7:
            quiet.append(made.ask(priority=P3, tenant="quiet"))
        if step % 10 == 0:
            made.end(running)
            running = made.dispatched[-1]
    assert all(record.tenant == "noisy" for record in made.records if record.reason)
    assert len(quiet) == 8
    assert made.core.queued == 20
