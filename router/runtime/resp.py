"""A connection to Redis for the path of requests: commands out, replies in, in their order.

`redis.asyncio` takes 55 us of CPU for a command and its reply (hiredis, uvloop), more than a limit
may cost; this takes a fifth of it: one write, one read, hiredis' parser, no task, no lock and no
timer per command. It connects, logs in, and hands each reply to whoever sent the command. Time-outs
are the owner's, who closes a connection on which a reply is overdue: no late reply can then be
taken for another's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import hiredis

from router.redis_settings import RedisSettings
from router.runtime.redis_errors import NO_REDIS, RedisAway
from router.runtime.redis_link import Endpoint

OnReply = Callable[[Any], None]
_NAME: Final = b"laneway-limits"


class RespConnection:
    """One connection, an `asyncio.Protocol` without its class, which can't be compiled. `on_reply`
    gets hiredis' values: bytes, int, list, or a `ReplyError`.
    """

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None  # once, however it ended, unless `close`d
        self.why_lost = "the connection was closed"
        self._reader = hiredis.Reader()
        self._waiting: deque[OnReply] = deque()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(
        cls, endpoint: Endpoint, settings: RedisSettings, *, loop: asyncio.AbstractEventLoop
    ) -> RespConnection:
        """Connect and log in. Raises RedisAway."""
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
                await connection._present(settings)
        except (OSError, TimeoutError, hiredis.HiredisError) as exc:
            connection.close()
            raise RedisAway(f"{endpoint}: {str(exc) or 'no answer in time'}") from exc
        except BaseException:
            connection.close()
            raise
        return connection

    def send(self, command: tuple[bytes, ...], on_reply: OnReply) -> None:
        """Write one command. Nothing is written once it is lost, and no reply will come."""
        if self._transport is not None:
            self._waiting.append(on_reply)
            self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type] # any length

    async def ask(self, *command: bytes) -> Any:
        """Send a command and return the reply; only while `on_lost` is nobody's.

        Raises OSError or `hiredis.ReplyError`.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answered(value: Any) -> None:
            if not reply.done():
                reply.set_result(value)

        self.on_lost = lambda: answered(ConnectionResetError(self.why_lost))
        self.send(command, answered)
        if self._transport is None:
            self.on_lost()
        try:
            value = await reply
        finally:
            self.on_lost = None
        if isinstance(value, Exception):
            raise value
        return value

    def close(self) -> None:
        """Close it at once; replies that are on their way are not wanted."""
        self.on_lost = None
        self._waiting.clear()
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
            self.why_lost = NO_REDIS
            self.connection_lost(None)

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

    async def _present(self, settings: RedisSettings) -> None:
        if settings.password is not None:
            password = settings.password.get_secret_value().encode()
            user = () if settings.user is None else (settings.user.encode(),)
            await self.ask(b"AUTH", *user, password)
        if settings.database:
            await self.ask(b"SELECT", str(settings.database).encode())
        await self.ask(b"CLIENT", b"SETNAME", _NAME)
