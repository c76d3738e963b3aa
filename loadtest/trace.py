"""The public traces in `traces/`: when requests arrived, how long they were, what they share.

A `Trace` is read once and never changed. It is treated as a ring: after its last request its first
one follows, one mean gap later, so that it can be played from any moment and for any time. Pure
apart from reading the file; `traces/README.md` says where the figures come from.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

TRACES_PATH: Final = Path(__file__).parent / "traces"
BLOCK_TOKENS: Final = 512  # prompt tokens per prefix block
# No prompt is anywhere near this long: a range that claims it is a fault of the file.
_BLOCKS_MAX: Final = 100_000
_COLUMNS: Final = ("arrival_s", "input_tokens", "output_tokens")
_BLOCKS_COLUMN: Final = "prefix_block_ids"


class BadTrace(ValueError):
    """A trace file that cannot be believed; says the line."""


class TraceRow(NamedTuple):
    """One request of a trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()  # one number per block begun; equal numbers, equal text


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, and the length of the ring they form."""

    name: str
    rows: tuple[TraceRow, ...]
    period_s: float

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second at native speed."""
        return len(self.rows) / self.period_s

    @cached_property
    def blocks(self) -> int:
        """How many block numbers there are, from 0; numbers above are free."""
        most = (max(row.prefix_blocks) for row in self.rows if row.prefix_blocks)
        return 1 + max(most, default=-1)

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
        return parsed_trace(name, csv.reader(lines))


def parsed_trace(name: str, lines: Iterator[Sequence[str]]) -> Trace:
    """Build a Trace from the lines of a file, each in its columns; the first one names them.

    Raises BadTrace, naming the line at fault.
    """
    place = {column: index for index, column in enumerate(next(lines, ()))}
    if missing := [column for column in _COLUMNS if column not in place]:
        raise BadTrace(f"{name}, line 1: no column {missing[0]}")
    at, prompt, output = (place[column] for column in _COLUMNS)
    blocks = place.get(_BLOCKS_COLUMN)
    rows: list[TraceRow] = []
    last_s = 0.0
    for number, line in enumerate(lines, start=2):
        try:
            row = TraceRow(
                float(line[at]),
                int(line[prompt]),
                int(line[output]),
                expanded_blocks(line[blocks]) if blocks is not None else (),
            )
        except (IndexError, ValueError) as exc:
            raise BadTrace(f"{name}, line {number}: {exc!r}") from exc
        if not last_s <= row.arrival_s < inf:
            raise BadTrace(f"{name}, line {number}: arrivals are not in order")
        if row.prompt_tokens < 0 or row.output_tokens < 0:
            raise BadTrace(f"{name}, line {number}: a figure is out of range")
        last_s = row.arrival_s
        rows.append(row)
    if len(rows) < 2 or rows[-1].arrival_s <= rows[0].arrival_s:
        raise BadTrace(f"{name}: no two requests at different times")
    mean_gap_s = rows[-1].arrival_s / (len(rows) - 1)
    return Trace(name, tuple(rows), rows[-1].arrival_s + mean_gap_s)


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
