"""A connection to Redis, as light as can be: commands out, replies in, in their order.

`redis.asyncio` takes 55 us of CPU for a command and its reply (hiredis, uvloop) and 3,000
bytecodes, more than a limit may cost; this takes a fifth of it: one write, one read, hiredis'
parser, no task, no lock and no timer per command. It connects, logs in, and hands each reply to
whoever sent the command. Time-outs are the owner's, who closes a connection on which a reply is
overdue: no late reply can then be taken for another's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import hiredis

from router.redis_settings import RedisSettings
from router.runtime.redis_errors import NO_REDIS, RedisAway

OnReply = Callable[[Any], None]
Part = bytes | str | int  # of a command


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that takes writes: a Unix socket's path, or host and port."""

    path: str | None
    host: str
    port: int
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class RespConnection:
    """One connection, an `asyncio.Protocol` without its class, which can't be compiled. `on_reply`
    gets hiredis' values: bytes, int, list, or a `ReplyError`.
    """

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None  # once, however it ended, unless `close`d
        self.why_lost = "the connection was closed"
        self._reader = hiredis.Reader()
        self._waiting: deque[OnReply] = deque()
        self._asked: set[asyncio.Future[Any]] = set()  # by `ask`, and not answered yet
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(
        cls,
        endpoint: Endpoint,
        settings: RedisSettings,
        *,
        name: str,
        loop: asyncio.AbstractEventLoop,
    ) -> RespConnection:
        """Connect, log in and say what the server is to call it. Raises RedisAway."""
        connection = cls()
        protocol = partial(cast, asyncio.Protocol, connection)
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                if endpoint.path is not None:
                    await loop.create_unix_connection(protocol, endpoint.path)
                else:
                    await loop.create_connection(
                        protocol, endpoint.host, endpoint.port, ssl=endpoint.tls
                    )
                await connection._present(settings, name)
        except (OSError, TimeoutError, hiredis.HiredisError) as exc:
            connection.close()
            raise RedisAway(f"{endpoint}: {str(exc) or 'no answer in time'}") from exc
        except BaseException:
            connection.close()
            raise
        return connection

    def send(self, command: Sequence[Part], on_reply: OnReply) -> None:
        """Write one command. Nothing is written once it is lost, and no reply will come."""
        self.send_packed(hiredis.pack_command(command), on_reply)  # type: ignore[arg-type] # any length

    def send_packed(self, command: bytes, on_reply: OnReply) -> None:
        """The same of a command as the protocol has it."""
        if self._transport is not None:
            self._waiting.append(on_reply)
            self._transport.write(command)

    async def ask(self, *command: Part) -> Any:
        """Send a command and return the reply; several may ask at once. One that is cancelled
        leaves a reply that nobody gets.

        Raises OSError when the connection ends before, or `hiredis.ReplyError`.
        """
        return await self.ask_packed(hiredis.pack_command(command))  # type: ignore[arg-type]

    async def ask_packed(self, command: bytes) -> Any:
        """The same of a command as the protocol has it."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise ConnectionResetError(self.why_lost)
        self.send_packed(command, partial(_answer, reply))
        self._asked.add(reply)
        try:
            value = await reply
        finally:
            self._asked.discard(reply)
        if isinstance(value, Exception):
            raise value
        return value

    def lose(self, why: str) -> None:
        """Close it, and say so to its owner and to who asks."""
        self.why_lost = why
        self.connection_lost(None)

    def close(self) -> None:
        """Close it at once; replies that are on their way are not wanted, except by who asks."""
        self.on_lost = None
        self._waiting.clear()
        for reply in list(self._asked):
            _answer(reply, ConnectionResetError(self.why_lost))
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Replies, or parts of them."""
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False and waiting:
                waiting.popleft()(reply)
        except hiredis.ProtocolError:
            self.lose(NO_REDIS)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """It ended, or what came is not the protocol."""
        on_lost = self.on_lost
        self.close()
        if on_lost is not None:
            on_lost()

    def eof_received(self) -> None:
        """The server closed it; so does the transport now."""

    def pause_writing(self) -> None:
        """The server reads too slowly; what is owed to it then is overdue before it is much."""

    def resume_writing(self) -> None:
        """It reads again."""

    async def _present(self, settings: RedisSettings, name: str) -> None:
        if settings.password is not None:
            password = settings.password.get_secret_value()
            user = () if settings.user is None else (settings.user,)
            await self.ask("AUTH", *user, password)
        if settings.database:
            await self.ask("SELECT", settings.database)
        await self.ask("CLIENT", "SETNAME", name)


def _answer(reply: asyncio.Future[Any], value: Any) -> None:
    if not reply.done():
        reply.set_result(value)
