"""Who is served next: bands, what they are owed, tenants, late ones, and nobody lost."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.contract import Lane
from router.core.bands import TENANTS_MAX
from router.core.drain import LATE
from router.core.flow import WAIT_PER_PREFILL, FlowQueue, dynamic_priority
from router.core.pools import ANY_MODEL, Pool
from router.core.types import Priority, Ticket
from tests.core.builders import config, request_spec, ticket

P0, P1, P2, P3 = Priority
NO_SHARES = {f"p{n}": {"share_min": 0.0} for n in range(4)}
PATIENT: dict[str, Any] = {"relegate_ratio": 0, "promote_after_targets": 0}


class Queue:
    """A flow queue with default arguments and a clock."""

    def __init__(self, *, shares: Sequence[float] | None = (0, 0, 0, 0), **sections: Any) -> None:
        sections = {"queue": PATIENT, **sections}
        self.flow = FlowQueue(config(**sections))
        if shares is not None:
            self.flow.set_shares(shares)
        self.now = 0.0
        self.pool = Pool("m", Lane.SHORT)
        self.count = 0

    def make(
        self,
        priority: Priority = P1,
        *,
        tenant: str = "t",
        cost: float = 1.0,
        pool: Pool | None = None,
        **fields: Any,
    ) -> Ticket:
        """A ticket that comes now, patient and never late unless said otherwise."""
        self.count += 1
        pool = pool or self.pool
        given_fields: dict[str, Any] = {
            "spec": request_spec(priority=priority, tenant=tenant),
            "pool": pool,
            "lane": pool.lane,
            "cost": cost,
            "arrived_at": self.now,
            "queue_deadline_at": 1e12,
        }
        return ticket(self.count, **(given_fields | fields))

    def push(self, priority: Priority = P1, **fields: Any) -> Ticket:
        made = self.make(priority, **fields)
        self.flow.push(made, now=self.now)
        return made

    def offer(self, *skipped: Ticket, pools: list[Pool] | None = None) -> Ticket | None:
        passed = {made.number for made in skipped}
        try:
            return self.flow.offer(pools or self.flow.pools, passed, now=self.now)
        finally:
            self.flow.end_round()

    def serve(self, *, pools: list[Pool] | None = None) -> Ticket:
        made = self.offer(pools=pools)
        assert made is not None, "nothing waits"
        self.flow.serve(made, now=self.now)
        return made

    def drain(self) -> list[Ticket]:
        return [self.serve() for _ in range(len(self.flow))]

    def pass_to(self, now: float) -> list[Ticket]:
        """Let time pass; returns those that waited too long, and takes them out."""
        over = []
        while (due := self.flow.next_deadline()) is not None and due <= now:
            self.now = max(self.now, due)
            while (made := self.flow.expired(self.now)) is not None:
                over.append(made)
                self.flow.remove(made, now=self.now)
        self.now = now
        return over


# Bands.


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


# Tenants.


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


# Late ones.


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


# Giving way.


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


# Rounds.


def snapshot_of(flow: FlowQueue) -> list[Any]:
    return [
        (sorted(e[:2] for e in heap if e[2].key == e[:2]), list(stand.tickets))
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


# A ticket that never waited.


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


# Other orders.


def test_the_dynamic_order_is_the_formula_of_the_brief() -> None:
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


# Nothing lost, nothing kept.


class Against(RuleBasedStateMachine):
    """The queue against a plain list of who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(shares=None, queue={}, tenants={"a": {"weight": 2.0}})
        self.pools = [Pool(m, lane) for m in ("m", "n") for lane in Lane]
        self.here: list[Ticket] = []
        self.away: list[Ticket] = []  # served, may be settled or come back

    @rule(
        priority=st.sampled_from(Priority),
        tenant=st.sampled_from("abc"),
        cost=st.floats(0.01, 10),
        prefill_s=st.sampled_from([0.0, 0.02, 0.3]),
        pool=st.integers(0, 3),
        wait_s=st.floats(0, 20),
        late_s=st.floats(0, 5),
        ttft_target_s=st.sampled_from([0.1, 0.5]),
    )
    def push(self, pool: int, wait_s: float, late_s: float, **fields: Any) -> None:
        now = self.queue.now
        made = self.queue.push(
            pool=self.pools[pool],
            queue_deadline_at=now + wait_s,
            late_at=now + late_s,
            **fields,
        )
        self.here.append(made)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        made = data.draw(st.sampled_from(self.here))
        assert self.queue.flow.remove(made, now=self.queue.now)
        assert not self.queue.flow.remove(made, now=self.queue.now)
        self.here.remove(made)

    @precondition(lambda self: self.here)
    @rule(passed=st.integers(0, 5), pools=st.lists(st.integers(0, 3), min_size=1, unique=True))
    def round(self, passed: int, pools: list[int]) -> None:
        """Some do not fit, then one does."""
        flow, asked = self.queue.flow, [self.pools[n] for n in pools]
        able = [made for made in self.here if made.pool in asked]
        skipped: dict[int, Ticket] = {}
        while len(skipped) <= passed:
            made = flow.offer(asked, skipped, now=self.queue.now)
            if made is None:
                assert len(skipped) == len(able)
                break
            assert made in able
            assert made.number not in skipped
            skipped[made.number] = made
        if len(skipped) > passed:
            *_, made = skipped.values()
            flow.serve(made, now=self.queue.now)
            self.here.remove(made)
            self.away.append(made)
        flow.end_round()

    @precondition(lambda self: self.away)
    @rule(data=st.data(), cost=st.floats(0, 20), back=st.booleans(), waited=st.booleans())
    def end(self, data: st.DataObject, cost: float, back: bool, waited: bool) -> None:
        made = data.draw(st.sampled_from(self.away))
        self.queue.flow.settle(made, 0.0 if back else cost)
        self.away.remove(made)
        if back and waited:
            made.attempts += 1
            self.queue.flow.push(made, now=self.queue.now)
            self.here.append(made)
        elif back:
            self.queue.flow.serve(made, now=self.queue.now)

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        over = self.queue.pass_to(self.queue.now + seconds)
        due = [made for made in self.here if made.queue_deadline_at <= self.queue.now]
        assert sorted(made.number for made in over) == sorted(made.number for made in due)
        self.here = [made for made in self.here if made not in over]

    @rule(which=st.integers(0, 3), joined=st.booleans())
    def membership_moves(self, which: int, joined: bool) -> None:
        pool = self.pools[which]
        pool.domain = "m" if joined else pool.model
        self.queue.flow.regroup({"m", "n"}, now=self.queue.now)

    @rule(relegate=st.booleans())
    def reload(self, relegate: bool) -> None:
        self.queue.flow.configure(config(queue={"relegate_ratio": 0.9 if relegate else 0}))

    @invariant()
    def who_waits_is_who_came_and_did_not_leave(self) -> None:
        flow = self.queue.flow
        assert len(flow) == len(self.here)
        for lane in Lane:
            in_lane = {made.number for made in self.here if made.lane is lane}
            bands = [{t.number for t in flow.waiting(lane, b)} for b in range(LATE + 1)]
            assert sorted(n for band in bands for n in band) == sorted(in_lane)
            assert flow.depth(lane) == len(in_lane)
        for pool in self.pools:
            assert {t.number for t in flow.of_pool(pool)} == {
                made.number for made in self.here if made.pool is pool
            }

    @invariant()
    def everybody_stands_in_one_line_and_is_counted_once(self) -> None:
        for domain in self.queue.flow.domains:
            for band in range(LATE + 1):
                lines = [line for s in domain.stands.values() for line in s.lines[band].values()]
                waiting = [t for line in lines for _, _, t in line.tickets]
                assert all(t.band == band for t in waiting)
                assert domain.drain.waiting(band) == len(waiting)
                assert domain.drain.cost(band) == pytest.approx(sum(t.cost for t in waiting))
                if band < LATE:
                    assert domain.bands[band].waiting == len(waiting)
                    assert domain.bands[band].owed >= 0
                for line in lines:
                    places = [(t.place_at, t.number) for _, _, t in line.tickets]
                    assert places == sorted(places)

    @invariant()
    def nothing_grows_without_bound(self) -> None:
        flow = self.queue.flow
        assert len(flow._alarms) <= 2 * len(self.here) + 65 + 2 * len(self.here)
        for domain in flow.domains:
            for stand in domain.stands.values():
                for heap, lines in zip(stand.heaps, stand.lines, strict=True):
                    assert len(heap) <= 2 * len(lines) + 66

    def teardown(self) -> None:
        """Whoever is left is offered."""
        for _ in range(len(self.here)):
            self.here.remove(self.queue.serve())
        assert not self.here
        assert not self.queue.flow.pools
        assert not self.queue.flow._lanes[Lane.SHORT][0]


Against.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestAgainst = Against.TestCase


def test_a_late_line_that_is_never_reached_holds_nothing_of_those_who_left() -> None:
    queue = late_queue()
    for number in range(3_000):
        queue.now = float(number)
        queue.push(P2, late_at=queue.now + 1, queue_deadline_at=queue.now + 30)
        queue.pass_to(queue.now)
    (domain,) = queue.flow.domains
    (stand,) = domain.stands.values()
    assert len(stand.heaps[LATE]) <= 2 * len(queue.flow) + 66
    assert len(queue.flow._alarms) <= 2 * len(queue.flow) + 66
