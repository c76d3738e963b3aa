"""The hold queue against a plain list that does the same slowly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.contract import Lane
from router.core.pools import Pool
from router.core.queue import HoldQueue
from router.core.types import Ticket
from tests.core.builders import ticket

POOLS = [Pool(model, Lane.SHORT) for model in ("a", "b", "c")]


def test_a_ticket_that_comes_back_stands_where_its_arrival_says() -> None:
    queue = HoldQueue(10)
    made = {number: ticket(number, pool=POOLS[0]) for number in (1, 2, 3, 5, 6)}
    for number in (5, 6, 2, 1, 3):
        queue.push(made[number])
    order = []
    while (head := queue.offer(POOLS, ())) is not None:
        order.append(head.number)
        queue.remove(head)
    assert order == [1, 2, 3, 5, 6]


def test_only_pools_asked_for_are_offered_and_the_passed_are_passed_over() -> None:
    queue = HoldQueue(10)
    tickets = [ticket(number, pool=POOLS[number % 3]) for number in range(6)]
    for one in tickets:
        queue.push(one)
    assert queue.offer(POOLS, ()) is tickets[0]
    assert queue.offer(POOLS[1:], ()) is tickets[1]
    assert queue.offer(POOLS[:1], {0: None}) is tickets[3]
    assert queue.offer([], ()) is None


def test_what_is_gone_is_not_kept_until_its_deadline() -> None:
    queue = HoldQueue(10)
    for number in range(10_000):
        one = ticket(number, pool=POOLS[0], queue_deadline_at=1e9)
        queue.push(one)
        assert queue.remove(one)
    assert len(queue._deadlines) <= 66
    assert queue.next_deadline() is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["push", "serve", "leave", "expire"]),
        st.integers(0, 2),
        st.integers(0, 20),
    ),
    max_size=80,
)


@given(STEPS)
def test_it_serves_in_order_of_arrival_whatever_leaves(steps: list[tuple[str, int, int]]) -> None:
    queue, model, now = HoldQueue(5), list[Ticket](), 0.0
    for number, (what, which, pick) in enumerate(steps):
        now += 1
        if what == "push" and not queue.full:
            one = ticket(number, pool=POOLS[which], queue_deadline_at=now + pick, arrived_at=now)
            queue.push(one)
            model.append(one)
        elif what == "serve":
            expected = next((t for t in model if t.pool is POOLS[which]), None)
            assert queue.offer([POOLS[which]], ()) is expected
            if expected is not None:
                assert queue.remove(expected)
                model.remove(expected)
        elif what == "leave" and model:
            gone = model.pop(pick % len(model))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif what == "expire":
            while (late := queue.expired(now)) is not None:
                assert late.queue_deadline_at <= now
                queue.remove(late)
                model.remove(late)
            assert all(t.queue_deadline_at > now for t in model)
        assert len(queue) == len(model) <= 5
        assert queue.offer(POOLS, ()) is (model[0] if model else None)
        deadlines = [t.queue_deadline_at for t in model]
        assert queue.next_deadline() == min(deadlines, default=None)
        assert queue.oldest_arrival_at() == (model[0].arrived_at if model else None)
        assert {id(pool) for pool in queue.pools} == {id(t.pool) for t in model}
