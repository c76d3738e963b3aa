"""Polls of workers that are well, which are nearly all polls there are.

Each asks what it asked a second ago, and gets a good answer of known length. So the bytes of a
question are made once, all its requests go out in one write over a connection that nothing else
uses, and the answer is found in what was read by its length. Whatever else comes of one (no answer
in time, another status, chunks) ends it without a judgement, and the prober asks again in full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import ceil
from typing import Final, Protocol, cast

from router.runtime.heads import HEAD_BYTES_MAX

_BYTES_MAX: Final = 4 * 2**20  # of answers that are not complete
_LENGTH: Final = b"\r\ncontent-length:"
_LENGTH_MAX: Final = 9_999_999
_DIGITS: Final = b"0123456789"
_OK: Final = b"HTTP/1.1 200 "
_SHAPES_MAX: Final = 64
_LENGTHS_MAX: Final = 256
_plain_shapes: Final[dict[bytes, bytes]] = {}  # to the name of the length as it is spelt there
_lengths: Final[dict[bytes, int]] = {}  # by heads: those of one second and length are the same
# Time passes in steps, at most one in each turn of the loop: so one that is late has looked at what
# came as often as any other before it gives up.
_STEP_S: Final = 0.05

Bodies = list[bytes]
Done = Callable[[Bodies | None], None]


class Network(Protocol):
    """Opens connections: the router's `Upstreams`, or a test's."""

    loop: asyncio.AbstractEventLoop

    async def open(self, url: str, protocol: asyncio.Protocol) -> None:
        """Connect. Raises OSError, TimeoutError or UnicodeError when that can't be."""


class Question:
    """What is asked again and again over a line; one at a time may be under way there.

    `done` hears of the bodies of all answers, or None after a fault or when their time is over.
    """

    __slots__ = ("answers", "done", "last_step", "line", "request", "under_way")

    def __init__(self, line: Line, requests: Sequence[bytes], done: Done) -> None:
        self.line = line
        self.request = b"".join(requests)
        self.answers = len(requests)
        self.done = done
        self.last_step = 0
        self.under_way = False  # or waiting for room


class Line:
    """The way to one address: a connection that is made when it is needed."""

    __slots__ = ("_connecting", "_network", "_url", "_wire", "over", "question")

    def __init__(
        self, network: Network, url: str, over: Callable[[Question, Bodies | None], None]
    ) -> None:
        self.question: Question | None = None  # that is under way
        self._network = network
        self._url = url
        self.over = over
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[None] | None = None

    def ask(self, question: Question) -> None:
        """Send the requests of a question, over a new connection if there is none."""
        self.question = question
        if self._wire is not None:
            self._wire.transport.write(question.request)
        else:
            self._connecting = self._network.loop.create_task(self._connect())

    def drop(self) -> None:
        """Close the connection. Nobody hears of the question that is under way."""
        self.question = None
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.line = None
            wire.abort()

    def fail(self) -> None:
        """Close the connection, and say that nothing good came of the question."""
        question = self.question
        self.drop()
        if question is not None:
            self.over(question, None)

    def lost(self, *, used: bool) -> None:
        """The connection was closed. A question that met with that is asked again."""
        self._wire = None
        if used and self.question is not None:
            self.ask(self.question)
        else:
            self.fail()

    async def _connect(self) -> None:
        wire = _Wire()
        try:
            await self._network.open(self._url, cast(asyncio.Protocol, wire))
        except (OSError, TimeoutError, UnicodeError):
            self._connecting = None
            self.fail()
        except asyncio.CancelledError:
            wire.abort()
            raise
        else:
            self._connecting = None
            question = self.question
            if question is None or wire.transport.is_closing():
                wire.abort()
                self.fail()
            else:
                wire.line, self._wire = self, wire
                wire.transport.write(question.request)


class _Wire:
    """One connection of a line: an asyncio.Protocol without its class, which can't be compiled."""

    __slots__ = ("_bodies", "_held", "_made", "_used", "line", "transport")

    def __init__(self) -> None:
        self.line: Line | None = None  # None: it is of no use any more, or not yet
        self.transport: asyncio.Transport
        self._made = False
        self._bodies: Bodies = []  # answers to the question so far
        self._held = b""  # of an answer that is not complete
        self._used = False  # it has brought answers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)
        self._made = True

    def abort(self) -> None:
        """Close a connection that may not even be made."""
        if self._made:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Find the answers in what was read."""
        line = self.line
        if line is None or (question := line.question) is None:
            self.transport.abort()  # bytes that nobody asked for
            return
        if self._held:
            data, self._held = self._held + data, b""
        at, size = 0, len(data)
        while (begin := data.find(b"\r\n\r\n", at) + 4) > 3:
            length = plain_length(data[at : begin - 2])
            if length < 0:
                line.fail()
                return
            end = begin + length
            if end > size:
                break
            self._bodies.append(data[begin:end])
            at = end
            if len(self._bodies) == question.answers:
                bodies, self._bodies = self._bodies, []
                if at == size:
                    self._used, line.question = True, None
                    line.over(question, bodies)
                else:
                    line.fail()
                return
        if size > _BYTES_MAX:
            line.fail()
        else:
            self._held = data[at:]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Tell the line. Of an answer that has begun the rest is missing."""
        line, self.line = self.line, None
        if line is not None:
            line.lost(used=self._used and not self._held and not self._bodies)

    def eof_received(self) -> None:
        """The worker closed it; so does the transport now."""

    def pause_writing(self) -> None:
        """The worker reads too slowly; its answer is overdue before much is owed to it."""

    def resume_writing(self) -> None:
        """It reads again."""


