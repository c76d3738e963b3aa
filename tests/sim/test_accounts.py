"""Figures of whole runs: recovery after a loss, and what Retry-After is worth."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan

import pytest

from loadtest.report import Served
from loadtest.sim.accounts import recovery_s
from loadtest.sim.ghosts import Ghosts, Told
from loadtest.workload import Tier
from router.contract import Lane
from router.core.drain import LATE
from router.core.flow import WAIT_PER_PREFILL
from router.core.pools import Pool
from router.core.types import Priority, Ticket
from tests.core.builders import request_spec, ticket

WAITS = (5.0, 30.0, 30.0, 600.0)
SHORT, LONG = Pool("m", Lane.SHORT), Pool("m", Lane.LONG)


def premium(at_s: float, *, good: bool) -> Served:
    return Served(
        at_s=at_s,
        tier=Tier.PREMIUM,
        tenant="t",
        prompt_tokens=100,
        output_tokens=10,
        ttft_s=0.05 if good else 1.0,
        tpot_s=0.02,
        outcome="served",
    )


def test_recovery_is_when_five_seconds_are_well_again() -> None:
    rows = [premium(at / 10, good=not 60 <= at / 10 < 62) for at in range(1200)]
    assert recovery_s(rows, lost_at=60) == 1.75  # of 50 arrivals in five seconds 2 may be late
    assert recovery_s(rows, lost_at=70) == 0.0
    assert isnan(recovery_s([replace(row, outcome="lost") for row in rows], lost_at=60))


@pytest.mark.parametrize(
    ("told_s", "wait_s", "right"),
    [(1.0, 0.0, True), (2.1, 0.5, False), (4.0, 2.0, True), (4.1, 2.0, False), (1.0, 2.1, False)],
)
def test_told_is_right_within_a_factor_two_of_at_least_a_second(
    told_s: float, wait_s: float, right: bool
) -> None:
    assert Told(Priority.P1, told_s, wait_s).within_factor_2 is right


def waiting(number: int, priority: Priority = Priority.P1, **fields: object) -> Ticket:
    tenant = str(fields.pop("tenant", "a"))
    spec = request_spec(priority=priority, tenant=tenant)
    made = ticket(number, **{"spec": spec, "late_at": inf, "pool": SHORT, **fields})
    made.band = int(priority)
    made.place_at = made.arrived_at + WAIT_PER_PREFILL * made.prefill_s
    return made


def sent(ghosts: Ghosts, made: Ticket, at: float) -> None:
    ghosts.left(made)
    ghosts.dispatched(made, now=at)


def test_a_ghost_is_served_after_those_of_its_line_that_stood_before_it() -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    first, second, other = waiting(1), waiting(2), waiting(3, tenant="b")
    for made in (first, second, other):
        ghosts.queued(made)
    ghosts.refused(waiting(4), 3.0, now=1.0)
    later = waiting(5, tenant="b", arrived_at=1.5)
    ghosts.queued(later)
    sent(ghosts, first, 2.0)
    sent(ghosts, other, 3.0)
    assert ghosts.end(3.0) == []
    sent(ghosts, second, 4.0)
    assert ghosts.end(4.0) == []
    ghosts.queued(waiting(6, arrived_at=4.0))
    sent(ghosts, later, 5.0)  # its tenant was served less
    assert ghosts.end(5.0) == []
    last = waiting(7, tenant="b")
    ghosts.queued(last)
    sent(ghosts, last, 6.0)
    assert [told.wait_s for told in ghosts.end(6.0)] == [5.0]


def test_a_ghost_stands_in_the_line_of_its_own_pool() -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    elsewhere = waiting(1, pool=LONG)
    ghosts.queued(elsewhere)
    ghosts.refused(waiting(2), 3.0, now=1.0)
    new = waiting(3, arrived_at=1.5)
    ghosts.queued(new)
    sent(ghosts, new, 2.0)  # `elsewhere` waits on, and not before it
    assert [told.wait_s for told in ghosts.end(2.0)] == [1.0]


def test_of_equal_tags_the_earlier_is_served_first() -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    earlier, later, new = waiting(1, tenant="b"), waiting(2, tenant="c"), waiting(5, tenant="d")
    for made in (earlier, later):
        ghosts.queued(made)
    ghosts.refused(waiting(4), 3.0, now=1.0)
    ghosts.queued(new)
    sent(ghosts, earlier, 2.0)
    sent(ghosts, later, 3.0)
    assert ghosts.end(3.0) == []
    sent(ghosts, new, 4.0)
    assert [told.wait_s for told in ghosts.end(4.0)] == [3.0]


@pytest.mark.parametrize(("real_cost", "wait_s"), [(1.0, 2.0), (0.0, 1.0)])
def test_a_ghost_knows_what_its_tenant_was_served_in_the_end(
    real_cost: float, wait_s: float
) -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    own = waiting(2)
    ghosts.queued(waiting(1, tenant="c"))
    ghosts.queued(own)
    sent(ghosts, own, 1.0)
    ghosts.refused(waiting(3), 3.0, now=1.0)
    ghosts.ended(own, real_cost)
    for number in (4, 5):
        ghosts.queued(waiting(number, tenant="b"))
    sent(ghosts, waiting(4, tenant="b"), 2.0)
    sent(ghosts, waiting(5, tenant="b"), 3.0)
    assert [told.wait_s for told in ghosts.end(3.0)] == [wait_s]


def test_a_long_prompt_is_served_where_one_as_long_finds_room() -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    ghosts.refused(waiting(1, prefill_s=0.1), 3.0, now=0.0)
    small, as_long = (
        waiting(number, Priority.P2, prefill_s=s) for number, s in ((2, 0.02), (3, 0.1))
    )
    ghosts.queued(waiting(4, Priority.P2))
    sent(ghosts, small, 1.0)
    assert ghosts.end(1.0) == []
    sent(ghosts, as_long, 2.0)
    assert [told.wait_s for told in ghosts.end(2.0)] == [2.0]


def test_a_more_urgent_dispatch_serves_no_ghost_below() -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    urgent, low = waiting(2, Priority.P0), waiting(3, Priority.P2)
    ghosts.refused(waiting(1), 3.0, now=0.0)
    ghosts.queued(urgent)
    ghosts.queued(low)
    sent(ghosts, urgent, 1.0)
    assert ghosts.end(1.0) == []
    sent(ghosts, low, 2.0)
    assert [told.wait_s for told in ghosts.end(2.0)] == [2.0]


def test_a_ghost_of_a_long_prompt_lets_shorter_ones_pass() -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    ghosts.refused(waiting(1, prefill_s=0.1), 3.0, now=0.0)
    shorter, longer = waiting(2, arrived_at=1.0, prefill_s=0.02), waiting(3, prefill_s=0.12)
    for made in (shorter, longer):
        ghosts.queued(made)
    sent(ghosts, shorter, 2.0)
    assert ghosts.end(2.0) == []
    sent(ghosts, longer, 3.0)
    assert [told.wait_s for told in ghosts.end(3.0)] == [3.0]


def test_a_late_ghost_is_served_by_age() -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    refused = waiting(1, arrived_at=0.0)
    refused.late_at = 0.5
    ghosts.refused(refused, 3.0, now=1.0)
    older, younger, new = (waiting(n, arrived_at=float(at)) for n, at in ((2, 0), (3, 2), (4, 3)))
    for made in (older, younger, new):
        ghosts.queued(made)
    older.band = younger.band = LATE
    sent(ghosts, older, 4.0)
    assert ghosts.end(4.0) == []
    sent(ghosts, younger, 6.0)
    assert [told.wait_s for told in ghosts.end(6.0)] == [5.0]


def test_a_ghost_that_nobody_serves_waits_as_long_as_its_class_may() -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    before = waiting(1)
    ghosts.queued(before)
    ghosts.refused(waiting(2), 3.0, now=0.0)
    assert ghosts.end(29.0) == []
    assert [told.wait_s for told in ghosts.end(31.0)] == [30.0]


def test_an_empty_queue_serves_every_ghost() -> None:
    ghosts = Ghosts(WAITS, elephant_s=0.15)
    for number in (1, 2, 3):
        ghosts.refused(waiting(number, Priority(number)), 3.0, now=0.0)
    ghosts.dispatched(waiting(4, Priority.P0), now=2.0)
    assert [told.wait_s for told in ghosts.end(2.0)] == [2.0] * 3
