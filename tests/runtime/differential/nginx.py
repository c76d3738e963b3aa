"""nginx before a worker, as the tests' second opinion on what HTTP means."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

# Debian puts it where ordinary users don't look.
PROGRAM = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
_START_S = 10.0

# No connection to the worker is used twice, so that no case can spoil the next one's.
_CONF = """
daemon off;
master_process off;
error_log {folder}/error.log crit;
pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
  access_log off;
  underscores_in_headers on;
  ignore_invalid_headers off;
  client_body_buffer_size 4m;
  client_max_body_size 4m;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{worker_port};
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_next_upstream off;
    }}
  }}
}}
"""


@contextlib.asynccontextmanager
async def running_nginx(worker_port: int) -> AsyncIterator[int]:
    """Run nginx before the worker on a loopback port; yields its own port."""
    assert PROGRAM is not None
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="laneway-nginx-") as name:
        folder = Path(name)
        conf = folder / "nginx.conf"
        conf.write_text(_CONF.format(folder=folder, port=port, worker_port=worker_port))
        process = await asyncio.create_subprocess_exec(
            PROGRAM, "-c", str(conf), "-p", name, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await _listening(port, process)
            yield port
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _listening(port: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            assert process.returncode is None, "nginx ended at once"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)  # nothing tells when a process begins to listen
            else:
                writer.close()
                return


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
