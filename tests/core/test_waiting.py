"""Rounds of offers, when requests are sent, and what those who are refused are told."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any, cast

import pytest

from router.contract import Lane, LoadReport, WorkerId
from router.core.dispatcher import Dispatcher
from router.core.drain import DrainEstimator, Left
from router.core.effects import Dispatch, Effect, Probe, Refuse
from router.core.flow import FlowQueue
from router.core.pools import Pool
from router.core.types import Outcome, Priority, Ticket
from router.core.waiting import Round
from router.errors import Reason, retry_after_value
from tests.core.builders import (
    FULL_ENGINE,
    Bench,
    bench,
    config,
    plain_config,
    request_spec,
    ticket,
    worker_spec,
)

P0, P1, P2, P3 = Priority
NOBODY_IS_LATE = {"relegate_ratio": 0.0, "promote_after_targets": 0.0}


# Rounds.


def filled(count: int, **queue: int) -> tuple[FlowQueue, list[Pool], list[Ticket]]:
    flow, pool = FlowQueue(config(queue={**NOBODY_IS_LATE, **queue})), Pool("m", Lane.SHORT)
    made = [ticket(n, pool=pool, queue_deadline_at=1e9) for n in range(1, count + 1)]
    for one in made:
        flow.push(one, now=0.0)
    return flow, [pool], made


def test_those_that_do_not_fit_are_passed_up_to_the_lookahead() -> None:
    flow, pools, made = filled(10, lookahead_max=4)
    turn, tried = Round(flow, pools), []
    while (one := turn.next(0.0)) is not None:
        tried.append(one)
        turn.passed(one)
    turn.end()
    assert tried == made[:4]
    assert all(one.skips == 0 for one in made), "nobody went ahead"


def test_a_skip_is_counted_for_each_that_goes_ahead() -> None:
    flow, pools, made = filled(4)
    turn = Round(flow, pools)
    for fits in (False, True, False, True):
        one = turn.next(0.0)
        assert one is not None
        if fits:
            flow.serve(one, now=0.0)
            turn.served(one)
        else:
            turn.passed(one)
    turn.end()
    assert [one.skips for one in made] == [2, 0, 1, 0]


def test_who_was_skipped_too_often_closes_its_pool_until_it_is_served() -> None:
    flow, pools, made = filled(3, skips_max=5)
    other = ticket(9, pool=Pool("n", Lane.SHORT), queue_deadline_at=1e9)
    flow.push(other, now=0.0)
    made[0].skips = 5
    turn = Round(flow, [*pools, other.pool])
    first = turn.next(0.0)
    assert first is made[0]
    turn.passed(first)
    assert turn.next(0.0) is other  # the other pool goes on
    turn.end()


# When requests are sent.


def small(**sections: Any) -> Bench:
    """Two workers, one request at a time each."""
    made = bench(**sections)
    made.join("w1", "w2", concurrency_max=1)
    return made


def test_nobody_overtakes_those_who_wait_and_could_have_been_sent() -> None:
    b = small()
    first = [b.ask() for _ in range(2)]
    waiting = [b.ask(priority=P2), b.ask(priority=P0), b.ask(priority=P1)]
    for one in first:
        b.end(one)
    assert b.dispatched == [*first, waiting[1], waiting[2]]


def test_an_attempt_that_failed_is_taken_off_its_tenants_account() -> None:
    b = small(queue=NOBODY_IS_LATE)
    running = [b.ask(tenant="x") for _ in range(2)]
    waiting = [b.ask(tenant=name) for name in "aabb"]
    b.end(running[0])
    assert waiting[0].worker is not None
    assert waiting[0].bill is not None
    b.fail(waiting[0])
    assert waiting[0].bill is None
    # What the worker is free for now is a's turn again, as if nothing had been.
    assert waiting[1].worker is not None


# Refusals.


def test_the_evicted_are_told_their_own_classs_wait() -> None:
    b = small(queue={"depth_max": 1, **NOBODY_IS_LATE})
    for _ in range(2):
        b.ask()
    evicted = b.ask(priority=P3)
    b.ask(priority=P0)
    refusal = b.refusal(evicted)
    assert refusal.reason is Reason.QUEUE_FULL
    assert refusal.retry_after_s is not None
    assert 1 <= refusal.retry_after_s <= 1.3


def test_what_waits_behind_a_slow_model_tells_nothing_of_another() -> None:
    b = bench(queue={"depth_max": 20, **NOBODY_IS_LATE})
    b.join("a", models=["a"], concurrency_max=1)
    b.join("b", models=["b"], concurrency_max=1)
    slow, fast = [b.ask(model="a") for _ in range(11)], [b.ask(model="b") for _ in range(11)]
    for step in range(1, 400):
        b.now = step * 0.1
        b.end(fast.pop(0))
        fast.append(b.ask(model="b"))
        if step % 40 == 0:
            b.end(slow.pop(0))
            slow.append(b.ask(model="a"))
    told = {m: b.refusal(b.ask(model=m)).retry_after_s or 0 for m in "ab"}
    assert 1 <= told["b"] <= 1.3 * 1.5
    assert 20 <= told["a"] <= 30 * 1.3  # 10 wait at 4 s each, nobody waits more than 30


class Deaf(DrainEstimator):
    """One that does not hear of ghosts, which cost nothing."""

    def enter(self, line: int, cost: float, *, now: float) -> None:
        if cost:
            super().enter(line, cost, now=now)

    def move(self, old: int, new: int, cost: float, *, now: float) -> None:
        if cost:
            super().move(old, new, cost, now=now)

    def leave(self, line: int, cost: float, *, now: float, left: Left = Left.WAITED) -> None:
        if cost:
            super().leave(line, cost, now=now, left=left)


@dataclass(slots=True, eq=False)
class Ghost:
    """What a refused request would have lived through, had it been let in when it was refused."""

    told_s: float
    at: float
    waited_s: float | None = None


class World:
    """Workers that run requests in virtual time, and more of those than they can serve."""

    def __init__(self, seed: int, load: float, *, mix: tuple[float, ...], **queue: Any) -> None:
        self.rng = Random(seed)
        self.load, self.mix = load, mix
        self.now = 0.0
        self.ghosts: list[Ghost] = []
        self.heap: list[tuple[float, int, Ticket | None]] = []
        self.order = 0
        patient = {f"p{n}": {"wait_s_max": 20.0} for n in range(4)}
        settings = config(
            queue={"depth_max": 100, **queue},
            classes=patient,
            pacing={"enabled": False},
            policy={"slow_start_s": 0.0},
        )
        self.core = Dispatcher(settings, rng=Random(seed))
        for n in range(4):
            self.core.on_worker_joined(worker_spec(f"w{n}", concurrency_max=4), now=0.0)
            self.core.on_report(WorkerId(f"w{n}"), LoadReport(kv_used_tokens=0), now=0.0)
        domain = self.core._room.flow._domain(self.core._pools.get("m", Lane.SHORT))
        domain.drain = Deaf(settings)

    def at(self, moment: float, one: Ticket | None) -> None:
        self.order += 1
        heappush(self.heap, (moment, self.order, one))

    def play(self, seconds: float) -> World:
        self.at(0.0, None)
        while self.now < seconds:
            due = self.core.next_deadline()
            if due is not None and due <= self.heap[0][0]:
                self.now = max(self.now, due)
                self.core.on_timer(now=self.now)
            else:
                self.now, _, one = heappop(self.heap)
                if one is None:
                    self.arrive()
                else:
                    self.core.on_first_token(one, now=self.now)
                    self.core.on_finished(one, Outcome.SUCCESS, now=self.now)
            while effects := self.core.take_effects():
                for effect in effects:
                    self.execute(effect)
        return self

    def arrive(self) -> None:
        # Sixteen at once, 0.5 s each: 32 a second at load 1.
        self.at(self.now + self.rng.expovariate(32 * self.load), None)
        tokens = min(250, round(self.rng.lognormvariate(4, 0.8)))
        spec = request_spec(
            priority=Priority(self.rng.choices(range(4), self.mix)[0]),
            prompt_bytes=tokens,
            max_tokens=tokens,
        )
        self.core.on_request(spec, owner=None, now=self.now)

    def execute(self, effect: Effect) -> None:
        match effect:
            case Dispatch(one) if isinstance(one.owner, Ghost):
                one.owner.waited_s = self.now - one.owner.at
                self.core.on_finished(one, Outcome.SUCCESS, now=self.now)
            case Dispatch(one):
                took_s = 0.5 * one.output_tokens / 70 * self.rng.uniform(0.8, 1.2)
                self.at(self.now + took_s, one)
            case Refuse(one) if isinstance(one.owner, Ghost):
                one.owner.waited_s = self.now - one.owner.at
            case Refuse(one, refusal):
                self.haunt(one, refusal.retry_after_s or 0.0)
            case Probe(worker_id):
                report = LoadReport(kv_used_tokens=0)
                self.core.on_report(worker_id, report, now=self.now)
            case _:
                pass

    def haunt(self, one: Ticket, told_s: float) -> None:
        """Let a ghost of a refused one wait in its place, beside the places there are."""
        shift_s = self.now - one.arrived_at
        self.core._requests += 1
        ghost = ticket(
            self.core._requests,
            spec=one.spec,
            owner=Ghost(retry_after_value(told_s), self.now),
            lane=Lane.LONG,  # all who live are in the other
            pool=one.pool,
            attempts=1,  # its wait is not to be learnt from
            cost=0.0,
            prompt_tokens=0,
            output_tokens=one.output_tokens,
            kv_tokens=0,
            prefill_s=one.prefill_s,
            arrived_at=self.now,
            ttft_target_s=one.ttft_target_s,
            late_at=one.late_at + shift_s,
            queue_deadline_at=one.queue_deadline_at + shift_s,
        )
        self.ghosts.append(cast("Ghost", ghost.owner))
        self.core._room.flow.push(ghost, now=self.now)

    def within(self, factor: float, *, after_s: float) -> float:
        """The share of refused clients that were told their wait within a factor.

        Waits below the second that a Retry-After has at least do not differ.
        """
        judged = [g for g in self.ghosts if g.at > after_s and g.waited_s is not None]
        assert len(judged) > 300
        good = sum(1 / factor <= g.told_s / max(1.0, g.waited_s or 0) <= factor for g in judged)
        return good / len(judged)


@pytest.mark.parametrize("load", [1.3, 2.0])
@pytest.mark.parametrize("mix", [(0.1, 0.4, 0.4, 0.1), (0.0, 1.0, 0.0, 0.0), (0.0, 0.2, 0.0, 0.8)])
@pytest.mark.parametrize("queue", [{"order": "fifo"}, {"order": "fair", "relegate_ratio": 0.0}])
@pytest.mark.patches
def test_most_are_told_their_wait_within_a_factor_of_two(
    queue: dict[str, Any], mix: tuple[float, ...], load: float
) -> None:
    # Of several classes at a little too much load few are refused, and those at the edge.
    least = 0.7 if len(mix) - mix.count(0.0) > 2 and load < 2 else 0.8
    assert World(1, load, mix=mix, **queue).play(100).within(2, after_s=30) >= least


# Permits of a lane.


def limited(**limits: int) -> Bench:
    """Two workers with room for all, and so many requests of a lane at once."""
    made = bench(lanes=limits)
    made.join("w1", "w2")
    return made


SHORT, LONG = {"max_tokens": 100}, {"max_tokens": 1000}


def test_no_more_of_a_lane_run_than_it_has_permits() -> None:
    b = limited(long_concurrency_max=3)
    asked = [b.ask(**LONG) for _ in range(5)]
    assert b.dispatched == asked[:3]
    short = [b.ask(**SHORT) for _ in range(5)]
    assert b.dispatched == asked[:3] + short, "the other lane has no limit"
    b.end(asked[1])
    assert b.dispatched[-1] is asked[3], "a permit lasts to the end of its request"
    b.fail(asked[0], FULL_ENGINE)
    b.pass_to(1.0)
    running = [one for one in asked if one.worker is not None]
    assert len(running) == 3


def test_a_permit_is_free_for_other_workers_and_models_at_once() -> None:
    b = bench(lanes={"short_concurrency_max": 1})
    b.join("a", models=["a"])
    b.join("b", models=["b"])
    first, second = b.ask(model="a"), b.ask(model="b")
    assert second.worker is None
    b.end(first)
    assert second.worker is not None
    assert second.worker.id == "b"


def test_a_permit_is_free_for_who_was_tried_in_vain_before() -> None:
    b = bench("w1", lanes={"short_concurrency_max": 1})
    first, second = b.ask(), b.ask()
    b.report("w1")  # with news of the only worker all that waits is tried
    b.report("w1")  # and then not again, as nothing has changed
    assert second.worker is None
    b.end(first)
    assert second.worker is not None


def test_who_finds_no_permit_in_time_is_told_when_to_return() -> None:
    b = bench(lanes={"short_concurrency_max": 1}, queue={"wait_s_max": 2.0})
    b.join("w1")
    b.ask()
    waits = b.ask()
    b.pass_to(2.1)
    refusal = b.refusal(waits)
    assert refusal.reason is Reason.QUEUE_TIMEOUT
    assert refusal.retry_after_s is not None


def test_permits_may_be_raised_while_requests_wait() -> None:
    b = limited(short_concurrency_max=1)
    asked = [b.ask() for _ in range(4)]
    b.core.on_config(plain_config(lanes={"short_concurrency_max": 3}), now=b.now)
    b.take()
    assert b.dispatched == asked[:3]
    assert b.core.snapshot(now=b.now).lanes[Lane.SHORT].running == 3