def plain_length(head: bytes) -> int:
    """How long the body behind a head is; -1: it is not a plain 200, or that can't be told at once.

    `head` ends with the end of its last line.
    """
    length = _lengths.get(head)
    if length is None:
        if len(_lengths) >= _LENGTHS_MAX:
            _lengths.clear()
        length = _lengths[head] = _plain_length(head)
    return length


def _plain_length(head: bytes) -> int:
    # Heads of one origin differ in their figures alone: most were looked at before.
    shape = head.translate(None, _DIGITS)
    name = _plain_shapes.get(shape) or _name_of_length(shape)
    if not name or not head.startswith(_OK):
        return -1
    try:
        at = head.index(name) + len(name)
        length = int(head[at : head.find(b"\r", at)])
    except ValueError:  # digits in the name, or blanks between them
        return -1
    return length if length <= _LENGTH_MAX else -1


def _name_of_length(shape: bytes) -> bytes:
    """The end of a line and "content-length:" as a head, digits left out, spells it.

    Empty where the head does not say by that alone where its answer ends.
    """
    lower = shape.lower()
    at = lower.find(_LENGTH)
    end = at + len(_LENGTH)
    if at < 0 or shape[end : shape.find(b"\r", end)].strip(b" \t") or len(shape) > HEAD_BYTES_MAX:
        return b""
    kept = b"\r\nconnection:" not in lower or b"\r\nconnection: keep-alive\r\n" in lower
    if not kept or lower.count(_LENGTH) != 1 or b"-encoding:" in lower:
        return b""
    if len(_plain_shapes) >= _SHAPES_MAX:
        _plain_shapes.clear()
    name = _plain_shapes[shape] = shape[at:end]
    return name


class QuickPolls:
    """Questions that are under way: in each step at most `most` begin that are not soon over.

    Those that take longer no longer count: hosts that are dead or far hold up no others. Each has
    `within_s` from its begin; one timer sees to all deadlines.
    """

    def __init__(self, network: Network, *, most: int, within_s: float) -> None:
        self.most = most
        self.allow(within_s)
        self._network = network
        self._loop = network.loop
        self._waiting: dict[Question, None] = {}
        self._new: dict[Question, None] = {}  # begun in this step
        self._old: dict[Question, None] = {}
        self._steps = 0  # that passed
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether more than half of the room is taken: what is not urgent had better wait."""
        return len(self._new) > self.most // 2

    def allow(self, within_s: float) -> None:
        """Give so long to each question that begins from now on."""
        self._steps_each = ceil(within_s / _STEP_S) + 1

    def line(self, url: str) -> Line:
        """A line of its own to an address."""
        return Line(self._network, url, self._over)

    def ask(self, question: Question) -> None:
        """Ask as soon as there is room. The question is not under way, nor another on its line."""
        question.under_way = True
        if self._waiting or len(self._new) >= self.most:
            self._waiting[question] = None
        else:
            self._begin(question)

    def cancel(self, question: Question) -> None:
        """End a question; nobody hears of it. One that is not under way is ignored."""
        if question.under_way:
            question.under_way = False
            if self._waiting.pop(question, self) is self:
                question.line.drop()
                self._forget(question)

    def close(self) -> None:
        """End all of them; nobody hears of it."""
        for question in (*self._waiting, *self._new, *self._old):
            self.cancel(question)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, question: Question) -> None:
        self._new[question] = None
        question.last_step = self._steps + self._steps_each
        if self._timer is None:
            self._timer = self._loop.call_later(_STEP_S, self._step)
        question.line.ask(question)

    def _forget(self, question: Question) -> None:
        question.under_way = False
        if self._new.pop(question, self) is self:
            self._old.pop(question, None)
        if self._waiting:
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._new) < self.most:
            question = next(iter(self._waiting))
            del self._waiting[question]
            if question.line.question is None:
                self._begin(question)
            else:  # another one took its line meanwhile
                self._over(question, None)

    def _over(self, question: Question, bodies: Bodies | None) -> None:
        self._forget(question)
        question.done(bodies)

    def _step(self) -> None:
        """Fail what is late. The timer goes on by itself, so that ending a poll costs nothing."""
        self._steps += 1
        self._timer = None
        for question in [each for each in self._old if each.last_step <= self._steps]:
            if question in self._old:
                question.line.fail()
        self._old |= self._new
        self._new = {}
        self._begin_waiting()
        if self._old and self._timer is None:
            self._timer = self._loop.call_later(_STEP_S, self._step)
