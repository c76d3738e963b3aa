"""Start-time fair queueing of the tenants in a line."""

from __future__ import annotations

from itertools import chain, count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.core.tenant_order import _SLACK, TenantOrder
from router.core.types import Ticket
from tests.core.builders import request_spec, ticket

TENANTS = ("a", "b", "c")
Step = tuple[str, str, float]


def ticket_of(tenant: str, number: int) -> Ticket:
    return ticket(number, spec=request_spec(tenant=tenant))


def serve(order: TenantOrder, amount: float, weight: float = 1.0) -> Ticket:
    """Grant the first what it asks for."""
    first = order.first()
    order.charge(first.spec.tenant, amount / weight, served=True)
    order.drop(first)
    return first


def test_of_one_tenant_the_earlier_goes_first_whatever_it_costs() -> None:
    order = TenantOrder()
    for number in (3, 5, 9):
        order.add(ticket_of("a", number))
    assert [serve(order, amount).number for amount in (100.0, 0.1, 7.0)] == [3, 5, 9]


def test_who_comes_takes_turns_with_those_who_wait_and_has_no_claim_for_before() -> None:
    order = TenantOrder()
    for number in range(20):
        order.add(ticket_of("a", number))
    for _ in range(10):
        serve(order, 1.0)
    for number in range(20, 24):
        order.add(ticket_of("b", number))
    served = [serve(order, 1.0).spec.tenant for _ in range(8)]
    assert sorted(served) == ["a"] * 4 + ["b"] * 4
    assert all(one != other for one, other in pairwise(served[1:]))


def test_one_that_comes_back_after_each_grant_gets_no_more_than_the_others() -> None:
    order, numbers, served = TenantOrder(), count(100), dict.fromkeys("abc", 0)
    for number in range(60):
        order.add(ticket_of("bc"[number % 2], number))
    order.add(ticket_of("a", next(numbers)))
    for _ in range(60):
        tenant = serve(order, 1.0).spec.tenant
        served[tenant] += 1
        order.add(ticket_of(tenant, next(numbers)))
    assert set(served.values()) == {20}


def test_what_comes_back_is_taken_off_the_account() -> None:
    order = TenantOrder()
    for number in range(8):
        order.add(ticket_of("ab"[number % 2], number))
    assert [serve(order, 10.0).spec.tenant for _ in range(2)] == ["a", "b"]
    order.charge("b", -9.0, served=False)
    assert [serve(order, 1.0).spec.tenant for _ in range(4)] == ["b", "b", "b", "a"]


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.integers(1, 40)), min_size=2),
    st.lists(st.floats(0.1, 10), min_size=60, max_size=60),
)
def test_all_who_wait_get_as_much_by_weight_within_one_request_each(
    tenants: list[tuple[float, int]], amounts: list[float]
) -> None:
    order, numbers = TenantOrder(), count()
    names = [f"t{number}" for number, _ in enumerate(tenants)]
    weight_of = {name: weight for name, (weight, _) in zip(names, tenants, strict=True)}
    for name, (_, tickets) in zip(names, tenants, strict=True):
        for _ in range(tickets):
            order.add(ticket_of(name, next(numbers)))
    got = dict.fromkeys(names, 0.0)
    for amount in amounts:
        tenant = order.first().spec.tenant
        serve(order, amount, weight_of[tenant])
        got[tenant] += amount / weight_of[tenant]
        order.add(ticket_of(tenant, next(numbers)))
    most = {name: 10 / weight for name, weight in weight_of.items()}
    for one in names:
        for other in names:
            assert got[one] - got[other] <= most[one] + most[other] + 1e-6


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "drop", "serve", "charge"]),
            st.sampled_from(TENANTS),
            st.floats(-5, 5),
        ),
        max_size=80,
    )
)
def test_the_first_is_the_lowest_tag_and_of_equals_the_earliest(steps: list[Step]) -> None:
    """Beside a model that looks at every tenant."""
    order, numbers = TenantOrder(), count()
    rows: dict[str, list[int]] = {}
    since: dict[str, float] = {}
    ends: dict[str, float] = {}
    clock, known = 0.0, dict[int, Ticket]()

    def tag(tenant: str) -> float:
        return max(since.get(tenant, clock), ends.get(tenant, 0.0))

    def drop(tenant: str, number: int) -> None:
        order.drop(known[number])
        rows[tenant].remove(number)
        if not rows[tenant]:
            del rows[tenant], since[tenant]

    for step, tenant, amount in steps:
        if step == "add":
            number = next(numbers)
            known[number] = ticket_of(tenant, number)
            order.add(known[number])
            since.setdefault(tenant, clock)
            rows.setdefault(tenant, []).append(number)
        elif step == "drop" and tenant in rows:
            drop(tenant, rows[tenant][-1])
        elif step == "serve" and rows:
            first = order.first().spec.tenant
            clock, end = max(clock, tag(first)), tag(first) + abs(amount)
            order.charge(first, abs(amount), served=True)
            ends[first] = end
            drop(first, rows[first][0])
        elif step == "charge":
            end = tag(tenant) + amount
            order.charge(tenant, amount, served=False)
            ends[tenant] = end
        if rows:
            wanted = min((tag(name), numbers[0]) for name, numbers in rows.items())
            assert order.first().number == wanted[1]
        assert sorted(order.tickets) == sorted(chain.from_iterable(rows.values()))
        assert order.tenants == list(rows)


def test_what_is_remembered_of_tenants_that_are_gone_is_bounded() -> None:
    order = TenantOrder()
    for number in range(3000):
        order.add(ticket_of("stays", number))
    for number in range(3000, 5000):
        order.add(ticket_of(f"t{number}", number))
        assert {serve(order, 1.0).spec.tenant for _ in range(2)} == {"stays", f"t{number}"}
        assert len(order._ends) <= 3 * _SLACK
        assert len(order._heap) <= 3 * _SLACK
