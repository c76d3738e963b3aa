"""`scripts/bench scale`: what it measures is measured, and its table says what is missed."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from loadtest.bench.procfs import cpu_by_process, name_of
from loadtest.bench.scale import limits
from loadtest.bench.scale.decision import request_us
from loadtest.bench.scale.figures import Figure, Size, table
from loadtest.bench.scale.parts import UnknownPart, measured
from loadtest.bench.scale.subjects import BUILDS, laneway
from loadtest.bench.subjects import INTERPRETED, OURS
from router.config_source import load_config


def figure(name: str, unit: str, value: float, **rest: float) -> Figure:
    return Figure(name=name, build=OURS, unit=unit, value=value, **rest)


def test_the_table_says_what_is_met_and_what_is_not() -> None:
    text = table(
        [
            ("a", figure("within", "us", 10.0, beside=8.0, ratio_max=1.5)),
            ("a", figure("too dear", "us", 70.0, value_max=60.0)),
            ("b", figure("too few", "", 9_000, value_min=10_000)),
            ("b", figure("free", "MB", 123.4)),
        ]
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert rows == [
        ["a", "within", "laneway", "10 us", "8 us", "1.25", "<= 1.5 x nginx", "yes"],
        ["a", "too dear", "laneway", "70 us", "", "", "<= 60 us", "NO"],
        ["b", "too few", "laneway", "9000", "", "", ">= 10000", "NO"],
        ["b", "free", "laneway", "123 MB", "", "", "", ""],
    ]


def test_a_limit_that_cannot_be_told_is_not_met() -> None:
    alone = figure("ratio without nginx", "us", 1.0, ratio_max=2.0)
    assert alone.met is None


def test_an_unknown_part_is_told_before_anything_is_measured() -> None:
    with pytest.raises(UnknownPart, match="decisions"):
        next(measured(["decision", "decisions"], Size(quick=True)))


def test_a_request_costs_more_among_more_workers_but_not_in_proportion() -> None:
    few, many = (asyncio.run(request_us(workers, blocks=4)) for workers in (2, 96))
    assert few[0] > 0 < few[1]
    assert many[0] < 20 * few[0]


def test_cpu_is_told_by_process_also_of_threads_that_are_new() -> None:
    before = {(1, 1): 1_000_000, (2, 2): 5_000_000}
    after = {(1, 1): 3_000_000, (1, 9): 500_000, (2, 2): 5_000_000, (3, 3): 250_000}
    assert cpu_by_process(before, after) == {1: 2_500.0, 2: 0.0, 3: 250.0}


def test_a_process_has_the_name_that_it_gave_itself() -> None:
    assert name_of(os.getpid()) == Path("/proc/self/comm").read_text().strip()
    assert name_of(2**22 + 1) == ""  # above any id


def test_ours_is_started_with_the_workers_of_a_file_and_nothing_else() -> None:
    subject = laneway(INTERPRETED, "probe: {{interval_s: 1}}", agents=True)
    assert subject.command[-2:] == ("--config", "{dir}/laneway.yaml")
    assert "--worker-urls" not in subject.command
    assert subject.files["laneway.yaml"] == "workers:{agent_specs}\nprobe: {{interval_s: 1}}\n"


def test_a_figure_says_of_which_build_it_is() -> None:
    rows = table([("a", Figure(name="x", build=build, unit="us", value=1.0)) for build in BUILDS])
    assert [row.split("|")[3].strip() for row in rows.splitlines()[2:]] == list(BUILDS)


def test_of_four_routers_three_keep_limits_each_in_its_way(tmp_path: Path) -> None:
    """Each starts with its settings, which say what it is named for."""
    found = []
    for subject in limits._subjects(INTERPRETED, 6379):
        path = tmp_path / "laneway.yaml"
        path.write_text(subject.files["laneway.yaml"].format(worker_specs=" []"))
        config = load_config(path)
        limited = config.limits.cluster.concurrency is not None
        found.append((limited, config.redis.mode, config.redis.key_prefix, config.limits.batch_s))
    assert found == [
        (False, "none", "laneway", 0.5), (True, "none", "laneway", 0.5),
        (True, "single", "leases", 0.5), (True, "single", "asked", 0.0),
    ]  # fmt: skip


def test_what_redis_adds_is_told_of_each_turn_beside_the_same_turn_without() -> None:
    local = [limits._Seen(100.0, 10.0, 20.0), limits._Seen(300.0, 10.0, 20.0)]
    leased = [limits._Seen(110.0, 11.0, 19.0), limits._Seen(312.0, 13.0, 25.0)]
    figures = list(limits._added(limits._LEASES, INTERPRETED, local, leased))
    assert [each.value for each in figures] == [11.0, 2.0, 2.0]
    assert [each.met for each in figures] == [True, None, True]


def test_a_valkey_is_there_while_it_is_needed() -> None:
    with limits._valkey() as port:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
