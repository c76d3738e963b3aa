"""The one place that makes connections to Redis or Valkey from the settings.

Single server, Sentinel or Cluster, TLS, ACL user. `RedisLink` has one connection for what is beside
the path of requests (registry, usage, configuration), behind a guard: while the server is away
nothing waits for it, and trials become rarer up to `retry_s_max`. The limits, which are on that
path, have a connection of their own to the address that `endpoint` finds.

Who is master the `redis.asyncio` client asks the Sentinels. Of a Cluster it sends the commands as
well, since each goes to the node of its key; elsewhere it would take ten times the CPU.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from math import inf
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import hiredis
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)

from router.redis_settings import RedisSettings
from router.runtime.redis_errors import NO_REDIS, RedisAway, RedisRefused
from router.runtime.resp import Endpoint, Part, RespConnection

_log = logging.getLogger(__name__)

_NAME: Final = "laneway"  # of a connection, at the server
_OVERDUE: Final = "no answer in time"
_NOT_TRIED: Final = "it did not answer before; it is tried again soon"
_LOG_EVERY_S: Final = 60.0  # a server that takes no writes answers every read
# Ways in which a server is not there; of a cluster, also that none of its nodes is.
_AWAY: Final = (RedisError, RedisClusterException, OSError, TimeoutError)
# A thousand characters on each client, which redis-py puts before what that Sentinel said.
_CLIENT_IN_WORDS: Final = re.compile("<redis.*?> - ")
# Answers of a server that is not, or no longer, or not yet, the one to ask.
_WRONG_SERVER: Final = (
    ReadOnlyError, MasterDownError, ClusterDownError, MovedError, TryAgainError,
)  # fmt: skip
_WRONG_SERVER_SAYS: Final = ("READONLY ", "MASTERDOWN ", "LOADING ", "NOAUTH ")


@contextmanager
def _cancellation_kept() -> Iterator[None]:
    """Raise CancelledError at the end if the task was cancelled inside and that was swallowed.

    redis-py writes by `asyncio.wait_for`, which until Python 3.12 returns as if nothing had been
    when what it waits for is done in the moment of the cancellation.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


class GuardState(Enum):
    """A guard's states; values are those of the gauge."""

    CLOSED = 0  # all is well
    HALF_OPEN = 1  # one trial is on its way
    OPEN = 2  # nothing is sent


class Guard:
    """Keeps requests from waiting for a server that is away. Times are the caller's clock.

    A failure opens it. Once the pause is over one trial is let through; when that fails too, the
    pause doubles, and after a success it is the first one again. A trial that nobody reports on
    counts as failed after a pause.
    """

    def __init__(
        self, first_s: float, longest_s: float, *, state: GuardState = GuardState.CLOSED
    ) -> None:
        self.state = state
        self._first_s = first_s
        self._longest_s = longest_s
        self._pause_s = first_s
        self._until = -inf

    def allows(self, now: float) -> bool:
        """Whether something may be sent; in the half-open state this is the trial."""
        if self.state is GuardState.CLOSED:
            return True
        if now < self._until:
            return False
        self.state = GuardState.HALF_OPEN
        self._until = now + self._pause_s
        return True

    def succeeded(self) -> bool:
        """Something was answered in time. True if that closed it."""
        closed = self.state is not GuardState.CLOSED
        self.state = GuardState.CLOSED
        self._pause_s = self._first_s
        return closed

    def failed(self, now: float) -> None:
        """Something was not answered."""
        if self.state is GuardState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, self._longest_s)
        if self.state is not GuardState.OPEN:
            self._until = now + self._pause_s
        self.state = GuardState.OPEN

    def trial_in_s(self, now: float) -> float:
        """Seconds until the next trial may be made."""
        return max(0.0, self._until - now)


