"""What a request really costs: estimates that are bounded, and what corrects them afterwards."""

from __future__ import annotations

import pytest

from router.core.types import Outcome, Priority, Ticket, Usage
from tests.core.builders import Bench, bench
from tests.core.flow_rig import P0, P1, P2, P3, Queue


def owed(queue: Queue) -> list[float]:
    (domain,) = queue.flow.domains
    return [band.owed for band in domain.bands]


def answers(made: Bench, count: int, output_tokens: int) -> None:
    for _ in range(count):
        one, usage = made.ask(), Usage(prompt_tokens=100, output_tokens=output_tokens)
        made.core.on_finished(one, Outcome.SUCCESS, now=made.now, usage=usage)


@pytest.mark.parametrize("max_tokens", [4_096, 2**31 - 1])
def test_what_a_client_allows_beyond_usual_answers_is_no_cost(max_tokens: int) -> None:
    made = bench("w1")
    unknown = made.ask(max_tokens=max_tokens)
    assert unknown.cost == made.ask(max_tokens=None).cost
    answers(made, 30, 100)
    known = made.ask(max_tokens=max_tokens)
    assert known.output_tokens == max_tokens
    assert known.cost == pytest.approx(0.1 + 2 * 0.1, rel=0.1)
    assert known.cost < unknown.cost
    assert made.ask(max_tokens=10).cost < known.cost
    assert made.ask(max_tokens=max_tokens, samples=3).cost > 2 * known.cost


def test_what_bands_are_owed_is_corrected_by_the_real_cost() -> None:
    """All wait, one of P0 is dispatched at an estimate of 8 and costs 2."""
    queue = Queue(shares=(0.5, 0.25, 0.15, 0.1))
    for priority in (P0, P0, P1, P2, P3):
        queue.push(priority, cost=8.0)
    first = queue.serve()
    assert owed(queue) == pytest.approx([0, 2, 1.2, 0.8])
    queue.flow.settle(first, 2.0)
    assert owed(queue) == pytest.approx([0, 0.5, 0.3, 0.2])
    queue.flow.settle(first, 0.0)
    assert owed(queue) == pytest.approx([0, 0.5, 0.3, 0.2]), "only once"


def test_a_band_that_got_its_turn_for_what_cost_less_waits_longer_for_the_next() -> None:
    queue = Queue(shares=(0, 0, 0, 0.5))
    for _ in range(9):
        queue.push(P0, cost=8.0)
        queue.push(P3, cost=4.0)
    first, then = queue.serve(), queue.serve()
    assert [first.spec.priority, then.spec.priority] == [P0, P3]
    queue.flow.settle(first, 2.0)
    assert owed(queue)[P3] == pytest.approx(1.0 + 2.0 - 4.0), "a debt: half of 6 - 4 + 4"
    queue.flow.settle(then, 6.0)
    assert owed(queue)[P3] == pytest.approx(-1.0 - 2.0 + 1.0), "it took its turn for 4"


def test_a_turn_that_was_not_owed_leaves_no_debt() -> None:
    queue = Queue(shares=(0.5, 0, 0, 0))
    for _ in range(4):
        queue.push(P0, cost=1.0)
    first = queue.serve()
    queue.flow.settle(first, 5.0)
    assert owed(queue)[P0] == 0


def test_an_estimate_that_is_corrected_concerns_nobody_who_came_later() -> None:
    queue = Queue(shares=(0.5, 0, 0, 0.5))
    queue.push(P0, cost=8.0)
    queue.push(P0, cost=8.0)
    first = queue.serve()
    queue.push(P3, cost=8.0)
    queue.flow.settle(first, 20.0)
    assert owed(queue)[P3] == 0


def shares_of(estimates: dict[Priority, float]) -> dict[Priority, int]:
    """Turns of classes that always wait, of ten who run at once, all of which really cost one."""
    queue, running = Queue(shares=(0.6, 0.3, 0.08, 0.02)), list[Ticket]()
    got = dict.fromkeys(estimates, 0)
    for priority, cost in estimates.items():
        for _ in range(3):
            queue.push(priority, cost=cost)
    for _ in range(2_000):
        made = queue.serve()
        got[made.spec.priority] += 1
        queue.push(made.spec.priority, cost=made.cost)
        running.append(made)
        if len(running) > 10:
            queue.flow.settle(running.pop(0), 1.0)
    return got


def test_who_is_estimated_too_high_loses_nothing_of_its_share() -> None:
    plain = shares_of({P0: 1.0, P1: 1.0, P3: 1.0})
    high = shares_of({P0: 8.0, P1: 1.0, P3: 1.0})
    assert high[P0] == pytest.approx(plain[P0], rel=0.05)
    assert high[P3] == pytest.approx(plain[P3], rel=0.3)
