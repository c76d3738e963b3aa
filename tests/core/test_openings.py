"""What a round that sent nothing leaves behind, and when it holds no longer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.elephants import Elephants
from router.core.openings import LOOK_S, Openings, Stuck, has_room
from router.core.pools import Pool
from router.core.prefix import blocks_of
from router.core.scheduler import Scheduler
from router.core.types import Priority, Ticket
from tests.core.builders import Bench, bench, config, request_spec, runs, ticket

NO_ELEPHANTS = Elephants(config(pacing={"enabled": False}))
HERE = (1, 5, 9)  # a version: of membership, of what may be cached, of the order


def full(**sections: Any) -> tuple[Bench, Pool]:
    """One worker that takes one request at a time and has it; its pool."""
    made = bench(**sections)
    made.join("w1", concurrency_max=1)
    running = made.ask()
    return made, running.pool


def stuck_by(pool: Pool, *tickets: Ticket) -> Stuck:
    made = Stuck([pool], 0.0)
    made.version = HERE
    for one in tickets:
        made.add(one, one.prompt_tokens, one.prompt_tokens, elephant=False)
    return made


def test_it_holds_until_a_worker_has_the_room() -> None:
    b, pool = full()
    (worker,) = pool.members.values()
    waits = ticket(2, pool=pool)
    stuck = stuck_by(pool, waits)
    assert stuck.holds(NO_ELEPHANTS, 0.0)
    assert stuck.holds_for(worker, NO_ELEPHANTS, 0.0)
    b.end(b.dispatched[0])
    assert not stuck.holds(NO_ELEPHANTS, 0.0)
    assert not stuck.holds_for(worker, NO_ELEPHANTS, 0.0)
    assert Openings(NO_ELEPHANTS, 0.0).of(pool) == [worker]


def test_after_each_dispatch_openings_are_what_a_new_look_would_find() -> None:
    b = bench()
    for name, most in (("w1", 1), ("w2", 2), ("w3", 3)):
        b.join(name, concurrency_max=most)
    pool = b.ask().pool
    openings = Openings(NO_ELEPHANTS, 0.0)
    seen = [len(openings.of(pool, rank)) for rank in range(3)]
    while openings.of(pool):
        before = len(b.dispatched)
        worker = b.ask().worker
        assert worker is not None
        assert len(b.dispatched) == before + 1
        openings.used(worker)
        fresh = Openings(NO_ELEPHANTS, 0.0)
        assert all(openings.of(pool, rank) == fresh.of(pool, rank) for rank in range(3))
    b.end(b.dispatched[0])
    (freed,) = Openings(NO_ELEPHANTS, 0.0).of(pool)
    openings.used(freed)
    assert [openings.of(pool, rank) for rank in range(3)] == [[freed]] * 3
    assert max(seen) == 3


def test_the_least_need_of_those_that_wait_counts() -> None:
    b, pool = full()
    b.end(b.dispatched[0])
    (worker,) = pool.members.values()
    most = int(worker.kv_admitted_tokens)
    large, small = (ticket(n, pool=pool, kv_tokens=most + 1 - n) for n in (0, 1))
    assert stuck_by(pool, large).holds(NO_ELEPHANTS, 0.0)
    assert not stuck_by(pool, large, small).holds(NO_ELEPHANTS, 0.0)
    assert has_room(worker, 1, (most, 100), 0.0)
    assert not has_room(worker, 1, (most + 1, 100), 0.0)


@pytest.mark.parametrize(
    ("complete", "prefix", "version", "exact"),
    [
        (False, (), HERE, True),
        (False, (), (1, 5, 10), False),  # others may be offered
        (True, (), (1, 5, 10), True),  # none are left
        (True, (), (1, 6, 10), True),
        (True, (7,), (1, 5, 10), True),
        (True, (7,), (1, 6, 9), False),  # more of its prompt may be cached by now
        (True, (), (2, 5, 9), False),  # other workers
    ],
)
def test_it_is_exact_while_a_round_would_try_the_same(
    complete: bool, prefix: tuple[int, ...], version: tuple[int, int, int], exact: bool
) -> None:
    _, pool = full()
    stuck = stuck_by(pool, ticket(2, pool=pool, spec=request_spec(prefix=prefix)))
    stuck.complete = complete
    assert stuck.is_exact(version) is exact


@pytest.mark.patches
def test_a_queue_in_which_nothing_fits_is_gone_through_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, fill = [], Scheduler._fill

    def counted(self: Scheduler, group: list[Pool], now: float) -> None:
        rounds.append(now)
        fill(self, group, now)

    monkeypatch.setattr(Scheduler, "_fill", counted)
    b, _ = full(queue={"relegate_ratio": 0.0, "promote_after_targets": 0.0, "lookahead_max": 1000})
    for _ in range(100):
        b.ask()
    assert len(rounds) == 1
    assert b.dispatched[1:] == []
    b.end(b.dispatched[0])
    assert len(b.dispatched) == 2, "the one with room is found at once"
    assert len(rounds) == 2


def test_the_floor_of_what_waits_is_known_while_all_of_it_was_tried() -> None:
    _, pool = full()
    stuck = Stuck([pool], 0.0)
    stuck.version = HERE
    for tokens, floor in ((900, 400), (800, 500)):
        stuck.add(ticket(2, pool=pool, kv_tokens=tokens), tokens, floor, elephant=floor == 400)
    later = (1, 8, 9)  # more may be cached by now
    assert stuck.floors([pool], later) is None
    stuck.complete = True
    assert stuck.floors([pool], later) == {(pool, 1): (800, 400)}
    assert stuck.floors([], later) is None
    assert stuck.floors([pool], (2, 5, 9)) is None, "other workers"
    other = Stuck([pool], 0.0)
    other.cover({(pool, 1): (800, 400)})
    assert other.complete
    assert other.floors([pool], (-1, 0, 0)) == {(pool, 1): (800, 400)}
    stuck.lanes.add(pool.lane)
    assert stuck.floors([pool], later) is None, "nobody was tried where no permit was left"


def test_the_floor_is_what_is_left_when_all_that_is_hashed_is_cached() -> None:
    b = bench()
    b.join("w1")
    placement = b.core._scheduler._placement
    for size in (100, 512, 5_000, 40_000, 400_000):
        prefix = tuple(range(min(128, blocks_of(size))))
        made = b.ask(prompt_bytes=size, prefix=prefix)
        assert placement.prompt_tokens_floor(made) == placement.prompt_tokens_min(made)
    assert placement.prompt_tokens_floor(ticket(3)) == 100


@pytest.mark.patches
def test_a_round_ends_when_nobody_has_room_for_the_least_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, place = [], Scheduler._may_fit

    def counted(self: Scheduler, ticket: Ticket, *rest: Any) -> bool:
        tried.append(ticket)
        return place(self, ticket, *rest)

    monkeypatch.setattr(Scheduler, "_may_fit", counted)
    b = bench(queue={"lookahead_max": 1000})
    b.join("w1", kv_total_tokens=2_000)
    first, *_ = (b.ask(prompt_bytes=5_000, prefix=(n,)) for n in range(50))
    assert b.dispatched == [first]
    for _ in range(9):
        tried.clear()
        b.end(b.dispatched[-1])
        assert tried == b.dispatched[-1:], "the others need as much, and were not asked"
    assert len(b.dispatched) == 10


asks = st.tuples(
    st.just("ask"),
    st.sampled_from([100, 2_000, 9_000, 60_000, 300_000]),
    st.integers(0, 2),  # of the same number the beginnings are the same
    st.sampled_from(Priority),
)
ends = st.tuples(st.sampled_from(["end", "fail", "token"]), st.integers(0, 50))
times = st.tuples(st.just("time"), st.sampled_from([0.001, 0.03, 1.0, 20.0]))


@pytest.mark.patches
@settings(max_examples=150, deadline=None)
@given(
    crowd=st.lists(asks, min_size=12, max_size=30),
    steps=st.lists(ends | asks | times, min_size=10, max_size=40),
    pacing=st.booleans(),
)
def test_what_ends_a_round_early_changes_nothing_of_what_is_sent(
    crowd: list[tuple[Any, ...]], steps: list[tuple[Any, ...]], pacing: bool
) -> None:
    steps = crowd + steps
    short = _sent(steps, pacing=pacing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stuck, "floors", lambda *_: None)
        assert short == _sent(steps, pacing=pacing)


def _sent(steps: list[tuple[Any, ...]], *, pacing: bool) -> list[tuple[int, str | None, float]]:
    """Who was sent where and when."""
    b = bench(pacing={"enabled": pacing}, queue={"lookahead_max": 40})
    b.join("w1", "w2", kv_total_tokens=100_000, concurrency_max=4)
    sent: list[tuple[int, str | None, float]] = []
    running: list[Ticket] = []
    for kind, *values in steps:
        if kind == "ask":
            size, family, priority = values
            prefix = tuple(hash((family, n)) for n in range(min(128, blocks_of(size))))
            b.ask(prompt_bytes=size, prefix=prefix, priority=priority)
        elif kind == "time":
            b.pass_to(b.now + values[0])
        elif running:
            made = running[values[0] % len(running)]
            if kind == "token":
                b.core.on_first_token(made, now=b.now)
                b.take()
            elif kind == "fail":
                b.fail(made)
            else:
                b.end(made)
        new = b.dispatched[len(sent) :]
        sent += [(made.number, made.worker_id, b.now) for made in new]
        running = [made for made in {*running, *new} if runs(made)]
        running.sort(key=lambda made: made.number)
    return sent


def test_a_look_that_came_too_soon_is_made_up_for() -> None:
    b, pool = full()
    waits = b.ask()
    (worker,) = pool.members.values()
    scheduler = b.core._scheduler
    b.pass_to(1.0)
    scheduler.pump(b.now)  # a look
    b.pass_to(1.0 + LOOK_S / 2)
    worker.concurrency_max, worker.valid_until = 2, b.now
    scheduler.pump(b.now)  # too soon after it
    assert b.dispatched == [b.dispatched[0]]
    b.pass_to(1.0 + LOOK_S)
    assert b.dispatched[1:] == [waits]


def test_one_timer_serves_all_looks_that_came_too_soon() -> None:
    b, _ = full()
    b.ask()
    b.pass_to(1.0)
    for _ in range(100):
        b.core._scheduler.pump(b.now)
    assert len(b.core._scheduler._timers._moments) < 20


def test_the_end_of_an_elephant_on_a_full_worker_lets_the_next_one_go_to_another() -> None:
    b = bench(pacing={"enabled": True, "prefill_ahead_s": 9.0, "elephant_headroom": 1.0})
    b.join("w1", "w2", concurrency_max=1)
    first = b.ask(prompt_bytes=80_000)
    assert first.worker is not None
    # Others' prefill leaves elephants one of the two.
    for _ in range(2_000):
        b.core._scheduler.elephants.came(ticket(pool=first.pool, prefill_s=0.1), b.now)
    second = b.ask(prompt_bytes=80_000)
    b.core._scheduler.pump(b.now)  # which leaves behind what it would need
    assert b.dispatched == [first]
    b.now = LOOK_S / 2
    b.core.on_first_token(first, now=b.now)
    b.take()
    assert not first.worker.is_open(b.now), "it streams, so the next one can't follow it there"
    assert b.dispatched == [first, second]
    assert second.worker is not first.worker
