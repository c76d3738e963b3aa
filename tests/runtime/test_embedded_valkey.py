"""The embedded server: it is there when started, alone, and gone with its router."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from redis import Redis

from router.redis_settings import RedisSettings
from router.runtime.embedded_valkey import EmbeddedValkey
from router.runtime.redis_link import RedisLink

_ROUTER = """
import asyncio
from router.runtime.embedded_valkey import EmbeddedValkey

async def main():
    valkey = EmbeddedValkey()
    await valkey.start()
    print(valkey.url, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_it_serves_a_socket_of_its_own_and_leaves_nothing() -> None:
    valkey = EmbeddedValkey()
    await valkey.start()
    link = RedisLink(RedisSettings(mode="embedded"), embedded_url=valkey.url)
    try:
        assert await link.ask("SET", "a", "1")
        config = await link.ask("CONFIG", "GET", "port")
        assert config == [b"port", b"0"]
        directory = Path(urlsplit(valkey.url).path).parent
        assert directory.stat().st_mode & 0o077 == 0
    finally:
        await link.aclose()
        await valkey.stop()
    assert not directory.exists()
    await valkey.stop()  # a second time is fine


def test_it_ends_when_its_router_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _ROUTER], stdout=subprocess.PIPE) as router:
        try:
            assert router.stdout is not None
            path = Path(urlsplit(router.stdout.readline().decode().strip()).path)
            with Redis(unix_socket_path=str(path)) as client:
                pid = int(client.info("server")["process_id"])
        finally:
            router.send_signal(signal.SIGKILL)
    ends_at = time.monotonic() + 5
    while time.monotonic() < ends_at and (_runs(pid) or path.parent.exists()):
        time.sleep(0.02)
    assert not _runs(pid)
    assert not path.parent.exists()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
