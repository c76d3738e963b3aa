"""The brain's side of its links: each relay's requests as if they were the brain's own.

A request of a relay is owned by a `Remote`, which passes on what the driver wants done. A relay
that is gone has lost its clients, so its requests end as aborted and give back what they hold.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from random import SystemRandom
from typing import Any, Final, cast

import orjson
from pydantic import SecretStr

from router.config import Config
from router.contract import WorkerId, WorkerSpec, encode_spec
from router.core.adoption import Run
from router.core.effects import WorkerChanged
from router.core.limits import Reservation
from router.core.types import (
    Failure,
    Outcome,
    RequestSpec,
    Ticket,
    Usage,
    WorkerState,
)
from router.errors import Reason
from router.load_formats import PriorityOrder
from router.metrics_relays import RelayFigures
from router.runtime import frames
from router.runtime.driver import Driver
from router.runtime.edge import FAILED
from router.runtime.frames import Message
from router.runtime.link import Link
from router.runtime.malformed import MalformedFrame
from router.runtime.remote import Remote
from router.runtime.remote_driver import SILENT_S, spec_in
from router.runtime.roster import Roster
from router.runtime.upstream import UpstreamPool

_log = logging.getLogger(__name__)

# How long requests are held back at the start for the first answer of each worker, and drains that
# a brain before this one began for the relays to say what runs.
_FIRST_POLLS_S: Final = 2.0
_LOOK_AGAIN_S: Final = 0.02
_LISTEN_S: Final = 1.0
_NO_TRAITS: Final = (None, None)


class RelayLink:
    """One relay."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._driver = hub.driver
        self._requests: dict[int, Remote] = {}  # by the relay's numbers; those that are not over
        self._pid = self._number = 0
        # It was lost for a while: this brain knows its workers better, and settled what it held.
        self._was_ours = False
        self._said = (0.0, 0, 0)  # CPU seconds, resident bytes, connections
        self.heard_at = hub.loop.time()
        self.announced = False
        self.resumed = False  # and said what waited under a brain before
        # Workers that it knew, and whose ids others have by now, or nobody.
        self._gone: set[WorkerId] = set()
        self.link = Link(
            {
                frames.HELLO: self._on_hello,
                frames.KNOWN: self._on_known,
                frames.RUNS: self._on_runs,
                frames.ANNOUNCED: self._on_announced,
                frames.SUBMIT: self._on_submit,
                frames.RESUBMIT: self._on_resubmit,
                frames.UNUSED: self._on_unused,
                frames.RESUMED: self._on_resumed,
                frames.FIRST_TOKEN: self._on_first_token,
                frames.TOKENS: self._on_tokens,
                frames.FAILED: self._on_failed,
                frames.PREEMPTED: self._on_preempted,
                frames.FINISHED: self._on_finished,
                frames.EDGE_REFUSED: hub.on_refused,
                frames.PING: self._on_ping,
            },
            loop=hub.loop,
            on_lost=self._on_lost,
        )

    def send(self, message: Message) -> None:
        """Say `message` at the end of this turn."""
        self.link.send(message)

    def forget(self, number: int) -> None:
        """The request `number` is over, and its relay knows or is told."""
        owner = self._requests.pop(number, None)
        if owner is not None:
            self._driver.left(owner)

    @property
    def figures(self) -> RelayFigures:
        """What there is to say of it."""
        cpu_s, resident_bytes, connections = self._said
        return RelayFigures(self._number, len(self._requests), connections, cpu_s, resident_bytes)

    # What a relay says. News of a request that is over by now is late, and dropped.

    def _on_hello(self, version: int, pid: int, number: int, known_of: int) -> None:
        if version != frames.VERSION:
            raise MalformedFrame(f"a relay speaks version {version}, not {frames.VERSION}")
        self._pid, self._number = pid, number
        self._was_ours = known_of == self._hub.token
        self.send((frames.HELLO, frames.VERSION, os.getpid(), 0, self._hub.token))

    def _on_ping(self, cpu_s: float, resident_bytes: int, connections: int) -> None:
        self.heard_at = self._hub.loop.time()
        self._said = cpu_s, resident_bytes, connections
        self.send((frames.PONG,))

    def _on_known(
        self, text: str, order: Any, router_id: str | None, draining: bool, listed: bool
    ) -> None:
        spec, hub = spec_in(text), self._hub
        if self._was_ours:
            is_here = hub.has(spec)
        else:
            is_here = hub.restore(spec, order, router_id, draining=draining, listed=listed)
        if not is_here:
            self._gone.add(spec.worker_id)

    def _on_runs(self, number: int, spec: RequestSpec, run: Run) -> None:
        owner = self._owner(number)
        if self._was_ours:
            run.reservation = None
        try:
            self._driver.adopt(spec, owner, run, charged=run.worker_id not in self._gone)
        except Exception:
            self._not_taken(number, owner)

    def _on_announced(self) -> None:
        _log.info("relay %d is here with %d running answers", self._pid, len(self._requests))
        self.announced = True
        self.send(self._hub.config)
        for message in self._hub.workers.values():
            self.send(message)
        self.send((frames.WORKERS, list(self._hub.workers)))
        self._hub.serve(self)

    def _on_submit(self, number: int, spec: RequestSpec) -> None:
        owner = self._owner(number)
        try:
            self._driver.submit(spec, owner)
        except Exception:
            self._not_taken(number, owner)

    def _on_resubmit(self, number: int, spec: RequestSpec, reservation: Reservation) -> None:
        if self._was_ours:
            self._on_submit(number, spec)
            return
        owner = self._owner(number)
        try:
            self._driver.submit_again(spec, owner, reservation)
        except Exception:
            self._not_taken(number, owner)

    def _on_unused(self, spec: RequestSpec, reservation: Reservation) -> None:
        if not self._was_ours:
            self._driver.give_back(spec, reservation)

    def _on_resumed(self) -> None:
        self.resumed = True
        self._hub.on_resumed()

    def _not_taken(self, number: int, owner: Remote) -> None:
        """Have a request ended whose beginning failed: without a ticket nothing else will."""
        _log.exception("a request could not be taken in")
        if not hasattr(owner, "ticket"):
            self.forget(number)
        owner.cut(Reason.INTERNAL, FAILED)

    def _owner(self, number: int) -> Remote:
        if number in self._requests:
            raise MalformedFrame(f"request {number} comes twice")
        owner = self._requests[number] = Remote(self, number)
        return owner

    def _on_first_token(self, number: int) -> None:
        owner = self._requests.get(number)
        if owner is not None:
            self._driver.first_token(owner.ticket)

    def _on_tokens(self, number: int, output_tokens: int) -> None:
        owner = self._requests.get(number)
        if owner is not None:
            self._driver.tokens(owner.ticket, output_tokens)

    def _on_failed(self, number: int, failure: Failure) -> None:
        owner = self._requests.get(number)
        if owner is None:
            return
        ticket = owner.ticket
        self._driver.attempt_failed(ticket, failure)
        if number not in self._requests:
            # One that was charged to nobody, as its worker left before this brain came, has not
            # ended by that.
            self._driver.finished(ticket, Outcome.FAILED, failure.reason, None)
            ticket.owner = None

    def _on_preempted(self, number: int) -> None:
        owner = self._requests.get(number)
        if owner is not None:
            self._driver.preempted(owner.ticket)

    def _on_finished(
        self, number: int, outcome: Outcome, reason: Reason | None, usage: Usage | None
    ) -> None:
        owner = self._requests.get(number)
        if owner is not None:
            self._end(number, owner, outcome, reason, usage)

    def _on_lost(self, link: Link) -> None:  # noqa: ARG002 - its own
        self._hub.links.discard(self)
        if self._requests:
            _log.error("relay %d is gone with %d requests", self._pid, len(self._requests))
        for number, owner in list(self._requests.items()):
            # One that fails must not leave the others charged.
            try:
                self._end(number, owner, Outcome.ABORTED, Reason.RELAY_LOST, None)
            except Exception:
                _log.exception("a request of a relay that is gone can't be ended in order")

    def _end(
        self,
        number: int,
        owner: Remote,
        outcome: Outcome,
        reason: Reason | None,
        usage: Usage | None,
    ) -> None:
        self.forget(number)
        self._driver.finished(owner.ticket, outcome, reason, usage)
        # Ticket and owner know each other; left so, only the garbage collector would free them.
        owner.ticket.owner = None


