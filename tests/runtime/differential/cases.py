"""Requests and answers of all kinds, cut into pieces, each made from the number of its case.

Plain random numbers rather than hypothesis' strategies: those prefer what is small and simple, and
most of what may go wrong here needs several unlikely things at once.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

_FIRST, _, _LAST = os.environ.get("LANEWAY_FUZZ_CASES", "0-120").partition("-")
CASES = range(int(_FIRST), int(_LAST or int(_FIRST) + 1))

PATH = b"/v1/chat/completions"
SECOND = b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}" % PATH

Framing = Literal["length", "chunked", "close"]
Ending = Literal["whole", "closed", "reset", "surplus"]
Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Sent:
    """A request: its bytes in pieces, and what the worker should get."""

    pieces: list[bytes]
    body: bytes
    headers: list[Header]
    http_1_0: bool
    pipelined: bool  # the next request follows at once


@dataclass(frozen=True)
class Told:
    """An answer of the worker: its bytes in pieces, and what they mean."""

    pieces: list[bytes]
    ending: Ending
    status: int
    framing: Framing
    headers: list[Header]
    body: bytes  # what of it was sent, where it ends with the connection
    event_stream: bool
    head_whole: bool  # at least its head came
    broken: bool  # it does not come to its proper end


NAMES = (b"x-a", b"X-B", b"x-C-d", b"x_e", b"x.f", b"x-1", b"Set-Cookie")
_VALUES = (b"", b"1", b"a b", b"  spaced ", b'"q;,="', b"\xc3\xa9", b"a\tb", b"x" * 300, b"close")
_EXTENSIONS = (b"", b"", b";a", b";a=b", b';a="b c"', b";a=b;c=d")
_SIZE_FORMS = (b"%x", b"%X", b"00%x")
_STATUSES = (200, 200, 200, 200, 201, 204, 206, 302, 304, 400, 404, 422, 429, 500, 503)
_TYPES = (b"application/json", b"text/event-stream", b"audio/wav", b"text/plain; charset=utf-8")
_TRAPS = (
    b"\r\n",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"z" * 4_000,
)
_EVENTS = (
    b"a",
    b'{"x":"\xc3\xa9"}',
    b"[DONE]",
    b"w" * 900,
    b'{"choices":[{"delta":{"content":"t"}}]}',
)
_SIZES = (0, 0, 100, 5_000, 70_000, 200_000)


def request(rng: Random) -> Sent:
    """A chat request that nobody may refuse."""
    content = "".join(rng.choices('aé"\\\n\u20ac', k=rng.randrange(30))) + "y" * rng.choice(_SIZES)
    document: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": content}]}
    if rng.random() < 0.5:
        document["stream"] = True
    body = json.dumps(document, ensure_ascii=rng.random() < 0.5).encode()
    http_1_0 = rng.random() < 0.1
    headers = [(name.replace(b"Set-Cookie", b"X-G"), value) for name, value in _headers(rng)]
    lines = [b"%b: %b" % header for header in headers]
    lines += [b"Content-Type: application/json", b"Host: h"]
    if rng.random() < 0.2:
        lines.append(b"Connection: close")
    if not http_1_0 and rng.random() < 0.2:
        lines.append(b"Expect: 100-continue")
    if not http_1_0 and rng.random() < 0.5:
        lines.append(rng.choice((b"Transfer-Encoding: chunked", b"transfer-encoding: Chunked")))
        framed = _chunked(rng, body)
    else:
        lines.append(b"content-length: %d" % len(body))
        framed = body
    rng.shuffle(lines)
    version = b"1.0" if http_1_0 else b"1.1"
    head = b"\r\n".join((b"POST %b HTTP/%b" % (PATH, version), *lines, b"", b""))
    pipelined = not http_1_0 and rng.random() < 0.4
    pieces = _cut(rng, head + framed + (SECOND if pipelined else b""))
    return Sent(pieces, body, _in_order(headers, lines), http_1_0, pipelined)


def answer(rng: Random) -> Told:
    """An answer of a worker, whole or not."""
    status = rng.choice(_STATUSES)
    bodiless = status in (204, 304)
    framing: Framing = "length" if bodiless else rng.choice(("length", "chunked", "close"))
    content_type = rng.choice(_TYPES)
    body = b"" if bodiless else _body(rng, content_type)
    headers = _headers(rng)
    lines = [b"%b: %b" % header for header in headers]
    lines.append(b"content-type: " + content_type)
    if framing == "close" or rng.random() < 0.3:
        lines.append(rng.choice((b"connection: close", b"Connection: Close")))
    framed = body
    if framing == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
        framed = _chunked(rng, body)
    elif framing == "length" and not bodiless:
        lines.append(b"Content-Length: %d" % len(body))
    rng.shuffle(lines)
    reason = rng.choice((b"OK", b"", b"Some Words"))
    head = b"\r\n".join((b"HTTP/1.1 %d %b" % (status, reason), *lines, b"", b""))
    whole, size = head + framed, len(head + framed)
    ending: Ending = rng.choice(("whole", "whole", "whole", "closed", "reset", "surplus"))
    if ending in ("closed", "reset"):
        whole = whole[: rng.randint(max(1, rng.choice((0, len(head)))), size)]
    elif framing == "close":
        ending = "closed"
    ends_so = framing == "close" and ending == "closed"
    pieces = _cut(rng, whole)
    if ending == "surplus":
        # With the end of the answer: later, they would be taken for the next one's.
        pieces[-1] += rng.choice((b"x", b"HTTP/1.1 200 OK\r\n\r\n", b"\r\n\r\n"))
    return Told(
        pieces,
        ending,
        status,
        framing,
        _in_order(headers, lines),
        whole[len(head) :] if ends_so else body,
        content_type == b"text/event-stream",
        head_whole=len(whole) >= len(head),
        broken=not ends_so and (len(whole) < size or (ending == "reset" and framing == "close")),
    )


def _headers(rng: Random) -> list[Header]:
    return [(rng.choice(NAMES), rng.choice(_VALUES)) for _ in range(rng.randrange(6))]


def _in_order(headers: list[Header], lines: list[bytes]) -> list[Header]:
    """The headers as they stand in `lines`, names in lower case and values without blanks."""
    known = {b"%b: %b" % header for header in headers}
    pairs = (line.partition(b": ") for line in lines if line in known)
    return [(name.lower(), value.strip(b" \t")) for name, _, value in pairs]


def _body(rng: Random, content_type: bytes) -> bytes:
    if content_type == b"text/event-stream":
        return b"".join(b"data: %b\n\n" % rng.choice(_EVENTS) for _ in range(rng.randrange(8)))
    pieces = []
    for _ in range(rng.randrange(4)):
        kind = rng.random()
        if kind < 0.4:
            pieces.append(rng.choice(_TRAPS))
        elif kind < 0.8:
            pieces.append(rng.randbytes(rng.randrange(60)))
        else:
            pieces.append(rng.randbytes(1_000) * rng.randrange(150))
    return b"".join(pieces)


def _chunked(rng: Random, body: bytes) -> bytes:
    cuts = sorted(rng.randint(0, len(body)) for _ in range(rng.randrange(6)))
    chunks = []
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        if start < end:
            size = rng.choice(_SIZE_FORMS) % (end - start) + rng.choice(_EXTENSIONS)
            chunks.append(b"%b\r\n%b\r\n" % (size, body[start:end]))
    chunks.append(rng.choice((b"0", b"0", b"000", b"0;last")) + b"\r\n")
    trailers = rng.choices((b"x-t: 1\r\n", b"X-Sum: abc\r\n"), k=rng.choice((0, 0, 1, 2)))
    return b"".join((*chunks, *trailers, b"\r\n"))


def _cut(rng: Random, data: bytes) -> list[bytes]:
    """`data` in pieces; most cuts fall near its ends, where heads and last chunks are."""
    size = len(data)
    cuts = set()
    for _ in range(rng.randrange(4)):
        near = rng.randint(0, min(size, rng.choice((8, 200))))
        cuts.add(rng.choice((near, size - near, rng.randint(0, size))))
    places = sorted(cuts - {0, size})
    return [data[a:b] for a, b in zip([0, *places], [*places, size], strict=True)]
