"""Waits are predicted from measured speeds, within a factor of two for most."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import Config
from router.core.drain import LATE, DrainEstimator, Forecast
from router.core.types import Priority
from router.errors import retry_after_value
from tests.core.queue_world import Conditions, QueueWorld, Told

P0, P1, P2, P3 = Priority
PATIENT = {"wait_s_max": 30.0}
WITH_LATE = Config.model_validate({"classes": {"p0": PATIENT}})
NO_LATE = Config.model_validate({"queue": {"relegate_ratio": 0}, "classes": {"p0": PATIENT}})


class Queue:
    """An estimator, and a queue that is served at a given speed per line."""

    def __init__(self, config: Config = NO_LATE) -> None:
        self.drain = DrainEstimator(config)
        self.now = 0.0

    def fill(self, line: int, count: int, cost: float = 1.0) -> None:
        for _ in range(count):
            self.drain.enter(line, cost, now=self.now)

    def serve(self, seconds: int, *speeds: int) -> None:
        """Each second `speeds[line]` tickets of cost 1 leave each line, and as many come."""
        for _ in range(seconds):
            self.now += 1
            for line, speed in enumerate(speeds):
                for _ in range(speed):
                    self.drain.leave(line, 1.0, now=self.now)
                    self.drain.enter(line, 1.0, now=self.now)

    def forecast(self, band: Priority) -> Forecast:
        forecast = self.drain.forecast(band, now=self.now)
        assert forecast is not None
        return forecast


def told(drain: DrainEstimator, band: Priority, *, now: float) -> list[float]:
    rng = Random(1)
    return [drain.retry_after_s(band, now=now, rng=rng) for _ in range(200)]


def test_nothing_known_means_the_least_wait() -> None:
    drain = DrainEstimator(WITH_LATE)
    assert drain.forecast(P1, now=0.0) is None
    assert all(1.0 <= s <= 1.3 for s in told(drain, P1, now=0.0))


def test_a_wait_is_the_waiting_cost_over_the_measured_speed() -> None:
    queue = Queue()
    queue.fill(P1, 100)
    queue.serve(40, 0, 10)
    assert queue.drain.cost(P1) == pytest.approx(100)
    assert queue.drain.cost_per_s(P1, now=queue.now) == pytest.approx(10, rel=0.06)
    assert queue.forecast(P1).on_time_s == pytest.approx(10, rel=0.06)
    figures = told(queue.drain, P1, now=queue.now)
    assert min(figures) >= 9.4
    assert max(figures) <= 13.8
    assert max(figures) > 1.2 * min(figures)


def test_a_line_counts_by_what_strict_order_leaves_it() -> None:
    queue = Queue()
    queue.fill(P0, 100)
    queue.fill(P2, 60)
    queue.serve(60, 23, 0, 2)  # P2 gets what it is guaranteed, 8 %
    assert queue.forecast(P2).on_time_s == pytest.approx(30, rel=0.1)
    assert queue.forecast(P0).on_time_s == pytest.approx(100 / 23, rel=0.1)


def test_when_a_burst_above_is_over_the_whole_speed_counts_at_once() -> None:
    queue = Queue()
    queue.fill(P0, 100)
    queue.fill(P2, 20)
    queue.serve(60, 9, 0, 1)
    for _ in range(10):  # nothing comes in above any more
        queue.now += 1
        for _ in range(10):
            queue.drain.leave(P0, 1.0, now=queue.now)
    # By its own line alone it would wait about 20 s.
    assert queue.forecast(P2).on_time_s < 6


def test_a_starved_line_counts_on_its_guarantee() -> None:
    queue = Queue()
    queue.fill(P0, 100)
    queue.serve(60, 10)
    queue.fill(P2, 4)  # guaranteed 0.08 of 10 per second
    assert queue.forecast(P2).on_time_s == pytest.approx(5, rel=0.1)


def test_what_times_out_or_is_abandoned_leaves_the_line_too() -> None:
    queue = Queue()
    queue.fill(P1, 50)
    queue.serve(30, 0, 5)
    before = queue.forecast(P1).on_time_s
    for _ in range(30):
        queue.drain.leave(P1, 1.0, now=queue.now)
    assert queue.forecast(P1).on_time_s < before / 2


def test_when_nothing_moves_the_longest_wait_of_the_class_is_told() -> None:
    queue = Queue()
    queue.fill(P1, 50)
    queue.now = 20.0
    assert all(30 <= s <= 30 * 1.3 for s in told(queue.drain, P1, now=queue.now))
    assert all(1 <= s <= 1.3 for s in told(queue.drain, P0, now=queue.now))


def test_the_configured_maximum_bounds_long_classes() -> None:
    config = Config.model_validate(
        {"queue": {"relegate_ratio": 0}, "drain": {"retry_after_s_max": 60, "jitter_ratio": 0}}
    )
    queue = Queue(config)
    queue.fill(P3, 50)
    queue.now = 20.0
    assert set(told(queue.drain, P3, now=queue.now)) == {60.0}


def test_who_cannot_be_in_time_waits_for_the_late_line() -> None:
    queue = Queue(WITH_LATE)
    queue.fill(P0, 10)
    queue.fill(LATE, 40)
    queue.serve(60, 8, 0, 0, 0, 2)
    late = queue.forecast(P0)
    assert late.on_time_s > 0.095
    assert queue.drain.expected_s(P0, late) == pytest.approx(20, rel=0.1)
    p2 = queue.forecast(P2)  # nobody waits there: two seconds are enough for P0's ten
    assert queue.drain.expected_s(P2, p2) < 2


def test_moving_to_another_line_is_not_leaving() -> None:
    queue = Queue(WITH_LATE)
    queue.fill(P0, 10)
    queue.now = 5.0
    queue.drain.move(P0, LATE, 1.0, now=5.0)
    assert queue.drain.cost(P0) == 9
    assert queue.drain.cost(LATE) == 1
    assert queue.drain.cost_per_s(P0, now=5.0) == 0


def test_time_in_which_nothing_waits_does_not_slow_a_line() -> None:
    queue = Queue()
    queue.fill(P1, 100)
    queue.serve(40, 0, 10)
    before = queue.drain.cost_per_s(P1, now=queue.now)
    for _ in range(100):
        queue.drain.leave(P1, 1.0, now=queue.now)
    queue.now += 1000
    queue.fill(P1, 100)
    after = queue.drain.cost_per_s(P1, now=queue.now)
    assert before is not None
    assert after is not None
    assert after >= before


def test_waits_shorter_than_a_tick_count_too() -> None:
    queue = Queue()
    for _ in range(1000):
        queue.now += 0.02
        queue.fill(P1, 1)
        queue.now += 0.01
        queue.drain.leave(P1, 1.0, now=queue.now)
    # One each 30 ms, but something waits in only 10 ms of them.
    assert queue.drain.cost_per_s(P1, now=queue.now) == pytest.approx(100, rel=0.05)


def test_what_was_learnt_does_not_lift_a_wait_above_the_longest_of_its_class() -> None:
    queue = Queue()
    queue.fill(P1, 250)
    queue.serve(40, 0, 10)
    forecast = queue.forecast(P1)
    for second in range(3000):
        queue.drain.learn(P1, forecast, waited_s=1000.0, line=P1, now=100.0 + second)
    assert queue.drain.expected_s(P1, forecast) == 30


def test_an_error_that_stays_is_learnt_and_bounded() -> None:
    queue = Queue()
    queue.fill(P1, 40)
    queue.serve(40, 0, 10)
    forecast = queue.forecast(P1)
    for waited_s, expected in ((10.0, 2.5), (1000.0, 3.0), (0.001, 1 / 3)):
        for _ in range(3000):
            queue.now += 1
            queue.drain.learn(P1, forecast, waited_s=waited_s, line=P1, now=queue.now)
        told_s = queue.drain.expected_s(P1, forecast)
        assert told_s / forecast.on_time_s == pytest.approx(expected, rel=0.1)


def test_a_burst_that_leaves_at_once_is_one_lesson() -> None:
    drain = DrainEstimator(NO_LATE)
    forecast = Forecast(1.0, 0.0)
    drain.learn(P1, forecast, waited_s=1.0, line=P1, now=0.0)
    for _ in range(500):
        drain.learn(P1, forecast, waited_s=3.0, line=P1, now=10.0)
    assert drain.expected_s(P1, forecast) < 1.1


def test_falling_behind_teaches_the_band_no_more_than_that() -> None:
    drain = DrainEstimator(WITH_LATE)
    forecast = Forecast(0.06, 20.0)
    for second in range(2000):
        drain.learn(P0, forecast, waited_s=25.0, line=LATE, now=float(second))
    # 0.06 s was too hopeful for a limit of 0.095 s; that it then took 25 s is the late line's.
    assert drain.expected_s(P0, forecast) < 0.11
    assert drain.expected_s(P0, Forecast(1.0, 20.0)) == pytest.approx(25, rel=0.05)


def test_leaving_a_line_twice_is_a_bug() -> None:
    queue = Queue()
    queue.fill(P1, 1)
    queue.drain.leave(P1, 1.0, now=0.0)
    with pytest.raises(AssertionError, match="twice"):
        queue.drain.leave(P1, 1.0, now=0.0)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "move", "learn", "ask"]),
        st.integers(0, 4),
        st.floats(0, 100),
        st.floats(0, 50),
    ),
    max_size=120,
)


@given(EVENTS)
def test_waits_stay_within_bounds_whatever_happens(
    events: list[tuple[str, int, float, float]],
) -> None:
    drain, rng, now = DrainEstimator(WITH_LATE), Random(1), 0.0
    lines: list[list[float]] = [[] for _ in range(LATE + 1)]
    for kind, line, cost, gap_s in events:
        now += gap_s
        band = Priority(min(line, 3))
        if kind == "enter":
            lines[line].append(cost)
            drain.enter(line, cost, now=now)
        elif kind == "leave" and lines[line]:
            drain.leave(line, lines[line].pop(), now=now)
        elif kind == "move" and lines[line]:
            lines[LATE].append(lines[line].pop())
            drain.move(line, LATE, lines[LATE][-1], now=now)
        elif kind == "learn":
            forecast = drain.forecast(band, now=now)
            drain.learn(band, forecast, waited_s=cost, line=line if line == LATE else band, now=now)
        for n, costs in enumerate(lines):
            assert drain.cost(n) == pytest.approx(sum(costs), abs=1e-6)
        most = 30 if band < P3 else 300
        assert 1 <= drain.retry_after_s(band, now=now, rng=rng) <= 1.3 * most


def close(answer: Told) -> bool:
    """Within a factor of two, as a client sees it: whole seconds, at least one."""
    return 0.5 <= retry_after_value(answer.told_s) / max(1.0, answer.wait_s) <= 2


CONDITIONS = {
    "overload": Conditions(load=1.3),
    "bursts": Conditions(load=0.7, burst=3.0),
    "bursts, steady speed": Conditions(load=0.7, burst=3.0, wander=False),
    "bursts, nobody relegated": Conditions(load=0.7, burst=3.0, relegate=False),
    "overload, nobody relegated": Conditions(load=1.3, relegate=False),
    "twice the load, long tail": Conditions(load=2.0, tail=1.5),
    "a small queue, just full": Conditions(load=1.0, depth=60, relegate=False),
}
SEEDS = range(300, 303)  # others than those that constants were chosen on


@pytest.mark.parametrize("name", CONDITIONS)
def test_four_of_five_refused_clients_are_told_a_wait_within_a_factor_of_two(name: str) -> None:
    answers = [a for seed in SEEDS for a in QueueWorld(CONDITIONS[name], seed=seed).play()]
    share = sum(map(close, answers)) / len(answers)
    long = [a for a in answers if a.wait_s > 2]
    share_long = sum(map(close, long)) / len(long)
    print(
        f"{name}: {share:.1%} of {len(answers)}; longer than 2 s: {share_long:.0%} of {len(long)}"
    )
    assert share >= 0.8
