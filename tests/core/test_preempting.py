"""Preemption through the dispatcher: who gives way, who gets the place, and news in any order."""

from __future__ import annotations

import pytest

from router.contract import WorkerId
from router.core.breaker import BreakerState
from router.core.effects import Preempt
from router.core.peers import PeerLoad
from router.core.types import Failure, Outcome, Priority, Ticket, TicketState
from router.errors import Reason
from tests.core.builders import Bench, bench

P0, P1, P2, P3 = Priority
ON = {"enabled": True}
LONG = 40_000  # bytes of a prompt whose prefill takes a few tenths of a second


def busy(priority: Priority = P3, **preempt: object) -> tuple[Bench, Ticket]:
    """The one place is taken by a long prompt that came just now."""
    made = bench(preempt={**ON, **preempt})
    made.join("w1", concurrency_max=1)
    victim = made.ask(priority=priority, prompt_bytes=LONG)
    made.now = 0.01
    return made, victim


def preempted(made: Bench) -> list[Ticket]:
    return [effect.ticket for effect in made.effects if isinstance(effect, Preempt)]


def stopped(made: Bench, ticket: Ticket) -> None:
    made.core.on_preempted(ticket, now=made.now)
    made.take()


def test_an_urgent_request_gets_the_place_of_one_that_nobody_has_seen() -> None:
    made, victim = busy()
    heir = made.ask(priority=P0)
    assert preempted(made) == [victim]
    assert (victim.state, heir.state) == (TicketState.DISPATCHED, TicketState.QUEUED)
    stopped(made, victim)
    assert (victim.state, heir.state) == (TicketState.QUEUED, TicketState.DISPATCHED)
    assert made.streams() == {"w1": 1}
    made.end(heir)
    assert victim.state is TicketState.DISPATCHED
    made.end(victim)
    assert [record.preempted for record in made.records] == [0, 1]
    assert made.core.snapshot(now=made.now).counters.preemptions == 1


def test_the_victim_keeps_its_age_and_its_patience() -> None:
    made, victim = busy()
    patience_s = victim.queue_deadline_at
    heir = made.ask(priority=P0)
    stopped(made, victim)
    assert victim.arrived_at == 0.0
    assert victim.queue_deadline_at == pytest.approx(patience_s + 0.01)
    later = made.ask(priority=P3)
    made.end(heir)
    assert (victim.state, later.state) == (TicketState.DISPATCHED, TicketState.QUEUED)
    assert victim.dispatched_at == made.now
    assert victim.attempts == 1  # what was stopped was no attempt that failed


def test_the_place_is_kept_for_the_heir() -> None:
    made = bench(preempt=ON)
    made.join("w1", concurrency_max=2)
    made.ask(priority=P0, prompt_bytes=400)
    victim = made.ask(priority=P3, prompt_bytes=LONG)
    made.now = 0.01
    elder = made.ask(priority=P0, tenant="elder")
    assert preempted(made) == [victim]
    other = made.ask(priority=P0, tenant="other")
    stopped(made, victim)
    assert (elder.state, other.state) == (TicketState.DISPATCHED, TicketState.QUEUED)


def test_the_place_is_kept_for_the_heir_though_a_more_urgent_one_waits() -> None:
    made, victim = busy()
    heir = made.ask(priority=P1)
    assert preempted(made) == [victim]
    urgent = made.ask(priority=P0)
    stopped(made, victim)
    assert (heir.state, urgent.state) == (TicketState.DISPATCHED, TicketState.QUEUED)
    made.end(heir)
    assert urgent.state is TicketState.DISPATCHED


def test_an_answer_that_began_meanwhile_keeps_its_place() -> None:
    made, victim = busy()
    heir = made.ask(priority=P0)
    made.core.on_first_token(victim, now=0.02)
    stopped(made, victim)
    assert (victim.state, heir.state) == (TicketState.STREAMING, TicketState.QUEUED)
    made.end(victim)
    assert heir.state is TicketState.DISPATCHED
    assert [record.preempted for record in made.records] == [0]
    assert made.core.snapshot(now=made.now).counters.preemptions == 0


def test_a_first_token_that_comes_late_is_ignored() -> None:
    made, victim = busy()
    made.ask(priority=P0)
    stopped(made, victim)
    made.core.on_first_token(victim, now=0.03)
    made.core.on_tokens(victim, 5, now=0.03)
    assert victim.state is TicketState.QUEUED
    assert (victim.first_token_at, victim.output_seen_tokens) == (None, 0)


