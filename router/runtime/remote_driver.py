"""An edge whose decisions are made in another process, the brain.

A relay tells the brain what happens and executes what comes back, so an exchange sees no difference
but that answers take their time. While the brain is away, requests that run on a worker go on; all
others wait for it a while. When it is back it hears of the workers that were known and of what
runs, then of those that wait. What ended meanwhile is told, too, so that it is counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

import orjson
from pydantic import ValidationError

from router.config import BadConfig, Config
from router.config_source import validated
from router.contract import Lane, WorkerId, WorkerSpec
from router.core.degrade import Decision
from router.core.limits import Reservation
from router.core.types import Failure, Outcome, Refusal, RequestSpec, Usage
from router.errors import Reason
from router.runtime import frames
from router.runtime.edge import FAILED, Edge, Running
from router.runtime.frames import Message
from router.runtime.link import Handlers, Link
from router.runtime.malformed import MalformedFrame
from router.runtime.packing import FAILURE, GRANTED, PLAIN, SPEC, USAGE
from router.runtime.relay_ticket import RelayTicket
from router.runtime.upstream import Upstreams

_log = logging.getLogger(__name__)

# Waiting for a brain: more requests than this are refused at once.
_WAITING_MAX: Final = 10_000
# What ended while there was no brain; more is not counted.
_OWED_MAX: Final = 20_000
_LINK_DEADLINE_S: Final = 5.0  # for the brain's own greeting
_PAUSE_S: Final = 0.05  # between attempts to reach it
_RETRY_AFTER_S: Final = 1.0
# Either side gives up the other after so much silence; it is asked for a sign once a second.
SILENT_S: Final = 15.0
_PING_S: Final = 1.0
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class RemoteDriver(Edge):
    """The edge of a relay. `path` is the brain's socket, `number` says which relay this is."""

    def __init__(
        self,
        config: Config,
        upstreams: Upstreams,
        path: Path,
        *,
        number: int = 0,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, upstreams, loop=loop, clock=clock)
        self._path = path
        self._number = number
        self._newest: Link | None = None  # that was begun, to whatever end it came
        self._link: Link | None = None  # of them the one to a brain that knows what is here
        self.ready = False  # it takes requests
        self.on_config: list[Callable[[Config], None]] = []  # the holders of settings
        self._met = asyncio.Event()  # a brain was here and has said what is in force
        self._lost = asyncio.Event()
        self._greeted = asyncio.Event()
        self._linking: asyncio.Task[None] | None = None
        self._pinged_at = self._heard_at = 0.0
        self._numbers = count(1)
        self._tickets: dict[int, RelayTicket] = {}  # that are not over
        self._waiting: dict[int, RelayTicket] = {}  # of them, those that no brain knows
        self._workers: dict[WorkerId, Message] = {}  # the brain's last word on each
        self._brain = self._known_of = 0  # at the other end; the one whose workers these are
        self._owed: list[Message] = []  # said when there is a brain again
        self._handlers: Handlers = {
            frames.HELLO: self._on_hello,
            frames.WORKER: self._on_worker,
            frames.WORKER_GONE: self._on_worker_gone,
            frames.READY: self._on_ready,
            frames.DISPATCH: self._on_dispatch,
            frames.JUDGED: self._on_judged,
            frames.REFUSE: self._on_refuse,
            frames.PREEMPT: self._on_preempt,
            frames.CUT: self._on_cut,
            frames.CONFIG: self._on_config,
            frames.PONG: self._on_pong,
            frames.WORKERS: self._on_workers,
            frames.RESERVED: self._on_reserved,
        }

    def start(self) -> None:
        """Begin to watch time, and to look for the brain."""
        self._sweep()
        self._linking = self._loop.create_task(self._keep_linked())
        self._linking.add_done_callback(_say_fault)

    async def met(self, *, within_s: float) -> None:
        """Wait for the configuration in force; it may have changed since this process began."""
        try:
            async with asyncio.timeout(within_s):
                await self._met.wait()
        except TimeoutError:
            _log.warning("no brain yet: serving by the configuration of the start")

    async def aclose(self) -> None:
        """Say what is unsaid, leave the brain, and stop."""
        if self._linking is not None:
            self._linking.cancel()
            await asyncio.gather(self._linking, return_exceptions=True)
        self.stop()

    def refused_at_edge(self, reason: Reason, request_id: str, target: bytes) -> None:
        """Have the brain count and log a request that it never heard of."""
        self._tell((frames.EDGE_REFUSED, reason.value, request_id, target.decode("latin-1")))

    # Requests.

    def submit(self, spec: RequestSpec, owner: Running) -> None:
        """Ask the brain; the owner hears of its answer later."""
        now = self._clock()
        ticket = RelayTicket(next(self._numbers), spec, owner, now)
        owner.ticket = ticket
        self.running.add(owner)
        self._tickets[ticket.number] = ticket
        link = self._link
        if link is not None and self.ready and not link.full:
            ticket.sent = True
            link.send((frames.SUBMIT, ticket.number, SPEC.fields_of(spec)))
            return
        self._waiting[ticket.number] = ticket
        ticket.waits_until = now + self.config.relays.brain_wait_s
        if len(self._waiting) > _WAITING_MAX:
            self._refuse(ticket)

    def first_token(self, ticket: RelayTicket) -> None:
        """The first byte of an answer came."""
        ticket.first_token_at = self._clock()
        if self._link is not None:
            self._link.send((frames.FIRST_TOKEN, ticket.number))

    def tokens(self, ticket: RelayTicket, output_tokens: int) -> None:
        """A stream has put out so many tokens by now; a brain that is slow hears of it later."""
        ticket.output_tokens = output_tokens
        if self._link is not None and not self._link.full:
            self._tell_tokens(ticket)

    def attempt_failed(self, ticket: RelayTicket, failure: Failure) -> None:
        """Ask the brain what follows. Without one nothing does."""
        if self._link is None:
            self._give_up(ticket, failure)
        else:
            ticket.failure = failure
            self._link.send((frames.FAILED, ticket.number, FAILURE.fields_of(failure)))

    def finished(
        self, ticket: RelayTicket, outcome: Outcome, reason: Reason | None, usage: Usage | None
    ) -> None:
        """A request is over, in whatever state."""
        if self._tickets.pop(ticket.number, None) is not None:
            self._waiting.pop(ticket.number, None)
            self._tell_end(ticket, outcome, reason, usage)

    def _give_up(self, ticket: RelayTicket, failure: Failure) -> None:
        del self._tickets[ticket.number]
        self._tell_end(ticket, Outcome.FAILED, failure.reason, None)
        ticket.owner.judged(again=False)

    def _tell_end(
        self, ticket: RelayTicket, outcome: Outcome, reason: Reason | None, usage: Usage | None
    ) -> None:
        end = (
            frames.FINISHED,
            ticket.number,
            PLAIN[outcome],
            None if reason is None else PLAIN[reason],
            None if usage is None else USAGE.fields_of(usage),
        )
        if ticket.sent:
            self._tell_tokens(ticket)
            self._tell(end)
        elif ticket.runs:
            self._tell(ticket.running(), end)
        else:
            self._tell_unused(ticket)

    def _tell_unused(self, ticket: RelayTicket) -> None:
        """A request is over that no brain knows, but for what one before granted it."""
        if ticket.reservation is not None:
            spec = SPEC.fields_of(ticket.spec)
            self._tell((frames.UNUSED, spec, GRANTED.fields_of(ticket.reservation)))

    def _tell_tokens(self, ticket: RelayTicket) -> None:
        if ticket.told_tokens != ticket.output_tokens:
            ticket.told_tokens = ticket.output_tokens
            self._tell((frames.TOKENS, ticket.number, ticket.output_tokens))

    def _tell(self, *messages: Message) -> None:
        """Say all of these, or owe all of them: one without the others would never end."""
        link = self._link  # saying the first may be what loses it
        if link is not None:
            for message in messages:
                link.send(message)
        elif len(self._owed) + len(messages) <= _OWED_MAX:
            self._owed.extend(messages)

    # The link.

    async def _keep_linked(self) -> None:
        """Find the brain again whenever it is gone."""
        try:
            while True:
                if (link := await self._linked()) is not None:
                    self._announce(link)
                    await self._lost.wait()
                    _log.warning("the brain is gone; what runs goes on")
                await asyncio.sleep(_PAUSE_S)
        finally:
            if self._newest is not None:
                self._newest.close()

    async def _linked(self) -> Link | None:
        """Reach the brain; None: it does not answer."""
        self._lost.clear()
        self._greeted.clear()
        link = self._newest = Link(self._handlers, loop=self._loop, on_lost=self._on_lost)
        try:
            async with asyncio.timeout(_LINK_DEADLINE_S):
                protocol = partial(cast, asyncio.Protocol, link)
                await self._loop.create_unix_connection(protocol, str(self._path))
                known_of = self._known_of
                link.send((frames.HELLO, frames.VERSION, os.getpid(), self._number, known_of))
                await self._greeted.wait()
        except (OSError, TimeoutError):
            link.close()
            return None
        return None if link.lost else link

    def _announce(self, link: Link) -> None:
        """Tell a brain what is here. Saying so much may be what loses it."""
        self._link, self._heard_at = link, self._clock()
        if self._brain == self._known_of:  # when it lost this relay it settled what requests held
            for ticket in self._tickets.values():
                ticket.reservation = None
        for _, *fields in self._workers.values():
            link.send((frames.KNOWN, *fields))
        for ticket in list(self._tickets.values()):
            if ticket.runs and not link.lost:
                ticket.sent, ticket.told_tokens = True, ticket.output_tokens
                link.send(ticket.running())
        for message in self._owed:
            link.send(message)
        link.send((frames.ANNOUNCED,))
        link.flush()
        if not link.lost:
            self._owed.clear()

    def _on_hello(self, version: int, pid: int, number: int, token: int) -> None:  # noqa: ARG002
        if version != frames.VERSION:
            raise MalformedFrame(f"the brain speaks version {version}, not {frames.VERSION}")
        _log.info("the brain is process %d", pid)
        self._brain = token
        self._greeted.set()

    def _on_ready(self) -> None:
        self.ready = True
        self._ask()
        if self._link is not None:
            self._link.send((frames.RESUMED,))

    def _ask(self) -> None:
        """Ask for all that waited."""
        link = self._link
        assert link is not None
        for ticket in self._waiting.values():
            ticket.sent = True
            link.send(ticket.asked())
        self._waiting.clear()

    def _on_lost(self, link: Link) -> None:
        if link is self._newest:  # whoever waits for it does so in vain
            self._greeted.set()
            self._lost.set()
        if link is not self._link:
            return  # it was given up before
        self._link, self.ready = None, False
        until = self._clock() + self.config.relays.brain_wait_s
        for ticket in list(self._tickets.values()):
            ticket.sent = False
            if ticket.failure is not None:
                self._guarded(ticket, partial(self._give_up, ticket, ticket.failure))
            elif not ticket.runs:
                self._waiting.setdefault(ticket.number, ticket)
                ticket.waits_until = until

    def _guarded(self, ticket: RelayTicket, act: Callable[[], object]) -> None:
        """Do what a request has to do now; a fault in it ends it, and touches no other."""
        try:
            act()
        except Exception:
            _log.exception("a request failed")
            self._cut(ticket.owner, Reason.INTERNAL, FAILED)

    # What the brain decides. News of a request that is over by now is late, and dropped.

    def _on_dispatch(
        self,
        number: int,
        lane: Lane,
        worker_id: str,
        degraded: Decision | None,
        reservation: Reservation | None,
    ) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.lane, ticket.worker_id, ticket.degraded = lane, WorkerId(worker_id), degraded
            ticket.reservation = reservation
            ticket.runs = True
            ticket.attempts += 1
            ticket.output_tokens = ticket.told_tokens = 0
            ticket.dispatched_at = self._clock()
            self._guarded(ticket, ticket.owner.dispatch)

    def _on_reserved(self, number: int, reservation: Reservation) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.reservation = reservation

    def _on_judged(self, number: int, again: bool) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.runs, ticket.failure = False, None
            if not again:
                del self._tickets[number]
            self._guarded(ticket, partial(ticket.owner.judged, again=again))

    def _on_refuse(self, number: int, refusal: Refusal) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            self._guarded(ticket, partial(ticket.owner.refuse, refusal))

    def _on_preempt(self, number: int) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None and ticket.owner.preempt():
            ticket.runs = False
            self._tell((frames.PREEMPTED, number))

    def _on_cut(self, number: int, reason: Reason, message: str) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None:
            self._cut(ticket.owner, reason, message)

    # Settings and workers.

    def _on_config(self, text: str) -> None:
        try:
            config = validated(orjson.loads(text))
        except (ValueError, BadConfig) as exc:
            raise MalformedFrame(f"no configuration: {exc}") from exc
        self.config = config
        for take_over in self.on_config:
            take_over(config)
        self._met.set()

    def _on_worker(self, text: str, order: Any, router_id: str | None, *flags: bool) -> None:
        spec = spec_in(text)
        known = self.upstreams.get(spec.worker_id)
        if known is not None and known.url != spec.url:  # the one that was known left meanwhile
            self._on_worker_gone(spec.worker_id)
        self._workers[spec.worker_id] = (frames.WORKER, text, order, router_id, *flags)
        pool = self.upstreams.add(spec)
        pool.set_priority_order(order)
        pool.set_router(router_id)

    def _on_worker_gone(self, worker_id: str) -> None:
        self._workers.pop(WorkerId(worker_id), None)
        self.upstreams.remove(WorkerId(worker_id))

    def _on_workers(self, worker_ids: tuple[str, ...]) -> None:
        self._known_of = self._brain
        for worker_id in self._workers.keys() - set(worker_ids):
            self._on_worker_gone(worker_id)

    # Time.

    def _on_pong(self) -> None:
        self._heard_at = self._clock()

    def _ping(self, link: Link, now: float) -> None:
        """Say a few figures, and give up a brain that does not answer."""
        if now - self._heard_at > SILENT_S:
            link.give_up("the brain says nothing any more")
        elif now - self._pinged_at >= _PING_S:
            self._pinged_at = now
            cpu_s = time.process_time()
            link.send((frames.PING, cpu_s, _resident_bytes(), len(self.clients)))

    def _swept(self, now: float) -> None:
        if self._link is not None:
            self._ping(self._link, now)
        if self.ready and self._link is not None and not self._link.full:
            self._ask()
            return
        for ticket in list(self._waiting.values()):
            if ticket.waits_until <= now:
                self._guarded(ticket, partial(self._refuse, ticket))

    def _refuse(self, ticket: RelayTicket) -> None:
        """Let a request wait for the brain no longer."""
        del self._tickets[ticket.number], self._waiting[ticket.number]
        self._tell_unused(ticket)
        self.refused_at_edge(Reason.RESTARTING, ticket.spec.request_id, b"")
        ticket.owner.refuse(
            Refusal(
                reason=Reason.RESTARTING,
                message="The process that decides is being restarted; try again soon.",
                retry_after_s=_RETRY_AFTER_S,
            )
        )


def _resident_bytes() -> int:
    """Memory of this process."""
    with Path("/proc/self/statm").open("rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _say_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _log.critical("this relay looks for its brain no more", exc_info=fault)


def spec_in(text: str) -> WorkerSpec:
    """The worker that a message names. Raises MalformedFrame."""
    try:
        return WorkerSpec.model_validate_json(text)
    except ValidationError as exc:
        raise MalformedFrame(f"no worker: {exc.error_count()} faults") from exc
