"""What tenants get above their guarantee, and that nobody else's guarantee pays for it."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.bucket import AMPLE_RATIO, Ask, Charge, DecidedBy, Rule, Scope, Settlement
from router.core.cost import CostModel
from router.core.dispatcher import Dispatcher
from router.core.effects import Reserve, Settle
from router.core.ledger import Ledger
from router.core.limits import Limits
from router.core.types import Priority, Ticket
from router.errors import Reason
from router.limit_settings import AwaySettings
from router.runtime.away import AwayBuckets
from router.runtime.limit_lines import limit_lines
from tests.core.builders import Bench, config, plain_config, request_spec, runs, ticket

PER_TOKEN = {"prompt_token_units": 0.0, "output_token_units": 1.0}


class Asking:
    """Tenants that ask at even moments and a little jitter, for one unit at a time or as many as
    `sizes` says, and what they are granted by the limits of a configuration.
    """

    def __init__(self, tenants: dict[str, Any], **limits: Any) -> None:
        settings = config(
            limits={"cost": PER_TOKEN, **limits},
            tenants={name: {"limits": own} for name, own in tenants.items()},
        )
        self.limits = Limits(settings, CostModel(settings.models))
        self.ledger = Ledger(DecidedBy.MEMORY, now=0.0)
        self.ids = count()
        self.sizes = dict.fromkeys(tenants, 1)
        self.asked = dict.fromkeys(tenants, 0)
        self.granted = dict.fromkeys(tenants, 0)

    def play(
        self,
        rates: dict[str, float],  # units per second
        *,
        start: float,
        end: float,
        seed: int,
        borrows: float = AMPLE_RATIO,
    ) -> None:
        rng = Random(seed)
        self.asked, self.granted = dict.fromkeys(rates, 0), dict.fromkeys(rates, 0)
        moments = [
            (start + (n + rng.uniform(0.0, 0.5)) * self.sizes[name] / rate, name)
            for name, rate in rates.items()
            for n in range(int((end - start) * rate / self.sizes[name]))
        ]
        for now, name in sorted(moments):
            units = self.sizes[name]
            one = ticket(spec=request_spec(tenant=name, max_tokens=units), output_tokens=units)
            charges = self.limits.charges(one)
            ask = Ask(f"a{next(self.ids)}", charges, Priority.P1, 60.0, borrows=borrows)
            self.asked[name] += units
            self.granted[name] += units * self.ledger.reserve(ask, now).granted


TENANTS = {
    "acme": {"cost_per_s": 12, "cost_ceiling_per_s": 60},
    "beta": {"cost_per_s": 28, "cost_ceiling_per_s": 90},
    "gamma": {"cost_per_s": 50},
}
CLUSTER = {"cluster": {"cost_per_s": 100}}


def test_alone_a_tenant_gets_its_ceiling_and_no_more() -> None:
    made = Asking(TENANTS, **CLUSTER)
    made.play({"acme": 300}, start=0, end=30, seed=1)  # what is saved up
    made.play({"acme": 300}, start=30, end=60, seed=1)
    assert made.granted["acme"] == pytest.approx(30 * 60, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_what_others_are_guaranteed_is_lent_until_they_come(seed: int) -> None:
    """The worked example of docs/limits.md."""
    tenants = {name: TENANTS[name] for name in ("acme", "gamma")} | {"third": {"cost_per_s": 38}}
    made = Asking(tenants, **CLUSTER)
    found = []
    coming: dict[str, float] = {"acme": 200}
    for start, more in ((0, {}), (30, {}), (60, {"gamma": 50}), (90, {"third": 38})):
        coming |= more
        made.play(coming, start=start, end=start + 30, seed=seed)
        for name in ("gamma", "third"):
            assert made.granted.get(name) == made.asked.get(name), f"seed {seed}"
        found.append(made.granted["acme"] / 30)
    assert found[1:] == [pytest.approx(rate, abs=0.5) for rate in (60, 50, 12)], f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_who_keeps_to_its_guarantee_is_refused_by_nobody_who_borrows(seed: int) -> None:
    """From the first moment on, while others ask for seven times what the cluster has."""
    made = Asking(TENANTS, **CLUSTER)
    made.play({"acme": 400, "beta": 300}, start=0, end=30, seed=seed)
    made.play({"acme": 400, "beta": 300, "gamma": 49}, start=30, end=60, seed=seed)
    assert made.granted["gamma"] == made.asked["gamma"], f"seed {seed}"
    for name in ("acme", "beta"):
        assert made.granted[name] >= 30 * TENANTS[name]["cost_per_s"] - 1, f"seed {seed}"
    total = sum(made.granted.values())
    assert 30 * 97 <= total <= 30 * 100 + 50, f"seed {seed}: what is left is lent"


@pytest.mark.parametrize("seed", range(3))
def test_what_was_borrowed_is_not_paid_for_by_the_guarantee(seed: int) -> None:
    """When nothing may be borrowed any more its rate is there at once, the first unit once due."""
    made = Asking(TENANTS, lanes={"short": {"cost_per_s": 1000}})
    made.play({"acme": 59}, start=0, end=30, seed=seed)
    made.play({"acme": 12}, start=30, end=60, seed=seed, borrows=0.0)
    assert made.granted["acme"] >= made.asked["acme"] - 1, f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_of_saturated_workers_a_guarantee_has_room_for_large_requests(seed: int) -> None:
    """P1 has 17.5 at once; nobody borrows of it but when all of it is there."""
    made = Asking(TENANTS, **CLUSTER)
    made.sizes["gamma"] = 14
    others: dict[str, float] = {"acme": 400, "beta": 300}
    made.play(others, start=0, end=10, seed=seed, borrows=1.0)  # what they had saved up
    made.play(others | {"gamma": 25}, start=10, end=40, seed=seed, borrows=1.0)
    assert made.granted["gamma"] == made.asked["gamma"], f"seed {seed}"
    for name in ("acme", "beta"):
        assert made.granted[name] >= 30 * TENANTS[name]["cost_per_s"] - 1, f"seed {seed}"


GUARANTEE = Rule(
    "g", Scope.TENANT_COST, 2.0, 6.0, debt_max=6.0,
    above=Rule("g+", Scope.TENANT_COST, 4.0, 12.0, debt_max=12.0),
)  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.floats(0, 2), st.floats(0, 6), st.sampled_from([0.0, AMPLE_RATIO]), st.floats(0, 20)
        ),
        max_size=40,
    )
)
def test_no_window_grants_more_than_the_ceiling_and_no_borrowing_touches_the_guarantee(
    steps: list[tuple[float, float, float, float]],
) -> None:
    """Also where more is used than was reserved."""
    store, now = Ledger(DecidedBy.MEMORY, now=0.0), 0.0
    grants: list[tuple[float, float]] = []
    for number, (gap_s, amount, borrows, used) in enumerate(steps):
        now += gap_s
        ask = Ask(str(number), (Charge(GUARANTEE, amount),), Priority.P1, 60.0, borrows=borrows)
        before = store.reserve(look(number), now).levels[0].remaining
        if not store.reserve(ask, now).granted:
            assert before < amount
            continue
        if before >= amount:
            grants.append((now, amount))
            continue
        assert borrows or before == pytest.approx(amount)
        grants.append((now, amount))
        store.settle(Settlement(str(number), (Charge(GUARANTEE, max(amount, used)),)), now)
        assert store.reserve(look(-number), now).levels[0].remaining == pytest.approx(before)
    for first, (start, _) in enumerate(grants):
        for last in range(first, len(grants)):
            granted = sum(amount for _, amount in grants[first : last + 1])
            assert granted <= 18 + 6 * (grants[last][0] - start) + 1e-6


def look(number: int) -> Ask:
    return Ask(f"look{number}", (Charge(GUARANTEE, 0.0),), Priority.P1, 1.0)


def test_while_redis_is_away_each_router_lends_its_part() -> None:
    lane = Rule("lane", Scope.LANE, 0.0, 80.0, lends=True)
    away = AwayBuckets(AwaySettings(), now=0.0)
    away.replicas = 4

    def granted(amount: float, *, borrows: float) -> bool:
        charges = tuple(Charge(rule, amount) for rule in (GUARANTEE, lane))
        ask = Ask(f"a{next(ids)}", charges, Priority.P1, 60.0, borrows=borrows)
        return away.reserve(ask, 0.0).granted

    ids = count()
    assert granted(1.5, borrows=0.0), "a quarter of 6"
    assert not granted(1.0, borrows=0.0)
    assert all(granted(1.0, borrows=AMPLE_RATIO) for _ in range(3))
    assert not granted(0.1, borrows=AMPLE_RATIO), "a quarter of 12 was borrowed"


class Borrowing(Bench):
    """A dispatcher with one worker and a tenant's guarantee of 10 units/s, 30 at once."""

    def __init__(self, **limits: Any) -> None:
        tenant = {"cost_per_s": 10, "cost_ceiling_per_s": 50}
        given = {"cost": PER_TOKEN, "tenant": tenant, "degrade": False, **limits}
        tenants = {"free": {"limits": {"inherit": False}}}
        settings = plain_config(limits=given, tenants=tenants)
        core = Dispatcher(settings, rng=Random(1), router_id="r1")
        super().__init__(core)
        self.ledger = Ledger(DecidedBy.MEMORY, now=0.0)
        self.join("w1")

    def take(self) -> list[Any]:
        new = super().take()
        for effect in new:
            if isinstance(effect, Reserve):
                verdict = self.ledger.reserve(effect.ask, self.now)
                self.core.on_reserved(effect.ticket, verdict, now=self.now)
                self.take()
            elif isinstance(effect, Settle):
                self.ledger.settle(effect.settlement, self.now)
        return new

    def memory(self, ratio: float) -> None:
        """The engine says so until it is believed."""
        for _ in range(20):
            self.report("w1", kv_used_tokens=int(ratio * 400_000), kv_total_tokens=400_000)

    def asks(self) -> Ticket:
        return self.ask(max_tokens=30)


