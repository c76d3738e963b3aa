"""A worker whose every byte the test decides. It answers as SGLang does until told otherwise.

`answer` handles every call, `script` the next ones: each an `Answering`, which gets the `Call` and
writes what it likes. The worker records calls, polls and aborts; `Call.gone` is set when the
router closes the connection of a call before its answer has ended. It runs in the test's event
loop, so a test holds an answer back with an asyncio.Event and needs no sleep.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.field.wire import reset
from tests.listening import stop_listening

Answering = Callable[["Call"], Awaitable[None]]
RawHeaders = Sequence[tuple[str, str]]
SSE = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]
JSON = [("content-type", "application/json")]
DONE = b"data: [DONE]\n\n"


class Call:
    """One request to the worker, and the hand that writes its answer."""

    def __init__(self, connection: _Connection, head: bytes, body: bytes) -> None:
        self._connection = connection
        line, *fields = head.split(b"\r\n")
        self.method, self.target, _ = line.decode("latin-1").split(" ", 2)
        self.body = body
        self.headers = [
            (name.decode("latin-1").lower(), value.strip().decode("latin-1"))
            for name, _, value in (field.partition(b":") for field in fields if field)
        ]
        self.arrived_at = asyncio.get_running_loop().time()
        self.gone = asyncio.Event()
        self.gone_at: float | None = None
        self.ended = False
        self._chunked = False

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def raw(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._connection.write(data)

    def head(self, status: int = 200, headers: RawHeaders = SSE, *, chunked: bool = True) -> None:
        """Write a head."""
        self._chunked = chunked
        lines = [f"HTTP/1.1 {status} X"] + [f"{name}: {value}" for name, value in headers]
        if chunked:
            lines.append("transfer-encoding: chunked")
        self.raw("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        """Write a piece of the body, as one chunk where the head said so."""
        self.raw(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def event(self, text: str, **choice: Any) -> None:
        """Write one chat event with `text` in it."""
        self.chunk(chat_event(text, **choice))

    def end(self) -> None:
        """Write the end of a chunked body."""
        if self._chunked:
            self.raw(b"0\r\n\r\n")
        self.ended = True

    async def drained(self) -> None:
        """Wait until the router has taken what was written, or has left."""
        await self._connection.drained()

    def reset(self) -> None:
        """Cut the connection by RST."""
        self.ended = True
        self._connection.reset()

    def close(self) -> None:
        """Close the connection."""
        self.ended = True
        self._connection.close()


class MockWorker:
    """A scripted worker on a port of its own."""

    def __init__(self, *, host: str = "127.0.0.1", models: Sequence[str] = ("m",)) -> None:
        self.host = host
        self.port = 0
        self.models = list(models)
        self.api_key: str | None = None
        self.kv_total_tokens = 100_000
        self.figures: dict[str, Any] = {}  # laid over the load answer's one rank
        self.load_answer: tuple[int, bytes] | None = None  # instead of the load answer
        self.hang = asyncio.Event()  # set: nothing but inference is answered
        self.answer: Answering = good
        self.script: deque[Answering] = deque()
        self.calls: list[Call] = []
        self.polls: list[Call] = []
        self.aborts: list[Any] = []
        self._connections: set[_Connection] = set()
        self._closed = asyncio.Event()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def id(self) -> str:
        """The id that the router derives."""
        return self.url.removeprefix("http://")

    @property
    def running(self) -> int:
        """Calls that have neither ended nor been left."""
        return sum(not call.ended and not call.gone.is_set() for call in self.calls)

    async def start(self) -> None:
        """Listen; on the same port as before, if there was one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), self.host, self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: refuse connections and reset the open ones."""
        if self._server is not None:
            await stop_listening(self._server)
            self._server = None
        for connection in list(self._connections):
            connection.reset()
        while self._connections:
            self._closed.clear()
            await self._closed.wait()

    async def handle(self, call: Call) -> None:
        """Answer one request."""
        ops = _OPS.get(call.path)
        if self.api_key is not None and call.header("authorization") != f"Bearer {self.api_key}":
            self.polls.append(call)
            if not call.path.startswith(("/health", "/ready", "/metrics")):
                plain(call, 401, {"error": "Unauthorized"})
                return
        if ops is None:
            self.calls.append(call)
            await (self.script.popleft() if self.script else self.answer)(call)
            return
        self.polls.append(call)
        if self.hang.is_set():
            await call.gone.wait()
            return
        ops(self, call)

    def load(self) -> dict[str, Any]:
        """The one rank of its load answer."""
        return {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": 0,
            "num_waiting_reqs": 0,
            "num_used_tokens": 0,
            "max_total_num_tokens": self.kv_total_tokens,
            "max_running_requests": 1024,
            "gen_throughput": 100.0,
            "cache_hit_rate": 0.0,
            **self.figures,
        }


class _Connection(asyncio.Protocol):
    def __init__(self, worker: MockWorker) -> None:
        self._worker = worker
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._call: Call | None = None
        self._lost = False
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._worker._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._writable.set()
        self._worker._connections.discard(self)
        self._worker._closed.set()
        if self._call is not None and not self._call.ended:
            self._call.gone_at = asyncio.get_running_loop().time()
            self._call.gone.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def write(self, data: bytes) -> None:
        if not self._lost:
            self._transport.write(data)

    async def drained(self) -> None:
        await self._writable.wait()

    def reset(self) -> None:
        if not self._lost:
            reset(self._transport)

    def close(self) -> None:
        self._transport.close()

    def _next(self) -> None:
        """Begin the next request if it is whole and the connection is free."""
        if self._task is not None:
            return
        head, blank, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not blank:
            return
        fields = head.lower().split(b"\r\n")[1:]
        lengths = [int(f.partition(b":")[2]) for f in fields if f.startswith(b"content-length:")]
        assert not any(f.startswith(b"transfer-encoding:") for f in fields), "not needed so far"
        length = lengths[0] if lengths else 0
        if len(rest) < length:
            return
        self._buffer = bytearray(rest[length:])
        self._call = Call(self, head, rest[:length])
        self._task = asyncio.get_running_loop().create_task(self._answer(self._call))

    async def _answer(self, call: Call) -> None:
        await self._worker.handle(call)
        self._task = None
        if not self._lost:
            self._next()


def chat_event(text: str, **choice: Any) -> bytes:
    """One chat chunk."""
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}]
    document = {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": choices}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def usage_event(prompt_tokens: int, output_tokens: int) -> bytes:
    """The last chunk of a stream with usage."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    usage["total_tokens"] = prompt_tokens + output_tokens
    document = {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def plain(call: Call, status: int, document: Any, headers: RawHeaders = ()) -> None:
    """Write a whole JSON answer (or bytes as they are)."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    call.head(status, [*JSON, *headers, ("content-length", str(len(body)))], chunked=False)
    call.chunk(body)
    call.end()


def status(code: int, headers: RawHeaders = (), *, message: str = "scripted") -> Answering:
    """Answers `code` with SGLang's error body."""
    error = {"object": "error", "message": message, "type": "X", "param": None, "code": code}

    async def answer(call: Call) -> None:
        plain(call, code, error, headers)

    return answer


async def good(call: Call) -> None:
    """Answer as a healthy worker: three tokens, plain or streamed."""
    if call.path in ("/v1/embeddings", "/encode"):
        plain(call, 200, {"object": "list", "data": [], "usage": {"prompt_tokens": 3}})
        return
    if not call.body or not call.json().get("stream"):
        message = {"role": "assistant", "content": "one two three"}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        chat = {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}
        plain(call, 200, chat)
        return
    call.head()
    for text in ("one ", "two ", "three"):
        call.event(text)
    call.event("", finish_reason="stop")
    call.chunk(usage_event(10, 3))
    call.chunk(DONE)
    call.end()


def held(gate: asyncio.Event, *, first: Sequence[str] = ("one ",)) -> Answering:
    """Streams `first` at once, the rest when `gate` opens. Nothing more once the router left."""

    async def answer(call: Call) -> None:
        call.head()
        for text in first:
            call.event(text)
        await either(gate, call.gone)
        if not call.gone.is_set():
            call.event("last", finish_reason="stop")
            call.chunk(usage_event(10, len(first) + 1))
            call.chunk(DONE)
            call.end()

    return answer


def silent(gate: asyncio.Event) -> Answering:
    """Sends nothing at all until `gate` opens, then a good answer."""

    async def answer(call: Call) -> None:
        await either(gate, call.gone)
        if not call.gone.is_set():
            await good(call)

    return answer


async def either(*signals: asyncio.Event) -> None:
    """Wait for the first of several events."""
    waits = [asyncio.ensure_future(signal.wait()) for signal in signals]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _loads(worker: MockWorker, call: Call) -> None:
    if worker.load_answer is not None:
        plain(call, *worker.load_answer)
        return
    loads = {"timestamp": "2026-01-01T00:00:00Z", "version": "0.5.23", "loads": [worker.load()]}
    plain(call, 200, loads)


def _models(worker: MockWorker, call: Call) -> None:
    data = [
        {"id": name, "object": "model", "owned_by": "sglang", "max_model_len": 32_768}
        for name in worker.models
    ]
    plain(call, 200, {"object": "list", "data": data})


def _model_info(worker: MockWorker, call: Call) -> None:
    plain(call, 200, {"model_path": worker.models[0], "served_model_name": worker.models[0]})


def _server_info(worker: MockWorker, call: Call) -> None:
    info = {"max_total_num_tokens": worker.kv_total_tokens, "version": "0.5.23", "api_key": "s"}
    plain(call, 200, info)


def _abort(worker: MockWorker, call: Call) -> None:
    worker.aborts.append(call.json())
    plain(call, 200, b"")


def _empty(worker: MockWorker, call: Call) -> None:
    plain(call, 200, b"")


def _missing(worker: MockWorker, call: Call) -> None:
    plain(call, 404, {"detail": "Not Found"})


_OPS: dict[str, Callable[[MockWorker, Call], None]] = {
    "/ready": _empty,
    "/health": _empty,
    "/health_generate": _empty,
    "/v1/loads": _loads,
    "/get_load": _missing,
    "/metrics": _missing,
    "/v1/models": _models,
    "/model_info": _model_info,
    "/get_model_info": _model_info,
    "/server_info": _server_info,
    "/get_server_info": _server_info,
    "/abort_request": _abort,
}
