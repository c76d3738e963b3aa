"""A worker that begins every answer, and ends it when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

CHUNK: Final = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


class StreamingWorker:
    """Streams one chunk to each chat, and the rest when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.asked = asyncio.Event()  # a request has come
        self.url = ""
        self.heads: list[bytes] = []  # of the requests that it got, polls left out

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the router closed its connection
        finally:
            writer.close()

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not head.startswith(b"POST"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        self.heads.append(head)
        self.asked.set()
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        writer.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
        await self.release.wait()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


@asynccontextmanager
async def streaming_worker() -> AsyncIterator[StreamingWorker]:
    """Serve on a free port."""
    worker = StreamingWorker()
    server = await asyncio.start_server(worker, "127.0.0.1", 0, backlog=1000)
    worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield worker
    finally:
        worker.release.set()
        server.close()
