"""A whole router in the test's own event loop, and clients that see every byte."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httptools
import orjson
import uvicorn
from uvicorn.server import ServerState

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.types import RequestRecord
from router.errors import Reason
from router.runtime.brain_link import Hub
from router.runtime.config_workers import ConfiguredWorkers
from router.runtime.driver import Driver
from router.runtime.edge import Edge
from router.runtime.front import Authenticate, Front, allow_all
from router.runtime.remote_driver import RemoteDriver
from router.runtime.roster import Roster
from router.runtime.server import protocol_for
from router.runtime.upstream import Upstreams
from tests.runtime.raw_worker import RawWorker

CHAT = b"/v1/chat/completions"
ROUTER_ID = b"the-rig"
# Whether a brain behind a link decides, as in a router with relays; `test_far` sets it.
decides_far = False
# A check that takes longer than this has failed; nothing waits for it to pass.
DEADLINE_S = 8.0


@dataclass
class Router:
    """The running router and what it told."""

    port: int
    driver: Driver
    front: Front
    state: ServerState
    records: list[RequestRecord]
    refused: list[Reason] = field(default_factory=list)
    clients: list[RawClient] = field(default_factory=list)

    async def client(self) -> RawClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(RawClient(reader, writer))
        return self.clients[-1]

    async def post(self, body: Any, *, path: bytes = CHAT, headers: bytes = b"") -> Answer:
        """Send one request on its own connection and return the answer."""
        client = await self.client()
        try:
            client.send(post(body, path=path, headers=headers))
            return await client.answer()
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def running_router(
    *workers: RawWorker | WorkerSpec,
    authenticate: Authenticate = allow_all,
    app: Any = None,
    **settings: Any,
) -> AsyncIterator[Router]:
    """Run a router before `workers`, which are active from the start."""
    loop = asyncio.get_running_loop()
    specs = [w if isinstance(w, WorkerSpec) else WorkerSpec(url=w.url) for w in workers]
    config = Config(workers=tuple(specs), **settings)
    upstreams = Upstreams(config.upstream, loop=loop, router_id=ROUTER_ID)
    driver = Driver(config, Dispatcher(config, rng=random.Random(7)), upstreams, loop=loop)
    driver.probe = _alive(driver, loop)
    records: list[RequestRecord] = []
    driver.on_record.append(records.append)
    refused: list[Reason] = []
    async with _edge_of(driver, refused) as edge:
        front = Front(
            config=config,
            driver=edge,
            authenticate=authenticate,
            on_refused=lambda reason, *_: refused.append(reason),
        )
        state = ServerState()
        server = await _served(front, state, app)
        port = server.sockets[0].getsockname()[1]
        router = Router(port, driver, front, state, records, refused)
        try:
            yield router
        finally:
            server.close()
            for client in router.clients:
                await client.close()
            for connection in list(state.connections):
                connection.transport.abort()
            await eventually(lambda: not state.connections)
            assert not edge.running
            assert edge.bodies_bytes == 0, "what was counted is given back, exactly once"
            await eventually(lambda: not driver.running)
            driver.stop()
            await server.wait_closed()


@contextlib.asynccontextmanager
async def _edge_of(driver: Driver, refused: list[Reason]) -> AsyncIterator[Edge]:
    """Start the driver; the edge of its clients is itself, or one with it behind a link."""
    active = partial(_all_active, driver)
    if not decides_far:
        driver.start()
        await eventually(active)
        yield driver
        return
    loop = asyncio.get_running_loop()
    upstreams = Upstreams(driver.config.upstream, loop=loop, router_id=ROUTER_ID)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "link"
        hub = Hub(
            driver,
            loop=loop,
            on_refused=lambda reason, *_: refused.append(reason),
            is_listed=ConfiguredWorkers(driver.config, driver).__contains__,
            roster=Roster(path.with_name("workers"), loop=loop),
        )
        listener = await loop.create_unix_server(hub.protocol, str(path))
        driver.start()
        hub.start()
        edge = RemoteDriver(driver.config, upstreams, path, loop=loop)
        edge.start()
        await eventually(lambda: edge.ready and active())
        try:
            yield edge
        finally:
            await edge.aclose()
            hub.close()
            listener.close()


def _all_active(driver: Driver) -> bool:
    return all(worker.state == "active" for worker in driver.snapshot().workers)


async def _served(front: Front, state: ServerState, app: Any) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(app or echo, http=protocol_for(front), ws="none", log_level=50)
    config.load()

    def protocol() -> asyncio.Protocol:
        made = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=state, app_state={}, _loop=loop
        )
        assert isinstance(made, asyncio.Protocol)
        return made

    return await loop.create_server(protocol, "127.0.0.1", 0)


def _alive(driver: Driver, loop: asyncio.AbstractEventLoop) -> Callable[[WorkerId], None]:
    report = LoadReport(
        running_requests=0, queued_requests=0, kv_used_tokens=0, kv_total_tokens=10**7, age_s=0.0
    )

    def probe(worker_id: WorkerId) -> None:
        loop.call_soon(driver.on_report, worker_id, report)

    return probe


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI side: answers with method, path and body."""
    assert scope["type"] == "http"
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    text = b"asgi %b %b %b" % (scope["method"].encode(), scope["raw_path"], body)
    head = {"type": "http.response.start", "status": 200}
    await send({**head, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


async def eventually(claim: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Wait until `claim` holds; fail when it does not within the deadline."""
    async with asyncio.timeout(deadline_s):
        while not claim():  # noqa: ASYNC110 - any state may be claimed; nothing tells of it
            await asyncio.sleep(0.005)


def post(body: Any, *, path: bytes = CHAT, headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    """A whole request; anything but bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return (
        b"POST %b HTTP/%b\r\nhost: router\r\ncontent-type: application/json\r\n%b"
        b"content-length: %d\r\n\r\n%b" % (path, version, headers, len(data), data)
    )


def chat(**fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


@dataclass
class Answer:
    """An answer as a client's library sees it, and its raw bytes."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    raw: bytes
    complete: bool  # it came to its proper end

    def all(self, name: bytes) -> list[bytes]:
        return [value for known, value in self.headers if known == name]

    def one(self, name: bytes) -> bytes:
        values = self.all(name)
        assert len(values) == 1, (name, self.headers)
        return values[0]

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def raw_body(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[2]


class RawClient:
    """One client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._held = b""

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self, size_max: int = 2**16) -> bytes:
        """Return what comes next; empty at the end."""
        async with asyncio.timeout(DEADLINE_S):
            held, self._held = self._held, b""
            return held or await self.reader.read(size_max)

    async def until(self, mark: bytes) -> bytes:
        """Read up to and including `mark`."""
        data = b""
        while mark not in data:
            piece = await self.read()
            assert piece, f"closed before {mark!r}: {data!r}"
            data += piece
        end = data.index(mark) + len(mark)
        self._held = data[end:]
        return data[:end]

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """Read one answer, or what there is of it when the connection ends."""
        seen = _Seen()
        parser = httptools.HttpResponseParser(seen)
        raw = b""
        while not seen.complete:
            try:
                data = await self.read()
            except ConnectionError:
                break
            if not data:
                break
            raw += data
            for index in range(len(data)):
                parser.feed_data(data[index : index + 1])
                if seen.interim:
                    seen.interim = False
                    seen.headers.clear()
                elif seen.complete or (bodiless and seen.headed):
                    seen.complete = True
                    self._held = data[index + 1 :]
                    raw = raw[: len(raw) - len(self._held)]
                    break
        if not seen.headed:
            return Answer(0, [], b"", raw, complete=False)
        names = [name for name, _ in seen.headers]
        until_close = b"content-length" not in names and b"transfer-encoding" not in names
        complete = seen.complete or until_close
        return Answer(parser.get_status_code(), seen.headers, seen.body, raw, complete)

    async def closed(self) -> bool:
        """Wait until the router closed the connection; True when nothing more came before."""
        try:
            return not await self.read()
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class _Seen:
    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.status = b""
        self.headed = False
        self.complete = False
        self.interim = False

    def on_status(self, status: bytes) -> None:
        self.status = status

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        if self.status == b"Continue":
            self.interim, self.headed = True, False
        else:
            self.complete = True


def assert_error(got: Any, status: int, reason: str) -> dict[str, Any]:
    assert got.status == status
    assert got.one(b"content-type") == b"application/json"
    assert got.one(b"x-laneway-reason") == reason.encode()
    assert got.one(b"x-request-id")
    error = got.json()["error"]
    assert error["code"] == reason
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    if status in (429, 503):
        assert int(got.one(b"retry-after")) >= 1
    assert isinstance(error, dict)
    return error


def pool_of(router: object, worker: RawWorker) -> object:
    upstreams = router.driver.upstreams  # type: ignore[attr-defined]
    return upstreams.get(WorkerId(f"127.0.0.1:{worker.port}"))
