"""Limits in the life of a request: refused, made cheaper, held in line, given back."""

from __future__ import annotations

import gc
import weakref
from random import Random
from typing import Any

import pytest

from router.core.bucket import Ask, Charge, DecidedBy, Scope, Settlement, Verdict
from router.core.dispatcher import Dispatcher
from router.core.effects import Effect, Reserve, Settle
from router.core.ledger import Ledger
from router.core.snapshot import Snapshot
from router.core.types import Outcome, Priority, TicketState, Usage
from router.errors import STATUS, Reason
from tests.core.builders import SERVER_ERROR, Bench, plain_config, request_spec, runs, waits

COST = {"prompt_token_units": 0.0, "output_token_units": 1.0}


class Limited(Bench):
    """A bench whose limits are decided at once; with `holds`, when `answer` is called."""

    def __init__(self, *, holds: bool = False, **sections: Any) -> None:
        super().__init__(Dispatcher(plain_config(**sections), rng=Random(1), router_id="r1"))
        self.ledger = Ledger(DecidedBy.MEMORY, now=0.0)
        self.holds = holds
        self.asks: list[Reserve] = []
        self.settled: list[Settlement] = []
        self.join("w1", "w2")

    def take(self) -> list[Effect]:
        new = super().take()
        for effect in new:
            if isinstance(effect, Reserve):
                self.asks.append(effect)
            elif isinstance(effect, Settle):
                self.settled.append(effect.settlement)
                self.ledger.settle(effect.settlement, self.now)
        while self.asks and not self.holds:
            self.answer()
        return new

    def answer(self, verdict: Verdict | None = None) -> Verdict:
        """The store decides on the oldest ask."""
        effect = self.asks.pop(0)
        verdict = verdict or self.ledger.reserve(effect.ask, self.now)
        self.core.on_reserved(effect.ticket, verdict, now=self.now)
        self.take()
        return verdict

    def snapshot(self) -> Snapshot:
        return self.core.snapshot(now=self.now)

    def level(self, key: str, tenant: str = "anonymous") -> float:
        """What remains of a bucket of a tenant."""
        rule = next(
            charge.rule
            for effect in self.effects
            if isinstance(effect, Reserve)
            for charge in effect.ask.charges
            if charge.rule.key == f"tenant:{tenant}:{key}"
        )
        look = Ask(f"look-{len(self.effects)}", (Charge(rule, 0.0),), Priority.P1, 1.0)
        return self.ledger.reserve(look, self.now).levels[0].remaining


def limited(tenant: dict[str, Any], *, holds: bool = False, **limits: Any) -> Limited:
    return Limited(holds=holds, limits={"tenant": tenant, "cost": COST, **limits})


def test_without_limits_the_store_is_never_asked() -> None:
    made = Limited()
    made.end(made.ask())
    assert not any(isinstance(effect, Reserve | Settle) for effect in made.effects)


def test_requests_above_the_rate_are_refused_until_it_refills() -> None:
    made = limited({"requests_per_minute": 60, "requests_burst": 2})
    first, second, third = (made.ask() for _ in range(3))
    assert runs(first)
    assert runs(second)
    refusal = made.refusal(third)
    assert refusal.reason is Reason.RATE_LIMITED
    assert refusal.retry_after_s == 1.0
    assert "the tenant anonymous is at its limit of requests per minute" in refusal.message
    ((rule, level),) = refusal.levels
    assert (rule.scope, level.limit, level.remaining) == (Scope.TENANT_REQUESTS, 2, 0)
    made.pass_to(0.5)
    assert made.ask().state is TicketState.FINISHED
    made.pass_to(1.0)
    assert runs(made.ask())
    assert made.snapshot().limits.refused == {(DecidedBy.MEMORY, Scope.TENANT_REQUESTS): 2}


def test_refused_by_one_limit_is_charged_by_none() -> None:
    """LM03."""
    made = limited({"requests_per_minute": 0.001, "requests_burst": 2, "concurrency": 1})
    running = made.ask()
    assert made.refusal(made.ask()).reason is Reason.RATE_LIMITED
    made.end(running)
    assert runs(made.ask())
    assert made.level("requests") < 0.01


def test_what_never_fits_is_refused_as_too_large_and_waits_for_nothing() -> None:
    made = limited({"cost_per_s": 1, "cost_burst": 50}, wait_s_max=10)
    refusal = made.refusal(made.ask(structured=True))
    assert STATUS[refusal.reason] == 413
    assert refusal.retry_after_s is None
    assert "costs 100 units, and the tenant anonymous never has more than 50" in refusal.message


