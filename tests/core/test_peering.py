"""Several routers in the core: own workers first, borrowing, others' load, and who leads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract import WorkerId
from router.core.peers import NO_LOAD, PeerLoad, Peers
from router.core.types import Priority
from tests.core.builders import IDLE, Bench, bench, runs, waits

EIGHT = tuple(f"w{number}" for number in range(1, 9))
LONG = 40_000  # bytes of a prompt that takes a worker about a tenth of a second


def one_of(count: int, *names: str, **sections: Any) -> Bench:
    """A dispatcher of one of `count` routers, called r0, with the given workers."""
    b = bench(*names, **sections)
    share(b, count)
    return b


def share(b: Bench, count: int) -> None:
    b.core.peering.on_replicas([f"r{number}" for number in range(count)], own="r0", now=b.now)
    b.take()


def hear(b: Bench, **loads: PeerLoad) -> None:
    b.core.peering.on_loads({WorkerId(name): load for name, load in loads.items()}, now=b.now)
    b.take()


def sent_to(b: Bench, count: int, **fields: Any) -> Counter[str]:
    return Counter(str(b.ask(**fields).worker_id) for _ in range(count))


def test_a_router_fills_its_own_workers_first() -> None:
    b = one_of(4, *EIGHT)
    own = b.core.peering.owned
    assert len(own) == 2
    assert set(sent_to(b, 6)) == set(own)


def test_it_borrows_when_its_own_are_behind_and_one_of_two_is_not() -> None:
    b = one_of(4, *EIGHT)
    own = b.core.peering.owned
    assert set(sent_to(b, 2, prompt_bytes=LONG)) == set(own)
    assert not set(sent_to(b, 2)) & set(own)


def test_a_long_prompt_waits_for_an_own_worker_before_it_goes_to_others() -> None:
    """Whoever owns the other one does not see it there, and would send short ones behind it."""
    b = bench(pacing={"elephant_s": 60.0}, classes={"p1": {"ttft_target_s": 4.0}})
    share(b, 2)
    b.join("w1", "w2", "w3", "w4", concurrency_max=1)
    own = b.core.peering.owned
    sent_to(b, 2)
    held = b.ask(prompt_bytes=LONG)
    assert waits(held)
    b.pass_to(b.now + 1.9)
    assert waits(held)
    b.pass_to(b.now + 0.2)
    b.report("w1")
    assert runs(held)
    assert held.worker_id not in own


def test_with_a_higher_threshold_it_does_not() -> None:
    b = one_of(4, *EIGHT, cluster={"borrow_wait_s": 60.0})
    own = b.core.peering.owned
    assert set(sent_to(b, 20, prompt_bytes=LONG)) == set(own)


def test_it_borrows_when_its_own_are_full() -> None:
    b = one_of(2)
    b.join("w1", "w2", "w3", "w4", concurrency_max=1)
    own = b.core.peering.owned
    first = sent_to(b, 2)
    assert set(first) == set(own)
    then = sent_to(b, 2)
    assert set(then) == {"w1", "w2", "w3", "w4"} - set(own)
    assert waits(b.ask())


def test_with_few_workers_all_routers_use_all() -> None:
    b = one_of(5, "w1", "w2", "w3", "w4")
    assert set(sent_to(b, 12)) == {"w1", "w2", "w3", "w4"}


def test_the_owner_of_a_dead_worker_gets_another() -> None:
    b = one_of(2, "w1", "w2", "w3", "w4")
    own = b.core.peering.owned
    for _ in range(3):
        b.core.on_probe_failed(next(iter(own)), "no answer", now=b.now)
    assert len(b.core.peering.owned & own) == 1
    assert len(b.core.peering.owned) in (1, 2)


def test_a_router_that_is_alone_again_owns_all() -> None:
    b = one_of(4, *EIGHT)
    share(b, 1)
    assert b.core.peering.owned == set(EIGHT)
    assert set(sent_to(b, 16)) == set(EIGHT)


def test_others_streams_take_places_and_give_them_back() -> None:
    b = one_of(3)
    b.join("w1", concurrency_max=4)
    hear(b, w1=PeerLoad(streams=3))
    assert runs(b.ask())
    last = b.ask()
    assert waits(last)
    hear(b)
    assert runs(last)


def test_others_reservations_take_memory() -> None:
    b = one_of(3)
    b.join("w1", kv_total_tokens=2000)
    hear(b, w1=PeerLoad(streams=1, kv_reserved_tokens=1700, kv_held_tokens=100))
    large = b.ask()
    assert waits(large)
    hear(b, w1=PeerLoad(streams=1, kv_reserved_tokens=1000, kv_held_tokens=100))
    assert runs(large)


def test_a_report_does_not_count_others_twice() -> None:
    b = one_of(3)
    b.join("w1", kv_total_tokens=10_000, concurrency_max=8)
    hear(b, w1=PeerLoad(2, 3000, 2000, 2000))
    b.now = 1.0
    b.report("w1", running_requests=2, queued_requests=0, queued_uncached_tokens=0,
             kv_used_tokens=2000)  # fmt: skip
    worker = b.core._fleet.workers[WorkerId("w1")]
    assert worker.others_streams == 2
    assert worker.kv_load_tokens == 3000
    b.report("w1", running_requests=5, queued_requests=0, queued_uncached_tokens=0,
             kv_used_tokens=4000)  # fmt: skip
    assert worker.others_streams > 2
    assert worker.kv_load_tokens == pytest.approx(5000)


def test_what_a_silent_router_had_is_believed_until_reports_say_otherwise() -> None:
    b = one_of(3)
    b.join("w1", kv_total_tokens=10_000)
    said = PeerLoad(streams=4, kv_reserved_tokens=4000, kv_held_tokens=3000)
    hear(b, w1=said)
    b.core.peering.on_loads({}, silent={WorkerId("w1"): said}, now=b.now)
    worker = b.core._fleet.workers[WorkerId("w1")]
    assert worker.others_streams == 4
    assert worker.kv_load_tokens == 3000
    for second in range(1, 60):
        b.now = float(second)
        b.core.on_report(WorkerId("w1"), IDLE, now=b.now)
    assert worker.others_streams == pytest.approx(0, abs=0.01)
    assert worker.kv_load_tokens == pytest.approx(0, abs=0.01)


def test_loads_are_what_runs() -> None:
    b = bench("w1", "w2")
    assert b.core.peering.loads == {}
    made = b.ask()
    (worker_id,) = b.core.peering.loads
    load = b.core.peering.loads[worker_id]
    assert load == PeerLoad(1, made.kv_tokens, 0, made.prompt_tokens)
    b.end(made)
    assert b.core.peering.loads == {}


@given(
    sharers=st.integers(2, 8),
    told=st.integers(0, 50),
    limit=st.integers(0, 100),
)
def test_between_two_words_all_sharers_together_stay_within_the_room(
    sharers: int, told: int, limit: int
) -> None:
    """Each takes its part beside the one request that is always allowed."""
    taken = []
    for _ in range(sharers):
        peers = Peers(sharers=sharers)
        peers.told(told, 0)
        streams = told
        while streams < peers.streams_max(streams, limit):
            streams += 1
        taken.append(streams - told)
    assert sum(taken) <= max(0, limit - told) + sharers


@given(told=st.floats(0, 1e5), more=st.floats(1, 1e5), left=st.floats(-1e5, 1e6))
def test_memory_is_parted_alike_and_never_more_than_there_is(
    told: float, more: float, left: float
) -> None:
    peers = Peers(sharers=4)
    peers.told(0, int(told))
    assert peers.kv_max_tokens(int(told), left) == left  # one request, if it fits
    reserved = int(told + more)
    assert peers.kv_max_tokens(reserved, left) <= left
    assert peers.kv_max_tokens(reserved, left) <= told + max(0, left - told) / 4 + 1


def test_nobody_else_is_nothing_to_reckon_with() -> None:
    peers = Peers()
    assert peers.none
    peers.load = PeerLoad(streams=1)
    assert not peers.none
    assert NO_LOAD + PeerLoad(1, 2, 3, 4) == PeerLoad(1, 2, 3, 4)


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leader_moves_shares(leads: bool) -> None:
    b = bench("w1", "w2")
    b.core.peering.on_leadership(leads=leads)
    for second in range(120):
        for number in range(10):
            b.pass_to(second + number / 10)
            made = [b.ask(priority=priority) for priority in Priority]
            for each in made[1:]:
                b.core.on_first_token(each, now=b.now)
                b.end(each)
            b.pass_to(b.now + 0.15)  # too late for P0 alone
            b.core.on_first_token(made[0], now=b.now)
            b.end(made[0])
    moved = b.core.peering.shares != pytest.approx((0.6, 0.3, 0.08, 0.02))
    assert moved is leads


def test_the_others_go_by_the_leaders_shares() -> None:
    b = bench("w1", "w2")
    b.core.peering.on_leadership(leads=False)
    b.core.peering.on_shares((0.5, 0.3, 0.15, 0.05))
    assert b.core.peering.shares == (0.5, 0.3, 0.15, 0.05)
    loop = b.core.snapshot(now=b.now).slo.loop
    assert loop.guarantees == pytest.approx([share * sum(loop.guarantees) for share in loop.shares])
    assert loop.shares == (0.5, 0.3, 0.15, 0.05)
