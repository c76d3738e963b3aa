"""Limits without I/O: what is granted over any window, who is guaranteed what, what comes back."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import isclose
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.core.bucket import (
    Ask,
    Charge,
    DecidedBy,
    Family,
    Kind,
    Rule,
    Scope,
    Settlement,
)
from router.core.ledger import Ledger
from router.core.types import Priority

_IDS = count()
CLUSTER = Rule("cluster", Scope.CLUSTER, 100.0, 50.0, debt_max=50.0)
CLASSES = Family(CLUSTER, (("p0", 0.6), ("p1", 0.35), ("p2", 0.05)))
KEYS = tuple(CLASSES.rules)


def cost(
    key: str = "tenant:a:cost",
    *,
    rate: float = 10.0,
    burst: float = 20.0,
    debt_max: float = 0.0,
    warm_up_s: float = 0.0,
) -> Rule:
    return Rule(key, Scope.TENANT_COST, rate, burst, debt_max=debt_max, warm_up_s=warm_up_s)


def ask(*charges: tuple[Rule, float], lease_s: float = 60.0) -> Ask:
    taken = tuple(Charge(rule, amount) for rule, amount in charges)
    return Ask(f"r{next(_IDS)}", taken, Priority.P1, lease_s)


def used(of: Ask, *amounts: float) -> Settlement:
    charges = tuple(Charge(c.rule, a) for c, a in zip(of.charges, amounts, strict=True))
    return Settlement(of.reservation_id, charges)


def ledger(now: float = 0.0) -> Ledger:
    return Ledger(DecidedBy.MEMORY, now=now)


def levels(of: Ledger, now: float, *rules: Rule) -> list[float]:
    """What is left, found by asking for nothing."""
    return [x.remaining for x in of.reserve(ask(*((r, 0.0) for r in rules)), now).levels]


STEPS = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 20)), max_size=40)


@given(STEPS, st.sampled_from([0.0, 1.0, 60.0]))
def test_no_window_grants_more_than_the_burst_and_the_refill(
    steps: list[tuple[float, float]], warm_up_s: float
) -> None:
    store, now, rule = ledger(), 0.0, cost(warm_up_s=warm_up_s)
    grants: list[tuple[float, float]] = []
    for gap_s, amount in steps:
        now += gap_s
        if store.reserve(ask((rule, amount)), now).granted:
            grants.append((now, amount))
    for first, (start, _) in enumerate(grants):
        for last in range(first, len(grants)):
            granted = sum(amount for _, amount in grants[first : last + 1])
            assert granted <= 20 + 10 * (grants[last][0] - start) + 1e-6


@given(st.lists(st.tuples(st.floats(0, 0.5), st.sampled_from(KEYS), st.floats(0, 50)), max_size=50))
@example([(0, "p1", 17), (0, "p2", 29), (0.125, "p0", 22), (0.375, "p0", 30), (0, "p2", 29)])
def test_the_classes_together_get_no_more_than_their_cluster(
    steps: list[tuple[float, str, float]],
) -> None:
    """Beyond burst and refill there is only what requests have above their class's part.

    Each class may owe that once to its own bucket, and one of them to what the others had left.
    """
    store, now = ledger(), 0.0
    granted, lent = 0.0, dict.fromkeys(KEYS, 0.0)
    for gap_s, key, amount in steps:
        now += gap_s
        rule = CLASSES.rules[key]
        if store.reserve(ask((rule, amount)), now).granted:
            granted += amount
            lent[key] = max(lent[key], amount - rule.burst)
        owed = sum(lent.values()) + max(lent.values())
        assert granted <= 50 + 100 * now + owed + 1e-6


@given(
    st.sampled_from(KEYS),
    st.lists(st.tuples(st.sampled_from(KEYS), st.floats(0, 50), st.floats(0, 100)), max_size=30),
    st.floats(0, 1),
)
def test_a_class_has_its_guarantee_whatever_the_others_do(
    mine: str, others: list[tuple[str, float, float]], at: float
) -> None:
    """Also when they settle for far more than they took."""
    store, rule = ledger(), CLASSES.rules[mine]
    for key, amount, actual in others:
        if key != mine:
            other = ask((CLASSES.rules[key], amount))
            if store.reserve(other, at).granted:
                store.settle(used(other, actual), at)
    for _ in range(5):
        assert store.reserve(ask((rule, rule.burst / 5)), at).granted
    assert not store.reserve(ask((rule, rule.burst)), at).granted or rule.burst == 0


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("amount", [0.5, 4.0, 40.0])
def test_a_class_alone_gets_the_whole_rate(key: str, amount: float) -> None:
    """Work-conserving: what the idle classes leave is lent, to long prompts too."""
    store, granted, rule = ledger(), 0.0, CLASSES.rules[key]
    for step in range(20_000):
        if store.reserve(ask((rule, amount)), step / 1000).granted:
            granted += amount
    assert granted == pytest.approx(100 * 20, rel=0.04)


def test_backlogged_classes_share_as_they_are_guaranteed() -> None:
    store, granted = ledger(), dict.fromkeys(KEYS, 0.0)
    for step in range(20_000):
        for key in KEYS:
            if store.reserve(ask((CLASSES.rules[key], 0.5)), step / 1000).granted:
                granted[key] += 0.5
    total = sum(granted.values())
    assert total == pytest.approx(2000, rel=0.03)
    assert [granted[key] / total for key in KEYS] == pytest.approx([0.6, 0.35, 0.05], abs=0.01)


GUARANTEE = Rule(
    "g", Scope.TENANT_COST, 2.0, 6.0, debt_max=6.0,
    above=Rule("g+", Scope.TENANT_COST, 4.0, 12.0, debt_max=12.0),
)  # fmt: skip
LESS = cost("a", rate=5.0, burst=8.0, debt_max=4.0)  # as a newer configuration has it
PERMITS = Rule("held", Scope.TENANT_CONCURRENCY, 0.0, 3.0, Kind.PERMITS)
DRAWN = (*CLASSES.rules.values(), cost("a", debt_max=5.0), cost("b", rate=0.0), GUARANTEE)
ASKED = st.tuples(
    st.lists(
        st.tuples(st.sampled_from((*DRAWN, LESS, PERMITS)), st.floats(0, 12)),
        min_size=1, max_size=4, unique_by=lambda drawn: drawn[0].key,
    ),
    st.floats(-0.5, 2),  # the clock moves so far
    st.lists(st.floats(0, 15), min_size=4, max_size=4),  # what is used in the end
    st.sampled_from(("running", "amended", "ended")),
)  # fmt: skip


@pytest.mark.patches
@given(st.lists(ASKED, max_size=25))
def test_what_levels_cover_is_taken_as_if_all_were_looked_at(steps: list[Any]) -> None:
    """To the last bit: by the arithmetic of `bucket`, which that of Lua is held together with."""
    store, reference, now = ledger(), ledger(), 60.0
    looked_at = pytest.MonkeyPatch()
    for charges, gap_s, amounts, then in steps:
        now += gap_s
        one = ask(*charges)
        looked_at.setattr(Ledger, "_covers", lambda *_: False)
        expected = reference.reserve(one, now)
        looked_at.undo()
        assert store.reserve(one, now) == expected
        if expected.granted and then != "running":
            of = used(one, *amounts[: len(charges)])
            settlement = replace(of, ends=then == "ended")
            for each in (store, reference):
                each.settle(settlement, now)
    assert levels(store, now, *DRAWN) == levels(reference, now, *DRAWN)


@pytest.mark.parametrize("ends", [True, False])
def test_a_settlement_names_what_it_likes_in_any_order(ends: bool) -> None:
    """What it does not name was used as it was reserved."""
    store, a, b, c = ledger(), cost("a"), cost("b"), cost("c")
    for _ in range(2):  # as new, and known
        one = ask((a, 5.0), (b, 5.0), (c, 5.0))
        before = levels(store, 0.0, a, b, c)
        assert store.reserve(one, 0.0).granted
        newer = cost("c", burst=20.0)
        for charges in (
            ((Charge(newer, 1.0), Charge(a, 2.0)),)
            if ends
            else (
                (Charge(newer, 3.0), Charge(b, 5.0), Charge(a, 4.0)),
                (Charge(newer, 1.0), Charge(a, 2.0)),
            )
        ):
            store.settle(Settlement(one.reservation_id, charges, ends=ends), 0.0)
        taken = [x - y for x, y in zip(before, levels(store, 0.0, a, b, c), strict=True)]
        assert taken == [2.0, 5.0, 1.0]


@given(st.floats(0, 20), st.floats(0, 20), st.floats(0, 5))
def test_what_is_denied_changes_nothing(first: float, second: float, gap_s: float) -> None:
    """Nor when another limit of the same ask denied it (LM03)."""
    store, a, b = ledger(), cost("a"), cost("b", rate=0.0, burst=5.0)
    class_rule = CLASSES.rules["p1"]
    store.reserve(ask((a, first), (class_rule, 3.0)), 0.0)
    before = levels(store, gap_s, a, b, class_rule)
    assert not store.reserve(ask((a, second), (class_rule, 2.0), (b, 5.1)), gap_s).granted
    assert levels(store, gap_s, a, b, class_rule) == before


def test_one_limit_denies_and_no_other_is_charged_lm03() -> None:
    """LM03: A runs, B is refused by concurrency, A ends; C is admitted, since B cost nothing."""
    store = ledger()
    requests = Rule("t:requests", Scope.TENANT_REQUESTS, 0.0, 2.0)
    permits = Rule("t:concurrency", Scope.TENANT_CONCURRENCY, 0.0, 1.0, Kind.PERMITS)
    first = ask((requests, 1.0), (permits, 1.0))
    assert store.reserve(first, 0.0).granted
    refused = store.reserve(ask((requests, 1.0), (permits, 1.0)), 0.0)
    assert (refused.granted, refused.scope, refused.wait_s) == (False, permits.scope, None)
    store.settle(used(first, 1.0, 1.0), 0.0)
    assert store.reserve(ask((requests, 1.0), (permits, 1.0)), 0.0).granted


def test_a_big_cost_that_does_not_fit_leaves_room_for_small_ones_lm07() -> None:
    """LM07: capacity 10, no refill; costs 8, 3, 2, 1: yes, no, yes, no."""
    store, rule = ledger(), cost(rate=0.0, burst=10.0)
    verdicts = [store.reserve(ask((rule, amount)), 0.0) for amount in (8.0, 3.0, 2.0, 1.0)]
    assert [v.granted for v in verdicts] == [True, False, True, False]


@given(st.floats(0, 20), st.floats(0, 20), st.sampled_from(["plain", "p0", "p2"]))
def test_the_wait_is_just_long_enough_lm15(first: float, second: float, which: str) -> None:
    """LM15: after the wait the same ask passes; a moment before it does not."""
    rule = cost() if which == "plain" else CLASSES.rules[which]
    store = ledger()
    for _ in range(4):
        store.reserve(ask((rule, first)), 0.0)
    verdict = store.reserve(ask((rule, second)), 0.0)
    if verdict.granted:
        return
    assert verdict.wait_s is not None
    assert verdict.wait_s > 0
    assert not store.reserve(ask((rule, second)), verdict.wait_s * (1 - 1e-3)).granted
    assert store.reserve(ask((rule, second)), verdict.wait_s * (1 + 1e-6)).granted


def test_two_limits_of_one_window_refill_each_on_its_own_lm17() -> None:
    """LM17: requests and tokens per minute, only tokens near their limit: 5 min at 95 %."""
    store = ledger()
    requests = Rule("t:requests", Scope.TENANT_REQUESTS, 1000 / 60, 1000.0)
    tokens = cost(rate=100.0, burst=6000.0)
    for step in range(300):
        verdict = store.reserve(ask((requests, 1.0), (tokens, 95.0)), float(step))
        assert verdict.granted
        assert verdict.levels[0].remaining >= 998


def test_a_cost_above_the_capacity_never_fits_and_says_so() -> None:
    verdict = ledger().reserve(ask((cost(), 20.5), (cost("b", rate=1.0), 1.0)), 0.0)
    assert (verdict.granted, verdict.never, verdict.wait_s) == (False, True, None)
    assert verdict.scope is Scope.TENANT_COST
    assert ledger().reserve(ask((CLASSES.rules["p2"], 50.5)), 0.0).never


def test_a_debt_blocks_until_it_is_paid_off() -> None:
    store, rule = ledger(), cost(debt_max=20.0)
    first = ask((rule, 20.0))
    assert store.reserve(first, 0.0).granted
    store.settle(used(first, 35.0), 0.0)  # 15 below 0
    verdict = store.reserve(ask((rule, 5.0)), 0.0)
    assert (verdict.granted, verdict.wait_s) == (False, pytest.approx(2.0))
    assert store.reserve(ask((rule, 5.0)), 2.0).granted


def test_a_debt_has_a_bound() -> None:
    store, rule = ledger(), cost(debt_max=20.0)
    first = ask((rule, 20.0))
    store.reserve(first, 0.0)
    store.settle(used(first, 1e9), 0.0)
    assert store.reserve(ask((rule, 0.0)), 0.0).wait_s == pytest.approx(2.0)


@given(st.floats(0, 20), st.floats(0, 60), st.integers(1, 4), st.sampled_from(["plain", "p1"]))
def test_settling_counts_once_and_conserves(
    reserved: float, actual: float, times: int, which: str
) -> None:
    rule = cost(rate=0.0, debt_max=100.0) if which == "plain" else STILL.rules[which]
    store = ledger()
    first = ask((rule, reserved))
    if not store.reserve(first, 0.0).granted:
        return
    for _ in range(times):
        store.settle(used(first, actual), 0.0)
    left = store.reserve(ask((rule, rule.burst - actual)), 0.0).granted if actual < 17 else None
    assert left in (True, None)
    if actual < 17:
        assert not store.reserve(ask((rule, rule.burst)), 0.0).granted or isclose(actual, 0)


STILL = Family(Rule("still", Scope.CLUSTER, 0.0, 50.0, debt_max=300.0), CLASSES.members)


@given(STEPS, st.floats(0, 20))
def test_whoever_asks_for_less_is_never_worse_off(
    steps: list[tuple[float, float]], amount: float
) -> None:
    store, now, rule = ledger(), 0.0, cost()
    for gap_s, taken in steps:
        now += gap_s
        store.reserve(ask((rule, taken)), now)
    more = store.reserve(ask((rule, amount)), now)
    if not more.granted and more.wait_s is not None:
        less = store.reserve(ask((rule, amount / 2)), now)
        assert less.wait_s is not None
        assert less.wait_s <= more.wait_s


def test_a_dead_routers_permits_come_back_and_its_charge_stays() -> None:
    store = ledger()
    permits = Rule("p", Scope.TENANT_CONCURRENCY, 0.0, 1.0, Kind.PERMITS)
    rule = cost(rate=0.0)
    dead = ask((permits, 1.0), (rule, 8.0), lease_s=10.0)
    assert store.reserve(dead, 0.0).granted
    assert not store.reserve(ask((permits, 1.0)), 9.9).granted
    assert store.reserve(ask((permits, 1.0)), 10.0).granted
    store.settle(used(dead, 1.0, 0.0), 10.0)
    assert levels(store, 10.0, rule) == [12.0]


def test_permits_come_back_once_however_often_it_is_said() -> None:
    store = ledger()
    permits = Rule("p", Scope.TENANT_CONCURRENCY, 0.0, 2.0, Kind.PERMITS)
    ended, other = ask((permits, 1.0), lease_s=5.0), ask((permits, 1.0))
    assert store.reserve(ended, 0.0).granted
    assert store.reserve(other, 0.0).granted
    for now in (1.0, 1.0, 6.0):  # and its lease is over by then
        store.settle(used(ended, 1.0), now)
    assert store.reserve(ask((permits, 1.0)), 6.0).granted
    assert not store.reserve(ask((permits, 1.0)), 6.0).granted


def test_a_renewed_lease_lasts() -> None:
    store = ledger()
    permits = Rule("p", Scope.TENANT_CONCURRENCY, 0.0, 1.0, Kind.PERMITS)
    long = ask((permits, 1.0), lease_s=10.0)
    store.reserve(long, 0.0)
    store.renew(long.reservation_id, 10.0, 9.0)
    assert not store.reserve(ask((permits, 1.0)), 18.0).granted
    assert store.reserve(ask((permits, 1.0)), 19.0).granted


def test_a_cold_start_warms_up_from_empty() -> None:
    store, rule = ledger(now=100.0), cost(rate=0.0, warm_up_s=10.0)
    assert not store.reserve(ask((rule, 1.0)), 100.0).granted
    later = ledger(now=100.0)
    assert levels(later, 105.0, rule) == [10.0]
    assert levels(ledger(now=100.0), 1000.0, rule) == [20.0]


def test_a_clock_that_goes_back_refills_nothing_and_takes_nothing() -> None:
    store, rule = ledger(now=100.0), cost()
    store.reserve(ask((rule, 20.0)), 100.0)
    assert levels(store, 50.0, rule) == [0.0]
    assert levels(store, 101.0, rule) == [10.0]


def test_buckets_and_reservations_that_are_over_are_forgotten() -> None:
    store = ledger()
    for number in range(20_000):
        one = ask((cost(f"tenant:{number}:cost"), 1.0))
        store.reserve(one, float(number))
        store.settle(used(one, 1.0), float(number))
    assert store.size() < 5_000


def test_the_part_of_one_router_takes_what_fits_the_whole() -> None:
    """A cost above a router's part passes when that is full, and is paid off at its rate."""
    part = cost().part(0.25)
    assert (part.rate_per_s, part.burst) == (2.5, 5.0)
    store, granted = ledger(), 0.0
    for step in range(4_000):
        if store.reserve(ask((part, 18.0)), step / 10).granted:
            granted += 18.0
    assert granted == pytest.approx(2.5 * 400, rel=0.05)
    assert store.reserve(ask((part, 21.0)), 500.0).never
    permits = Rule("p", Scope.TENANT_CONCURRENCY, 0.0, 10.0, Kind.PERMITS)
    assert permits.part(0.25).burst == 2.0
    assert permits.part(0.01).burst == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: cost(burst=0.0),
        lambda: cost(rate=-1.0),
        lambda: cost(rate=float("nan")),
        lambda: cost(burst=float("inf")),
        lambda: Family(CLUSTER, (("a", 0.7), ("b", 0.4))),
        lambda: Family(CLUSTER, (("a", 0.0),)),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=r"cluster|tenant:a:cost"):
        wrong()
