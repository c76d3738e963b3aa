"""What a refused client is told where late requests yield: by what would stand before it."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from router.contract import Lane
from router.core.flow import WAIT_PER_PREFILL
from router.core.pools import Pool
from tests.core.flow_rig import P0, P1, P2, P3, Queue

LONGEST_S = 30.0  # that a request of P2 waits
EARLY, LATEST = LONGEST_S / 4, LONGEST_S / 2  # what is told who would be late


class Busy(Queue):
    """A queue in which one second of prefill has been sent each second, and none of the late."""

    def __init__(self, *, late: bool = True) -> None:
        super().__init__(queue={"promote_after_targets": 0}, drain={"jitter_ratio": 0})
        self.push(P3, late_at=0.0 if late else inf)
        for _ in range(50):
            sent = self.push(P0, prefill_s=0.1)
            self.now += 0.1
            assert self.serve() is sent

    def told(
        self, prefill_s: float = 0.01, *, tenant: str = "t", pool: Pool | None = None
    ) -> float:
        """What a refused request of P2 that has 2 s until it is late is told."""
        made = self.make(P2, tenant=tenant, pool=pool, prefill_s=prefill_s, late_at=self.now + 2)
        return self.flow.retry_after_s(made, now=self.now, rng=Random(1))


def test_who_stands_behind_nobody_is_in_time() -> None:
    assert Busy().told() == 1.0
    assert 1.0 <= Busy().told(0.2) <= 2.0


def test_a_tenant_that_floods_is_told_to_stay_away_and_no_other() -> None:
    queue = Busy()
    for _ in range(50):
        queue.push(P2, tenant="floods", prefill_s=0.01)
    assert queue.told(tenant="floods") >= EARLY
    assert queue.told(tenant="modest") <= 2.0


def test_nobody_is_told_more_than_the_longest_wait_of_its_class() -> None:
    queue = Busy()
    for _ in range(60):
        queue.push(P2, prefill_s=0.1)
    far = queue.make(P2, prefill_s=0.1, late_at=queue.now + 1000)
    assert queue.flow.retry_after_s(far, now=queue.now, rng=Random(1)) == LONGEST_S


def test_of_its_own_line_only_what_has_a_lower_place_counts() -> None:
    queue = Busy()
    for _ in range(5):
        queue.push(P2, prefill_s=0.2)
    assert queue.told(0.21) >= EARLY
    assert queue.told(0.01) <= 2.0, "it would pass them"
    queue.now += WAIT_PER_PREFILL * 0.2
    assert queue.told(0.01) >= EARLY, "it would not any more"


def test_of_others_one_turn_each_counts() -> None:
    queue = Busy()
    for n in range(100):
        queue.push(P2, tenant=f"o{n % 4}", prefill_s=0.01)
    assert queue.told(0.01) <= 2.0
    for n in range(100):
        queue.push(P2, tenant=f"o{n}", prefill_s=0.01)
    assert queue.told(0.01) >= EARLY


def test_of_many_lines_some_tell_for_all() -> None:
    queue = Busy()
    for n in range(300):
        queue.push(P2, tenant=f"o{n}", prefill_s=0.002)
    assert queue.told(0.01) >= EARLY
    few = Busy()
    for n in range(64):
        few.push(P2, tenant=f"o{n}", prefill_s=0.002)
    assert few.told(0.01) <= 2.0


def test_another_class_and_another_pools_line_do_not_count() -> None:
    queue = Busy()
    elsewhere = Pool("m", Lane.LONG)
    for _ in range(50):
        queue.push(P1, prefill_s=0.01)
        queue.push(P2, pool=elsewhere, prefill_s=0.01)
    assert queue.told() <= 2.0
    assert queue.told(pool=elsewhere) >= EARLY


def test_what_was_sent_while_only_other_models_waited_is_no_speed() -> None:
    queue = Busy()
    other = Pool("other", Lane.SHORT)
    for _ in range(1000):
        queue.flow.serve(queue.make(P2, pool=other, prefill_s=0.1), now=queue.now)
        queue.now += 0.01
    for _ in range(50):
        sent = queue.push(P2, pool=other, prefill_s=0.1)
        queue.now += 0.1
        assert queue.serve(pools=[other]) is sent
    for _ in range(60):
        queue.push(P2, pool=other, prefill_s=0.01)
    assert queue.told(pool=other) == pytest.approx(60 / 10, rel=0.1), "as its line takes"


@pytest.mark.parametrize("prefill_s", [0.4, 0.06, 3.0])
def test_the_late_are_told_a_quarter_of_the_longest_wait_and_what_their_prompt_costs(
    prefill_s: float,
) -> None:
    queue = Busy()
    for _ in range(50):
        queue.push(P2, prefill_s=0.01)
    assert queue.told(prefill_s) == min(LATEST, EARLY + WAIT_PER_PREFILL * prefill_s)


def test_a_class_that_is_served_fast_is_told_what_its_line_takes() -> None:
    queue = Busy(late=False)
    for _ in range(50):
        sent = queue.push(P2, tenant="o", prefill_s=0.1)
        queue.now += 0.1
        assert queue.serve() is sent
    for _ in range(50):
        queue.push(P2, prefill_s=0.01)
    assert queue.told() == pytest.approx(50 / 10, rel=0.1)  # ten of that cost a second


def test_one_that_gives_way_does_not_stand_before_itself() -> None:
    queue = Busy()
    loser = queue.push(P2, prefill_s=0.1, late_at=queue.now + 2)
    other = queue.make(P2, prefill_s=0.1, late_at=queue.now + 2)
    rng = Random(1)
    alone_s = Busy().told(0.1)
    assert queue.flow.retry_after_s(loser, now=queue.now, rng=rng) == pytest.approx(alone_s)
    assert queue.flow.retry_after_s(other, now=queue.now, rng=rng) > alone_s


def test_where_nothing_was_sent_yet_its_class_is_told() -> None:
    queue = Queue(queue={"promote_after_targets": 0}, drain={"jitter_ratio": 0})
    for _ in range(50):
        queue.push(P2, prefill_s=0.1)
    made = queue.make(P2, prefill_s=0.1, late_at=2.0)
    assert queue.flow.retry_after_s(made, now=0.0, rng=Random(1)) == 1.0
