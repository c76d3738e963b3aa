"""Faults of the simulated cluster: each does what it says, and the router lives with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.sim.cluster import Cluster, PollFault
from loadtest.sim.laneway import LanewayRouter
from loadtest.sim.run import played, simulate
from loadtest.sim.trials import SUITE, TRIALS, BadTrial, Fault
from router.contract import LoadReport
from tests.sim.worlds import SHORT, flow, trial

QUIET = trial("quiet", flow(25))


def polls_of(*faults: Fault) -> list[object]:
    """What worker 0 answers to polls at 3.5 s and at 6.5 s."""
    answers: list[object] = []

    class Asking(LanewayRouter):
        def start(self, cluster: Cluster) -> None:
            super().start(cluster)
            for at_s in (3.5, 6.5):
                cluster.at(
                    at_s, lambda _: cluster.poll(0, lambda polled, _: answers.append(polled))
                )

    played(replace(QUIET, faults=faults), "laneway", seed=1, make=Asking)
    return answers


def age_s(polled: object) -> float | None:
    assert isinstance(polled, LoadReport)
    return polled.age_s


@pytest.mark.patches
def test_a_dead_worker_answers_no_poll_and_a_revived_one_does() -> None:
    first, second = polls_of(
        Fault(at_s=3, worker=0, kind="kill"), Fault(at_s=6, worker=0, kind="revive")
    )
    assert first is PollFault.DEAD
    assert second is not PollFault.DEAD


@pytest.mark.patches
def test_a_mute_worker_answers_without_figures_until_it_speaks_again() -> None:
    begin = Fault(at_s=3, worker=0, kind="mute")
    first, second = polls_of(begin, replace(begin, at_s=6, value=0))
    assert first is PollFault.MUTE
    assert not isinstance(second, PollFault)


@pytest.mark.patches
def test_frozen_figures_stand_still_and_look_fresh() -> None:
    first, second = polls_of(Fault(at_s=3, worker=0, kind="freeze"))
    assert first == second
    assert age_s(first) in (None, 0.0)


@pytest.mark.patches
def test_lagging_figures_are_old_and_say_so() -> None:
    _, second = polls_of(Fault(at_s=2, worker=0, kind="lag", value=2))
    assert 2.0 <= (age_s(second) or 0.0) <= 2.5


@pytest.mark.patches
def test_a_clock_that_is_off_makes_fresh_figures_look_old() -> None:
    first, _ = polls_of(Fault(at_s=3, worker=0, kind="skew", value=5))
    assert age_s(first) == 5.0


def test_a_slow_worker_is_sent_less() -> None:
    slow = replace(QUIET, faults=(Fault(at_s=0.5, worker=0, kind="slow", value=4),))
    cluster, _ = played(slow, "laneway", seed=2)
    sent = [0] * 4
    for job in cluster.jobs:
        assert job.server is not None
        sent[job.server.index] += job.item.at_s > 2
    assert sent[0] < 0.6 * sum(sent[1:]) / 3


@pytest.mark.parametrize("seed", range(3))
def test_reports_that_cannot_be_believed_cost_little(seed: int) -> None:
    faults = (
        Fault(at_s=1, worker=0, kind="freeze"),
        Fault(at_s=1, worker=1, kind="mute"),
        Fault(at_s=1, worker=2, kind="lag", value=2.5),
        Fault(at_s=1, worker=3, kind="skew", value=5),
    )
    well = simulate(QUIET, "laneway", seed=seed)
    ill = simulate(replace(QUIET, faults=faults), "laneway", seed=seed)
    assert ill.accounts.retractions == 0
    assert ill.figures.goodput_per_s >= 0.95 * well.figures.goodput_per_s


def test_several_routers_share_the_arrivals_and_each_ends_its_own() -> None:
    cluster, routers = played(replace(QUIET, routers=4, poll_delay_s=0.05), "laneway", seed=1)
    counts = []
    for router in routers:
        assert isinstance(router, LanewayRouter)
        counts.append(len(router.records))
    assert sum(counts) == len(cluster.jobs)
    assert max(counts) - min(counts) <= 1
    assert cluster.retractions == 0


def test_a_smaller_cluster_keeps_load_mix_and_faults_in_proportion() -> None:
    halved = TRIALS["S5"].on_workers(4)
    assert halved.scenario.rate_per_s == TRIALS["S5"].scenario.rate_per_s / 2
    assert [fault.worker for fault in halved.faults] == [1, 2]
    assert TRIALS["S6"].on_workers(4).workers == ("h100-8b",) * 2 + ("a100-8b",) * 2
    assert len(TRIALS["S1"].on_workers(16).workers) == 16
    with pytest.raises(BadTrial, match="needs more than 1"):
        TRIALS["S5"].on_workers(1)


@pytest.mark.parametrize("name", list(TRIALS))
def test_every_trial_can_be_played(name: str) -> None:
    begin = replace(TRIALS[name], length_s=1.5, measured_from_s=0.0)
    run = simulate(begin, "laneway", seed=1)
    assert run.figures.requests > 0
    assert run.accounts.retractions == 0


def test_the_benchmark_is_a_part_of_all_trials() -> None:
    assert set(SUITE) < set(TRIALS)
    assert set(SHORT) <= set(TRIALS)
