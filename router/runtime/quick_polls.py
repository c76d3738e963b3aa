"""Polls of workers that are well: plain callbacks instead of a task, a timer and a head for each.

Most polls ask what they asked a second ago and get a good answer. Those take this way. Whatever
else comes of one (no answer in time, another status, a body that makes no sense) ends it without a
judgement, and the prober asks again in full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

from router.runtime.connection import Connection, Fault
from router.runtime.heads import AnswerHead
from router.runtime.upstream import UpstreamPool

_BODY_BYTES_MAX: Final = 4 * 2**20
# Time passes in steps, at most one in each turn of the loop: so one that is late has looked at what
# came as often as any other before it gives up.
_STEP_S: Final = 0.05
# One that took so long no longer counts among those under way.
_PATIENCE_S: Final = 0.05

Bodies = list[bytes]
Done = Callable[[Bodies | None], None]


class QuickPoll:
    """Some questions to one worker, each asked when the one before was answered well.

    `done` hears once of the bodies of all answers, or None.
    """

    __slots__ = (
        "_bodies",
        "_connection",
        "_done",
        "_pieces",
        "_pool",
        "_requests",
        "_size",
        "began_at",
        "counts",
        "last_step",
        "within_s",
    )

    def __init__(
        self,
        pool: UpstreamPool,
        requests: Sequence[bytes],
        done: Callable[[QuickPoll, Bodies | None], None],
        *,
        within_s: float,
    ) -> None:
        self.within_s = within_s
        self.began_at, self.last_step = 0.0, 0  # as `QuickPolls` says
        self.counts = False  # among those under way
        self._pool = pool
        self._requests = requests
        self._bodies: Bodies = []
        self._done = done
        self._connection: Connection | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def begin(self) -> None:
        """Ask the first question, or the next."""
        self._pool.acquire(self)

    def cancel(self) -> None:
        """End it; nobody hears of it."""
        self._pool.cancel(self)
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None

    def fail(self) -> None:
        """End it without an answer."""
        self.cancel()
        self._done(self, None)

    # Receiver

    def on_connected(self, connection: Connection) -> None:
        """Send the question."""
        self._connection = connection
        connection.send(self, self._requests[len(self._bodies)], b"")

    def on_connect_failed(self, fault: Fault) -> None:  # noqa: ARG002
        """End without an answer."""
        self._done(self, None)

    def on_whole(self, head: AnswerHead, body: bytes, connection: Connection) -> bool:  # noqa: ARG002
        """Take a good answer that came in one piece: most of them."""
        self._connection = None
        connection.release()
        self._answered(body)
        return True

    def on_head(self, head: AnswerHead) -> bool | None:
        """Go on with a good answer, else end."""
        if 200 <= head.status < 300:
            return True
        self.fail()
        return None

    def on_data(self, data: bytes) -> None:
        """Keep a piece of the body."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _BODY_BYTES_MAX:
            self.fail()

    def on_end(self) -> None:
        """Take the answer."""
        self._connection = None
        body = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        self._answered(body)

    def on_broken(self, fault: Fault) -> None:  # noqa: ARG002
        """End without an answer."""
        self._connection = None
        self._done(self, None)

    def _answered(self, body: bytes) -> None:
        self._bodies.append(body)
        if len(self._bodies) == len(self._requests):
            self._done(self, self._bodies)
        else:
            self.begin()


class QuickPolls:
    """Those under way, at most `most` that are new; one timer sees to all their deadlines.

    One that takes long no longer counts: hosts that are dead or far hold up no others.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, most: int) -> None:
        self.most = most
        self._loop = loop
        self._waiting: dict[QuickPoll, Done] = {}
        self._under_way: dict[QuickPoll, Done] = {}
        self._counted = 0  # of those under way
        self._steps = 0  # that passed
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether more than half of the room is taken: what is not urgent had better wait."""
        return self._counted > self.most // 2

    def begin(
        self, pool: UpstreamPool, requests: Sequence[bytes], done: Done, *, within_s: float
    ) -> QuickPoll:
        """Ask, as soon as there is room.

        `done` hears of the answers' bodies, or None after `within_s` or a fault.
        """
        poll = QuickPoll(pool, requests, self._ended, within_s=within_s)
        if self._counted < self.most and not self._waiting:
            self._begin(poll, done, self._loop.time())
        else:
            self._waiting[poll] = done
            self._begin_waiting()
        return poll

    def cancel(self, poll: QuickPoll) -> None:
        """End a poll; nobody hears of it. One that has ended is ignored."""
        if self._waiting.pop(poll, None) is None and self._over(poll) is not None:
            poll.cancel()
            self._begin_waiting()

    def close(self) -> None:
        """End all of them; nobody hears of it."""
        self._waiting.clear()
        for poll in list(self._under_way):
            self.cancel(poll)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_waiting(self) -> None:
        now = self._loop.time()
        while self._waiting and (self._counted < self.most or self._found_room(now)):
            poll = next(iter(self._waiting))
            self._begin(poll, self._waiting.pop(poll), now)

    def _begin(self, poll: QuickPoll, done: Done, now: float) -> None:
        self._under_way[poll] = done
        self._counted += 1
        poll.counts, poll.began_at = True, now
        poll.last_step = self._steps + ceil(poll.within_s / _STEP_S) + 1
        if self._timer is None:
            self._timer = self._loop.call_later(_STEP_S, self._step)
        poll.begin()

    def _found_room(self, now: float) -> bool:
        """Count those no longer that take long. Whether that made room."""
        for poll in self._under_way:  # the oldest first
            if now - poll.began_at < _PATIENCE_S:
                break
            self._counted -= poll.counts
            poll.counts = False
        return self._counted < self.most

    def _over(self, poll: QuickPoll) -> Done | None:
        self._counted -= poll.counts
        poll.counts = False
        return self._under_way.pop(poll, None)

    def _ended(self, poll: QuickPoll, bodies: Bodies | None) -> None:
        done = self._over(poll)
        if self._waiting:
            self._begin_waiting()
        if done is not None:
            done(bodies)

    def _step(self) -> None:
        """Fail what is late. The timer goes on by itself, so that ending a poll costs nothing."""
        self._steps += 1
        self._timer = None
        for poll in [each for each in self._under_way if each.last_step <= self._steps]:
            if poll in self._under_way:
                poll.fail()
        if self._waiting:
            self._begin_waiting()
        if self._under_way and self._timer is None:
            self._timer = self._loop.call_later(_STEP_S, self._step)
