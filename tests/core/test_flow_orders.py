"""Other orders than the fair one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.drain import LATE
from router.core.flow import dynamic_priority
from router.core.types import Priority
from tests.core.builders import config, request_spec, ticket
from tests.core.flow_rig import P0, P1, P2, Queue


def test_the_dynamic_order_is_the_formula_of_the_documentation() -> None:
    made = ticket(spec=request_spec(priority=P1), arrived_at=10.0, ttft_target_s=2.0)
    assert dynamic_priority(made, 10.0) == pytest.approx(0.5 * 2 / 3)
    assert dynamic_priority(made, 11.0) == pytest.approx(0.5 * 2 / 3 + 0.3 * 0.5 + 0.2 * 0.05)
    assert dynamic_priority(made, 1e6) == pytest.approx(0.5 * 2 / 3 + 0.3 + 0.2)
    top = ticket(spec=request_spec(priority=P0), arrived_at=0.0, ttft_target_s=0.1)
    assert dynamic_priority(top, 60.0) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.sampled_from(Priority), st.floats(0, 40)), min_size=1, max_size=20))
def test_the_dynamic_order_serves_the_highest_first(sent: list[tuple[Priority, float]]) -> None:
    queue = Queue(queue={"order": "dynamic"})
    made = []
    for priority, at in sorted(sent, key=lambda item: item[1]):
        queue.now = at
        target_s = config().classes.by_priority[priority].ttft_target_s
        made.append(queue.push(priority, ttft_target_s=target_s, late_at=at))
    queue.pass_to(45.0)
    expected = sorted(made, key=lambda t: (-dynamic_priority(t, 45.0), t.number))
    assert queue.drain() == expected


@given(st.lists(st.tuples(st.sampled_from(Priority), st.sampled_from("ab")), max_size=20))
def test_fifo_is_by_arrival_whatever_they_are(sent: list[tuple[Priority, str]]) -> None:
    queue = Queue(queue={"order": "fifo"})
    made = [queue.push(priority, tenant=tenant, late_at=1.0) for priority, tenant in sent]
    queue.pass_to(200.0)
    assert queue.drain() == made


@pytest.mark.parametrize("order", ["fifo", "dynamic"])
def test_who_waits_when_the_order_becomes_fair_is_late_in_time(order: str) -> None:
    queue = Queue(queue={"order": order})
    soon, gone, in_time = (queue.push(P2, late_at=at) for at in (2.0, 0.5, 50.0))
    queue.pass_to(1.0)
    assert [made.band for made in (soon, gone, in_time)] == [P2] * 3
    for _ in range(2):
        queue.flow.configure(config(queue={"order": "fair", "promote_after_targets": 0}))
    queue.pass_to(1.0)
    assert [made.band for made in (soon, gone, in_time)] == [P2, LATE, P2]
    queue.pass_to(2.0)
    assert [made.band for made in (soon, gone, in_time)] == [LATE, LATE, P2]
    assert queue.flow.relegated == 2
    assert queue.flow.next_deadline() == 50.0
