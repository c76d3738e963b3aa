"""What became of those like it, and what a refused client is told of it."""

from __future__ import annotations

from random import Random

import pytest

from router.core.drain import DrainEstimator
from router.core.lateness import ELEPHANT, TALLIES_MAX, Lateness, size_of
from router.core.types import Priority
from tests.core.builders import config

P1, P2 = Priority.P1, Priority.P2


def test_a_tenant_is_judged_by_its_own_requests_and_others_by_their_class() -> None:
    seen = Lateness(10.0)
    assert seen.ratio(P1, "a", 0, now=0.0) is None
    for _ in range(10):
        seen.count(P1, "floods", 0, late=True, now=0.0)
    for n in range(10):
        seen.count(P1, "modest", 0, late=n == 0, now=0.0)
    assert seen.ratio(P1, "floods", 0, now=1.0) == 1.0
    assert seen.ratio(P1, "modest", 0, now=1.0) == pytest.approx(0.1)
    assert seen.ratio(P1, "new", 0, now=1.0) == pytest.approx(0.55)
    assert seen.ratio(P1, "floods", ELEPHANT, now=1.0) is None, "another size"
    assert seen.ratio(P2, "floods", 0, now=1.0) is None, "another class"


def test_what_was_long_ago_tells_nothing() -> None:
    seen = Lateness(10.0)
    for n in range(10):
        seen.count(P1, "a", 0, late=n < 5, now=0.0)
    assert seen.ratio(P1, "a", 0, now=10.0) == 0.5
    assert seen.ratio(P1, "a", 0, now=30.0) is None
    for _ in range(10):
        seen.count(P1, "a", 0, late=False, now=30.0)
    assert (seen.ratio(P1, "a", 0, now=30.0) or 0) < 0.05


def test_names_of_clients_fill_no_memory() -> None:
    seen = Lateness(10.0)
    for n in range(3 * TALLIES_MAX):
        seen.count(P1, f"t{n}", 0, late=False, now=0.0)
    assert len(seen._tallies) <= TALLIES_MAX
    assert seen.ratio(P1, "another", 0, now=0.0) == 0.0, "the class as a whole is kept"


@pytest.mark.parametrize(
    ("prefill_s", "size"), [(0.0, 0), (0.04, 0), (0.06, 1), (0.15, 1), (0.2, 2), (9.0, 2)]
)
def test_sizes(prefill_s: float, size: int) -> None:
    assert size_of(prefill_s, 0.15) == size


def edge() -> DrainEstimator:
    """P1 stands at the edge of its target, one unit a second leaves each line, late ones wait."""
    made = DrainEstimator(config())
    for n in range(1, 40):
        made.enter(P1, 1.0, now=n - 1.0)
        made.enter(4, 1.0, now=n - 1.0)
        made.leave(P1, 1.0, now=float(n))
        made.leave(4, 1.0, now=float(n))
    made.enter(P1, 0.6, now=39.0)
    made.enter(4, 20.0, now=39.0)
    return made


def told(drain: DrainEstimator, tenant: str, *, shed: bool = False, size: int = 0) -> float:
    """Without the jitter, within which all is equal."""
    rng = Random(1)
    return min(
        drain.retry_after_s(P1, tenant, size, now=39.0, rng=rng, shed=shed) for _ in range(500)
    )


def test_who_mostly_falls_behind_is_told_the_long_wait_and_others_the_short_one() -> None:
    drain = edge()
    for _ in range(10):
        drain.outcome(P1, "floods", 0, late=True, now=39.0)
        drain.outcome(P1, "modest", 0, late=False, now=39.0)
    assert told(drain, "floods") > 15
    assert told(drain, "modest") == pytest.approx(1.0, abs=0.02)


def test_what_is_shed_may_come_again_soon_unless_it_waits_for_an_elephants_turn() -> None:
    drain = edge()
    for size in (0, ELEPHANT):
        for _ in range(10):
            drain.outcome(P1, "a", size, late=True, now=39.0)
    assert told(drain, "a", shed=True) == pytest.approx(1.0, abs=0.02)
    assert told(drain, "a", shed=True, size=ELEPHANT) > 15
