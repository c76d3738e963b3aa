"""Late requests, promoted ones, and those that waited too long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.drain import LATE
from router.core.flow import WAIT_PER_PREFILL
from router.core.types import Priority, Ticket
from tests.core.flow_rig import P0, P1, P2, P3, Queue


def late_queue(**sections: Any) -> Queue:
    return Queue(**({"queue": {"promote_after_targets": 0}} | sections))


def test_at_late_at_a_ticket_yields_to_all_that_can_be_in_time() -> None:
    queue = late_queue()
    late = queue.push(P0, late_at=1.0)
    urgent = queue.push(P3, late_at=50.0)
    assert queue.offer() is late
    queue.pass_to(0.999)
    assert queue.offer() is late
    queue.pass_to(1.0)
    assert late.band == LATE
    assert queue.offer() is urgent
    assert queue.flow.relegated == 1


def test_equals_in_the_late_line_are_served_by_age() -> None:
    queue = late_queue()
    made = [queue.push(P3, late_at=5.0), queue.push(P0, late_at=9.0), queue.push(P1, late_at=1.0)]
    queue.pass_to(10.0)
    assert queue.drain() == made


@given(
    st.lists(st.tuples(st.floats(0, 50), st.sampled_from([0.01, 0.02, 0.1, 0.4])), max_size=30),
    st.booleans(),
)
def test_short_prompts_of_a_burst_go_first_and_later_ones_pass_nobody_for_long(
    gaps: list[tuple[float, float]], late: bool
) -> None:
    """In a tenant's line and in the late line alike."""
    queue = late_queue() if late else Queue()
    for gap_s, prefill_s in gaps:
        queue.now += gap_s
        queue.push(P1, prefill_s=prefill_s, late_at=queue.now + 1.0)
    if late:
        queue.pass_to(queue.now + 2.0)
    served = queue.drain()
    for index, first in enumerate(served):
        for then in served[index + 1 :]:
            passed_s = first.arrived_at - then.arrived_at
            shorter_s = then.prefill_s - first.prefill_s
            assert passed_s <= WAIT_PER_PREFILL * shorter_s + 1e-9


def test_one_that_comes_late_already_goes_to_the_late_line() -> None:
    queue = late_queue()
    queue.push(P0, late_at=0.0)
    assert queue.offer() is queue.offer() is not None
    on_time = queue.push(P3)
    assert queue.offer() is on_time


@given(st.floats(0, 1e6), st.floats(0.01, 60), st.sampled_from([P2, P3]))
@settings(max_examples=200)
def test_promotion_goes_one_band_at_a_time_and_never_above_p1(
    start: float, target_s: float, priority: Priority
) -> None:
    queue = Queue(queue={"relegate_ratio": 0})
    queue.now = start
    made = queue.push(priority, ttft_target_s=target_s)
    bands = [made.band]
    for _ in range(4):
        due = queue.flow.next_deadline()
        assert due is not None
        if due >= 1e12:
            break
        assert due > queue.now, "the same moment for ever"
        queue.pass_to(due)
        bands.append(made.band)
    assert bands == list(range(priority, P1 - 1, -1))
    assert queue.now == pytest.approx(start + (priority - P1) * 10 * target_s)


def test_p0_and_p1_are_never_promoted() -> None:
    queue = Queue(queue={"relegate_ratio": 0})
    made = [queue.push(P0, ttft_target_s=0.1), queue.push(P1, ttft_target_s=0.1)]
    queue.pass_to(1_000.0)
    assert [t.band for t in made] == [P0, P1]


def test_a_promoted_ticket_keeps_its_age_among_those_it_joins() -> None:
    queue = Queue(queue={"relegate_ratio": 0})
    old = queue.push(P2, ttft_target_s=1.0)
    queue.now = 5.0
    young = queue.push(P1)
    queue.pass_to(10.0)
    assert queue.drain() == [old, young]


