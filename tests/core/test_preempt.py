"""Who may be preempted, by tables: each condition alone saves a candidate."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract import Lane
from router.core.pools import Pool
from router.core.preempt import Candidate, Newcomer, done_ratio, victim
from router.core.types import Endpoint, Priority, RequestSpec, Ticket, TicketState
from router.qos_settings import PreemptSettings

P0, P1, P2, P3 = Priority
ON = PreemptSettings(enabled=True)
NOW = 50.0


def ticket(
    priority: Priority,
    number: int = 1,
    *,
    state: TicketState = TicketState.DISPATCHED,
    first_token_at: float | None = None,
) -> Ticket:
    spec = RequestSpec("r", Endpoint.CHAT, priority=priority)
    made = Ticket(spec, number, Lane.SHORT, 1, 1, 1, NOW, inf, Pool("m", Lane.SHORT))
    made.state, made.first_token_at = state, first_token_at
    return made


def newcomer(priority: Priority = P0, **changes: float) -> Newcomer:
    """Due in 100 ms, 20 ms of own prefill: slack 80 ms; would wait 200 ms."""
    figures = {"target_at": NOW + 0.1, "prefill_s": 0.02, "wait_s": 0.2} | changes
    waiting = ticket(priority, 99, state=TicketState.QUEUED)
    return Newcomer(ticket=waiting, **figures)


def candidate(
    priority: Priority = P2,
    number: int = 1,
    *,
    state: TicketState = TicketState.DISPATCHED,
    first_token_at: float | None = None,
    **changes: Any,
) -> Candidate:
    """A P2 prompt of 200 ms of which 10 % are done; without it the newcomer waits 10 ms."""
    figures: dict[str, Any] = {
        "prefill_s": 0.2,
        "done_ratio": 0.1,
        "wait_after_s": 0.01,
        "preempted": 0,
    }
    running = ticket(priority, number, state=state, first_token_at=first_token_at)
    return Candidate(ticket=running, **(figures | changes))


def test_a_young_lower_request_gives_way_to_one_that_would_be_late() -> None:
    one = candidate()
    assert victim(newcomer(), [one], now=NOW, settings=ON) is one.ticket


@pytest.mark.parametrize(
    "saved",
    [
        candidate(P0),
        candidate(state=TicketState.STREAMING),
        candidate(state=TicketState.QUEUED),
        candidate(state=TicketState.FINISHED),
        candidate(first_token_at=NOW),
        candidate(preempted=1),
        candidate(done_ratio=0.26),
        candidate(wait_after_s=0.081),  # its place would not save the newcomer
        candidate(prefill_s=2.0),  # 10 % of it, thrown away, are worth more than the 190 ms gained
    ],
)
def test_each_condition_alone_saves_a_candidate(saved: Candidate) -> None:
    assert victim(newcomer(), [saved], now=NOW, settings=ON) is None


@pytest.mark.parametrize(
    "waiting",
    [
        newcomer(wait_s=0.08),  # in time anyway
        newcomer(target_at=NOW + 0.01),  # late anyway
        newcomer(prefill_s=0.11),  # infeasible
        newcomer(P2),  # of the same band
        newcomer(P3),
    ],
)
def test_a_newcomer_that_gains_nothing_preempts_nobody(waiting: Newcomer) -> None:
    assert victim(waiting, [candidate()], now=NOW, settings=ON) is None


def test_it_is_off_unless_it_is_switched_on() -> None:
    assert victim(newcomer(), [candidate()], now=NOW, settings=PreemptSettings()) is None


def test_nobody_to_preempt_is_nobody_preempted() -> None:
    assert victim(newcomer(), [], now=NOW, settings=ON) is None


@pytest.mark.parametrize(
    ("candidates", "number"),
    [
        # The lowest band first, though another restart is cheaper.
        ([candidate(P1, 1, done_ratio=0), candidate(P3, 2), candidate(P2, 3, done_ratio=0)], 2),
        # Then the cheapest restart: 4 ms of work lost, not 20.
        ([candidate(P3, 1, done_ratio=0.02), candidate(P3, 2), candidate(P3, 3)], 1),
        # Then who came last.
        ([candidate(P3, 4), candidate(P3, 7), candidate(P3, 5)], 7),
        # The best that may.
        ([candidate(P3, 1, preempted=1), candidate(P2, 2), candidate(P1, 3)], 2),
    ],
)
def test_the_lowest_and_cheapest_gives_way(candidates: list[Candidate], number: int) -> None:
    chosen = victim(newcomer(), candidates, now=NOW, settings=ON)
    assert chosen is not None
    assert chosen.number == number
    again = victim(newcomer(), reversed(candidates), now=NOW, settings=ON)
    assert again is chosen


def test_a_wait_of_unknown_length_is_long() -> None:
    one = candidate()
    assert victim(newcomer(wait_s=inf), [one], now=NOW, settings=ON) is one.ticket


@pytest.mark.parametrize(
    ("running_s", "ahead_s", "prefill_s", "share"),
    [
        (0.0, 0.0, 0.2, 0.0),
        (0.1, 0.0, 0.2, 0.5),
        (0.1, 0.1, 0.2, 0.0),
        (0.1, 0.3, 0.2, 0.0),
        (9.0, 0.0, 0.2, 1.0),
        (0.0, 0.0, 0.0, 1.0),
    ],
)
def test_what_is_done_is_the_time_that_was_its_own(
    running_s: float, ahead_s: float, prefill_s: float, share: float
) -> None:
    assert done_ratio(running_s=running_s, ahead_s=ahead_s, prefill_s=prefill_s) == share


SECONDS = st.floats(0, 2)
CANDIDATES = st.lists(
    st.builds(
        candidate,
        st.sampled_from(Priority),
        st.integers(1, 50),
        state=st.sampled_from(TicketState),
        first_token_at=st.none() | SECONDS,
        prefill_s=SECONDS,
        done_ratio=st.floats(0, 1),
        wait_after_s=SECONDS,
        preempted=st.integers(0, 2),
    ),
    max_size=8,
)


@given(st.sampled_from(Priority), SECONDS, SECONDS, SECONDS, CANDIDATES)
def test_a_victim_always_saves_a_more_urgent_request_and_is_hit_once(
    priority: Priority, due_s: float, prefill_s: float, wait_s: float, some: list[Candidate]
) -> None:
    waiting = newcomer(priority, target_at=NOW + due_s, prefill_s=prefill_s, wait_s=wait_s)
    chosen = victim(waiting, some, now=NOW, settings=ON)
    if chosen is None:
        return
    one = next(c for c in some if c.ticket is chosen)
    assert chosen.spec.priority > priority
    assert chosen.state is TicketState.DISPATCHED
    assert chosen.first_token_at is None
    assert one.preempted == 0
    assert prefill_s + wait_s > due_s >= prefill_s + one.wait_after_s - 1e-9
    assert one.done_ratio * one.prefill_s <= wait_s
