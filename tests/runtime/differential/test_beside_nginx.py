"""The router and nginx relay the same exchanges: bytes, headers and ends must be the same.

Both are held against what was sent. Where they differ on purpose, the rule stands in `_same`.
LANEWAY_FUZZ_CASES=1000-3000 takes other cases than the first ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import pytest

from tests.runtime.differential.cases import CASES, NAMES, SECOND, Sent, Told, answer, request
from tests.runtime.differential.client import GAP_S, Client, End, Seen
from tests.runtime.differential.nginx import PROGRAM, running_nginx
from tests.runtime.raw_worker import Close, Pause, RawRequest, RawWorker, Reset, Step
from tests.runtime.relay.rig import running_router

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="nginx is not installed")

_NAMES = {b"x-g", *(name.lower() for name in NAMES)}


@dataclass
class Both:
    """A worker, and both proxies before it."""

    worker: RawWorker
    router_port: int
    nginx_port: int


@dataclass
class Exchange:
    """What came of one case through one proxy."""

    request: RawRequest | None
    answer: Seen
    second: Seen | None  # to another request on the same connection; None: it was not sent


@asynccontextmanager
async def _running() -> AsyncIterator[Both]:
    async with (
        RawWorker([[]]) as worker,
        running_router(worker, retry={"retries_max": 0}, breaker={"failures": 1000}) as router,
        running_nginx(worker.port) as nginx_port,
    ):
        yield Both(worker, router.port, nginx_port)


async def test_the_router_relays_as_nginx_does() -> None:
    async with _running() as both:
        for number in CASES:
            rng = Random(number)
            sent, told = request(rng), answer(rng)
            try:
                await _compared(both, sent, told)
            except Exception as exc:
                exc.add_note(
                    f"case {number}: {_brief(sent.pieces)}\n{_brief(told.pieces)}\n{told}"[:4000]
                )
                raise


async def _compared(both: Both, sent: Sent, told: Told) -> None:
    both.worker.scripts = [_script(told)]
    ours = await _exchange(both.worker, both.router_port, sent)
    theirs = await _exchange(both.worker, both.nginx_port, sent)
    _same(sent, told, ours, theirs)


def _brief(pieces: list[bytes]) -> list[bytes]:
    return [p if len(p) < 600 else b"%b...%d...%b" % (p[:400], len(p), p[-99:]) for p in pieces]


def _script(told: Told) -> Sequence[Step]:
    steps: list[Step] = []
    for piece in told.pieces:
        steps += [piece, Pause(GAP_S)]
    if told.ending in ("closed", "reset"):
        steps.append(Close() if told.ending == "closed" else Reset())
    return steps


async def _exchange(worker: RawWorker, port: int, sent: Sent) -> Exchange:
    worker.requests.clear()
    client = await Client.connected(port)
    try:
        await client.send(sent.pieces)
        answer = await client.answer()
        # A further request of the case before, whose client has left, may come late.
        request = next((each for each in worker.requests if each.body != b"{}"), None)
        if answer.end is not End.COMPLETE or not answer.keeps or sent.http_1_0:
            return Exchange(request, answer, None)
        if not sent.pipelined:
            await client.send([SECOND])
        return Exchange(request, answer, await client.answer())
    finally:
        client.close()


def _same(sent: Sent, told: Told, ours: Exchange, theirs: Exchange) -> None:
    """What the client and the worker got is the same."""
    for each in (ours, theirs):
        assert each.request is not None
        assert each.request.body == sent.body
        assert _plain(each.request.headers) == list(sent.headers)
    if not told.head_whole:
        assert ours.answer.status == theirs.answer.status == 502
        return
    if told.broken:
        _broken(told, ours.answer, sent)
        _broken(told, theirs.answer, sent)
        return
    if told.ending == "surplus" and told.framing == "chunked":
        # Whose bytes follow the last chunk is in doubt: to us the answer is broken, unless they
        # come when it is over.
        if ours.answer.end is not End.COMPLETE or ours.answer.body != told.body:
            _broken(told, ours.answer, sent)
        return
    for each in (ours, theirs):
        assert each.answer.status == told.status
        assert each.answer.body == told.body
        assert _plain(each.answer.headers) == list(told.headers)
    assert ours.answer.end == theirs.answer.end
    assert (ours.second is None) == (theirs.second is None)
    if told.ending == "whole" and ours.second is not None and theirs.second is not None:
        assert ours.second.status == theirs.second.status == told.status
        assert ours.second.body == theirs.second.body == told.body
        assert ours.second.end == theirs.second.end


def _broken(told: Told, seen: Seen, sent: Sent) -> None:
    """A broken answer does not look whole; the router may say in its own words what happened."""
    if seen.status == 502:
        return  # the client had nothing yet
    assert seen.status == told.status
    text, mark, _ = seen.body.partition(b'data: {"error":')
    assert told.body.startswith(text)
    if mark:
        assert told.event_stream
    elif seen.end is End.CLOSED:
        assert sent.http_1_0, "only there a connection's end may be an answer's"
    else:
        assert seen.end is End.CUT


def _plain(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that a proxy has no business with."""
    return [(name.lower(), value) for name, value in headers if name.lower() in _NAMES]
