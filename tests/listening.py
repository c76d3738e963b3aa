"""How a test's server stops to listen."""

from __future__ import annotations

import asyncio


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server when every connection that it has accepted is made.

    asyncio leaves those that are between the two open for ever, as nobody's.
    """
    loop = asyncio.get_running_loop()
    for sock in server.sockets:
        loop.remove_reader(sock)
    for _ in range(3):  # turns that a connection takes from one to the other
        await asyncio.sleep(0)
    server.close()