@pytest.mark.parametrize("outcome", [Outcome.SUCCESS, Outcome.ABORTED, Outcome.FAILED])
def test_an_end_that_came_first_stands(outcome: Outcome) -> None:
    made, victim = busy()
    heir = made.ask(priority=P0)
    made.end(victim, outcome)
    stopped(made, victim)
    assert victim.state is TicketState.FINISHED
    assert heir.state is TicketState.DISPATCHED
    assert len(made.records) == 1


def test_an_attempt_that_failed_first_is_retried_as_ever() -> None:
    made, victim = busy(P2)
    made.join("w2", concurrency_max=1)
    made.ask(priority=P1)
    made.ask(priority=P0)
    assert preempted(made) == [victim]
    assert made.fail(victim, Failure(reason=Reason.UPSTREAM_ERROR))
    stopped(made, victim)
    assert victim.state is TicketState.QUEUED
    assert victim.tried == ("w1",)


def test_without_an_heir_the_victim_gets_its_place_back() -> None:
    made, victim = busy()
    heir = made.ask(priority=P0)
    made.end(heir, Outcome.ABORTED)
    stopped(made, victim)
    assert victim.state is TicketState.DISPATCHED
    assert made.streams() == {"w1": 1}


def test_nobody_gives_way_twice() -> None:
    made, victim = busy()
    heir = made.ask(priority=P0)
    stopped(made, victim)
    made.end(heir)
    assert victim.state is TicketState.DISPATCHED
    made.ask(priority=P0)
    assert preempted(made) == [victim]


def test_one_victim_has_one_heir() -> None:
    made, victim = busy()
    made.ask(priority=P0)
    made.ask(priority=P0)
    assert preempted(made) == [victim]


@pytest.mark.parametrize("first", [P0, P1])
def test_equals_and_betters_are_spared(first: Priority) -> None:
    made, _ = busy(first)
    made.ask(priority=P1 if first is P1 else P0)
    assert preempted(made) == []


def test_what_streams_is_spared() -> None:
    made, victim = busy()
    made.core.on_first_token(victim, now=made.now)
    made.ask(priority=P0)
    assert preempted(made) == []


def test_a_prefill_that_is_far_on_is_spared() -> None:
    made, _ = busy()
    made.now = 0.2
    made.ask(priority=P0)
    assert preempted(made) == []


def test_of_the_prompts_that_wait_only_the_first_counts_as_begun() -> None:
    made = bench(preempt=ON)
    made.join("w1", concurrency_max=2)
    made.ask(priority=P3, prompt_bytes=LONG)
    second = made.ask(priority=P3, prompt_bytes=LONG)
    made.now = 0.2
    made.ask(priority=P1)
    assert preempted(made) == [second]


@pytest.mark.parametrize("retried", [False, True])
def test_who_was_retried_is_spared(*, retried: bool) -> None:
    made = bench(preempt=ON)
    made.join("w1", concurrency_max=1)
    victim = made.ask(priority=P2, prompt_bytes=LONG)
    made.join("w2", concurrency_max=1)
    if retried:
        made.fail(victim)
        made.pass_to(victim.not_before_at)
    assert victim.worker_id == ("w2" if retried else "w1")
    made.ask(priority=P0)  # on the other worker
    made.ask(priority=P0)
    assert preempted(made) == ([] if retried else [victim])


@pytest.mark.parametrize(("passed_s", "gives_way"), [(0.02, True), (0.1, False)])
def test_what_is_done_of_a_prefill_is_no_wait_any_more(passed_s: float, *, gives_way: bool) -> None:
    made = bench(preempt=ON, pacing={"enabled": True})
    made.join("w1")
    victim = made.ask(priority=P3, prompt_bytes=84_000)  # takes some 0.55 s
    made.now = passed_s
    made.ask(priority=P1)  # is due in 0.5 s
    assert preempted(made) == ([victim] if gives_way else [])


# In vain: what keeps the newcomer waiting would still be there.


def test_nobody_gives_way_to_one_whose_lane_has_no_permit() -> None:
    made = bench(preempt=ON, lanes={"short_concurrency_max": 1})
    made.join("w1", concurrency_max=2)
    made.core.on_first_token(made.ask(priority=P1), now=0.0)
    made.ask(priority=P3, prompt_bytes=LONG, max_tokens=1_000)  # in the long lane
    made.ask(priority=P0)
    assert preempted(made) == []


