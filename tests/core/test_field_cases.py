"""Cases from other projects' queues that the core has to do better in; each test names its case."""

from __future__ import annotations

from router.core.bands import TENANTS_MAX
from router.core.types import Priority
from tests.core.builders import one_at_a_time, request_spec, ticket
from tests.core.flow_rig import Queue

P0, P1, P2, P3 = Priority
PATIENT = {"relegate_ratio": 0.0, "promote_after_targets": 0.0, "wait_s_max": 3600.0}


def test_no_class_starves_however_many_more_urgent_ones_come() -> None:
    """QU07: strict priority starved low classes without bound."""
    classes = {
        name: {
            "wait_s_max": 3600.0,
            "ttft_target_s": 10.0,
            "tpot_target_s": 1.0,
            "share_min": share,
        }
        for name, share in (("p0", 0.6), ("p1", 0.25), ("p2", 0.1), ("p3", 0.05))
    }
    b = one_at_a_time(queue=PATIENT, classes=classes)
    running = b.ask(priority=P0)
    low = [b.ask(priority=priority) for priority in (P1, P2, P3)]
    for step in range(1, 60):
        b.now = step * 0.1
        for _ in range(2):  # twice what the worker can do
            b.ask(priority=P0)
        b.end(running)
        running = b.dispatched[-1]
    order = [one.spec.priority for one in b.dispatched]
    # Equal costs: a class is owed one of n requests when its share of n is one.
    for priority, at_most in ((P1, 1 / 0.25), (P2, 1 / 0.1), (P3, 1 / 0.05)):
        assert order.index(priority) <= at_most + 3
    assert all(one in b.dispatched for one in low)


def test_what_a_tenant_has_waiting_outlives_all_that_is_forgotten_of_tenants() -> None:
    """QU09: idle clean-up removed a tenant's queue while requests were still in it."""
    queue = Queue()
    mine = [queue.push(P1, tenant="mine", cost=50.0) for _ in range(3)]
    ahead = queue.push(P1, tenant="ahead")
    assert queue.serve() is mine[0], "its account is charged, and it has two more"
    for number in range(2 * TENANTS_MAX + 500):
        other = queue.push(P1, tenant=f"t{number}", cost=0.001)
        queue.flow.serve(other, now=0.0)
    (domain,) = queue.flow.domains
    assert len(domain.bands[P1].ends) <= 2 * TENANTS_MAX + 1, "some were forgotten"
    assert queue.drain() == [ahead, mine[1], mine[2]]


def test_a_tenant_that_comes_back_finds_its_line_as_it_left_it() -> None:
    """QU09: the line of a tenant ends with its last request, and begins anew with the next."""
    queue = Queue()
    keeps = queue.push(P1, tenant="keeps")
    leaves = queue.push(P1, tenant="leaves")
    assert queue.flow.remove(leaves, now=0.0)
    back = ticket(
        queue.count + 1,
        spec=request_spec(priority=P1, tenant="leaves"),
        pool=queue.pool,
        queue_deadline_at=1e12,
    )
    queue.flow.push(back, now=0.0)
    assert queue.drain() == [keeps, back]
