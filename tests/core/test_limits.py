"""What a request draws on and how much: rules from settings, amounts from tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import Config
from router.contract import Lane
from router.core.bucket import Kind, Scope
from router.core.cost import CostModel
from router.core.limits import Limits, Reservation, tenant_limits
from router.core.pools import Pool
from router.core.snapshot import record_of
from router.core.types import Endpoint, Outcome, Priority, Ticket, Usage
from router.errors import Reason
from tests.core.builders import config, request_spec, ticket

COST = {"request_units": 1.0, "prompt_token_units": 0.01, "output_token_units": 0.1}


def limits(settings: Config) -> Limits:
    costs = CostModel(settings.models)
    costs.serve(["m"])
    return Limits(settings, costs)


def asking(**fields: Any) -> Ticket:
    """A ticket of 100 prompt and 100 output tokens: 12 units by COST."""
    return ticket(spec=request_spec(**fields))


def amounts(made: Limits, one: Ticket) -> dict[str, float]:
    return {charge.rule.key: charge.amount for charge in made.charges(one)}


def test_without_a_limit_nothing_is_active_and_nothing_charged() -> None:
    made = limits(config(tenants={"acme": {"weight": 2}}))
    assert not made.active
    assert made.charges(asking()) == ()


@pytest.mark.parametrize(
    "settings",
    [
        {"limits": {"tenant": {"requests_per_minute": 1}}},
        {"limits": {"tenant": {"concurrency": 1}}},
        {"limits": {"lanes": {"long": {"cost_per_s": 1}}}},
        {"limits": {"models": {"m": {"concurrency": 1}}}},
        {"limits": {"classes": {"p3": {"concurrency": 1}}}},
        {"limits": {"cluster": {"cost_per_s": 1}}},
        {"tenants": {"acme": {"limits": {"cost_per_s": 1}}}},
    ],
)
def test_any_limit_makes_them_active(settings: dict[str, Any]) -> None:
    assert limits(config(**settings)).active


def test_every_scope_is_charged_in_its_own_unit() -> None:
    made = limits(
        config(
            limits={
                "cost": COST,
                "tenant": {"requests_per_minute": 60, "cost_per_s": 5, "concurrency": 3},
                "models": {"big": {"cost_per_s": 50, "concurrency": 9}},
                "lanes": {"short": {"cost_per_s": 40}},
                "classes": {"p1": {"cost_per_s": 60, "concurrency": 20}},
                "cluster": {"cost_per_s": 100, "concurrency": 50},
            },
            models={"m": {"aliases": ["big"], "cost_factor": 2.0}},
            classes={"p1": {**_CLASS, "cost_weight": 3.0}},
        )
    )
    units = 2.0 * 3.0 * (1 + 1 + 10)
    assert amounts(made, asking()) == {
        "tenant:anonymous:requests": 1,
        "tenant:anonymous:cost": units,
        "tenant:anonymous:concurrency": 1,
        "model:big:cost": units,
        "model:big:concurrency": 1,
        "lane:short:cost": units,
        "class:p1:cost": units,
        "cluster:concurrency": 1,
        "class:p1:ceiling:cost": units,
        "class:p1:ceiling:concurrency": 1,
    }
    scopes = {charge.rule.key: charge.rule.scope for charge in made.charges(asking())}
    assert scopes["class:p1:cost"] is Scope.CLASS
    assert scopes["tenant:anonymous:concurrency"] is Scope.TENANT_CONCURRENCY


_CLASS = {"ttft_target_s": 0.5, "tpot_target_s": 0.075, "share_min": 0.3}


def test_a_tenant_that_nobody_configured_shares_the_limits_of_anonymous() -> None:
    made = limits(
        config(
            limits={"tenant": {"requests_per_minute": 60}},
            auth={"api_keys": ["sk-1"]},
            tenants={"acme": {}, "free": {"limits": {"inherit": False}}},
        )
    )
    assert "tenant:acme:requests" in amounts(made, asking(tenant="acme"))
    assert "tenant:anonymous:requests" in amounts(made, asking(tenant="key-00000000"))
    (known,) = config(auth={"api_keys": ["sk-1"]}).tenant_names - {"anonymous"}
    assert f"tenant:{known}:requests" in amounts(made, asking(tenant=known))
    assert amounts(made, asking(tenant="free")) == {}


def test_a_tenants_own_rate_brings_its_own_burst() -> None:
    settings = config(
        limits={"tenant": {"cost_per_s": 1, "cost_burst": 7, "requests_per_minute": 6}},
        tenants={"acme": {"limits": {"cost_per_s": 2, "concurrency": 4}}},
    )
    own = tenant_limits(settings.tenants, "acme", settings.limits.tenant)
    assert (own.cost_per_s, own.cost_burst) == (2, None)
    assert (own.requests_per_minute, own.concurrency) == (6, 4)
    assert tenant_limits(settings.tenants, "else", settings.limits.tenant).cost_burst == 7


def test_a_ceiling_is_as_many_seconds_above_the_guarantee() -> None:
    tenants = {
        "acme": {"limits": {"cost_per_s": 12, "cost_ceiling_per_s": 60}},
        "burst": {"limits": {"cost_per_s": 10, "cost_burst": 40, "cost_ceiling_per_s": 15}},
        "cap": {"limits": {"cost_per_s": 12}},
        "more": {"limits": {"concurrency": 4}},
    }
    usual = {"cost_per_s": 1, "cost_ceiling_per_s": 100}
    made = limits(config(limits={"tenant": usual, "cluster": {"cost_per_s": 9}}, tenants=tenants))
    found = {}
    for name in tenants:
        rules = {c.rule.key: c.rule for c in made.charges(asking(tenant=name))}
        own = rules[f"tenant:{name}:cost"]
        assert not own.lends
        above = own.above and (own.above.rate_per_s, own.above.burst, own.above.amount_max)
        found[name] = own.rate_per_s, own.burst, own.amount_max, above
        assert rules["class:p1:cost"].lends
    assert found["acme"] == (12, 36, 720, pytest.approx((48, 144, 720)))
    assert found["burst"] == (10, 40, 40, pytest.approx((5, 20, 40)))
    assert found["cap"] == (12, 36, 720, None)
    assert found["more"] == (1, 3, 60, pytest.approx((99, 297, 297)))


def test_bursts_by_default_and_as_set() -> None:
    made = limits(
        config(
            limits={
                "tenant": {"requests_per_minute": 90, "cost_per_s": 2},
                "lanes": {"short": {"cost_per_s": 2, "cost_burst": 5}},
                "cluster": {"cost_per_s": 10},
            }
        )
    )
    rules = {charge.rule.key: charge.rule for charge in made.charges(asking())}
    requests = rules["tenant:anonymous:requests"]
    assert (requests.rate_per_s, requests.burst) == (1.5, 90)
    cost = rules["tenant:anonymous:cost"]
    assert (cost.burst, cost.amount_max, cost.debt_max) == (6, 120, 6)
    lane = rules["lane:short:cost"]
    assert (lane.burst, lane.amount_max) == (5, 5)
    member = rules["class:p1:cost"]
    assert member.family is not None
    assert member.family.parent.burst == 5
    assert dict(member.family.members) == {
        "class:p0:cost": 0.6,
        "class:p1:cost": 0.35,
        "class:p2:cost": 0.05,
    }


def test_p3_lives_on_p2s_share_unless_it_has_one() -> None:
    settings: dict[str, Any] = {"cluster": {"cost_per_s": 10}}
    offline = asking(priority=Priority.P3)
    assert "class:p2:cost" in amounts(limits(config(limits=settings)), offline)
    settings["cluster"]["shares"] = {"p1": 0.3, "p3": 0.05}
    assert "class:p3:cost" in amounts(limits(config(limits=settings)), offline)


def test_a_ceiling_is_its_classs_also_where_it_lives_on_anothers_share() -> None:
    settings = {"cluster": {"cost_per_s": 10}, "classes": {"p3": {"cost_per_s": 2}}}
    made = limits(config(limits=settings))
    assert [*amounts(made, asking(priority=Priority.P3))] == [
        "class:p2:cost",
        "class:p3:ceiling:cost",
    ]
    assert [*amounts(made, asking(priority=Priority.P2))] == ["class:p2:cost"]


def test_without_borrowing_a_class_has_its_share_and_no_more() -> None:
    settings = {"cluster": {"cost_per_s": 10, "cost_burst": 20, "shares": {"borrow": False}}}
    rules = [c.rule for c in limits(config(limits=settings)).charges(asking())]
    assert [rule.key for rule in rules] == ["class:p1:cost", "cluster:cost"]
    assert (rules[0].rate_per_s, rules[0].burst, rules[0].family) == (3.5, 7, None)


def test_beforehand_the_usual_answer_is_charged_if_that_is_shorter() -> None:
    settings = config(limits={"cost": COST, "lanes": {"short": {"cost_per_s": 1}}})
    costs = CostModel(settings.models)
    costs.serve(["m"])
    made = Limits(settings, costs)
    one = asking(samples=2)
    assert amounts(made, one)["lane:short:cost"] == 1 + 1 + 20
    for _ in range(30):
        costs.of("m").outputs.add(16)
    assert amounts(made, one)["lane:short:cost"] == pytest.approx(1 + 1 + 2 * 16 * 0.1)


@pytest.mark.parametrize(
    ("outcome", "fields", "usage", "units", "requests"),
    [
        # what the worker reported; cached prompt tokens cost nothing
        (Outcome.SUCCESS, {}, Usage(100, 40, 20), 1 + 0.6 + 2, 1),
        (Outcome.SUCCESS, {}, Usage(100, None, 200), 1 + 1 + 20, 1),
        # a stream without usage: what was counted; a plain answer without: what was expected
        (Outcome.SUCCESS, {"output_seen_tokens": 7}, None, 1 + 1 + 0.7, 1),
        (Outcome.SUCCESS, {}, None, 1 + 1 + 10, 1),
        # a client that leaves pays for what was made
        (Outcome.ABORTED, {"first_token_at": 2.0, "output_seen_tokens": 5}, None, 1 + 1 + 0.5, 1),
        (Outcome.ABORTED, {}, None, 1 + 1, 1),
        (Outcome.ABORTED, {"dispatched_at": None}, None, 0, 1),
        # what broke off before it began costs nothing, later what was made
        (Outcome.FAILED, {}, None, 0, 0),
        (Outcome.FAILED, {"first_token_at": 2.0, "output_seen_tokens": 5}, None, 1 + 1 + 0.5, 1),
        (Outcome.CLIENT_ERROR, {}, None, 0, 0),
        (Outcome.REFUSED, {"dispatched_at": None}, None, 0, 0),
    ],
)
def test_in_the_end_what_was_used_is_charged(
    outcome: Outcome, fields: dict[str, Any], usage: Usage | None, units: float, requests: float
) -> None:
    tenant = {"requests_per_minute": 60, "cost_per_s": 5}
    made = limits(config(limits={"cost": COST, "tenant": tenant}))
    one = asking()
    one.dispatched_at = 1.0
    for name, value in fields.items():
        setattr(one, name, value)
    record = record_of(one, outcome, None, usage, 3.0)
    settled = made.settled(one, Reservation("r", made.charges(one), ()), record)
    assert [charge.amount for charge in settled] == pytest.approx([requests, units])


def test_a_request_that_the_router_cut_in_the_queue_did_not_happen() -> None:
    made = limits(config(limits={"tenant": {"requests_per_minute": 60}}))
    one = asking()
    record = record_of(one, Outcome.ABORTED, Reason.SHUTTING_DOWN, None, 3.0)
    assert [
        c.amount for c in made.settled(one, Reservation("r", made.charges(one), ()), record)
    ] == [0]


def test_a_plain_answer_that_was_cut_costs_what_was_expected() -> None:
    made = limits(config(limits={"cost": COST, "tenant": {"cost_per_s": 5}}))
    one = asking(stream=False)
    one.dispatched_at = 1.0
    record = record_of(one, Outcome.ABORTED, None, None, 3.0)
    (charge,) = made.settled(one, Reservation("r", made.charges(one), ()), record)
    assert charge.amount == 12


@given(
    tokens=st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 8)),
    endpoint=st.sampled_from(Endpoint),
    priority=st.sampled_from(Priority),
    lane=st.sampled_from(Lane),
)
def test_one_charge_per_rule_never_negative_and_permits_always_one(
    tokens: tuple[int, int, int], endpoint: Endpoint, priority: Priority, lane: Lane
) -> None:
    prompt, output, samples = tokens
    tenant = {"requests_per_minute": 60, "cost_per_s": 5, "concurrency": 2}
    made = limits(
        config(
            limits={
                "tenant": tenant,
                "lanes": {"long": {"cost_per_s": 9, "concurrency": 5}},
                "cluster": {"cost_per_s": 100},
            }
        )
    )
    one = ticket(
        spec=request_spec(endpoint=endpoint, priority=priority, samples=samples),
        prompt_tokens=prompt,
        output_tokens=output,
        lane=lane,
        pool=Pool("m", lane),
    )
    charges = made.charges(one)
    assert len({charge.rule.key for charge in charges}) == len(charges)
    for charge in charges:
        assert charge.amount >= 0
        if charge.rule.kind is Kind.PERMITS or charge.rule.scope is Scope.TENANT_REQUESTS:
            assert charge.amount == 1
