"""Fake SGLang workers: canned answers from a protocol far cheaper than any router.

    python -m loadtest.bench.worker 18001 18002 [--interval-ms 0] [--reports]

One process serves any number of ports, one worker each. A stream is written at once while the
decode step is 0 (its chunks coalesce in the kernel). With a step of N ms each port writes, as an
SGLang worker does, one chunk to every running stream per step, each as its own write.
`GET /_bench/set?interval_ms=N` changes the step, `?pad_bytes=N` puts so many bytes of a comment
behind each chunk of a stream that is written at once; `GET /_bench/stats` counts. With `--reports`
each answers /health with the load report of an agent, else as SGLang does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from typing import Final, cast

import httptools
import uvloop

from loadtest.bench.payloads import (
    MODEL,
    SSE_DONE,
    STAMP_DIGITS,
    compact_json,
    completion,
    stream_parts,
)

INFERENCE_PATHS: Final = frozenset(
    (b"/v1/chat/completions", b"/v1/completions", b"/generate", b"/chat/completions")
)
DEFAULT_TOKENS: Final = 64
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?(?:new_)?tokens"\s*:\s*(\d+)')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_KV_TOKENS = 1_000_000
_PROMPT_TOKENS = 300
_HEAD = b"date: Sun, 29 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
_SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\n" + _HEAD + b"content-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class FakeWorker:
    """One port: canned answers, the running streams and the decode steps."""

    def __init__(
        self, port: int, *, interval_ms: float = 0.0, model: str = MODEL, reports: bool = False
    ) -> None:
        self.interval_s = interval_ms / 1000
        self.requests = self.streams = self.chunks = self.in_flight = self.polls = 0
        self._port = port
        self._running: list[WorkerConnection] = []
        self._ticking = False
        self._padding = b""
        self._last_stamp = 0
        self._completion = _answer(completion(model))
        parts = stream_parts(model)
        zeros = b"0" * STAMP_DIGITS
        chunk = _framed(parts.before_stamp + zeros + parts.after_stamp)
        self._before_stamp, self._after_stamp = chunk.split(zeros)
        self._first = _framed(parts.first)
        self._last = _framed(parts.finish) + _framed(SSE_DONE) + b"0\r\n\r\n"
        self._fixed = _fixed_answers(model)
        self._live: dict[bytes, Callable[[], bytes]] = {
            b"/get_load": self._get_load,
            b"/v1/loads": self._loads,
            b"/metrics": self._metrics,
            b"/_bench/stats": self._stats,
        }
        if reports:
            self._live[b"/health"] = self._report

    def get(self, path: bytes, query: bytes) -> bytes:
        """The whole response to a request that is no inference."""
        if path in self._live:
            self.polls += 1
            return self._live[path]()
        if path in self._fixed:
            return self._fixed[path]
        if path == b"/_bench/set" and query.startswith(b"interval_ms="):
            self.interval_s = float(query.partition(b"=")[2]) / 1000
            return _answer(compact_json({"interval_ms": self.interval_s * 1000}))
        if path == b"/_bench/set" and query.startswith(b"pad_bytes="):
            size = int(query.partition(b"=")[2])
            self._padding = _framed(b":%b\n\n" % (b" " * size)) if size else b""
            return _answer(compact_json({"pad_bytes": size}))
        return _answer(compact_json({"error": {"message": "not found"}}), status=b"404 Not Found")

    def infer(self, connection: WorkerConnection, body: bytes) -> None:
        """Answer an inference request, now or step by step."""
        self.requests += 1
        if not _STREAM.search(body):
            connection.write(self._completion)
            return
        found = _MAX_TOKENS.search(body)
        tokens = int(found.group(1)) if found else DEFAULT_TOKENS
        self.streams += 1
        self.chunks += tokens
        start = _SSE_HEAD + self._first
        if not self.interval_s and self._padding:
            pairs = ((self._chunk(), self._padding) for _ in range(tokens))
            connection.write_all([start, *(piece for pair in pairs for piece in pair), self._last])
            return
        if not self.interval_s:
            chunks = b"".join([self._chunk() for _ in range(tokens)])
            connection.write(start + chunks + self._last)
            return
        connection.write(start)
        connection.tokens_left = tokens
        self.in_flight += 1
        self._running.append(connection)
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(self.interval_s, self._step)

    def _step(self) -> None:
        """One decode step: a chunk to every running stream."""
        still_running = []
        for connection in self._running:
            if connection.closed:
                self.in_flight -= 1
            elif connection.tokens_left:
                connection.tokens_left -= 1
                connection.write(self._chunk())
                still_running.append(connection)
            else:
                self.in_flight -= 1
                connection.write(self._last)
        self._running = still_running
        self._ticking = bool(still_running)
        if still_running:
            asyncio.get_running_loop().call_later(self.interval_s, self._step)

    def _chunk(self) -> bytes:
        # Stamps never repeat, so that the client can tell a repeated chunk from a new one.
        self._last_stamp = max(time.monotonic_ns(), self._last_stamp + 1)
        return b"%b%019d%b" % (self._before_stamp, self._last_stamp, self._after_stamp)

    def _get_load(self) -> bytes:
        load = {
            "dp_rank": 0,
            "num_reqs": self.in_flight,
            "num_waiting_reqs": 0,
            "num_tokens": self.in_flight * _PROMPT_TOKENS,
            "ts_tic": time.monotonic(),
        }
        return _answer(compact_json([load]))

    def _loads(self) -> bytes:
        used_tokens = self.in_flight * _PROMPT_TOKENS
        load = {
            "dp_rank": 0,
            "timestamp": time.time(),
            "num_running_reqs": self.in_flight,
            "num_waiting_reqs": 0,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": used_tokens,
            "num_total_tokens": used_tokens,
            "max_total_num_tokens": _KV_TOKENS,
            "max_running_requests": 1024,
            "token_usage": used_tokens / _KV_TOKENS,
            "gen_throughput": 1000.0,
            "cache_hit_rate": 0.5,
            "utilization": self.in_flight / 1024,
        }
        return _answer(
            compact_json(
                {"timestamp": "2026-11-29T12:00:00+00:00", "version": "0.5.20", "loads": [load]}
            )
        )

    def _report(self) -> bytes:
        used_tokens = self.in_flight * _PROMPT_TOKENS
        return _answer(
            compact_json(
                {
                    "format": "laneway.load/1",
                    "running_requests": self.in_flight,
                    "queued_requests": 0,
                    "queued_uncached_tokens": 0,
                    "max_running_requests": 1024,
                    "kv_used_tokens": used_tokens,
                    "kv_total_tokens": _KV_TOKENS,
                    "generation_tokens_per_s": 1000.0,
                    "cache_hit_ratio": 0.5,
                    "gpu_utilization_ratio": 0.4,
                    "gpu_memory_used_bytes": 60_000_000_000,
                    "gpu_memory_total_bytes": 80_000_000_000,
                    "age_s": time.monotonic() % 0.5,
                    "ready": True,
                }
            )
        )

    def _metrics(self) -> bytes:
        text = (
            b"# TYPE sglang:num_running_reqs gauge\n"
            b"sglang:num_running_reqs %d\nsglang:num_queue_reqs 0\n"
            b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\n"
            b"vllm:gpu_cache_usage_perc 0.1\n"
        )
        return _answer(text % (self.in_flight, self.in_flight), b"text/plain; version=0.0.4")

    def _stats(self) -> bytes:
        return _answer(
            compact_json(
                {
                    "port": self._port,
                    "requests": self.requests,
                    "streams": self.streams,
                    "chunks": self.chunks,
                    "in_flight": self.in_flight,
                    "polls": self.polls,
                }
            )
        )


class WorkerConnection(asyncio.Protocol):
    """A connection from the router: parses requests, answers each at once."""

    __slots__ = ("_body", "_parser", "_transport", "_url", "_worker", "tokens_left")

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self.tokens_left = 0

    @property
    def closed(self) -> bool:
        """Whether nobody reads what is written here."""
        return self._transport is None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send `data`; a no-op once the peer has left."""
        if self._transport is not None:
            self._transport.write(data)

    def write_all(self, pieces: list[bytes]) -> None:
        """Send `pieces` without joining them: streams may share most of theirs."""
        if self._transport is not None:
            self._transport.writelines(pieces)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # Not an isinstance check: uvloop's transports only look like asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Forget the transport, which ends a running stream at its next step."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Feed the parser; bytes that are no HTTP close the connection."""
        try:
            with contextlib.suppress(httptools.HttpParserUpgrade):
                self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.close()

    def on_url(self, url: bytes) -> None:
        """Collect the target, which may come in pieces."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002
        """Let a client that asks first send its body."""
        if name.lower() == b"expect":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Collect the body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Answer."""
        url, self._url = self._url, b""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        path, _, query = url.partition(b"?")
        method = self._parser.get_method()
        if method == b"POST" and path in INFERENCE_PATHS:
            self._worker.infer(self, body)
            return
        answer = self._worker.get(path, query)
        if method == b"HEAD":
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        self.write(answer)