def test_who_waited_too_long_is_told_and_may_be_taken_out() -> None:
    queue = Queue()
    first = queue.push(queue_deadline_at=3.0)
    second = queue.push(queue_deadline_at=2.0)
    queue.push(queue_deadline_at=9.0)
    assert queue.pass_to(5.0) == [second, first]
    assert len(queue.flow) == 1


def test_a_late_line_that_is_never_reached_holds_nothing_of_those_who_left() -> None:
    queue = late_queue()
    for number in range(3_000):
        queue.now = float(number)
        queue.push(P2, late_at=queue.now + 1, queue_deadline_at=queue.now + 30)
        queue.pass_to(queue.now)
    (domain,) = queue.flow.domains
    (stand,) = domain.stands.values()
    assert len(stand.heaps[LATE + P2]) <= 2 * len(queue.flow) + 66
    assert len(queue.flow._alarms) <= 2 * len(queue.flow) + 66


# Late ones of the classes that are served last keep the share of their class.


def overloaded(priority: Priority, share: float, *, late: int) -> tuple[Queue, list[Ticket]]:
    """P0 always waits, in time; so many of another class came before and are late."""
    shares = [0.0] * len(Priority)
    shares[priority] = share
    queue = late_queue_with(shares)
    made = [queue.push(priority, late_at=1.0) for _ in range(late)]
    queue.pass_to(1.0)
    assert all(each.band == LATE for each in made)
    return queue, made


def late_queue_with(shares: list[float]) -> Queue:
    return Queue(shares=shares, queue={"promote_after_targets": 0})


@pytest.mark.parametrize("priority", [P2, P3])
def test_what_is_late_of_a_class_has_the_share_of_it(priority: Priority) -> None:
    queue, _ = overloaded(priority, 0.1, late=30)
    served = []
    for _ in range(200):
        queue.push(P0)
        served.append(queue.serve().spec.priority)
    assert served.count(priority) == pytest.approx(20, abs=1)
    longest = max(
        len(run) for run in "".join(str(int(p)) for p in served).split(str(int(priority)))
    )
    assert longest <= 11, "evenly"


@pytest.mark.parametrize("priority", [P0, P1])
def test_a_late_request_that_was_urgent_takes_nothing_of_what_can_be_in_time(
    priority: Priority,
) -> None:
    queue, _ = overloaded(priority, 0.5, late=5)
    for _ in range(50):
        queue.push(P3)
        assert queue.serve().spec.priority is P3
    (domain,) = queue.flow.domains
    assert domain.bands[priority].owed == 0


def test_of_a_class_that_is_owed_its_turn_who_can_be_in_time_goes_before_the_late() -> None:
    queue, late = overloaded(P3, 0.5, late=3)
    in_time = [queue.push(P3, late_at=50.0) for _ in range(2)]
    served = []
    for _ in range(9):
        queue.push(P0)
        served.append(queue.serve())
    of_p3 = [made for made in served if made.spec.priority is P3]
    assert of_p3 == [*in_time, *late[:2]]


def test_the_oldest_late_one_is_tried_once_and_paced_as_one_in_time() -> None:
    """It found no room: the round goes on with who can be in time, not with the next late one."""
    queue, late = overloaded(P3, 0.5, late=5)
    for _ in range(3):
        queue.push(P0)
    queue.serve(), queue.serve()
    assert [made.rank for made in late] == [2] * 5
    assert queue.offer() is late[0]
    assert late[0].rank == 1
    urgent = queue.offer(late[0])
    assert urgent is not None
    assert urgent.spec.priority is P0
    assert queue.offer(late[0], urgent) is late[1], "in its turn behind all others"
    assert [made.rank for made in late[1:]] == [2] * 4


def test_what_is_late_has_no_claim_when_it_is_gone() -> None:
    queue, late = overloaded(P3, 0.5, late=1)
    queue.push(P0)
    queue.push(P0)
    queue.serve()
    (domain,) = queue.flow.domains
    assert domain.bands[P3].owed == 0.5
    queue.flow.remove(late[0], now=1.0)
    assert domain.bands[P3].owed == 0