def test_one_gives_way_with_the_permit_of_its_lane() -> None:
    made = bench(preempt=ON, lanes={"short_concurrency_max": 2})
    made.join("w1")
    made.ask(priority=P1, prompt_bytes=LONG)
    victim = made.ask(priority=P3, prompt_bytes=LONG)
    made.join("w2")
    heir = made.ask(priority=P0)  # w2 is idle, but its lane is full
    assert preempted(made) == [victim]
    stopped(made, victim)
    assert (heir.state, heir.worker_id) == (TicketState.DISPATCHED, "w2")


@pytest.mark.parametrize(("streams", "gives_way"), [(0, True), (1, False), (2, False)])
def test_nobody_gives_way_where_other_routers_have_the_place(
    streams: int, *, gives_way: bool
) -> None:
    made = bench(preempt=ON)
    made.join("w1", concurrency_max=2)
    made.ask(priority=P0)
    victim = made.ask(priority=P3, prompt_bytes=LONG)
    made.core.peering.on_replicas(("b",), own="a", now=0.0)
    made.core.peering.on_loads({WorkerId("w1"): PeerLoad(streams, 9, 9, 9)}, now=0.0)
    heir = made.ask(priority=P0)
    assert preempted(made) == [victim] * gives_way
    stopped(made, victim)
    assert (heir.state is TicketState.DISPATCHED) is gives_way


def test_nobody_gives_way_on_a_worker_that_the_newcomer_avoids() -> None:
    made, _ = busy()
    made.join("w2", concurrency_max=1)
    made.ask(priority=P0)
    made.ask(priority=P0, avoid=(WorkerId("w1"),))
    assert preempted(made) == []


def test_an_elephant_takes_nobodys_place() -> None:
    made = bench(preempt=ON, pacing={"enabled": True})
    made.join("w1", concurrency_max=1)
    made.ask(priority=P3, prompt_bytes=LONG)
    made.ask(priority=P0, prompt_bytes=LONG)
    assert preempted(made) == []
    made.ask(priority=P0)
    assert len(preempted(made)) == 1


def test_it_is_off_by_default() -> None:
    made, _ = busy(enabled=False)
    made.ask(priority=P0)
    assert preempted(made) == []
    assert not bench("w1").core._preempting.enabled


def test_a_trial_that_is_stopped_leaves_the_breaker_ready_for_another() -> None:
    made = bench(preempt=ON, breaker={"failures": 1, "open_s": 1.0})
    made.join("w1", concurrency_max=1)
    made.fail(made.ask())
    made.pass_to(1.5)
    victim = made.ask(priority=P3, prompt_bytes=LONG)
    assert made.view("w1").breaker is BreakerState.HALF_OPEN
    heir = made.ask(priority=P0)
    if preempted(made):
        stopped(made, victim)
        assert heir.state is TicketState.DISPATCHED
        assert victim.state is TicketState.QUEUED
    made.end(victim if victim.state is TicketState.DISPATCHED else heir)
    assert made.view("w1").breaker is BreakerState.CLOSED


def test_ended_requests_are_not_remembered() -> None:
    made = bench("w1", preempt=ON)
    for _ in range(1_000):
        made.end(made.ask())
    assert len(made.core._preempting._sent) <= 256
    made.core.on_config(made.core._config.model_copy(), now=made.now)
    assert made.core._preempting.enabled


def test_what_was_stopped_costs_its_tenant_nothing() -> None:
    made = bench(preempt=ON)
    made.join("w1", concurrency_max=1)
    first = made.ask(priority=P3)
    victim = made.ask(priority=P3, tenant="victim", prompt_bytes=LONG)
    made.ask(priority=P3, tenant="other", prompt_bytes=LONG)
    made.end(first)
    assert victim.bill is not None
    band = victim.bill.band
    assert band is not None
    charged = band.ends["victim"]
    made.now = 0.01
    made.ask(priority=P0)
    stopped(made, victim)
    assert victim.bill is None
    assert band.ends["victim"] == pytest.approx(charged - victim.cost)


def test_the_victim_goes_to_another_worker_that_has_room_for_it() -> None:
    made, victim = busy()
    made.join("w2", kv_total_tokens=15_000)
    heir = made.ask(priority=P0, samples=64, max_tokens=500)
    assert preempted(made) == [victim], "w2 is too small for the heir"
    stopped(made, victim)
    assert (heir.worker_id, victim.worker_id) == ("w1", "w2")
    assert victim.state is TicketState.DISPATCHED
