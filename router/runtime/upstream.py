"""Pools of kept-alive connections to workers.

A pool belongs to one origin. A receiver asks for a connection and is called back, at once when one
is idle. The last one used is used next, so that surplus connections grow old and are closed before
the worker would. Only making a connection takes a task; it has a deadline, and is cancelled when
its receiver no longer wants it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from functools import partial
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

from pydantic import SecretStr

from router.config import Config, UpstreamSettings
from router.contract import WorkerId, WorkerSpec
from router.core.types import Priority
from router.errors import Reason
from router.load_formats import PriorityOrder
from router.runtime.connection import Connection, Fault, Receiver
from router.runtime.heads import Headers, PreparedHeads, header_text
from router.runtime.hops import PRIORITY_LINES
from router.runtime.loops import via_line
from router.runtime.outbox import Outbox
from router.runtime.patience import Patience
from router.runtime.rounds import Round, steps_for
from router.runtime.side_calls import Answer, SideCall, UpstreamFailed

__all__ = ["Answer", "UpstreamFailed", "UpstreamPool", "Upstreams"]

# A pool of an address that is no worker's (an agent's) is dropped when unused for this long.
_ORIGIN_UNUSED_S: Final = 60.0
# No file was left for a connection, of this process or of the machine: no worker's fault.
_FILES_USED_UP: Final = frozenset((errno.EMFILE, errno.ENFILE))
# What SGLang is told of P0 to P3, from first to last. Steps of 10: with its default threshold it
# stops running requests for those that are two classes above them, never for the next one.
_PRIORITY_STEP: Final = 10


def why_unreachable(exc: Exception, *, within_s: float) -> str:
    """Say why no connection could be made, in words that name the thing to mend."""
    match exc:
        case ConnectionRefusedError():
            return "connection refused"
        case TimeoutError():
            return f"no connection within {within_s:g} s"
        case socket.gaierror():
            known = exc.errno in (socket.EAI_AGAIN, socket.EAI_FAIL)
            return "the name server gives no answer" if known else "no such host"
        case ssl.SSLError():
            return f"TLS: {exc.reason or exc}"
        case OSError():
            return (exc.strerror or str(exc) or type(exc).__name__).lower()
        case _:
            return f"no such host ({exc})"  # a name that no name can be


class SweepClock:
    """The moment of the last sweep: fine enough to age idle connections."""

    now = 0.0


class UpstreamPool:
    """Connections to one origin, at most `connections_max`; more receivers wait their turn."""

    def __init__(
        self,
        name: str,
        url: str,
        settings: UpstreamSettings,
        *,
        loop: asyncio.AbstractEventLoop,
        outbox: Outbox,
        tls: ssl.SSLContext | None = None,
        api_key: SecretStr | None = None,
        router_id: bytes = b"",
        clock: SweepClock,
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        mark = b"x-laneway-worker: %b\r\nx-laneway-lane: %b\r\n"
        self.short_marks = mark % (header_text(name), b"short")
        self.long_marks = mark % (header_text(name), b"long")
        self.name = name
        self.url = url
        self.prefix = parts.path.rstrip("/").encode()
        self.heads = PreparedHeads()
        self.outbox = outbox
        self.clock = clock
        self.used_at = 0.0
        self._host, self._port = parts.hostname, parts.port or (443 if tls else 80)
        self._netloc = parts.netloc.encode()
        self._via = via_line(router_id)
        self._settings = settings
        self._loop = loop
        self._tls = tls
        self.idle: list[Connection] = []
        self._open = 0  # idle, busy and being made
        self._waiting: deque[Receiver] = deque()
        self._connecting: dict[Receiver, asyncio.Task[None]] = {}
        self._closed = False
        # Lines that tell the worker a request's class, by class; None: it does not listen.
        self.priority_lines: tuple[bytes, ...] | None = None
        self._passes_priority = False
        self.router_id: str | None = None  # where the worker is a router
        self.is_router = False
        self._priority_order: PriorityOrder | None = None
        self.set_key(api_key)

    def __repr__(self) -> str:
        return (
            f"<UpstreamPool {self._netloc.decode()} open={self._open} idle={len(self.idle)} "
            f"connecting={len(self._connecting)} waiting={len(self._waiting)}>"
        )

    def on_settings(self, settings: UpstreamSettings, tls: ssl.SSLContext | None) -> None:
        """Go by these settings; connections that are open stay as they were made."""
        self._settings = settings
        if self._tls is not None:
            self._tls = tls
        for _ in range(len(self._waiting)):  # who waited may find more room now
            self._serve_waiting()

    def set_key(self, api_key: SecretStr | None) -> None:
        """Use this bearer key from now on; None: the worker wants none."""
        self.has_key = api_key is not None
        key = f"authorization: Bearer {api_key.get_secret_value()}\r\n" if api_key else ""
        lines = key.encode() + self._via
        self.after_target = b" HTTP/1.1\r\nhost: %b\r\n%b" % (self._netloc, lines)

    def pass_priority(self, passes: bool) -> None:
        """Tell the worker the class of requests, as soon as it says that it goes by them."""
        self._passes_priority = passes
        self._settle_priorities()

    def set_priority_order(self, order: PriorityOrder | None) -> None:
        """Learn which priorities the worker serves first; None: it does not go by them."""
        self._priority_order = order
        self._settle_priorities()

    def set_router(self, router_id: str | None) -> None:
        """Learn whether the worker is a router, and which."""
        if router_id != self.router_id:
            self.router_id, self.is_router = router_id, router_id is not None
            self._settle_priorities()

    @property
    def traits(self) -> tuple[PriorityOrder | None, str | None]:
        """What the worker said of itself that matters to whoever sends it requests."""
        return self._priority_order, self.router_id

    def _settle_priorities(self) -> None:
        if self.is_router:
            self.priority_lines = PRIORITY_LINES
            return
        order = self._priority_order
        if not self._passes_priority or order is None:
            self.priority_lines = None
            return
        values = [_PRIORITY_STEP * int(priority) for priority in Priority]
        if order == "high_first":
            values.reverse()
        self.priority_lines = tuple(b"x-override-priority: %d\r\n" % value for value in values)

    def acquire(self, receiver: Receiver) -> None:
        """Call `receiver.on_connected`, now or when there is a connection."""
        idle = self.idle
        while idle:
            connection = idle.pop()
            if not connection.transport.is_closing():
                receiver.on_connected(connection)
                return
        self.connect(receiver)

    def connect(self, receiver: Receiver) -> None:
        """Make a new connection for `receiver`, or let it wait for one to be free."""
        if self._open >= self._settings.connections_max:
            self._waiting.append(receiver)
            return
        self._open += 1
        connection = Connection(self)
        task = self._loop.create_task(self._connect(receiver, connection))
        # Not in the task itself: one that is cancelled at once never runs.
        task.add_done_callback(partial(self._connect_ended, connection))
        self._connecting[receiver] = task

    def cancel(self, receiver: Receiver) -> None:
        """Forget a receiver that waits for a connection."""
        task = self._connecting.pop(receiver, None)
        if task is not None:
            task.cancel()
        elif receiver in self._waiting:
            self._waiting.remove(receiver)

    def give_back(self, connection: Connection) -> None:
        """Take back a connection that can serve another request."""
        if self._closed:
            connection.abandon()
        elif self._waiting:
            self._waiting.popleft().on_connected(connection)
        else:
            connection.idle_since = self.clock.now
            self.idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Note that a connection is closed; for each only the first time counts."""
        if connection.counted:
            connection.counted = False
            self._open -= 1
        if connection in self.idle:
            self.idle.remove(connection)
        self._serve_waiting()

    def sweep(self, now: float) -> None:
        """Close connections that were idle for too long. Called once a second or more often."""
        idle, too_old = self.idle, now - self._settings.idle_s
        while idle and idle[0].idle_since < too_old:
            idle.pop(0).abandon()

    def close(self) -> None:
        """Serve nothing new; running answers come to their end."""
        self._closed = True
        while self.idle:
            self.idle.pop().abandon()
        fault = Fault(Reason.UPSTREAM_UNREACHABLE, "the worker was removed")
        while self._waiting:
            self._waiting.popleft().on_connect_failed(fault)
        for receiver in list(self._connecting):
            self.cancel(receiver)
            receiver.on_connect_failed(fault)

    @property
    def unused(self) -> bool:
        """Whether the pool holds no connection at all."""
        return self._open == 0

    async def request(
        self,
        method: str,
        target: bytes | str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        deadline_s: float,
        body_bytes_max: int = 2**20,
    ) -> Answer:
        """Send one request beside the hot path and return its whole answer.

        Raises UpstreamFailed when there is none within `deadline_s`, or it is longer than
        `body_bytes_max`. Hop-by-hop headers are made here; `headers` names none.
        """
        call = SideCall(self, method, target, headers=headers, body=body)
        return await call.whole(deadline_s=deadline_s, body_bytes_max=body_bytes_max)

    async def _connect(self, receiver: Receiver, connection: Connection) -> None:
        try:
            async with Patience(self._settings.connect_timeout_s):
                await self._loop.create_connection(
                    partial(cast, asyncio.Protocol, connection),
                    self._host,
                    self._port,
                    ssl=self._tls,
                )
        except (OSError, TimeoutError, UnicodeError) as exc:
            self._connecting.pop(receiver, None)
            self._unmade(connection)
            if isinstance(exc, OSError) and exc.errno in _FILES_USED_UP:
                fault = Fault(Reason.CONNECTIONS_FULL, "the router has too many open files")
            else:
                why = why_unreachable(exc, within_s=self._settings.connect_timeout_s)
                fault = Fault(Reason.UPSTREAM_UNREACHABLE, why)
            receiver.on_connect_failed(fault)
        else:
            self._connecting.pop(receiver, None)
            receiver.on_connected(connection)

    def _connect_ended(self, connection: Connection, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._unmade(connection)

    def _unmade(self, connection: Connection) -> None:
        """Count out a connection that failed, or that was made just as nobody wanted it more."""
        connection.discard()
        self.forget(connection)

    def _serve_waiting(self) -> None:
        if self._waiting and not self._closed:
            self.connect(self._waiting.popleft())


def _tls_context(settings: UpstreamSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca_path)
    if settings.cert_path is not None:
        context.load_cert_chain(settings.cert_path, settings.key_path)
    return context


def _files(settings: UpstreamSettings) -> tuple[Path | None, ...]:
    return settings.ca_path, settings.cert_path, settings.key_path


class Upstreams:
    """The pools of all workers, and of the agents beside them.

    `router_id` marks whatever is sent, so that the router knows it when it comes back.
    """

    def __init__(
        self,
        settings: UpstreamSettings,
        *,
        loop: asyncio.AbstractEventLoop,
        router_id: bytes = b"",
    ) -> None:
        self.router_id = router_id
        self._settings = settings
        self.loop = loop
        self.outbox = Outbox(loop)  # of the connections to workers and to clients
        self._tls: ssl.SSLContext | None = None
        if settings.ca_path is not None or settings.cert_path is not None:
            self._tls = _tls_context(settings)  # files are read at the start, or the start fails
        self._clock = SweepClock()
        self._workers: dict[WorkerId, UpstreamPool] = {}
        self._origins: dict[str, UpstreamPool] = {}
        self._workers_round: Round[UpstreamPool] = Round()
        self._origins_round: Round[tuple[str, UpstreamPool]] = Round()
        self.get = self._workers.get

    def add(self, spec: WorkerSpec) -> UpstreamPool:
        """Make the pool of a new worker, or give a known one, at the same URL, its new key."""
        pool = self._workers.get(spec.worker_id)
        if pool is None:
            pool = self._made(spec.worker_id, spec.url, spec.api_key)
            self._workers[spec.worker_id] = pool
        else:
            pool.set_key(spec.api_key)
        pool.pass_priority(spec.pass_priority == "header")
        return pool

    def remove(self, worker_id: WorkerId) -> None:
        """Close the pool of a worker that is gone; running answers come to their end."""
        pool = self._workers.pop(worker_id, None)
        if pool is not None:
            pool.close()

    def routers_in(self, via: bytes) -> tuple[WorkerId, ...]:
        """The workers that are routers through which a request with this via header came."""
        pools = self._workers.items()
        return tuple(
            worker_id
            for worker_id, pool in pools
            if pool.router_id is not None and pool.router_id.encode() in via
        )

    def origin(self, url: str) -> UpstreamPool:
        """Return the pool of an address as such: no path before targets, no key.

        For an agent beside a worker, or for probes, whose connections stay apart from the relay's.
        """
        pool = self._origins.get(url)  # most have no path
        if pool is None:
            parts = urlsplit(url)
            origin = f"{parts.scheme}://{parts.netloc}"
            pool = self._origins.get(origin)
            if pool is None:
                pool = self._origins[origin] = self._made(origin, origin, None)
        pool.used_at = self._clock.now
        return pool

    async def open(self, url: str, protocol: asyncio.Protocol) -> None:
        """Connect `protocol` to an address as such: no pool knows of it.

        Raises OSError, TimeoutError or UnicodeError when there is no connection.
        """
        parts, tls = urlsplit(url), self._tls_for(url)
        assert parts.hostname is not None
        port = parts.port or (443 if tls else 80)
        async with Patience(self._settings.connect_timeout_s):
            await self.loop.create_connection(lambda: protocol, parts.hostname, port, ssl=tls)

    def on_config(self, config: Config) -> None:
        """Go by these settings. Raises OSError for certificates that are gone meanwhile."""
        if self._tls is not None and _files(self._settings) != _files(config.upstream):
            self._tls = _tls_context(config.upstream)
        self._settings = config.upstream
        for pool in (*self._workers.values(), *self._origins.values()):
            pool.on_settings(self._settings, self._tls)

    def sweep(self, now: float) -> None:
        """Age idle connections and drop pools that nobody uses; of many pools, those of a part."""
        self._clock.now = now
        steps = steps_for(self._settings.idle_s)
        for pool in self._workers_round.turn(self._workers.values(), steps):
            if pool.idle:
                pool.sweep(now)
        for url, pool in self._origins_round.turn(self._origins.items(), steps):
            if pool.idle:
                pool.sweep(now)
            elif not pool.used_at:
                pool.used_at = now
            elif now - pool.used_at > _ORIGIN_UNUSED_S and pool.unused:
                self._origins.pop(url, None)

    def close(self) -> None:
        """Close all pools."""
        for pool in (*self._workers.values(), *self._origins.values()):
            pool.close()
        self._workers.clear()
        self._origins.clear()

    def _made(self, name: str, url: str, api_key: SecretStr | None) -> UpstreamPool:
        return UpstreamPool(
            name,
            url,
            self._settings,
            loop=self.loop,
            outbox=self.outbox,
            tls=self._tls_for(url),
            api_key=api_key,
            router_id=self.router_id,
            clock=self._clock,
        )

    def _tls_for(self, url: str) -> ssl.SSLContext | None:
        if not url.startswith("https:"):
            return None
        self._tls = self._tls or _tls_context(self._settings)
        return self._tls
