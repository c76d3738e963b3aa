"""The public traces in `traces/`: when requests arrived, how long they were, what they share.

A `Trace` is read once and never changed. It is treated as a ring: after its last request its first
one follows, one mean gap later, so that it can be played from any moment and for any time. Pure
apart from reading the file; `traces/README.md` says where the figures come from.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final

TRACES_PATH: Final = Path(__file__).parent / "traces"
BLOCK_TOKENS: Final = 512  # prompt tokens per prefix block
# No prompt is anywhere near this long: a range that claims it is a fault of the file.
_BLOCKS_MAX: Final = 100_000


class BadTrace(ValueError):
    """A trace file that cannot be believed; says the line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()  # one number per block begun; equal numbers, equal text


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and the length of the ring they form."""

    name: str
    rows: tuple[TraceRow, ...]
    period_s: float

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second at native speed."""
        return len(self.rows) / self.period_s

    @property
    def blocks(self) -> int:
        """How many block numbers there are, from 0; numbers above are free."""
        return 1 + max((max(row.prefix_blocks, default=-1) for row in self.rows), default=-1)

    def where(self, keep: Callable[[TraceRow], bool]) -> Trace:
        """The same ring with only the rows that `keep` likes.

        Raises ValueError when none is left: a trace without requests has no arrivals.
        """
        rows = tuple(row for row in self.rows if keep(row))
        if not rows:
            raise ValueError(f"no row of {self.name} is left")
        return Trace(self.name, rows, self.period_s)

    def played_from(self, offset_s: float) -> Iterator[tuple[float, int, TraceRow]]:
        """Yield (seconds since `offset_s`, lap, row) for ever, in order of arrival.

        `offset_s` is a moment on the ring, 0 to `period_s`; laps count from 0 and change where
        the trace's own end is passed.
        """
        first = bisect_left(self.rows, offset_s, key=lambda row: row.arrival_s)
        for lap in count():
            base_s = lap * self.period_s - offset_s
            for row in self.rows[first if lap == 0 else 0 :]:
                yield base_s + row.arrival_s, lap, row


@cache
def read_trace(name: str) -> Trace:
    """Read `traces/NAME.csv`. Raises BadTrace, or OSError when there is no such file."""
    with (TRACES_PATH / f"{name}.csv").open(newline="", encoding="ascii") as lines:
        return parsed_trace(name, csv.DictReader(lines))


def parsed_trace(name: str, lines: Iterator[dict[str, str]] | csv.DictReader[str]) -> Trace:
    """Build a Trace from the columns of a file. Raises BadTrace, naming the line at fault."""
    rows: list[TraceRow] = []
    for number, line in enumerate(lines, start=2):
        try:
            row = _row(line)
        except (KeyError, TypeError, ValueError) as exc:
            raise BadTrace(f"{name}, line {number}: {exc!r}") from exc
        if rows and row.arrival_s < rows[-1].arrival_s:
            raise BadTrace(f"{name}, line {number}: arrivals are not in order")
        rows.append(row)
    if len(rows) < 2 or rows[-1].arrival_s <= rows[0].arrival_s:
        raise BadTrace(f"{name}: no two requests at different times")
    mean_gap_s = rows[-1].arrival_s / (len(rows) - 1)
    return Trace(name, tuple(rows), rows[-1].arrival_s + mean_gap_s)


def _row(line: dict[str, str]) -> TraceRow:
    row = TraceRow(
        float(line["arrival_s"]),
        int(line["input_tokens"]),
        int(line["output_tokens"]),
        expanded_blocks(line.get("prefix_block_ids") or ""),
    )
    if not 0 <= row.arrival_s < float("inf") or row.prompt_tokens < 0 or row.output_tokens < 0:
        raise ValueError("a figure is out of range")
    return row


def expanded_blocks(ranges: str) -> tuple[int, ...]:
    """Return the block numbers of `ranges`: "0 14-16" is (0, 14, 15, 16).

    Raises ValueError for anything that is not such ranges, rising and of sane length.
    """
    numbers: list[int] = []
    for part in ranges.split():
        first, dash, last = part.partition("-")
        if not part.isascii() or not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"not a range: {part!r:.40}")
        low, high = int(first), int(last) if dash else int(first)
        if not low <= high < low + _BLOCKS_MAX - len(numbers):
            raise ValueError(f"not a rising range of sane length: {part!r:.40}")
        numbers.extend(range(low, high + 1))
    return tuple(numbers)
