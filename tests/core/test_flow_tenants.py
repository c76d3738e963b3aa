"""Tenants in the queue: equal work, accounts, and what real costs correct."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.contract import Lane
from router.core.bands import TENANTS_MAX
from router.core.pools import Pool
from tests.core.flow_rig import P0, P1, P3, Queue


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 3)), min_size=30, max_size=120),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 2.0]), max_size=3),
)
def test_backlogged_tenants_get_equal_work_within_one_request(
    sent: list[tuple[str, float]], weights: dict[str, float]
) -> None:
    tenants = {name: {"weight": weight} for name, weight in weights.items()}
    queue = Queue(tenants=tenants)
    for name in "abc":
        queue.push(tenant=name, cost=3.0)
    for name, cost in sent:
        queue.push(tenant=name, cost=cost)
    left = {name: sum(t == name for t, _ in sent) + 1 for name in "abc"}
    work = dict.fromkeys("abc", 0.0)
    largest = max(3.0 / weights.get(name, 1.0) for name in "abc")
    while all(left.values()):
        made = queue.serve()
        name = made.spec.tenant
        left[name] -= 1
        work[name] += made.cost / weights.get(name, 1.0)
        if all(left.values()):
            assert max(work.values()) - min(work.values()) <= largest + 1e-9


def test_a_tenant_that_floods_delays_others_by_one_request() -> None:
    queue = Queue()
    for _ in range(500):
        queue.push(tenant="noisy")
    for _ in range(100):
        queue.serve()
    victim = queue.push(tenant="quiet")
    assert victim in (queue.serve(), queue.serve())


def test_a_tenant_with_both_lanes_has_one_account() -> None:
    queue, long = Queue(), Pool("m", Lane.LONG)
    for _ in range(20):
        queue.push(tenant="both")
        queue.push(tenant="both", pool=long)
        queue.push(tenant="one")
    served = [queue.serve().spec.tenant for _ in range(20)]
    assert served.count("one") == 10


def test_a_fast_model_starves_no_tenant_of_a_slow_one() -> None:
    queue, slow, fast = Queue(), Pool("slow", Lane.SHORT), Pool("fast", Lane.SHORT)
    for _ in range(50):
        queue.push(tenant="old", pool=slow)
        queue.push(tenant="both", pool=fast)
        queue.push(tenant="busy", pool=fast)
    for _ in range(80):
        queue.serve(pools=[fast])
    for tenant in ("new", "both"):  # neither V nor F of another model's queue counts here
        newcomer = queue.push(tenant=tenant, pool=slow)
        assert newcomer in (queue.serve(pools=[slow]), queue.serve(pools=[slow]))


def test_a_model_that_serves_p3_alone_does_not_use_up_p3s_share_of_another() -> None:
    queue = Queue(shares=None)
    busy, calm = Pool("busy", Lane.SHORT), Pool("calm", Lane.SHORT)
    got = 0
    for _ in range(500):
        for pool, priority in ((busy, P0), (busy, P3), (calm, P3)):
            queue.push(priority, pool=pool)
        got += queue.serve(pools=[busy]).spec.priority is P3
        queue.serve(pools=[calm])
    assert got >= 9


def test_real_costs_correct_a_tenants_account() -> None:
    queue = Queue()
    for tenant in "aabb":
        for _ in range(20):
            queue.push(tenant=tenant)
    first = [queue.serve() for _ in range(20)]
    queue.offer()  # both lines have their new tags
    for made in first:
        if made.spec.tenant == "b":
            queue.flow.settle(made, 0.5)  # ten of them cost half of what they were charged
            queue.flow.settle(made, 0.0)  # only once
    then = [queue.serve().spec.tenant for _ in range(5)]
    assert then == ["b"] * 5


def test_a_bill_of_an_earlier_busy_period_is_not_presented_in_this_one() -> None:
    queue = Queue()
    queue.push(tenant="a")
    queue.push(tenant="b")
    early = queue.serve()
    queue.drain()
    for tenant in "ab":
        for _ in range(4):
            queue.push(tenant=tenant)
    queue.serve(), queue.serve()
    queue.flow.settle(early, 100.0)
    assert sorted(queue.serve().spec.tenant for _ in range(4)) == ["a", "a", "b", "b"]


def test_tenants_that_only_came_once_are_not_remembered_for_ever() -> None:
    queue = Queue()
    queue.push(tenant="keeps the period alive", cost=1e9)
    queue.push(tenant="keeps the period alive", cost=1e9)
    for number in range(2 * TENANTS_MAX + 500):
        queue.flow.serve(queue.push(tenant=f"once-{number}"), now=0.0)
    (domain,) = queue.flow.domains
    assert len(domain.bands[P1].ends) <= 2 * TENANTS_MAX + 1
    queue.drain()
    assert not domain.bands[P1].ends


def test_a_correction_counts_by_the_tenants_weight() -> None:
    queue = Queue(tenants={"a": {"weight": 4.0}})
    for _ in range(3):
        queue.push(tenant="a", cost=8.0)
    made = queue.serve()
    (domain,) = queue.flow.domains
    assert domain.bands[P1].ends["a"] == 2.0
    queue.flow.settle(made, 4.0)
    assert domain.bands[P1].ends["a"] == 1.0
