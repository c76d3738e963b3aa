"""The same asks give the same verdicts in Python and inside Redis, on Valkey and on Redis."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path

import pytest
from hiredis import Reader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from router.core.bucket import (
    AMPLE_RATIO,
    Ask,
    Charge,
    DecidedBy,
    Family,
    Kind,
    Rule,
    Scope,
    Settlement,
    Verdict,
)
from router.core.ledger import Ledger
from router.core.types import Priority
from router.runtime import redis_scripts
from router.runtime.redis_scripts import Codec, script_text, verdicts
from tests.redis_servers import BINARIES, single

# The script with a clock of the test's, which production does not have.
_CLOCK = "local now = clock()"
assert script_text().count(_CLOCK) == 1
SCRIPT = script_text().replace(_CLOCK, "local now = tonumber(ARGV[2])")
CODEC = Codec("test")

CLUSTER = Rule("cluster", Scope.CLUSTER, 10.0, 20.0, debt_max=10.0, warm_up_s=3.0)
FAMILY = Family(CLUSTER, (("p0", 0.6), ("p1", 0.3), ("p2", 0.05)))
ABOVE = Rule("g+", Scope.TENANT_COST, 4.0, 12.0, debt_max=12.0, amount_max=20.0)
GUARANTEE = Rule("g", Scope.TENANT_COST, 2.0, 6.0, debt_max=6.0, amount_max=18.0, above=ABOVE)
LANE = Rule("l", Scope.LANE, 5.0, 15.0, debt_max=5.0, lends=True)
RULES = [
    *FAMILY.rules.values(),
    Rule("a", Scope.TENANT_COST, 3.0, 10.0, debt_max=5.0),
    GUARANTEE,
    LANE,
    Rule("b", Scope.MODEL, 0.0, 40.0, warm_up_s=5.0),
    Rule("c", Scope.TENANT_REQUESTS, 0.1, 4.0).part(0.5),
    Rule("held", Scope.TENANT_CONCURRENCY, 0.0, 3.0, Kind.PERMITS),
]


@pytest.fixture(scope="module", params=BINARIES, ids=lambda path: Path(path).name)
def redis(request: pytest.FixtureRequest) -> Iterator[Redis]:
    with single(binary=request.param) as server, server.admin() as admin:
        yield admin


@dataclass
class Both:
    """A ledger and a server that are asked the same."""

    redis: Redis
    now: float = 1_000_000.0
    ledger: Ledger = field(init=False)
    ids: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.redis.flushdb()
        self.ledger = Ledger(DecidedBy.REDIS, now=self.now)
        self._run(CODEC.call())  # the store begins

    def reserve(self, *asks: Ask, settled: Sequence[Settlement] = ()) -> list[Verdict]:
        """Settle and ask in one call."""
        there = verdicts(asks, self._run(CODEC.call(asks, settlements=settled)))
        for settlement in settled:
            self.ledger.settle(settlement, self.now)
        here = [self.ledger.reserve(ask, self.now) for ask in asks]
        for one, other in zip(here, there, strict=True):
            assert_same(one, other)
        return here

    def renew(self, ask: Ask) -> None:
        self._run(CODEC.call(renewals=[ask]))
        self.ledger.renew(ask.reservation_id, ask.lease_s, self.now)

    def _run(self, call: bytes) -> bytes:
        answer = self.redis.execute_command("EVAL", SCRIPT, *arguments(call), repr(self.now))
        assert isinstance(answer, bytes)
        return answer


def arguments(call: bytes) -> list[bytes]:
    """Those of a call's command, without the script that production runs."""
    reader = Reader()
    reader.feed(call)
    command: list[bytes] = reader.gets()
    assert reader.gets() is False
    assert command[0] == b"EVALSHA"
    return command[2:]


def assert_same(here: Verdict, there: Verdict) -> None:
    assert (here.granted, here.scope, here.never) == (there.granted, there.scope, there.never)
    assert here.borrowed == there.borrowed
    assert_near(here.wait_s, there.wait_s)
    for one, other in zip(here.levels, there.levels, strict=True):
        assert one.limit == other.limit
        assert_near(one.remaining, other.remaining)
        assert_near(one.reset_s, other.reset_s)


def assert_near(here: float | None, there: float | None) -> None:
    if here is None or there is None:
        assert here is there
    else:
        assert here == pytest.approx(there, rel=1e-6, abs=1e-5)


