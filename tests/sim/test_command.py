"""`laneway sim`: what it accepts, what it says, what it writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from loadtest.sim.batch import BadRequest, done, errands, seeds_in
from loadtest.sim.run import POLICIES
from loadtest.sim.tables import BEGIN, END, NoPlace, as_json, markdown, written
from loadtest.sim.trials import SUITE, TRIALS
from router.cli import main
from tests.sim.worlds import SHORT

DOCUMENT = f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["sim", *args])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "which SCENARIO?"),
        (["S9"], "no scenario is named 'S9': there are S1, S2,"),
        (["s1"], "no scenario is named 's1'"),
        (
            ["S1", "--policy", "best"],
            "no policy is named 'best': there are laneway, limit, weighted_lanes,",
        ),
        (["S1", "--seeds", "5-1"], "run backwards"),
        (["S1", "--seeds", "one"], "not 'one'"),
        (["S1", "--seeds", "1-"], "not '1-'"),
        (["S1", "--seeds", "-3"], "not '-3'"),
        (["S1", "--seeds", ""], "not ''"),
        (["S1", "--seeds", "1-9999"], "more than 1000"),
        (["S1", "--workers", "0"], "workers"),
        (["S5", "--workers", "1"], "S5 kills 1 workers"),
        (["S1", "--jobs", "0"], "jobs"),
        (["S1", "--set", "queue.depth_max=-1"], "queue.depth_max: "),
        (["S1", "--set", "no.such=1"], "no: "),
        (["S1", "--set", "nonsense"], "PATH=VALUE"),
        (["S1", "--set", "queue=1", "--set", "queue.a.b=1"], "PATH=VALUE"),
        (["S1", "--set", "policy.weight_queue=-1"], "policy.weight_queue: must be 0.0 or more"),
        (["S1", "--set", "classes.p0.share_min=1.5"], "classes.p0.share_min: must be 1.0 or less"),
        (["S1", "--set", "classes.p0.share_min=0.9"], "the minimum shares add up to 130%"),
        (["S1", "--table", "--write", "no/such.md"], "no/such.md"),
        (["S1", "--table", "--write", __file__], "has no lines"),
        (["S1", "--table", "--write", "/"], "directory"),
    ],
)
def test_a_mistake_is_named_and_ends_with_status_2(
    capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    assert says in err


def test_help_names_all_that_may_be_played(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--help")
    assert (status, err) == (0, "")
    said = out.partition("Scenarios")[2]
    for name, trial in TRIALS.items():
        assert f"\n  {name} " in said
        assert trial.about.split()[-1] in said
    assert set(POLICIES) <= set(re.split(r"[,\s]+", said))
    example = next(line for line in said.splitlines() if line.startswith("  laneway sim"))
    flags = example.split()
    assert flags[2] in TRIALS
    assert set(flags[4:7:2]) <= set(POLICIES)
    runs = len(SUITE) * len(POLICIES) * 5
    assert f"--table is {runs} of them" in said
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "seeds"), [("7", [7]), ("1-3", [1, 2, 3]), ("4,1-2,4", [4, 1, 2]), (" 1 , 2 ", [1, 2])]
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert seeds_in(text) == seeds


@pytest.mark.parametrize("text", ["", ",", "1--2", "1-2-3", "٣x", "1.5"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        seeds_in(text)


def test_json_has_figures_and_a_digest_that_processes_and_order_do_not_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ("S6", "--workers", "1", "--policy", "lmetric", "--json")
    status, out, _ = run(capsys, *small, "--seeds", "1-2", "--jobs", "2")
    assert status == 0
    first, second = json.loads(out)
    assert (first["scenario"], first["policy"], first["seed"]) == ("S6", "lmetric", 1)
    assert first["figures"]["requests"] > 100
    assert first["accounts"]["recovery_s"] is None
    _, out, _ = run(capsys, *small, "--seeds", "2", "--jobs", "1")
    assert [again["digest"] for again in json.loads(out)] == [second["digest"]]
    assert first["digest"] != second["digest"]


def test_a_setting_changes_ours(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("S6", "--workers", "1", "--seeds", "1", "--json")
    digests = []
    for setting in ((), ("--set", "policy.name=random")):
        _, out, _ = run(capsys, *small, *setting)
        digests.append(json.loads(out)[0]["digest"])
    assert digests[0] != digests[1]


def test_tables_pair_by_seed_and_go_between_their_marks(tmp_path: Path) -> None:
    trial = SHORT["S6"]
    runs = list(done(errands([trial], POLICIES, [1, 2]), jobs=1))
    text = markdown(runs)
    head, _, first = text.splitlines()[2:5]
    assert head.startswith("| policy | goodput /s | feasible premium % | standard % | free % |")
    assert first.startswith("| laneway | ")
    assert all(f"\n| {policy} |" in text for policy in POLICIES)
    for pair in ("laneway / limit", "laneway / best baseline (", "weighted_lanes / laneway"):
        assert f"- goodput, {pair}" in text
    path = tmp_path / "doc.md"
    path.write_text(DOCUMENT)
    written(path, text)
    assert path.read_text() == f"before\n\n{BEGIN}\n{text.strip()}\n{END}\n\nafter\n"
    path.write_text("nothing")
    with pytest.raises(NoPlace):
        written(path, text)
    assert as_json(runs[0])["digest"] == runs[0].digest


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_played(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    status, out, err = run(capsys, "S1", "--plots", f"{__file__}/plots")
    assert (status, out) == (2, "")
    assert "Not a directory" in err


def test_plots_are_pictures(tmp_path: Path) -> None:
    plots = pytest.importorskip("loadtest.sim.plots")
    trials = [SHORT["S6"], SHORT["P3"]]  # one without any request of two tiers
    runs = list(done(errands(trials, ["laneway", "lmetric"], [1]), jobs=1))
    paths = plots.plotted(runs, tmp_path)
    assert [path.name for path in paths] == [
        f"{name}-{kind}.png" for name in ("S6", "P3") for kind in ("attainment", "tails")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_with_all_its_processes(ending: signal.Signals) -> None:
    # Where tests run in the background interrupts may be ignored, which processes inherit.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from router.cli import main; main(['sim', 'S2', '--seeds', '1-40', '--jobs', '2'])"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            # Two that simulate, and one of Python's own that looks after what they share.
            eventually(lambda: len(_ignoring_interrupts(children)) == 3)
            found = _ignoring_interrupts(children)
            process.send_signal(ending)
            assert process.wait(30) == 130
            eventually(lambda: not any(map(_lives, found)))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _ignoring_interrupts(children: Path) -> list[str]:
    """The children that have begun their work: they leave interrupts to their parent."""
    pids = children.read_text().split()
    return [pid for pid in pids if int(_status(pid, "SigIgn"), 16) & 1 << (signal.SIGINT - 1)]


def _lives(pid: str) -> bool:
    return _status(pid, "State")[0] not in "ZX"


def _status(pid: str, name: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return "X" if name == "State" else "0"
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))
