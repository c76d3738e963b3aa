"""What the prober knows of one worker, and when it asks what."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from router.contract import LoadReport, MalformedReport, WorkerId
from router.load_formats import LoadFormat, WorkerDescription, parse
from router.runtime.probed import ProbedWorker, Source
from router.runtime.quick_polls import Line, Question

# Polls between two searches for a better source of load than the present one (or none): 1, 2, 4 ...
_POLLS_TO_SEARCH_MAX: Final = 32
# Polls between two descriptions of a worker, while all is known; else 1, 2, 4 ... up to this.
_POLLS_TO_DESCRIPTION_MAX: Final = 32
_QUICK_FAILURES_MAX: Final = 6  # that are counted
UNKNOWN: Final = WorkerDescription()


@dataclass(slots=True, eq=False)
class Watch:
    """Polling one worker: what the next poll does, and what is under way."""

    worker: ProbedWorker
    worker_id: WorkerId
    source: Source | None = None
    polls_to_search: int | None = 0  # 0: the next poll searches; None: nothing better to find
    searches: int = 0  # in a row that left something to wish for
    failures: int = 0  # in a row
    trouble: str | None = None  # why the load is unknown
    troubles: set[str] = field(default_factory=set)  # said since it was last well
    described: WorkerDescription = UNKNOWN  # as last read
    polls_to_description: int = 0  # 0: the next poll asks again what it is
    gaps: int = 0  # descriptions in a row that left something unknown
    # What quick polls ask; None: the next poll is one in full.
    question: Question | None = None
    quick_failures: int = 0  # in a row, of a worker that is well
    polls_in_full: int = 0  # until it is asked quickly again
    poll: asyncio.Task[None] | None = None
    lines: dict[str, Line] = field(default_factory=dict)  # by address
    description_question: Question | None = None
    answers: int | None = None  # to it, as a hash, when they last told all there is
    description: asyncio.Task[None] | None = None
    slot: asyncio.Semaphore | None = None  # held by a poll that still counts
    again: asyncio.TimerHandle | None = None  # the next poll, where there was no file for the last

    @property
    def polling(self) -> bool:
        """Whether a poll is under way."""
        quickly = self.question is not None and self.question.under_way
        return quickly or self.poll is not None

    @property
    def describing(self) -> bool:
        """Whether it is being asked what it is."""
        question = self.description_question
        quickly = question is not None and question.under_way
        return quickly or (self.description is not None and not self.description.done())

    def release_slot(self) -> None:
        """No longer count among the polls at once."""
        if self.slot is not None:
            self.slot.release()
            self.slot = None

    def ask_in_full(self) -> None:
        """A quick poll failed: when the worker is well again, make 1, 2, 4 ... polls in full."""
        self.question = None
        self.quick_failures = min(self.quick_failures + 1, _QUICK_FAILURES_MAX)
        self.polls_in_full = 2 ** (self.quick_failures - 1)

    def search_later(self) -> None:
        """Search after 1, 2, 4 ... polls."""
        self.polls_to_search = min(2**self.searches, _POLLS_TO_SEARCH_MAX)
        self.searches = min(self.searches + 1, 16)

    def describe_later(self, *, complete: bool) -> None:
        """Describe after 1, 2, 4 ... polls, or after many where nothing is unknown."""
        self.gaps = 0 if complete else min(self.gaps + 1, 16)
        most = _POLLS_TO_DESCRIPTION_MAX
        self.polls_to_description = most if complete else min(2 ** (self.gaps - 1), most)

    def start_over(self) -> None:
        """Take nothing about the worker for known: what comes back may be another release."""
        self.source, self.polls_to_search, self.searches = None, 0, 0
        self.described, self.gaps, self.answers = UNKNOWN, 0, None
        self.worker.has_ready = True
        if self.description is not None:
            self.description.cancel()
            self.description = None

    def end(self) -> None:
        """Stop what is under way."""
        for task in (self.poll, self.description, self.again):
            if task is not None:
                task.cancel()
        for line in self.lines.values():
            line.drop()


def report_in(body: bytes, load_format: LoadFormat) -> LoadReport | None:
    """The report in a load answer; None: it is none, or says that the worker is not ready."""
    try:
        report = parse(load_format, body)
    except MalformedReport:
        return None
    return None if report.ready is False else report
