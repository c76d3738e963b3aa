"""`scripts/bench scale`: what it measures is measured, and its table says what is missed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from loadtest.bench.procfs import cpu_by_process, name_of
from loadtest.bench.scale.decision import request_us
from loadtest.bench.scale.figures import Figure, Size, table
from loadtest.bench.scale.parts import UnknownPart, measured


def test_the_table_says_what_is_met_and_what_is_not() -> None:
    text = table(
        [
            ("a", Figure(name="within", unit="us", value=10.0, beside=8.0, ratio_max=1.5)),
            ("a", Figure(name="too dear", unit="us", value=70.0, value_max=60.0)),
            ("b", Figure(name="too few", unit="", value=9_000, value_min=10_000)),
            ("b", Figure(name="free", unit="MB", value=123.4)),
        ]
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert rows == [
        ["a", "within", "10 us", "8 us", "1.25", "<= 1.5 x nginx", "yes"],
        ["a", "too dear", "70 us", "", "", "<= 60 us", "NO"],
        ["b", "too few", "9000", "", "", ">= 10000", "NO"],
        ["b", "free", "123 MB", "", "", "", ""],
    ]


def test_a_limit_that_cannot_be_told_is_not_met() -> None:
    alone = Figure(name="ratio without nginx", unit="us", value=1.0, ratio_max=2.0)
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
