"""Polls of workers that are well: plain callbacks instead of a task, a timer and a head for each.

Most polls ask what they asked a second ago and get a good answer. Those take this way. Whatever
else comes of one (no answer in time, another status, a body that makes no sense) ends it without a
judgement, and the prober asks again in full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from router.runtime.connection import Connection, Fault
from router.runtime.heads import AnswerHead
from router.runtime.upstream import UpstreamPool

_BODY_BYTES_MAX: Final = 4 * 2**20


class QuickPoll:
    """Some questions to one worker, each asked when the one before was answered well.

    `done` hears once of the body of the last answer, or None.
    """

    __slots__ = ("_connection", "_done", "_pieces", "_pool", "_requests", "_size", "deadline")

    def __init__(
        self,
        pool: UpstreamPool,
        requests: Sequence[bytes],
        done: Callable[[QuickPoll, bytes | None], None],
        *,
        deadline: float,
    ) -> None:
        self.deadline = deadline
        self._pool = pool
        self._requests = list(requests)
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
        connection.send(self, self._requests[0], b"")

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
        if len(self._requests) == 1:
            self._done(self, body)
        else:
            del self._requests[0]
            self.begin()


class QuickPolls:
    """Those under way, at most so many; one timer sees to all their deadlines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._under_way: dict[QuickPoll, Callable[[bytes | None], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(
        self,
        pool: UpstreamPool,
        requests: Sequence[bytes],
        done: Callable[[bytes | None], None],
        *,
        within_s: float,
    ) -> QuickPoll:
        """Ask; `done` hears of the last answer's body, or None after `within_s` or a fault."""
        poll = QuickPoll(pool, requests, self._ended, deadline=self._loop.time() + within_s)
        self._under_way[poll] = done
        if self._timer is None:
            self._timer = self._loop.call_at(poll.deadline, self._expire)
        poll.begin()
        return poll

    def cancel(self, poll: QuickPoll) -> None:
        """End a poll; nobody hears of it. One that has ended is ignored."""
        if self._under_way.pop(poll, None) is not None:
            poll.cancel()

    def close(self) -> None:
        """End all of them; nobody hears of it."""
        for poll in list(self._under_way):
            self.cancel(poll)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ended(self, poll: QuickPoll, body: bytes | None) -> None:
        done = self._under_way.pop(poll, None)
        if done is not None:
            done(body)

    def _expire(self) -> None:
        """Fail what is late. The timer goes on by itself, so that ending a poll costs nothing."""
        now = self._loop.time()
        self._timer = None
        for poll in [each for each in self._under_way if each.deadline <= now]:
            if poll in self._under_way:
                poll.fail()
        if self._under_way and self._timer is None:
            at = min(poll.deadline for poll in self._under_way)
            self._timer = self._loop.call_at(at, self._expire)