def test_a_long_answer_is_cut_before_a_cost_limit_refuses_it() -> None:
    made = limited({"cost_per_s": 1, "cost_burst": 300})
    cut = made.ask(max_tokens=400)
    assert runs(cut)
    assert cut.degraded is not None
    assert cut.degraded.header == "max_tokens=256; level=0"
    assert made.level("cost") == pytest.approx(44)
    assert made.refusal(made.ask(max_tokens=400)).reason is Reason.RATE_LIMITED
    assert made.snapshot().limits.shortened == 2


@pytest.mark.parametrize(
    ("sections", "fields"),
    [
        ({"tenants": {"anonymous": {"degrade": False}}}, {}),
        ({"degrade": {"enabled": False}}, {}),
        ({}, {"structured": True}),
        ({}, {"fixed": True}),
    ],
)
def test_what_may_not_be_cut_is_refused(sections: dict[str, Any], fields: dict[str, Any]) -> None:
    limits = {"tenant": {"cost_per_s": 1, "cost_burst": 300}, "cost": COST}
    made = Limited(limits=limits, **sections)
    assert made.refusal(made.ask(max_tokens=400, **fields)).reason is Reason.TOO_LARGE


def test_the_difference_is_given_back_or_becomes_a_debt() -> None:
    made = limited({"cost_per_s": 0.0001, "cost_burst": 300})
    first = made.ask()
    made.core.on_finished(
        first, Outcome.SUCCESS, now=made.now, usage=Usage(prompt_tokens=10, output_tokens=40)
    )
    made.take()
    assert made.level("cost") == pytest.approx(260)
    second = made.ask()
    made.core.on_finished(
        second, Outcome.SUCCESS, now=made.now, usage=Usage(prompt_tokens=10, output_tokens=400)
    )
    made.take()
    assert made.level("cost") == 0
    assert made.ask().state is TicketState.FINISHED


def test_a_retry_keeps_its_reservation_and_a_failure_gives_it_back() -> None:
    made = limited({"cost_per_s": 0.0001, "cost_burst": 300, "concurrency": 1})
    one = made.ask()
    assert made.fail(one)
    made.pass_to(3.0)
    assert runs(one)
    assert len(made.settled) == 0
    assert not made.fail(one, SERVER_ERROR)
    assert len(made.settled) == 1
    assert made.level("cost") == pytest.approx(300, abs=0.01)
    assert runs(made.ask())


def test_a_client_that_leaves_while_the_store_decides_gets_nothing() -> None:
    made = limited({"requests_per_minute": 60, "requests_burst": 1}, holds=True)
    one = made.ask()
    assert one.state is TicketState.RESERVING
    made.end(one, Outcome.ABORTED)
    assert made.answer().granted
    (settlement,) = made.settled
    assert [charge.amount for charge in settlement.charges] == [0]
    made.ask()
    assert made.answer().granted


def test_no_worker_is_there_any_more_when_the_store_answers() -> None:
    made = limited({"requests_per_minute": 60}, holds=True)
    one = made.ask()
    for name in ("w1", "w2"):
        made.core.on_worker_left(_id(name), now=made.now)
    made.take()
    made.answer()
    assert made.refusal(one).reason in (Reason.NO_WORKERS, Reason.MODEL_NOT_FOUND)
    assert [charge.amount for charge in made.settled[0].charges] == [0]


def test_who_may_wait_is_let_in_in_order_as_the_limit_refills() -> None:
    made = limited({"requests_per_minute": 60, "requests_burst": 1}, wait_s_max=10)
    tickets = [made.ask() for _ in range(4)]
    assert [runs(t) for t in tickets] == [True, False, False, False]
    assert made.snapshot().limits.waiting == 3
    began = len([e for e in made.effects if isinstance(e, Reserve)])
    for passed in (1, 2, 3):
        made.pass_to(passed + 0.01)
        assert [runs(t) for t in tickets].count(True) == passed + 1
    assert [t.number for t in made.dispatched] == [1, 2, 3, 4]
    asks = len([e for e in made.effects if isinstance(e, Reserve)]) - began
    assert asks <= 8, "only the first of a line asks"
    assert made.snapshot().limits.waiting == 0


