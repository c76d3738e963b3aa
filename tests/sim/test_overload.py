"""What overload does to requests, over twenty seeds: who is late, gives way, is cut or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from loadtest.sim.run import played
from loadtest.workload import Tier
from router.core.degrade import Act
from router.core.types import Outcome, Priority, RequestRecord
from tests.sim.test_guarantees import router_of, runs
from tests.sim.worlds import FOUR, SEEDS, flow, trial

FLOOD: Final = trial(
    "flood", flow(10), flow(110, begin_s=1.0, length_s=1.5), workers=FOUR[:2], length_s=3
)
# Long engine queues: there are prompts that were sent and can still give way.
YIELDING: Final[dict[str, Any]] = {
    "preempt": {"enabled": True},
    "pacing": {"prefill_ahead_s": 0.4},
}


@cache
def flooded(seed: int) -> Sequence[RequestRecord]:
    cluster, routers = played(FLOOD, "laneway", seed=seed, settings=YIELDING)
    assert cluster.retractions == 0
    return router_of(cluster, routers).records


def all_flooded() -> Iterator[RequestRecord]:
    for seed in SEEDS:
        yield from flooded(seed)


def late_share(waits_s: Sequence[float]) -> float:
    return sum(wait_s > 0.5 for wait_s in waits_s) / len(waits_s)


def test_in_a_burst_short_prompts_are_late_more_seldom_than_long_ones() -> None:
    rows = [row for run in runs("S2") for row in run.rows if row.tier is Tier.STANDARD]
    short = late_share([row.ttft_s for row in rows if row.prompt_tokens <= 1_024])
    long = late_share([row.ttft_s for row in rows if 2_048 < row.prompt_tokens <= 4_096])
    assert long > 0.1, "no overload"
    assert short < long / 2


def test_who_gives_way_does_so_once_for_a_higher_class_and_is_served() -> None:
    victims = [record for record in all_flooded() if record.preempted]
    assert victims, "nobody gives way in the flood"
    for record in victims:
        assert record.preempted == 1
        assert record.priority > Priority.P0
        assert record.outcome is Outcome.SUCCESS


def test_the_ladder_touches_the_lower_classes_only() -> None:
    acts = Counter(
        (record.degraded, record.priority)
        for record in all_flooded()
        if record.degraded is not None
    )
    assert {act for act, _ in acts} == {Act.CUT}, acts  # nobody waits until its patience ends
    assert all(priority >= Priority.P2 for _, priority in acts), acts


def test_the_ladder_touches_nothing_that_can_be_in_time() -> None:
    for run in runs("S1"):
        assert not run.figures.refused