async def listen(worker: FakeWorker, port: int) -> asyncio.Server:
    """Serve `worker` on a loopback port (0: any free one)."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(
        lambda: WorkerConnection(worker), "127.0.0.1", port, backlog=4096
    )


def _answer(
    body: bytes, content_type: bytes = b"application/json", *, status: bytes = b"200 OK"
) -> bytes:
    return (
        b"HTTP/1.1 %b\r\n" % status
        + _HEAD
        + b"content-length: %d\r\ncontent-type: %b\r\n\r\n" % (len(body), content_type)
        + body
    )


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _fixed_answers(model: str) -> dict[bytes, bytes]:
    """The routes by which routers find out what stands behind a URL."""
    info = {
        "model_path": model,
        "served_model_name": model,
        "tokenizer_path": model,
        "is_generation": True,
        "version": "0.5.20",
        "tp_size": 1,
        "dp_size": 1,
        "preferred_sampling_params": None,
        "max_total_num_tokens": _KV_TOKENS,
        "max_running_requests": 1024,
        "context_length": 32_768,
        "disaggregation_mode": "null",
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }
    state = {
        "max_running_requests": 1024,
        "last_gen_throughput": 1000.0,
        "memory_usage": {"weight": 1.0, "kvcache": 1.0, "token_capacity": _KV_TOKENS},
    }
    card = {
        "id": model,
        "object": "model",
        "created": 1_764_000_000,
        "owned_by": "sglang",
        "root": model,
        "parent": None,
        "max_model_len": 32_768,
    }
    empty = _answer(b"", b"text/plain")
    model_info = _answer(compact_json(info))
    server_info = _answer(compact_json(info | {"status": "ready", "internal_states": [state]}))
    live = (b"/health", b"/health_generate", b"/ready", b"/liveness", b"/readiness")
    return dict.fromkeys(live, empty) | {
        b"/version": _answer(compact_json({"version": "0.5.20"})),
        b"/v1/models": _answer(compact_json({"object": "list", "data": [card]})),
        b"/get_model_info": model_info,
        b"/model_info": model_info,
        b"/get_server_info": server_info,
        b"/server_info": server_info,
        b"/flush_cache": _answer(b"Cache flushed.\n", b"text/plain"),
    }


async def _serve(ports: list[int], interval_ms: float, *, reports: bool) -> None:
    servers = [
        await listen(FakeWorker(port, interval_ms=interval_ms, reports=reports), port)
        for port in ports
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    """Run from the command line until stopped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ports", nargs="+", type=int)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    parser.add_argument("--reports", action="store_true")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(args.ports, args.interval_ms, reports=args.reports))


if __name__ == "__main__":
    main()
