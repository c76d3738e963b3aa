"""The waiting tickets of one tenant in one band of one pool, in the order of their places.

They stand in blocks of at most `_BLOCK_MAX`, each with its prefill in all: so to come, to leave and
to tell how much work goes before a place each touch one block, and of the others a figure.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Container, Iterator
from typing import Final

from router.core.types import Ticket

_BLOCK_MAX: Final = 128
NO_NUMBER: Final = -1  # no ticket has it
_LAST_NUMBER: Final = 2**62  # behind all others of an equal place

_Place = tuple[float, int]
_Entry = tuple[float, int, Ticket]


class Line:
    """Tickets by place and number. Work is seconds of prefill."""

    __slots__ = (
        "_blocks",
        "_firsts",
        "_works_s",
        "count",
        "filed_number",
        "filed_tag",
        "since",
        "tenant",
        "work_s",
    )

    def __init__(self, tenant: str, since: float) -> None:
        self.tenant = tenant
        self.since = since  # V when it began; for a late ticket, which has its own line, its place
        self.count = 0
        self.work_s = 0.0  # of all
        self._blocks: list[list[_Entry]] = []
        self._firsts: list[_Place] = []  # by block: its first place, and its work
        self._works_s: list[float] = []
        # Of its valid entry in the heap, if the number is one; others are outdated.
        self.filed_tag = 0.0
        self.filed_number = NO_NUMBER

    def __lt__(self, other: Line) -> bool:
        """No order of its own: a heap may hold two entries of a line with one key."""
        return False

    @property
    def tickets(self) -> Iterator[Ticket]:
        """All of them, in order."""
        return iter([ticket for block in self._blocks for _, _, ticket in block])

    @property
    def first_number(self) -> int:
        """The number of the first ticket; there must be one."""
        return self._firsts[0][1]

    @property
    def last(self) -> Ticket:
        """The last ticket; there must be one."""
        return self._blocks[-1][-1][2]

    def first(self, skipped: Container[int]) -> Ticket | None:
        """The first ticket that was not skipped."""
        for block in self._blocks:
            for _, number, ticket in block:
                if number not in skipped:
                    return ticket
        return None

    def work_before_s(self, place_at: float) -> float:
        """The work of all whose place is not behind `place_at`."""
        at = bisect(self._firsts, (place_at, _LAST_NUMBER)) - 1
        if at < 0:
            return 0.0
        work_s = sum(self._works_s[:at])
        for place, _, ticket in self._blocks[at]:
            if place > place_at:
                break
            work_s += ticket.prefill_s
        return work_s

    def add(self, ticket: Ticket) -> None:
        """Put `ticket` in at its place, the same when it comes back after a failed attempt."""
        entry, place = (ticket.place_at, ticket.number, ticket), (ticket.place_at, ticket.number)
        self.count += 1
        self.work_s += ticket.prefill_s
        if not self._blocks:
            self._blocks.append([entry])
            self._firsts.append(place)
            self._works_s.append(ticket.prefill_s)
            return
        at = max(0, bisect(self._firsts, place) - 1)
        block = self._blocks[at]
        insort(block, entry)
        self._works_s[at] += ticket.prefill_s
        self._firsts[at] = min(self._firsts[at], place)
        if len(block) > _BLOCK_MAX:
            self._split(at)

    def drop(self, ticket: Ticket) -> None:
        """Take `ticket` out; its place and its work are those with which it came."""
        place = ticket.place_at, ticket.number
        at = bisect(self._firsts, place) - 1
        block = self._blocks[at]
        del block[bisect(block, place)]  # which is just before its entry
        self.count -= 1
        if not block:
            del self._blocks[at], self._firsts[at], self._works_s[at]
        else:
            self._works_s[at] -= ticket.prefill_s
            self._firsts[at] = block[0][0], block[0][1]
        # An empty line has no work, whatever rounding says.
        self.work_s = self.work_s - ticket.prefill_s if self.count else 0.0

    def _split(self, at: int) -> None:
        block = self._blocks[at]
        behind = block[_BLOCK_MAX // 2 :]
        del block[_BLOCK_MAX // 2 :]
        self._blocks.insert(at + 1, behind)
        self._firsts.insert(at + 1, (behind[0][0], behind[0][1]))
        self._works_s[at] = sum([ticket.prefill_s for _, _, ticket in block])
        self._works_s.insert(at + 1, sum([ticket.prefill_s for _, _, ticket in behind]))