class RedisLink:
    """Connections of one router to its Redis. Make it inside the loop that uses it."""

    def __init__(
        self,
        settings: RedisSettings,
        *,
        embedded_url: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert settings.mode != "none", "there is no Redis to connect to"
        self.settings = settings
        self.guard = Guard(settings.retry_s, settings.retry_s_max)
        self._clock = clock
        self._away_logged = False
        self._log_at = -inf  # not before it is said again that it is away
        self._urls = settings.urls if embedded_url is None else (embedded_url,)
        self._sentinel: Sentinel | None = None
        self._tls = tls_context(settings) if settings.uses_tls else None
        self._connection: RespConnection | None = None  # not of a Cluster, which has a client
        self._endpoint: Endpoint | None = None  # of the last connection
        self._connecting = asyncio.Lock()
        self._cluster: RedisCluster | None = None

    async def ask(self, *command: Part, timeout_s: float | None = None) -> Any:
        """Send a command, and return the reply: bytes, int, None, or a list of these; of a Cluster
        what `redis.asyncio` makes of it. It takes `timeout_s` at most (default `redis.timeout_s`),
        besides the time to connect.

        Raises RedisAway: whether the command was executed is then unknown. Raises RedisRefused
        when the server answered with an error.
        """
        if not self.guard.allows(self._clock()):
            raise RedisAway(_NOT_TRIED)
        within_s = timeout_s or self.settings.timeout_s
        try:
            if self.settings.mode == "cluster":
                answer = await self._ask_cluster(command, within_s)
            else:
                answer = await self._ask_server(command, within_s)
        except RedisRefused:
            self._succeeded()
            raise
        except RedisAway as exc:
            self._failed(exc)
            raise
        self._succeeded()
        return answer

    async def _ask_server(self, command: tuple[Part, ...], within_s: float) -> Any:
        connection = self._connection or await self._connected()
        overdue = asyncio.get_running_loop().call_later(within_s, connection.lose, _OVERDUE)
        try:
            return await connection.ask(*command)
        except OSError as exc:
            raise RedisAway(str(exc)) from exc
        except hiredis.ReplyError as exc:
            if not str(exc).startswith(_WRONG_SERVER_SAYS):
                raise RedisRefused(str(exc)) from exc
            if self._connection is connection:
                self._drop()
            raise RedisAway(str(exc)) from exc
        finally:
            overdue.cancel()

    async def _connected(self) -> RespConnection:
        """One connection serves all who ask. Raises RedisAway."""
        async with self._connecting:
            if self._connection is None:
                if self.guard.state is GuardState.OPEN:  # somebody before tried in vain
                    raise RedisAway(_NOT_TRIED)
                loop = asyncio.get_running_loop()
                endpoint = await self.endpoint("")
                connection = await RespConnection.open(
                    endpoint, self.settings, name=_NAME, loop=loop
                )
                connection.on_lost = self._drop
                self._connection, self._endpoint = connection, endpoint
            return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _ask_cluster(self, command: tuple[Part, ...], within_s: float) -> Any:
        if self._cluster is None:  # it is to be connected first, and to learn who is who
            self._cluster = self._new_cluster()
            within_s += self._find_timeout_s
        try:
            with _cancellation_kept():
                async with asyncio.timeout(within_s):
                    return await self._cluster.execute_command(*command)
        except ResponseError as exc:
            kind = RedisAway if isinstance(exc, _WRONG_SERVER) else RedisRefused
            raise kind(str(exc)) from exc
        except _AWAY as exc:
            raise RedisAway(_why(exc)) from exc

    async def endpoint(self, key: str) -> Endpoint:
        """Find the server that takes writes to `key`. Raises RedisAway."""
        try:
            with _cancellation_kept():
                async with asyncio.timeout(self._find_timeout_s):
                    match self.settings.mode:
                        case "sentinel":
                            return await self._master()
                        case "cluster":
                            return await self._node_of(key)
                        case _:
                            return self._first()
        except _AWAY as exc:
            raise RedisAway(_why(exc, "it could not be found in time")) from exc

    async def aclose(self) -> None:
        """Close all connections."""
        cluster, self._cluster = self._cluster, None
        sentinel, self._sentinel = self._sentinel, None
        self._drop()
        if cluster is not None:
            await cluster.aclose()
        for each in () if sentinel is None else sentinel.sentinels:
            await each.aclose()

    @property
    def _find_timeout_s(self) -> float:
        # One that is frozen must not keep those beside it from being asked.
        return self.settings.connect_timeout_s * 2 * (len(self._urls) + 1)

    def _first(self) -> Endpoint:
        parts = urlsplit(self._urls[0])
        if parts.scheme == "unix":
            return Endpoint(unquote(parts.path), "", 0, None)
        return Endpoint(None, parts.hostname or "", parts.port or 6379, self._tls)

    async def _master(self) -> Endpoint:
        name = self.settings.sentinel_master
        host, port = await self._sentinels().discover_master(name)
        endpoint = Endpoint(None, str(host), int(port), self._tls)
        if self._endpoint != endpoint:
            self._drop()  # it is one to a server that was master
        return endpoint

    async def _node_of(self, key: str) -> Endpoint:
        # A client that is new knows no slots, so it learns those of this moment.
        client = self._new_cluster()
        try:
            await client.initialize()
            node = client.get_node_from_key(key)
        finally:
            await client.aclose()
        if node is None:
            raise RedisAway(f"no node of the cluster has the slot of {key}")
        return Endpoint(None, str(node.host), int(node.port), self._tls)

    def _succeeded(self) -> None:
        if self.guard.succeeded() and self._away_logged:
            self._away_logged = False
            _log.info("redis answers again")

    def _failed(self, exc: RedisAway) -> None:
        now = self._clock()
        self.guard.failed(now)
        if not self._away_logged and now >= self._log_at:
            self._away_logged, self._log_at = True, now + _LOG_EVERY_S
            _log.warning("redis is away: %s", exc)

    def _new_cluster(self) -> RedisCluster:
        options = self._options()
        options.pop("db")
        options.pop("retry")
        nodes = [ClusterNode(host, port) for host, port in self._hosts()]
        return RedisCluster(
            startup_nodes=nodes,
            max_connections=self.settings.connections_max - 1,  # one is the limits'
            retry=Retry(NoBackoff(), 1),
            ssl=self._tls is not None,
            **options,
        )

    def _sentinels(self) -> Sentinel:
        if self._sentinel is None:
            settings = self.settings
            options = self._options()
            tls = {"ssl": self._tls is not None}
            own = {name: options[name] for name in options if name not in ("db",)}
            own |= {"username": settings.sentinel_user}
            password = settings.sentinel_password
            own |= {"password": None if password is None else password.get_secret_value()}
            self._sentinel = Sentinel(
                self._hosts(), sentinel_kwargs={**own, **tls}, **options, **tls
            )
        return self._sentinel

    def _hosts(self) -> list[tuple[str, int]]:
        default = 26379 if self.settings.mode == "sentinel" else 6379
        parts = [urlsplit(url) for url in self._urls]
        return [(part.hostname or "", part.port or default) for part in parts]

    def _options(self) -> dict[str, Any]:
        """What every connection of a `redis.asyncio` client is made with."""
        settings = self.settings
        password = settings.password
        options: dict[str, Any] = {
            "db": settings.database,
            "username": settings.user,
            "password": None if password is None else password.get_secret_value(),
            "socket_timeout": settings.timeout_s,
            "socket_connect_timeout": settings.connect_timeout_s,
            "client_name": _NAME,
            "retry": Retry(NoBackoff(), 0),  # the guard decides when it is tried again
        }
        if self._tls is not None:
            tls = settings.tls
            options |= {
                "ssl_ca_certs": None if tls.ca_path is None else str(tls.ca_path),
                "ssl_certfile": None if tls.cert_path is None else str(tls.cert_path),
                "ssl_keyfile": None if tls.key_path is None else str(tls.key_path),
                "ssl_check_hostname": tls.check_hostname,
            }
        return options


def _why(exc: BaseException, otherwise: str = _OVERDUE) -> str:
    """What a server that is not there is said to be."""
    if isinstance(exc, InvalidResponse):
        return NO_REDIS
    if isinstance(exc, MasterNotFoundError):
        return _CLIENT_IN_WORDS.sub("", str(exc))
    return str(exc) or otherwise


def tls_context(settings: RedisSettings) -> ssl.SSLContext:
    """How a server of rediss:// is verified, and what it is shown."""
    tls = settings.tls
    context = ssl.create_default_context(cafile=tls.ca_path)
    context.check_hostname = tls.check_hostname
    if tls.cert_path is not None:
        context.load_cert_chain(tls.cert_path, tls.key_path)
    return context