def test_each_request_is_one_decision_however_often_it_asked() -> None:
    made = limited({"requests_per_minute": 60, "requests_burst": 1}, wait_s_max=2.5)
    tickets = [made.ask() for _ in range(4)]
    made.pass_to(3.0)
    assert [t.state is TicketState.FINISHED for t in tickets] == [False, False, False, True]
    view = made.snapshot().limits
    assert view.granted == {DecidedBy.MEMORY: 3}
    assert view.refused == {(DecidedBy.MEMORY, Scope.TENANT_REQUESTS): 1}


def test_tenants_take_turns_and_who_asks_stays_first_until_the_store_has_spoken() -> None:
    units = {"request_units": 1.0, "prompt_token_units": 0.0, "output_token_units": 0.0}
    cluster = {"cost_per_s": 1, "cost_burst": 1}
    made = Limited(holds=True, limits={"cost": units, "cluster": cluster, "wait_s_max": 20})
    made.ask(tenant="a")
    assert made.answer().granted
    second, third, fourth = (made.ask(tenant="a") for _ in range(3))
    while made.asks:
        assert not made.answer().granted
    made.pass_to(1.01)
    other = made.ask(tenant="b")
    assert [effect.ticket for effect in made.asks] == [second]
    assert made.answer().granted
    assert [effect.ticket for effect in made.asks] == [other], "who had one waits for the others"
    assert not made.answer().granted
    made.holds = False
    made.pass_to(4.2)
    assert [ticket.number for ticket in made.dispatched[1:]] == [
        ticket.number for ticket in (second, other, third, fourth)
    ]


def test_who_is_next_by_turn_asks_at_once_and_not_when_another_would_have_fitted() -> None:
    """A large request waits for a whole bucket; one that fits need not wait for that."""
    units = {"request_units": 0.0, "prompt_token_units": 0.0, "output_token_units": 1.0}
    model = {"m": {"cost_per_s": 2, "cost_burst": 30}}
    limits = {"cost": units, "models": model, "wait_s_max": 60, "degrade": False}
    made = Limited(limits=limits)
    first, second, large = (made.ask(tenant="a", max_tokens=most) for most in (20, 25, 29))
    made.pass_to(9.0)
    small = made.ask(tenant="b", max_tokens=1)
    assert [runs(ticket) for ticket in (first, second, large, small)] == [True, True, False, True]
    made.pass_to(23.0)
    assert runs(large)


def test_who_would_wait_too_long_is_refused_at_once_and_the_others_at_their_deadline() -> None:
    made = limited({"requests_per_minute": 60, "requests_burst": 1}, wait_s_max=1.5)
    made.ask()
    second, third = made.ask(), made.ask()
    made.pass_to(2.0)
    assert runs(second)
    assert made.refusal(third).reason is Reason.RATE_LIMITED
    late = limited({"requests_per_minute": 6, "requests_burst": 1}, wait_s_max=5)
    late.ask()
    assert late.refusal(late.ask()).retry_after_s == pytest.approx(10)


def test_what_never_fits_is_refused_at_once_whoever_waits() -> None:
    made = limited({"cost_per_s": 10, "cost_burst": 20}, wait_s_max=10, degrade=False)
    tickets = [made.ask(max_tokens=20) for _ in range(3)]
    assert [runs(t) for t in tickets] == [True, False, False]
    never = made.refusal(made.ask(max_tokens=21))
    assert (never.reason, never.retry_after_s) == (Reason.TOO_LARGE, None)
    made.pass_to(4.1)
    assert all(map(runs, tickets))


def test_what_fits_once_it_is_cut_waits_behind_those_who_were_there() -> None:
    made = limited({"cost_per_s": 100, "cost_burst": 1000}, wait_s_max=60)
    assert runs(made.ask(max_tokens=700))
    before = made.ask(max_tokens=999)
    cut = made.ask(max_tokens=5000)  # to 256, of which there are enough, but for the one before
    assert (cut.degraded is None, runs(before), runs(cut)) == (False, False, False)
    made.pass_to(7.0)
    assert runs(before)
    made.pass_to(10.0)
    assert runs(cut)


def test_one_that_leaves_the_line_makes_place_for_the_next() -> None:
    made = limited({"requests_per_minute": 60, "requests_burst": 1}, wait_s_max=10)
    made.ask()
    second, third = made.ask(), made.ask()
    made.end(second, Outcome.ABORTED)
    made.pass_to(1.01)
    assert runs(third)


def test_permits_that_come_back_let_the_next_in_at_once() -> None:
    made = limited({"concurrency": 1}, wait_s_max=10)
    first, second = made.ask(), made.ask()
    assert second.state is TicketState.RESERVING
    made.pass_to(0.6)
    made.end(first)
    assert runs(second)