class Hub:
    """All relays of a brain, and what all of them have to know."""

    def __init__(
        self,
        driver: Driver,
        *,
        loop: asyncio.AbstractEventLoop,
        on_refused: Callable[[Reason, str, bytes], None],
        is_listed: Callable[[WorkerId], bool],
        roster: Roster,
    ) -> None:
        self.driver = driver
        self.loop = loop
        self.links: set[RelayLink] = set()
        self.workers: dict[WorkerId, Message] = {}
        self.config = _config_message(driver.config)
        self.token = SystemRandom().randint(1, 2**53)  # tells it from those before it
        self._on_refused = on_refused
        self._is_listed = is_listed
        self._roster = roster
        self._specs: dict[WorkerId, WorkerSpec] = {}
        self._traits: dict[WorkerId, tuple[PriorityOrder | None, str | None]] = {}
        self._draining: set[WorkerId] = set()
        self._to_drain: set[WorkerId] = set()  # once it is known what runs there
        self._drains_at: asyncio.TimerHandle | None = None
        self._ready = False
        self._listening: asyncio.TimerHandle | None = None
        driver.on_worker_spec.append(self._on_worker_spec)
        driver.on_worker_changed.append(self._on_worker_changed)
        driver.on_pool_told.append(self._on_pool_told)
        driver.on_reserved = _tell_reserved

    def on_config(self, config: Config) -> None:
        """Have all relays take over a configuration."""
        self.config = _config_message(config)
        self._tell_all(self.config)

    def protocol(self) -> asyncio.Protocol:
        """What speaks with the relay that just connected."""
        relay = RelayLink(self)
        self.links.add(relay)
        return cast("asyncio.Protocol", relay.link)

    def start(self) -> None:
        """Let requests come when each worker has answered its first poll, or not in time."""
        self._look(self.loop.time() + _FIRST_POLLS_S)
        self._listen()

    def _listen(self) -> None:
        """Give up relays that hang: what they hold is others'."""
        now = self.loop.time()
        for relay in list(self.links):
            if now - relay.heard_at > SILENT_S:
                relay.link.give_up("a relay says nothing any more")
        self._listening = self.loop.call_later(_LISTEN_S, self._listen)

    def figures(self) -> list[RelayFigures]:
        """What there is to say of each relay, in their order."""
        found = [relay.figures for relay in self.links if relay.announced]
        return sorted(found, key=lambda each: each.number)

    def close(self) -> None:
        """End all links."""
        if self._listening is not None:
            self._listening.cancel()
        if self._drains_at is not None:
            self._drains_at.cancel()
        for relay in list(self.links):
            relay.link.close()

    def serve(self, relay: RelayLink) -> None:
        """Tell a relay, which has said all that it knows, when requests may come."""
        if not self._awaits_relays():
            self._roster.keep(self._specs.keys())
            if self._to_drain:
                self._drain()
        if self._ready:
            relay.send((frames.READY,))

    def on_resumed(self) -> None:
        """A relay has said all that a brain before granted. When all have, the rest is nobody's."""
        buckets, core = self.driver.buckets, self.driver.dispatcher.router_id
        if buckets is not None and self._count(attrgetter("resumed")) >= self._relays:
            buckets.reclaim(core.partition(".")[0] + ".", own=core + ":")

    def on_refused(self, reason: Reason, request_id: str, target: str) -> None:
        """A relay refused a request on its own."""
        self._on_refused(reason, request_id, target.encode("latin-1"))

    def has(self, spec: WorkerSpec) -> bool:
        """Whether that worker is here, at that address."""
        known = self._specs.get(spec.worker_id)
        return known is not None and known.url == spec.url

    def restore(
        self,
        spec: WorkerSpec,
        order: PriorityOrder | None,
        router_id: str | None,
        *,
        draining: bool,
        listed: bool,
    ) -> bool:
        """Take back a worker that a relay knows from a brain before this one; False: it left.

        One that was `listed` in the file left if that names it no more; it may end its drain. A
        relay that hung may not have heard that a worker left, or drains.
        """
        known = self._specs.get(spec.worker_id)
        draining = draining or self._roster.drained(spec.worker_id)
        if known is None:
            if not self._roster.has(spec):
                _log.info("worker %s left while a relay did not hear of it", spec.worker_id)
                return False
            if listed and not draining:
                _log.warning("worker %s is not in the configuration any more", spec.worker_id)
                return False
            if any(other.url == spec.url for other in self._specs.values()):
                _log.warning("worker %s is here under another name by now", spec.worker_id)
                return False
            self._rejoin(spec, order, router_id)
        elif known.url != spec.url:
            _log.warning("worker %s is at %s by now", spec.worker_id, known.url)
            return False
        if draining and spec.worker_id not in self._draining | self._to_drain:
            self._to_drain.add(spec.worker_id)
            self._tell_worker(spec.worker_id)
            if self._drains_at is None:
                self._drains_at = self.loop.call_later(_FIRST_POLLS_S, self._drain)
        return True

    def _rejoin(self, spec: WorkerSpec, order: PriorityOrder | None, router_id: str | None) -> None:
        self.driver.on_worker_joined(spec)
        pool = self.driver.upstreams.get(spec.worker_id)
        assert pool is not None, "whoever joined has one"
        pool.set_priority_order(order)
        self.driver.on_routers(spec.worker_id, None if router_id is None else (router_id,))

    def _awaits_relays(self) -> bool:
        return self._count(attrgetter("announced")) < self._relays

    @property
    def _relays(self) -> int:
        return self.driver.config.relays.count

    def _count(self, has: Callable[[RelayLink], bool]) -> int:
        return sum(map(has, self.links))

    def _drain(self) -> None:
        """Go on with the drains of a brain before this one.

        A worker leaves as soon as nothing runs on it, so that has to be known first.
        """
        if self._drains_at is not None:
            self._drains_at.cancel()
            self._drains_at = None
        grace_s = self.driver.config.server.shutdown_grace_s
        to_drain, self._to_drain = self._to_drain, set()
        for worker_id in to_drain:
            self.driver.on_drain(worker_id, deadline_s=grace_s)

    def _on_pool_told(self, pool: UpstreamPool) -> None:
        worker_id = WorkerId(pool.name)
        if worker_id in self._specs and self._traits.get(worker_id, _NO_TRAITS) != pool.traits:
            self._traits[worker_id] = pool.traits
            self._tell_worker(worker_id)

    def _on_worker_spec(self, spec: WorkerSpec) -> None:
        self._specs[spec.worker_id] = spec
        self._tell_worker(spec.worker_id)

    def _on_worker_changed(self, change: WorkerChanged) -> None:
        worker_id = change.worker_id
        if change.new is WorkerState.DRAINING:
            self._draining.add(worker_id)
            self._tell_worker(worker_id)
        elif change.new is None:
            for known in (self._specs, self._traits, self.workers):
                known.pop(worker_id, None)
            self._roster.drop(worker_id)
            self._draining.discard(worker_id)
            self._to_drain.discard(worker_id)
            self._tell_all((frames.WORKER_GONE, worker_id))

    def _tell_worker(self, worker_id: WorkerId) -> None:
        spec = self._specs[worker_id]
        drains = worker_id in self._draining or worker_id in self._to_drain
        self._roster.put(worker_id, spec.url, drains=drains)
        message = (
            frames.WORKER,
            encode_spec(spec).decode(),
            *self._traits.get(worker_id, _NO_TRAITS),
            drains,
            self._is_listed(worker_id),
        )
        self.workers[worker_id] = message
        self._tell_all(message)

    def _tell_all(self, message: Message) -> None:
        for relay in list(self.links):  # one that does not read leaves it by that
            if relay.announced:
                relay.send(message)

    def _look(self, until: float) -> None:
        views = self.driver.snapshot().workers
        waits = bool(self._to_drain) or any(
            not view.answered and not view.probe_failures for view in views
        )
        if waits and self.loop.time() < until:
            self.loop.call_later(_LOOK_AGAIN_S, partial(self._look, until))
            return
        self._drain()
        self._ready = True
        for relay in list(self.links):
            if relay.announced:
                relay.send((frames.READY,))


def _tell_reserved(ticket: Ticket) -> None:
    assert isinstance(ticket.owner, Remote)
    ticket.owner.reserved()


def _config_message(config: Config) -> Message:
    document = config.model_dump(exclude_unset=True)
    text = orjson.dumps(document, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    return (frames.CONFIG, text.decode())


def _plain(value: Any) -> Any:
    """What JSON has no form for, as a document of a configuration says it; secrets are shown."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value)
