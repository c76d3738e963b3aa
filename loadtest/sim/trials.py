"""The trials: a scenario, the cluster it meets, and what breaks meanwhile.

S1 to S7x are the benchmark. The others try one guarantee each: several routers, a slow worker,
reports that cannot be believed, a worker that comes back, Redis away, the lowest class under
permanent load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from loadtest.scenarios import SCENARIOS, Scenario
from loadtest.sim.cluster import POLL_DELAY_S
from loadtest.workload import Flow, Tier

FaultKind = Literal["kill", "revive", "slow", "freeze", "mute", "lag", "skew"]


class BadTrial(ValueError):
    """A trial that cannot be played; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a worker at a moment.

    `value` is how many times as long its steps last for slow, seconds for lag (its figures are
    this old) and skew (its clock makes them look older), 1 or 0 for freeze (its figures stand
    still and look fresh) and mute (it answers polls without figures).
    """

    at_s: float
    worker: int
    kind: FaultKind
    value: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Figures count requests that arrive between `measured_from_s` and `length_s`."""

    name: str
    scenario: Scenario
    about: str = ""
    workers: tuple[str, ...] = ("h100-8b",) * 8  # engine profiles
    faults: tuple[Fault, ...] = ()
    routers: int = 1  # arrivals go to them in turn; none sees all
    # How often routers of ours tell each other their loads; None: each decides alone.
    sync_interval_s: float | None = 0.2
    redis_away_s: tuple[float, float] | None = None  # from when until when none hears of another
    poll_delay_s: float = POLL_DELAY_S  # from a poll's question until its answer is known
    length_s: float = 120.0
    measured_from_s: float = 10.0
    prefix_block_tokens: int = 512
    kv_total_tokens: int | None = None  # of each worker, instead of its profile's

    def on_workers(self, count: int) -> Trial:
        """The same trial on `count` workers: mix, faults and load in proportion.

        Raises BadTrial when its faults would leave no worker alive.
        """
        old = len(self.workers)
        scale = count / old
        faults = tuple(replace(f, worker=int(f.worker * scale)) for f in self.faults)
        killed = {fault.worker for fault in faults if fault.kind == "kill"}
        if len(killed) >= count:
            raise BadTrial(f"{self.name} kills {len(killed)} workers: it needs more than {count}")
        scenario = self.scenario.at_rate(self.scenario.rate_per_s * scale)
        workers = tuple(self.workers[int(index / scale)] for index in range(count))
        return replace(self, scenario=scenario, workers=workers, faults=faults)


_MIXED = SCENARIOS["mixed"]
_OVERLOADED = Scenario(
    name="overloaded",
    about="More real-time requests than the cluster can serve, and offline ones beside them.",
    flows=(Flow(rate_per_s=190, tier=Tier.PREMIUM), Flow(rate_per_s=10, tier=Tier.OFFLINE)),
)
_SUITE: Final = (
    Trial(name="S1", about="steady, 95/s", scenario=SCENARIOS["steady"]),
    Trial(name="S2", about="burst: 55/s, four times that for 10 s", scenario=SCENARIOS["burst"]),
    Trial(name="S3", about="storm of long prompts over 60/s", scenario=SCENARIOS["storm"]),
    Trial(name="S4", about="noisy tenant: 90/s beside 60/s", scenario=SCENARIOS["noisy"]),
    Trial(
        name="S5",
        about="80/s, two of eight workers die at 60 s",
        scenario=_MIXED.at_rate(80),
        faults=(Fault(at_s=60, worker=2, kind="kill"), Fault(at_s=60, worker=5, kind="kill")),
    ),
    Trial(
        name="S6",
        about="62/s on mixed GPUs",
        scenario=_MIXED.at_rate(62),
        workers=("h100-8b",) * 4 + ("a100-8b",) * 4,
    ),
    Trial(
        name="S7", about="conversations that share prefixes, 5/s", scenario=SCENARIOS["prefixes"]
    ),
    Trial(name="S7x", about="the same at 8.6/s", scenario=SCENARIOS["prefixes"].at_rate(8.6)),
)
_SINGLE: Final = (
    Trial(
        name="R4",
        about="80/s through four routers; baselines know of the others from polls only",
        scenario=_MIXED.at_rate(80),
        routers=4,
        poll_delay_s=0.05,
    ),
    Trial(
        name="F1",
        about="70/s, one worker is three times slower from 40 to 80 s",
        scenario=_MIXED.at_rate(70),
        faults=(
            Fault(at_s=40, worker=3, kind="slow", value=3),
            Fault(at_s=80, worker=3, kind="slow", value=1),
        ),
    ),
    Trial(
        name="F2",
        about="70/s, from 30 s on two workers' figures stand still, two have none, two lag, "
        "and one's clock is off",
        scenario=_MIXED.at_rate(70),
        faults=(
            *(Fault(at_s=30, worker=worker, kind="freeze") for worker in (0, 1)),
            *(Fault(at_s=30, worker=worker, kind="mute") for worker in (2, 3)),
            *(Fault(at_s=30, worker=worker, kind="lag", value=2.5) for worker in (4, 5)),
            Fault(at_s=30, worker=6, kind="skew", value=5),
        ),
    ),
    Trial(
        name="F3",
        about="70/s, two workers die at 40 s and are back at 60 s",
        scenario=_MIXED.at_rate(70),
        faults=(
            *(Fault(at_s=40, worker=worker, kind="kill") for worker in (2, 5)),
            *(Fault(at_s=60, worker=worker, kind="revive") for worker in (2, 5)),
        ),
    ),
    Trial(
        name="F4",
        about="80/s through four routers, Redis is away from 40 to 80 s",
        scenario=_MIXED.at_rate(80),
        routers=4,
        poll_delay_s=0.05,
        redis_away_s=(40.0, 80.0),
    ),
    Trial(
        name="KV",
        about="40/s on workers with a seventh of the memory",
        scenario=_MIXED.at_rate(40),
        kv_total_tokens=60_000,
    ),
    Trial(name="P3", about="the lowest class under permanent P0 overload", scenario=_OVERLOADED),
)
SUITE: Final[tuple[str, ...]] = tuple(trial.name for trial in _SUITE)
TRIALS: Final[Mapping[str, Trial]] = {trial.name: trial for trial in (*_SUITE, *_SINGLE)}
