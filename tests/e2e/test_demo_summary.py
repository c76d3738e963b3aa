"""What the demo says at the end: every request that was sent has one outcome."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.demo.load import CHAT, CHATS_MAX, Load
from router.demo.view import View

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-laneway-lane: short\r\n"
    b"x-laneway-worker: w\r\ntransfer-encoding: chunked\r\n\r\n"
)
TOKEN = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


ANSWERS = {
    "answered": HEAD + chunk(TOKEN) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
    "broken: no [DONE]": HEAD + chunk(TOKEN) + b"0\r\n\r\n",
    "broken: not an event (JSONDecodeError)": HEAD + chunk(b"data: {\n\n") + b"0\r\n\r\n",
    "broken: not an event (KeyError)": HEAD + chunk(b"data: {}\n\n") + b"0\r\n\r\n",
    "broken: x": HEAD + chunk(b'data: {"error":{"code":"x"}}\n\n') + b"0\r\n\r\n",
    "lost: RemoteProtocolError": HEAD + chunk(TOKEN),
    "429 shed": b"HTTP/1.1 429 X\r\nx-laneway-reason: shed\r\ncontent-length: 0\r\n\r\n",
    "still running at the end": HEAD + chunk(TOKEN),
}


@asynccontextmanager
async def answering(outcome: str) -> AsyncIterator[str]:
    """A router that gives every chat the same answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWERS[outcome])
            if "running" in outcome:
                await reader.read()  # the body, then the end of the client
                while await reader.read(2**16):
                    pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("outcome", ANSWERS)
async def test_what_was_sent_has_one_outcome_each(outcome: str) -> None:
    async with answering(outcome) as url:
        load, stopping = Load(url, model="m"), asyncio.Event()
        view = View(load.tally, url=url)
        running = asyncio.get_running_loop().create_task(load.run(stopping))
        async with asyncio.timeout(10):
            while load.tally.sent < 5:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        stopping.set()
        await running
    tally = load.tally
    assert tally.running == 0
    assert sum(tally.outcomes.values()) == tally.sent
    assert tally.outcomes.keys() <= {outcome, "still running at the end"}
    text = "\n".join(view.summary())
    sent = re.search(r"(\d+) requests sent in", text)
    assert sent is not None
    assert int(sent[1]) == sum(int(n) for n in re.findall(r"^ +(\d+)  \S", text, re.MULTILINE))


async def test_chats_of_a_burst_are_counted_apart_and_it_is_said_why() -> None:
    async with answering("answered") as url:
        load, stopping = Load(url, model="m", burst_every_s=0.5), asyncio.Event()
        view = View(load.tally, url=url)
        running = asyncio.get_running_loop().create_task(load.run(stopping))
        async with asyncio.timeout(10):
            while load.tally.first_tokens["burst"] < CHAT.burst:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        stopping.set()
        await running
    counts = load.tally.first_tokens
    assert counts["burst"] + counts["short"] <= load.tally.sent
    summary = "\n".join(view.summary())
    assert re.search(rf"  burst  p50 .*\({counts['burst']} answers\)", summary)
    assert f"A burst is {CHAT.burst} short chats at once, every 9 s." in summary


async def test_what_was_not_sent_is_told_apart() -> None:
    load = Load("http://127.0.0.1:9", model="m")
    load.tally.not_sent = 3
    view = View(load.tally, url="u")
    assert f"3 more not sent, as {CHATS_MAX} were running" in view.summary()
    assert "not sent: 3" in view.line()
