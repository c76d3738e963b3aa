"""Who is served next: bands, what they are owed, rounds of offers, and who gives way."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.contract import Lane
from router.core.flow import FlowQueue
from router.core.line import Line
from router.core.pools import ANY_MODEL, Pool
from router.core.types import Priority
from tests.core.flow_rig import P0, P1, P2, P3, Queue


@given(st.lists(st.sampled_from(Priority), max_size=30))
def test_bands_are_served_in_order_and_equals_by_arrival(classes: list[Priority]) -> None:
    queue = Queue()
    made = [queue.push(priority) for priority in classes]
    expected = sorted(made, key=lambda t: (t.spec.priority, t.number))
    assert queue.drain() == expected


def test_an_urgent_request_of_another_lane_goes_first() -> None:
    queue = Queue()
    queue.push(P2)
    urgent = queue.push(P0, pool=Pool("m", Lane.LONG))
    assert queue.serve() is urgent


def served_costs(queue: Queue, rounds: int, refill: dict[Priority, float]) -> dict[Priority, float]:
    """What each class got while all of them always wait."""
    got = dict.fromkeys(refill, 0.0)
    for priority, cost in refill.items():
        for _ in range(3):
            queue.push(priority, cost=cost)
    for _ in range(rounds):
        made = queue.serve()
        got[made.spec.priority] += made.cost
        queue.push(made.spec.priority, cost=made.cost)
    return got


def test_p3_gets_its_minimum_share_under_permanent_overload_by_p0() -> None:
    got = served_costs(Queue(shares=None), 5_000, {P0: 1.3, P3: 0.7})
    assert got[P3] / sum(got.values()) >= 0.02 * 0.98
    assert got[P3] / sum(got.values()) <= 0.03


@given(
    st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
    st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_every_band_gets_its_share_whatever_the_costs(
    parts: list[float], costs: list[float]
) -> None:
    shares = [part / sum(parts) for part in parts]
    got = served_costs(Queue(shares=shares), 2_000, dict(zip(Priority, costs, strict=True)))
    total = sum(got.values())
    for priority, share in zip(Priority, shares, strict=True):
        assert got[priority] >= share * total - 6 * max(costs)


def test_a_share_that_is_moved_holds_from_then_on() -> None:
    queue = Queue(shares=(0.9, 0, 0, 0.1))
    queue.flow.set_shares((0.5, 0, 0, 0.5))
    got = served_costs(queue, 1_000, {P0: 1, P3: 1})
    assert got[P3] == pytest.approx(500, abs=5)


def test_a_band_is_owed_nothing_for_the_time_in_which_it_did_not_wait() -> None:
    queue = Queue(shares=(0.5, 0, 0, 0.5))
    for _ in range(100):
        queue.push(P0)
        queue.serve()
    for _ in range(10):
        queue.push(P0)
        queue.push(P3)
    first = [queue.serve().spec.priority for _ in range(10)]
    assert first.count(P3) <= 5


def worst_wait_over_bound(seed: int) -> float:
    """One server of one cost unit a second; the other bands always wait; random costs.

    Returns the longest wait of band k over (sigma + Lmax) / phi + Lmax, with sigma measured: the
    most by which arrivals ever were ahead of phi.
    """
    rng = Random(seed)
    k, phi = rng.choice(list(Priority)), rng.uniform(0.02, 0.6)
    rest = [rng.random() if p is not k else 0.0 for p in Priority]
    shares = [
        phi if p is k else (1 - phi) * r / sum(rest) for p, r in zip(Priority, rest, strict=True)
    ]
    queue = Queue(shares=shares)
    largest = rng.uniform(0.5, 5)

    def cost() -> float:
        return rng.uniform(0.01, 1) ** rng.choice((1, 3)) * largest

    coming, now, ahead, sigma = [], 0.0, 0.0, 0.0
    for _ in range(60):
        gap = rng.expovariate(1) * largest / phi if rng.random() < 0.5 else 0.0
        c = cost()
        now += gap
        ahead = max(0.0, ahead - phi * gap) + c
        sigma = max(sigma, ahead)
        coming.append((now, c))
    lmax, worst, left = 0.0, 0.0, len(coming)
    while left:
        while coming and coming[0][0] <= queue.now:
            at, c = coming.pop(0)
            queue.push(k, cost=c, arrived_at=at)
            lmax = max(lmax, c)
        for p in Priority:
            while p is not k and not queue.flow.waiting(Lane.SHORT, p):
                queue.push(p, cost=cost())
        made = queue.serve()
        lmax = max(lmax, made.cost)
        if made.spec.priority is k:
            worst, left = max(worst, queue.now - made.arrived_at), left - 1
        queue.now += made.cost
    return worst / ((sigma + lmax) / phi + lmax)


@pytest.mark.parametrize("seed", range(60))
def test_the_delay_bound_of_a_latency_rate_server_holds(seed: int) -> None:
    assert worst_wait_over_bound(seed) <= 1


def late_queue(**sections: Any) -> Queue:
    return Queue(**({"queue": {"promote_after_targets": 0}} | sections))


def test_the_latest_of_the_lowest_band_gives_way() -> None:
    queue = late_queue()
    queue.push(P3, pool=Pool("m", Lane.LONG))
    assert queue.flow.victim(queue.make(P0), now=0.0) is None  # the other lane's place is no use
    queue.push(P2)
    p3 = [queue.push(P3), queue.push(P3)]
    late = queue.push(P0, late_at=0.0)
    assert queue.flow.victim(queue.make(P1), now=0.0) is late
    queue.flow.remove(late, now=0.0)
    assert queue.flow.victim(queue.make(P1), now=0.0) is p3[1]
    assert queue.flow.victim(queue.make(P3), now=0.0) is None
    assert queue.flow.victim(queue.make(P0, late_at=0.0), now=0.0) is None


def is_filed(tag: float, number: int, line: Line) -> bool:
    return (line.filed_tag, line.filed_number) == (tag, number)


def snapshot_of(flow: FlowQueue) -> list[Any]:
    return [
        (sorted(e[:2] for e in heap if is_filed(*e)), list(stand.tickets))
        for domain in flow.domains
        for stand in domain.stands.values()
        for heap in stand.heaps
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from(Priority), st.sampled_from("ab"), st.sampled_from(Lane)),
        min_size=1,
        max_size=25,
    )
)
def test_a_round_of_offers_without_a_dispatch_leaves_everything_as_it_was(
    sent: list[tuple[Priority, str, Lane]],
) -> None:
    queue = Queue()
    pools = {lane: Pool("m", lane) for lane in Lane}
    for priority, tenant, lane in sent:
        queue.push(priority, tenant=tenant, pool=pools[lane])
    before, order = snapshot_of(queue.flow), []
    skipped: dict[int, None] = {}
    while (made := queue.flow.offer(queue.flow.pools, skipped, now=0.0)) is not None:
        order.append(made)
        skipped[made.number] = None
    queue.flow.end_round()
    assert sorted(t.number for t in order) == list(range(1, len(sent) + 1))
    assert snapshot_of(queue.flow) == before
    assert queue.offer() is order[0]


def test_only_pools_with_room_are_asked() -> None:
    queue, long = Queue(), Pool("m", Lane.LONG)
    queue.push(P0)
    other = queue.push(P3, pool=long)
    assert queue.offer(pools=[long]) is other
    assert queue.offer(pools=[Pool("n", Lane.SHORT)]) is None


def test_pools_whose_requests_never_compete_have_rounds_of_their_own() -> None:
    queue = Queue()
    a, b = Pool("a", Lane.SHORT), Pool("b", Lane.SHORT)
    adapter = Pool("adapter", Lane.SHORT)
    adapter.domain = "a"
    assert list(queue.flow.groups([a, b, adapter])) == [[a, adapter], [b]]
    # A request for any model competes with all.
    anything = Pool(ANY_MODEL, Lane.SHORT)
    assert list(queue.flow.groups([a, b, anything])) == [[a, b, anything]]
    old, young = queue.push(P1, pool=anything), queue.push(P1, pool=a)
    urgent = queue.push(P0, pool=b)
    assert queue.drain() == [urgent, old, young]


def test_pools_that_come_to_share_workers_share_their_bands_from_then_on() -> None:
    queue = Queue()
    a, b = Pool("a", Lane.SHORT), Pool("b", Lane.SHORT)
    first, urgent = queue.push(P2, pool=a, queue_deadline_at=50.0), queue.push(P0, pool=b)
    b.domain = "a"
    queue.now = 1.0
    queue.flow.regroup({"a"}, now=1.0)
    (domain,) = queue.flow.domains
    assert {pool.model for pool in domain.stands} == {"a", "b"}
    assert queue.drain() == [urgent, first]
    queue.flow.regroup(set(), now=2.0)
    assert not queue.flow.domains


def test_who_only_changes_its_place_is_not_taken_for_served() -> None:
    """Workers came at last, and say what they serve: nobody of those who waited was served yet."""
    queue = Queue()
    a, b = Pool("a", Lane.SHORT), Pool("b", Lane.SHORT)
    for _ in range(100):
        queue.push(P1, pool=a)
    queue.push(P1, pool=b)
    b.domain = "a"
    queue.flow.regroup({"a"}, now=10.0)
    elsewhere = queue.flow.of_pool(a)
    for moved in elsewhere:
        queue.flow.take_out(moved, now=10.0)
        queue.flow.put_back(moved, now=10.0)
    (domain,) = queue.flow.domains
    assert not domain.drain.cost_per_s(now=20.0)
    assert domain.drain.cost_per_s(now=20.0) is not None


def test_a_request_that_passes_the_queue_is_charged_to_its_own_band_and_tenant() -> None:
    queue = Queue(shares=(0.5, 0, 0, 0.5))
    for _ in range(10):
        queue.push(P0)
        queue.push(P3, tenant="a")
        queue.push(P3, tenant="b")
    queue.flow.serve(queue.make(P3, tenant="a", cost=5.0), now=0.0)
    (domain,) = queue.flow.domains
    assert domain.bands[P0].owed == 2.5
    assert domain.bands[P3].owed == 0
    of_p3 = [made.spec.tenant for made in queue.drain() if made.spec.priority is P3]
    assert of_p3[:5] == ["b"] * 5


def test_of_two_that_are_owed_the_one_goes_first_that_is_owed_more_of_its_share() -> None:
    queue = Queue(shares=(0.6, 0, 0, 0.02))
    queue.push(P0)
    low = queue.push(P3)
    (domain,) = queue.flow.domains
    domain.bands[P0].owed, domain.bands[P3].owed = 2.0, 1.1  # 1.7 and 5 times their shares too much
    assert queue.offer() is low
    domain.bands[P3].owed = 1.01
    assert queue.offer() is not low