def test_the_lines_have_the_places_of_the_queue_and_one_leaves_some_to_others() -> None:
    made = Limited(limits={"tenant": {"concurrency": 1}, "wait_s_max": 10}, queue={"depth_max": 10})
    states = [made.ask().state for _ in range(20)]
    assert states.count(TicketState.RESERVING) == 8
    assert states.count(TicketState.FINISHED) == 11
    assert made.ask(priority=Priority.P2).state is TicketState.RESERVING


def test_those_who_wait_are_let_in_when_their_limits_are_taken_away() -> None:
    made = limited(
        {"requests_per_minute": 0.01, "requests_burst": 1, "concurrency": 1}, wait_s_max=60
    )
    tickets = [made.ask() for _ in range(300)]
    made.core.on_config(plain_config(), now=made.now)
    made.end(tickets[0])
    made.pass_to(1.0)
    assert all(runs(t) or waits(t) for t in tickets[1:])
    assert made.snapshot().limits.waiting == 0


def test_a_store_that_is_away_and_closed_makes_a_503_that_says_when_to_come_back() -> None:
    made = limited({"requests_per_minute": 60}, holds=True, wait_s_max=10)
    one = made.ask()
    made.answer(Verdict(False, None, 0.5, False, (), DecidedBy.CLOSED))
    refusal = made.refusal(one)
    assert (refusal.reason, refusal.retry_after_s) == (Reason.LIMITS_UNKNOWN, 1.0)
    assert made.snapshot().limits.refused == {(DecidedBy.CLOSED, None): 1}


def test_two_limits_of_a_tenant_refill_on_their_own() -> None:
    """LM17: requests far from their limit, cost at 95 % of its own, for five minutes."""
    made = limited({"requests_per_minute": 6000, "cost_per_s": 100}, degrade=False)
    for second in range(300):
        made.pass_to(float(second))
        one = made.ask(max_tokens=95)
        assert runs(one), (second, made.refusal(one))
        made.core.on_finished(
            one, Outcome.SUCCESS, now=made.now, usage=Usage(prompt_tokens=1, output_tokens=95)
        )
        made.take()
    for _ in range(3):
        made.ask(max_tokens=95)
    assert made.refusal(made.ask(max_tokens=95)).levels[0][0].scope is Scope.TENANT_COST


def test_a_class_within_its_share_passes_whatever_the_others_take() -> None:
    shares = {"cost_per_s": 1000, "cost_burst": 1000}
    made = Limited(limits={"cost": COST, "cluster": shares})
    low = [made.ask(priority=Priority.P2, tenant=f"t{n}") for n in range(20)]
    assert sum(runs(t) for t in low) < 20
    assert runs(made.ask(priority=Priority.P0))
    assert {made.refusal(t).levels[0][0].scope for t in low if not runs(t)} == {Scope.CLASS}


def test_a_class_gets_no_more_than_its_ceiling_whatever_the_others_leave() -> None:
    limits = {
        "cost": COST,
        "cluster": {"cost_per_s": 1000, "cost_burst": 1000},
        "classes": {"p2": {"cost_per_s": 10, "cost_burst": 20}},
        "wait_s_max": 5,
    }
    made = Limited(limits=limits)
    low = [made.ask(priority=Priority.P2, max_tokens=10) for _ in range(3)]
    assert [runs(ticket) for ticket in low] == [True, True, False]
    never = made.refusal(made.ask(priority=Priority.P2, max_tokens=21))
    assert "its priority class never has more than 20" in never.message
    assert runs(made.ask(priority=Priority.P1, max_tokens=100)), "the others have theirs"
    made.pass_to(1.0)
    assert runs(low[2])


NO_PERMIT = Verdict(False, Scope.TENANT_CONCURRENCY, None, False, (), DecidedBy.REDIS)


def test_a_line_asks_no_more_often_the_longer_it_waits() -> None:
    """What comes back here others take each time: an ask for each, and one for each quarter."""
    made = limited({"concurrency": 1000}, holds=True, wait_s_max=60)
    running = [made.ask() for _ in range(100)]
    while made.asks:
        made.answer()
    waiting = [made.ask(priority=Priority.P3) for _ in range(5)]
    asked = []
    for step in range(1, 401):
        made.pass_to(step / 20)
        if step % 4 == 0:
            made.end(running.pop())
        asked.append(len(made.asks))
        while made.asks:
            made.answer(NO_PERMIT)
    assert max(asked[1:]) <= 2
    assert 40 <= sum(asked[200:]) <= 60
    assert all(t.state is TicketState.RESERVING for t in waiting)