def test_above_its_guarantee_a_tenant_passes_while_the_workers_are_not_saturated() -> None:
    made = Borrowing()
    assert runs(made.asks())
    assert runs(made.asks()), "borrowed"
    made.memory(0.9)
    made.pass_to(0.5)
    refusal = made.refusal(made.asks())
    assert refusal.reason is Reason.RATE_LIMITED
    assert "the tenant anonymous is at its limit of cost units" in refusal.message
    assert refusal.retry_after_s == pytest.approx(2.5), "when the guarantee has room"
    made.memory(0.7)
    made.pass_to(1.0)
    assert runs(made.asks())


def test_the_saturation_below_which_is_borrowed_is_a_setting() -> None:
    made = Borrowing(borrow_below=0.5)
    made.memory(0.7)
    assert [runs(made.asks()) for _ in range(2)] == [True, False]


def test_with_a_limit_of_the_cluster_what_that_has_left_decides() -> None:
    made = Borrowing(
        tenant={"cost_per_s": 10, "cost_ceiling_per_s": 1000},
        cluster={"cost_per_s": 1000, "shares": {"p0": 0.1, "p1": 0.8, "p2": 0.1}},
    )
    assert all(runs(made.asks()) for _ in range(3))
    assert runs(made.ask(max_tokens=200, tenant="free"))
    refusal = made.refusal(made.asks())  # of 500 less than half would be left
    assert "the tenant anonymous is at its limit of cost units" in refusal.message
    assert runs(made.ask(max_tokens=100, tenant="free"))
    made.pass_to(0.3)
    assert all(runs(made.asks()) for _ in range(2))
    made.memory(0.9)
    made.pass_to(0.8)
    assert runs(made.asks()), "all of it is there"
    assert not runs(made.asks())


def test_at_the_ceiling_the_wait_is_until_that_or_the_guarantee_has_room() -> None:
    made = Borrowing()
    assert sum(runs(made.asks()) for _ in range(9)) == 5  # 3 s of 10, and of 40
    assert made.refusal(made.asks()).retry_after_s == pytest.approx(1.0)  # 30 of 40 per second
    made.pass_to(0.8)
    assert runs(made.asks())


def test_what_a_tenant_is_told_is_where_its_guarantee_stands() -> None:
    made = Borrowing()
    for units in (10, 25):  # the second is borrowed
        held = made.ask(max_tokens=units).reservation
        assert held is not None
        lines = limit_lines(held)
        assert b"x-ratelimit-limit-cost: 30\r\n" in lines
        assert b"x-ratelimit-remaining-cost: 20\r\n" in lines