MIXED = [
    *FAMILY.rules.values(),
    *Family(CLUSTER, (("p0", 0.5), ("p2", 0.2), ("p3", 0.1))).rules.values(),
    Rule("cluster", Scope.CLUSTER, 5.0, 10.0),
    Rule("p1", Scope.CLASS, 2.0, 4.0),
    Rule("a", Scope.TENANT_COST, 3.0, 10.0),
]


@given(
    asked=st.lists(st.sampled_from(MIXED), max_size=6),
    ended=st.lists(st.sampled_from(MIXED), max_size=6),
)
def test_rules_of_two_configurations_in_one_call(asked: list[Rule], ended: list[Rule]) -> None:
    """Each key is written once, as asks have it; a member says where its parent is."""
    asks = [Ask(f"a{n}", (Charge(r, 1.0),), Priority.P1, 1.0) for n, r in enumerate(asked)]
    settled = [Settlement(f"s{n}", (Charge(r, 1.0),)) for n, r in enumerate(ended)]
    count_of_keys, *keys, blob = arguments(CODEC.call(asks, settlements=settled))
    numbers = array("d", blob)
    count = int(numbers[0])
    assert int(count_of_keys) == len(keys) == 1 + count + len(asks) + len(settled)
    names = [key.decode().rpartition(":")[2] for key in keys[1 : 1 + count]]
    assert len(set(names)) == count
    rules = {name: numbers[1 + 7 * n : 8 + 7 * n] for n, name in enumerate(names)}
    for number, name in enumerate(names):
        if ahead := int(rules[name][6]):
            assert (names[number - ahead], name[0]) == ("cluster", "p")
    if asks:
        assert rules[asked[0].key][2] == asked[0].burst
    sets_at = 1 + 7 * count
    sets = {id(rule): rule for rule in (*asked, *ended)}.values()
    assert numbers[sets_at] == len(sets)
    for n, rule in enumerate(sets):
        assert names[int(numbers[sets_at + 2 + 2 * n]) - 1] == rule.key
    first = sets_at + 1 + 2 * len(sets)
    assert len(numbers) - first == 3 + 3 * len(settled) + 6 * len(asks)
    assert numbers[first] == len(settled)


@pytest.mark.patches
def test_what_is_remembered_of_calls_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_scripts, "_SETS_MAX", 3)
    monkeypatch.setattr(redis_scripts, "_HEADS_MAX", 5)
    codec = Codec("test")
    for asked, ended in [*product(RULES, RULES), *product(MIXED, RULES)]:
        asks = [Ask("a", (Charge(asked, 1.0),), Priority.P1, 1.0)]
        settled = [Settlement("s", (Charge(ended, 2.0), Charge(LANE, 1.0)))]
        assert codec.call(asks, settled) == Codec("test").call(asks, settled)
        assert sum(map(len, codec._sets.values())) == codec._sets_count <= 3
        assert len(codec._heads) <= 5


CHARGES = st.lists(
    st.tuples(st.sampled_from(RULES), st.floats(0, 25)), min_size=1, max_size=5,
    unique_by=lambda pair: pair[0].key,
)  # fmt: skip
SHARED = (LANE, FAMILY.rules["p0"], FAMILY.rules["p2"])
BORROWING = st.tuples(
    st.floats(0, 20), st.lists(st.sampled_from(SHARED), max_size=2, unique_by=lambda r: r.key)
).map(lambda drawn: [(rule, drawn[0]) for rule in (GUARANTEE, *drawn[1])])
STEP = st.one_of(
    st.tuples(st.just("reserve"), st.lists(CHARGES, min_size=1, max_size=4), st.floats(1, 20)),
    st.tuples(st.just("borrow"), st.lists(BORROWING, min_size=1, max_size=4), st.floats(1, 20)),
    st.tuples(st.just("fetch"), st.lists(CHARGES, min_size=1, max_size=2), st.floats(1, 20)),
    st.tuples(st.just("settle"), st.integers(0, 20), st.floats(0, 30)),
    st.tuples(st.just("amend"), st.integers(0, 20), st.integers(0, 30)),
    st.tuples(st.just("extend"), st.integers(0, 20), st.integers(0, 30)),
    st.tuples(st.just("fetch more"), st.integers(0, 20), st.integers(0, 30)),
    st.tuples(st.just("renew"), st.integers(0, 20), st.floats(1, 20)),
    st.tuples(st.just("wait"), st.floats(0, 8), st.none()),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(STEP, max_size=25))