def test_units_that_come_back_let_the_next_in_soon() -> None:
    made = limited({"cost_per_s": 0.2, "cost_burst": 100}, wait_s_max=600, degrade=False)
    first, second = (made.ask(max_tokens=n, priority=Priority.P3) for n in (100, 60))
    assert (runs(first), runs(second)) == (True, False)
    made.core.on_finished(
        first, Outcome.SUCCESS, now=made.now, usage=Usage(prompt_tokens=1, output_tokens=5)
    )
    made.take()
    made.pass_to(0.1)
    assert runs(second)


def test_what_was_used_above_the_guarantee_is_counted_by_class() -> None:
    tenant = {"cost_per_s": 10, "cost_burst": 100, "cost_ceiling_per_s": 40}
    made = limited(tenant, cluster={"cost_per_s": 1000, "cost_burst": 1000})
    within, above = made.ask(max_tokens=100), made.ask(max_tokens=100, priority=Priority.P2)
    assert runs(within)
    assert runs(above)
    assert made.snapshot().limits.borrowed == {}, "what it costs is known at its end"
    for ticket, output_tokens in ((within, 100), (above, 40)):
        usage = Usage(prompt_tokens=10, output_tokens=output_tokens)
        made.core.on_finished(ticket, Outcome.SUCCESS, now=made.now, usage=usage)
        made.take()
    price = made.core.reserving.limits.price(None, Priority.P2, 1, 10, 40)
    assert made.snapshot().limits.borrowed == {Priority.P2: price}
    assert price >= 40


def test_what_one_class_gives_back_another_may_borrow() -> None:
    shares = {"p0": 0.1, "p1": 0.1, "p2": 0.1}
    cluster = {"cost_per_s": 0.5, "cost_burst": 1000, "shares": shares}
    made = Limited(limits={"cost": COST, "cluster": cluster, "wait_s_max": 600, "degrade": False})
    first = made.ask(max_tokens=900)
    low, lower = (made.ask(max_tokens=n, priority=Priority.P3) for n in (100, 110))
    assert (runs(first), runs(low), lower.state) == (True, True, TicketState.RESERVING)
    made.core.on_finished(
        first, Outcome.SUCCESS, now=made.now, usage=Usage(prompt_tokens=1, output_tokens=5)
    )
    made.take()
    made.pass_to(0.1)
    assert runs(lower)


@pytest.mark.parametrize("in_flight", [False, True])
def test_who_waits_is_judged_by_new_limits_at_once(in_flight: bool) -> None:
    slow, fast = (
        {"tenant": {"cost_per_s": rate, "cost_burst": 100}, "cost": COST, "wait_s_max": 600}
        for rate in (0.2, 1000)
    )
    made = Limited(holds=in_flight, limits={**slow, "degrade": False})
    made.ask(max_tokens=100, priority=Priority.P3)
    if in_flight:
        made.answer()
    second = made.ask(max_tokens=100, priority=Priority.P3)
    made.core.on_config(plain_config(limits={**fast, "degrade": False}), now=made.now)
    made.take()
    if in_flight:
        assert not made.answer().granted  # by the old ones
    made.pass_to(0.2)
    while made.asks:
        made.answer()
        made.pass_to(made.now + 0.2)
    assert runs(second)


def test_a_verdict_that_names_no_limit_is_waited_for_by_nobody() -> None:
    made = limited({"requests_per_minute": 60}, holds=True, wait_s_max=10)
    one = made.ask()
    made.answer(Verdict(False, None, None, False, (), DecidedBy.REDIS))
    assert made.refusal(one).reason is Reason.RATE_LIMITED
    assert made.snapshot().limits.waiting == 0


class Owner:
    """Lives as long as its ticket does."""


def test_a_ticket_that_left_the_line_is_not_kept_until_its_deadline() -> None:
    made = limited({"concurrency": 1}, wait_s_max=600)
    first = made.ask()

    def comes_and_goes() -> weakref.ref[Owner]:
        owner, spec = Owner(), request_spec(priority=Priority.P3)
        ticket = made.core.on_request(spec, owner=owner, now=made.now)
        made.take()
        assert ticket.state is TicketState.RESERVING
        made.end(ticket, Outcome.ABORTED)
        return weakref.ref(owner)

    gone = [comes_and_goes() for _ in range(5)]
    made.end(first)
    made.effects.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5


def _id(name: str) -> Any:
    return name
