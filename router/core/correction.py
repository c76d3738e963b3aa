"""What a worker's reports add to the router's own account: load that others put there.

A report shows the worker at some past moment, the own account at that same moment is known from a
`Mark`, with what other routers had said by then, and the difference between the two is foreign:
others who say nothing, requests from before a restart, tokens that were estimated too low. The
present load is then the own account of now plus what the others say now plus what is foreign, so
dispatches that the report could not yet have seen are never lost or doubled.

More KV memory in use than expected is believed at once, as overfilling costs retractions; all else
moves by a weight, as single reports are noisy and old. Less than expected means that running
prompts share their memory: then `kv_scale` shrinks what own streams are counted to hold, and only
that, so nothing remains of it once they end.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.contract import LoadReport
from router.core.peers import PeerLoad

# Where a worker counts its waiting requests but not their tokens.
_TOKENS_PER_QUEUED_REQUEST = 512
_KV_SCALE_MIN = 0.2


@dataclass(slots=True, init=False)
class Mark:
    """The own account of a worker at one moment, and what other routers said of theirs."""

    at: float
    streams: int
    waiting: int
    pend_tokens: int
    kv_held_tokens: int  # surely in the pool: prefilled prompts and the output seen
    kv_held_tokens_max: int  # possibly in the pool: waiting prompts and unseen output too

    def __init__(  # noqa: PLR0917 - made by position
        self,
        at: float,
        streams: int,
        waiting: int,
        pend_tokens: int,
        kv_held_tokens: int,
        kv_held_tokens_max: int,
    ) -> None:
        self.at = at
        self.streams = streams
        self.waiting = waiting
        self.pend_tokens = pend_tokens
        self.kv_held_tokens = kv_held_tokens
        self.kv_held_tokens_max = kv_held_tokens_max


@dataclass(slots=True)
class Foreign:
    """Estimated load that is not on the own account; all zero while nothing is known."""

    streams: float = 0.0
    waiting: float = 0.0
    pend_tokens: float = 0.0
    kv_tokens: float = 0.0
    kv_scale: float = 1.0  # share of the own held tokens that really occupy the pool
    known: bool = False
    # What a report said that changed nothing, as it came while nothing of ours was there; said
    # again of such a moment, it changes nothing again.
    settled: tuple[int | None, ...] = ()

    def forget(self) -> None:
        """The last report is too old: nothing is known any more."""
        self.streams = self.waiting = self.pend_tokens = self.kv_tokens = 0.0
        self.kv_scale = 1.0
        self.known = False
        self.settled = ()

    def take_over(self, silent: PeerLoad) -> None:
        """Routers are silent now that said they had this here: load that reports must show."""
        if self.known:
            self.settled = ()
            self.streams += silent.streams
            self.kv_tokens += silent.kv_held_tokens

    def learn(
        self, report: LoadReport, mark: Mark, *, weight: float, kv_total_tokens: int | None = None
    ) -> None:
        """Compare `report` with the own account of its moment; what it lacks changes nothing.

        A pool of which more is used than there is counts as full: one such word must not keep the
        worker out for as long as many good ones need to outweigh it.
        """
        figures = running, queued, pending, used = (
            report.running_requests,
            report.queued_requests,
            report.queued_uncached_tokens,
            report.kv_used_tokens,
        )
        alone = not (mark.streams or mark.kv_held_tokens_max)
        if alone and figures == self.settled:
            return
        if used is not None and kv_total_tokens is not None and used > kv_total_tokens:
            used = kv_total_tokens
        before = self.streams, self.waiting, self.pend_tokens, self.kv_tokens, self.known
        share = weight if self.known else 1.0
        self.known = True
        if running is not None:
            there = running + (queued or 0) - mark.streams
            self.streams += share * ((there if there > 0 else 0) - self.streams)
        if queued is not None:
            queued -= mark.waiting
            queued = queued if queued > 0 else 0
            self.waiting += share * (queued - self.waiting)
        if pending is not None:  # others' uncached prompt tokens that wait
            pending -= mark.pend_tokens
        elif queued is not None:
            pending = queued * _TOKENS_PER_QUEUED_REQUEST
        if pending is not None:
            self.pend_tokens += share * ((pending if pending > 0 else 0) - self.pend_tokens)
        if used is not None:
            self._learn_kv(used, mark, weight)
        after = self.streams, self.waiting, self.pend_tokens, self.kv_tokens, self.known
        self.settled = figures if alone and after == before else ()

    def _learn_kv(self, used: int, mark: Mark, weight: float) -> None:
        least = self.kv_scale * mark.kv_held_tokens + self.kv_tokens
        most = self.kv_scale * mark.kv_held_tokens_max + self.kv_tokens
        if used > most:
            missing = used - most
            if mark.kv_held_tokens_max > 0:
                back = min(1.0 - self.kv_scale, missing / mark.kv_held_tokens_max)
                self.kv_scale += back
                missing -= back * mark.kv_held_tokens_max
            self.kv_tokens += max(0.0, missing)
        elif used < least:
            surplus = weight * (least - used)
            gone = min(self.kv_tokens, surplus)
            self.kv_tokens -= gone
            if mark.kv_held_tokens > 0:
                shrunk = self.kv_scale - (surplus - gone) / mark.kv_held_tokens
                self.kv_scale = max(_KV_SCALE_MIN, shrunk)