def test_lua_and_python_decide_the_same(redis: Redis, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    both, made = Both(redis), list[Ask]()
    for what, first, second in steps:
        if what == "wait":
            both.now += first
        elif what in ("reserve", "borrow", "fetch"):
            borrows = 0.0 if what != "borrow" else AMPLE_RATIO if second > 10 else 1.0
            asks = [
                as_ask(both, charges, second, ahead=what == "fetch", borrows=borrows)
                for charges in first
            ]
            granted = both.reserve(*asks)
            made += [ask for ask, v in zip(asks, granted, strict=True) if v.granted]
        elif made:
            ask = made[first % len(made)]
            if what == "renew":
                both.renew(ask)
            elif what in ("extend", "fetch more"):
                charges = tuple(Charge(c.rule, second) for c in ask.charges)
                more = replace(ask, charges=charges, extends=True, ahead=what == "fetch more")
                both.reserve(more)
            elif what == "amend":
                charges = tuple(Charge(c.rule, second) for c in ask.charges)
                both.reserve(settled=[Settlement(ask.reservation_id, charges, ends=False)])
            else:
                charges = tuple(Charge(c.rule, second) for c in ask.charges)
                next_one = as_ask(both, [(c.rule, second / 2) for c in ask.charges], 5.0)
                asks = [next_one] if first % 2 else []
                both.reserve(*asks, settled=[Settlement(ask.reservation_id, charges)])
    both.now += 1
    both.reserve(as_ask(both, [(rule, 1.0) for rule in RULES if rule.family is None], 5.0))
    both.reserve(as_ask(both, [(rule.above, 0.0) for rule in RULES if rule.above], 5.0))


A = next(each for each in RULES if each.key == "a")
P0, P2 = FAMILY.rules["p0"], FAMILY.rules["p2"]
HALF = AMPLE_RATIO
# What is taken first, what is asked for then, and how long that has to wait; None: in vain. The
# guarantee holds 6 and refills 2 per second, what is above it 12 and 4. Of the lane's 15 and the
# cluster's 20 half stays; of what the others leave to p0 and p2, 13 and 2, half of their 12 and 1.
BORROWED = [
    ([], [(GUARANTEE, 6.0)], HALF, 0.0),
    ([], [(GUARANTEE, 6.0)], 0.0, 0.0),
    ([(GUARANTEE, 6.0)], [(GUARANTEE, 12.0)], HALF, 0.0),
    ([(GUARANTEE, 6.0)], [(GUARANTEE, 4.0)], 0.0, 2.0),  # from its own
    ([(GUARANTEE, 6.0), (GUARANTEE, 12.0)], [(GUARANTEE, 3.0)], HALF, 0.75),  # from above
    ([(GUARANTEE, 3.0), (GUARANTEE, 12.0)], [(GUARANTEE, 4.0)], HALF, 0.5),  # from its own
    ([(GUARANTEE, 1.0)], [(GUARANTEE, 14.0)], HALF, 0.0),  # above is full
    ([(GUARANTEE, 1.0), (GUARANTEE, 9.0)], [(GUARANTEE, 18.0)], HALF, 0.5),  # its own is full then
    ([], [(GUARANTEE, 19.0)], HALF, None),
    ([(GUARANTEE, 6.0)], [(GUARANTEE, 7.0), (LANE, 7.0)], HALF, 0.0),
    ([(GUARANTEE, 6.0), (LANE, 1.0)], [(GUARANTEE, 7.0), (LANE, 7.0)], HALF, 0.1),
    ([(GUARANTEE, 6.0)], [(GUARANTEE, 9.0), (LANE, 9.0)], HALF, 0.0),  # it is full
    ([(GUARANTEE, 6.0), (LANE, 1.0)], [(GUARANTEE, 9.0), (LANE, 9.0)], HALF, 0.2),
    ([(LANE, 12.0)], [(GUARANTEE, 3.0), (LANE, 3.0)], HALF, 0.0),  # within the guarantee
    ([(GUARANTEE, 6.0)], [(GUARANTEE, 7.0), (P0, 7.0)], HALF, 0.0),
    ([(GUARANTEE, 6.0), (P0, 1.0)], [(GUARANTEE, 7.0), (P0, 7.0)], HALF, 0.1),
    ([(GUARANTEE, 6.0)], [(GUARANTEE, 1.5), (P2, 1.5)], HALF, 0.0),
    ([(GUARANTEE, 6.0), (P2, 1.0)], [(GUARANTEE, 1.5), (P2, 1.5)], HALF, 0.1),
    ([(GUARANTEE, 6.0)], [(GUARANTEE, 10.0), (P2, 10.0)], HALF, 0.0),  # what it may have is there
    ([(GUARANTEE, 6.0), (P2, 1.0)], [(GUARANTEE, 10.0), (P2, 10.0)], HALF, 0.1),
    ([(GUARANTEE, 6.0)], [(GUARANTEE, 7.0), (LANE, 7.0)], 1.0, 0.0),
    ([(GUARANTEE, 6.0), (LANE, 1.0)], [(GUARANTEE, 7.0), (LANE, 7.0)], 1.0, 0.2),
    ([(GUARANTEE, 6.0), (P0, 1.0)], [(GUARANTEE, 1.0), (P0, 1.0)], 1.0, 0.1),
    ([(GUARANTEE, 6.0), (P2, 0.5)], [(GUARANTEE, 1.0), (P2, 1.0)], 1.0, 0.05),
    ([(P0, 12.0)], [(GUARANTEE, 1.0), (P2, 1.0)], HALF, 0.0),  # within guarantee and share
]


@pytest.mark.parametrize(("before", "charges", "borrows", "wait_s"), BORROWED)
def test_above_a_guarantee_one_borrows_what_others_leave(
    redis: Redis,
    before: list[tuple[Rule, float]],
    charges: list[tuple[Rule, float]],
    borrows: float,
    wait_s: float | None,
) -> None:
    both = Both(redis)
    both.now += 10  # warmed up
    for one in before:
        assert both.reserve(as_ask(both, [one], 60.0, borrows=HALF))[0].granted
    (verdict,) = both.reserve(as_ask(both, charges, 60.0, borrows=borrows))
    assert verdict.wait_s == (None if wait_s is None else pytest.approx(wait_s, abs=1e-6))
    assert verdict.scope is (None if wait_s == 0 else Scope.TENANT_COST)
    assert verdict.never == (wait_s is None)


def test_what_was_borrowed_is_settled_above_and_what_is_guaranteed_within(redis: Redis) -> None:
    both = Both(redis)

    def left() -> list[float]:
        levels = [
            both.reserve(as_ask(both, [(rule, 0.0)], 1.0))[0].levels[0].remaining
            for rule in (GUARANTEE, ABOVE)
        ]
        return [round(level, 6) for level in levels]

    within, borrowed = (as_ask(both, [(GUARANTEE, 4.0)], 60.0, borrows=HALF) for _ in range(2))
    verdicts = both.reserve(within, borrowed)
    assert [verdict.borrowed for verdict in verdicts] == [False, True]
    assert left() == [2.0, 8.0]
    more = [Charge(GUARANTEE, 6.0)]
    both.reserve(settled=[Settlement(borrowed.reservation_id, tuple(more), ends=False)])
    assert left() == [2.0, 6.0]
    both.reserve(settled=[Settlement(within.reservation_id, tuple(more), ends=False)])
    assert left() == [0.0, 6.0]
    for one in (within, borrowed, borrowed):  # a second settlement changes nothing
        both.reserve(settled=[Settlement(one.reservation_id, (Charge(GUARANTEE, 1.0),))])
    assert left() == [5.0, 11.0]


PERMITS = Rule("many", Scope.TENANT_CONCURRENCY, 0.0, 10.0, Kind.PERMITS)


@pytest.mark.parametrize(
    "charges",
    [
        [(A, 5.0)],
        [(PERMITS, 5.0)],
        [(FAMILY.rules["p0"], 7.0)],  # the others leave it 13, and 6 must be left
        [(FAMILY.rules["p2"], 1.5)],  # 2, and 0.5
        [(PERMITS, 5.0), (A, 5.0)],
    ],
    ids=lambda charges: "+".join(rule.key for rule, _ in charges),
)
def test_what_is_fetched_ahead_leaves_half_of_every_bucket(
    redis: Redis, charges: list[tuple[Rule, float]]
) -> None:
    both = Both(redis)
    both.now += 10  # warmed up

    def is_granted(amounts: list[tuple[Rule, float]], *, ahead: bool = True) -> bool:
        taken = tuple(Charge(rule, amount) for rule, amount in amounts)
        one = Ask(str(next(both.ids)), taken, Priority.P1, 10.0, ahead=ahead)
        return both.reserve(one)[0].granted

    for place in range(len(charges)):
        assert not is_granted([(r, a + (n == place)) for n, (r, a) in enumerate(charges)])
    assert is_granted(charges)
    assert not is_granted([(rule, 1.0) for rule, _ in charges])
    assert is_granted([(rule, rule.burst / 2) for rule, _ in charges], ahead=False)


def test_a_class_that_borrows_fetches_ahead_while_others_leave_plenty(redis: Redis) -> None:
    both, rule, other = Both(redis), FAMILY.rules["p2"], FAMILY.rules["p0"]
    both.now += 10
    fetch = as_ask(both, [(rule, 0.5)], 10.0, ahead=True)
    assert both.reserve(as_ask(both, [(rule, 1.0)], 10.0), fetch)[1].granted, "its own is used up"
    both.reserve(as_ask(both, [(other, 7.0)], 10.0))
    assert not both.reserve(as_ask(both, [(rule, 0.1)], 10.0, ahead=True))[0].granted


def test_a_class_fetches_nothing_ahead_while_the_cluster_is_scarce(redis: Redis) -> None:
    """Though its own share is full."""
    both = Both(redis)
    both.now += 10
    both.reserve(as_ask(both, [(FAMILY.rules["p0"], 12.0)], 10.0))
    asks = [as_ask(both, [(FAMILY.rules["p1"], 1.0)], 10.0, ahead=ahead) for ahead in (True, False)]
    assert [verdict.granted for verdict in both.reserve(*asks)] == [False, True]


def test_what_comes_back_to_a_full_bucket_is_lost_for_the_next_ask_of_the_same_call(
    redis: Redis,
) -> None:
    both, rule = Both(redis), next(each for each in RULES if each.key == "a")
    first = as_ask(both, [(rule, 8.0)], 600.0)
    both.reserve(first)
    both.now += 60
    back = Settlement(first.reservation_id, (Charge(rule, 0.0),))
    (verdict,) = both.reserve(as_ask(both, [(rule, 1.0)], 600.0), settled=[back])
    assert verdict.levels[0].remaining == rule.burst - 1


def test_an_extension_lasts_as_long_as_what_it_extends_unless_that_is_renewed(
    redis: Redis,
) -> None:
    both, most = Both(redis), Rule("permits", Scope.TENANT_CONCURRENCY, 0.0, 10.0, Kind.PERMITS)
    nobody = as_ask(both, [(most, 1.0)], 10.0)
    look = replace(nobody, charges=(Charge(most, 0.0),))

    def left() -> float | None:
        (verdict,) = both.reserve(replace(look, reservation_id=str(next(both.ids))))
        return verdict.levels[0].remaining

    renewed = as_ask(both, [(most, 1.0)], 10.0)
    both.reserve(nobody, renewed)
    both.now += 6
    for one in (nobody, renewed):
        both.reserve(replace(one, charges=(Charge(most, 3.0),), extends=True))
    both.renew(renewed)
    assert left() == 4.0
    both.now += 6
    assert left() == 7.0
    both.now += 6
    assert left() == 10.0


def test_a_reservation_may_change_in_its_last_moment(redis: Redis) -> None:
    both, rule = Both(redis), next(each for each in RULES if each.key == "a")
    one = as_ask(both, [(rule, 1.0)], 10.0)
    assert both.reserve(one)[0].granted
    both.now += 9.9998
    more = replace(one, charges=(Charge(rule, 3.0),), extends=True)
    less = Settlement(one.reservation_id, (Charge(rule, 0.5),), ends=False)
    both.reserve(more, settled=[less])


def as_ask(
    both: Both,
    charges: list[tuple[Rule, float]],
    lease_s: float,
    *,
    ahead: bool = False,
    borrows: float = 0.0,
) -> Ask:
    taken = tuple(
        Charge(rule, 1.0 if rule.kind is Kind.PERMITS else amount) for rule, amount in charges
    )
    return Ask(str(next(both.ids)), taken, Priority.P1, lease_s, ahead=ahead, borrows=borrows)
