"""HTTP heads: what of a client's head goes to the worker, and of a worker's to the client.

Hop-by-hop headers end here, also those that a Connection header names. Everything else passes in
its order, repeated names included. A worker's heads repeat from answer to answer, so each pool
keeps the prepared form of the last ones under their exact bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum, auto
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import quote

import httptools

from router.core import claims
from router.core.types import Priority
from router.errors import Reason, Refused
from router.runtime.hops import WAIT_HEADER, wait_s_of
from router.runtime.loops import VIA_HEADER, is_own, loop_refused
from router.wire import BodyReader

Headers = Sequence[tuple[bytes, bytes]]

HEAD_BYTES_MAX: Final = 64 * 1024
# What a 429 or 503 of a worker says when it names no time itself.
_PREPARED_MAX: Final = 64
_PREPARED_BYTES_MAX: Final = 2048
_ID_CHARS_MAX: Final = 128

HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_PLAIN_CONNECTION: Final = frozenset((b"keep-alive", b"close"))


_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


def _status_line(status: int) -> bytes:
    phrase = _PHRASES.get(status, "")
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


STATUS_LINES: Final = {status: _status_line(status) for status in range(100, 600)}


class MalformedHead(ValueError):
    """A worker's head that is not HTTP, or leaves the answer's length in doubt."""


def no_cors(origin: bytes) -> bytes:  # noqa: ARG001 - the signature of what prepares CORS lines
    """Let no page of another origin read answers."""
    return b""


class HeadRules:
    """How clients' heads are read; made once from the settings."""

    __slots__ = ("_rules",)

    def __init__(
        self,
        *,
        request_id_headers: Iterable[str],
        pass_credentials: bool,
        ending_headers: Iterable[str] = (),
        cors: Callable[[bytes], bytes] = no_cors,
        router_id: bytes = b"",
    ) -> None:
        ends_here = (None, False)
        rules: dict[bytes, _Rule] = dict.fromkeys((*HOP_BY_HOP, b"host"), ends_here)
        rules |= {
            b"connection": (_connection, False),
            b"content-length": (_content_length, False),
            b"content-type": (_content_type, True),
            b"content-encoding": (_content_encoding, True),
            b"expect": (_expect, False),
            b"x-forwarded-for": (_forwarded_for, False),
            b"accept-encoding": (_accept_encoding, True),
            # The router alone says which pages may read its answers; SGLang would say any.
            b"origin": (partial(_origin, cors), False),
            b"x-request-id": ends_here,
            VIA_HEADER: (partial(_via, router_id), True),
            b"x-laneway-priority": (_claim, False),
            WAIT_HEADER.encode(): (_wait, False),
            # The router alone tells an engine how urgent a request is.
            b"x-override-priority": ends_here,
        }
        for name in (b"authorization", b"x-api-key", b"api-key"):
            rules[name] = (partial(_credential, name), False) if pass_credentials else ends_here
        for rank, text in enumerate(request_id_headers):
            name = text.lower().encode()
            rules[name] = (partial(_request_id, rank), name != b"x-request-id")
        for text in ending_headers:  # a worker may be a router that trusts this one's word
            rules[text.encode()] = ends_here
        self._rules = rules

    def read(self, headers: Headers) -> RequestHead:
        """Sort a client's headers (names in lower case) in one pass."""
        head = RequestHead()
        lines: list[bytes] = []
        rule_of = self._rules.get
        for name, value in headers:
            rule = rule_of(name)
            if rule is None:
                lines += (name, b": ", value, b"\r\n")
                continue
            act, passes = rule
            if passes:
                lines += (name, b": ", value, b"\r\n")
            if act is not None:
                act(head, value)
        if head.named:
            lines = _without(lines, head.named)
        head.lines = b"".join(lines)
        return head


class RequestHead:
    """A client's head, sorted. Requests that repeat it share it; nothing about it changes then."""

    __slots__ = (
        "accept_encoding",
        "answer_lines",
        "claim",
        "content_length",
        "content_type",
        "credentials",
        "expects_continue",
        "forwarded_for",
        "http_1_0",
        "id_rank",
        "lines",
        "named",
        "reader",
        "refused",
        "request_id",
        "target",
        "via",
        "wait_s_max",
    )

    def __init__(self) -> None:
        self.reader: BodyReader  # of the body; set where the head is good
        self.target = b""
        self.http_1_0 = False
        self.lines = b""  # what passes on, ready to be sent: all behind the host
        self.answer_lines = b""  # what the answer to this client carries: CORS
        self.credentials = b""  # likewise, for workers that have no key of their own
        self.content_length: int | None = None
        self.content_type: bytes | None = None
        self.accept_encoding: bytes | None = None
        self.expects_continue = False
        self.forwarded_for: bytes | None = None
        self.request_id: str | None = None
        self.id_rank = 0
        self.named: tuple[bytes, ...] = ()  # headers that Connection makes hop-by-hop
        self.claim: Priority | None = None  # the class that the client asks for
        self.refused: Refused | None = None  # what the head says can't be served
        self.via = b""  # routers that it came through
        self.wait_s_max: float | None = None  # how long the client lets the request wait

    def accepts(self, coding: bytes) -> bool:
        """Whether the client takes this content coding: RFC 9110 12.5.3, by its plain rules."""
        for item in (self.accept_encoding or b"").split(b","):
            name, _, weight = item.partition(b";")
            if name.strip() in (coding, b"*"):
                return weight.replace(b" ", b"").rstrip(b".0") != b"q="
        return False


# What a header tells us, if anything, and whether it passes on to the worker.
_Rule = tuple[Callable[[RequestHead, bytes], None] | None, bool]


def _origin(cors: Callable[[bytes], bytes], head: RequestHead, value: bytes) -> None:
    head.answer_lines = cors(value)


def _credential(name: bytes, head: RequestHead, value: bytes) -> None:
    head.credentials += b"%b: %b\r\n" % (name, value)


def _content_length(head: RequestHead, value: bytes) -> None:
    head.content_length = int(value)


def _content_type(head: RequestHead, value: bytes) -> None:
    head.content_type = value


def _content_encoding(head: RequestHead, value: bytes) -> None:
    if (coding := value.strip().lower()) not in (b"", b"identity"):
        message = f"The body's content-encoding is {coding.decode('latin-1')!r:.50}; send it plain."
        head.refused = Refused(Reason.UNSUPPORTED_MEDIA, message, param="content-encoding")


def _accept_encoding(head: RequestHead, value: bytes) -> None:
    head.accept_encoding = value.lower()


def _connection(head: RequestHead, value: bytes) -> None:
    if value not in _PLAIN_CONNECTION:
        head.named += tuple(token.strip().lower() for token in value.split(b","))


def _expect(head: RequestHead, value: bytes) -> None:
    head.expects_continue = value.lower() == b"100-continue"


def _forwarded_for(head: RequestHead, value: bytes) -> None:
    known = head.forwarded_for
    head.forwarded_for = known + b", " + value if known else value


def _via(router_id: bytes, head: RequestHead, value: bytes) -> None:
    head.via = head.via + b"," + value if head.via else value
    if is_own(router_id, value):
        head.refused = loop_refused()


def _request_id(rank: int, head: RequestHead, value: bytes) -> None:
    """Take a request id: printable ASCII of bounded length; the lowest rank wins."""
    if head.request_id is None or rank < head.id_rank:
        text = value.decode("latin-1")
        if 0 < len(text) <= _ID_CHARS_MAX and text.isascii() and text.isprintable():
            head.request_id, head.id_rank = text, rank


def _claim(head: RequestHead, value: bytes) -> None:
    """Take the class that the client asks for; said twice, it must be the same."""
    text = value.decode("latin-1")
    claim = claims.claim_of(text)
    if claim is None or head.claim not in (None, claim):
        known = ", ".join(claims.WORDS)
        message = f"{claims.HEADER}: expected one of {known}, not {text!r:.100}"
        head.refused = Refused(Reason.BAD_REQUEST, message, param=claims.HEADER)
    head.claim = claim


def _wait(head: RequestHead, value: bytes) -> None:
    """Take how long the request may wait; said twice, the shorter wait counts."""
    text = value.decode("latin-1")
    wait_s = wait_s_of(text)
    if wait_s is None:
        message = f"{WAIT_HEADER}: expected seconds above 0, at most a day, not {text!r:.100}"
        head.refused = Refused(Reason.BAD_REQUEST, message, param=WAIT_HEADER)
    elif head.wait_s_max is None or wait_s < head.wait_s_max:
        head.wait_s_max = wait_s


def _without(lines: list[bytes], named: tuple[bytes, ...]) -> list[bytes]:
    kept = []
    for index in range(0, len(lines), 4):
        if lines[index] not in named:
            kept += lines[index : index + 4]
    return kept


class Framing(IntEnum):
    """How the end of an answer's body is found."""

    NONE = auto()  # there is no body
    LENGTH = auto()
    CHUNKED = auto()
    UNTIL_CLOSE = auto()


class AnswerHead:
    """A worker's head: what it means to us, and its lines for the client. Shared; never changed."""

    __slots__ = (
        "encoding",
        "event_stream",
        "framing",
        "headers",
        "keep_alive",
        "length",
        "lines",
        "opening",
        "plain",
        "retry_after_s",
        "status",
    )

    def __init__(self, status: int, headers: Headers, *, keep_alive: bool) -> None:
        self.status = status
        self.keep_alive = keep_alive
        self.length = 0
        self.encoding: bytes | None = None
        self.event_stream = False
        self.retry_after_s: float | None = None
        self.framing = self._framing(headers)
        self.headers = _end_to_end(headers)
        for name, value in self.headers:
            if name == b"content-type":
                self.event_stream = value.lower().startswith(b"text/event-stream")
            elif name == b"content-encoding":
                self.encoding = value.strip().lower()
            elif name == b"retry-after":
                self.retry_after_s = float(value) if value.isdigit() and len(value) < 9 else None
        self.lines = b"".join(b"%b: %b\r\n" % header for header in self.headers)
        # Most answers pass with just this, so it is made once for all that have the same head.
        self.opening = STATUS_LINES[status] + self.lines + self.framing_line
        # A good answer of known length, to be passed as it is: nothing about it needs a decision.
        self.plain = (
            status == 200
            and self.framing is Framing.LENGTH
            and self.encoding is None
            and not self.event_stream
        )

    def _framing(self, headers: Headers) -> Framing:
        codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
        lengths = [value for name, value in headers if name == b"content-length"]
        if self.status < 200 or self.status in (204, 304):
            return Framing.NONE
        if codings:
            if codings != [b"chunked"] or lengths:
                raise MalformedHead("a transfer coding other than chunked, or with a length")
            return Framing.CHUNKED
        if lengths:
            self.length = int(lengths[0])
            return Framing.LENGTH if self.length else Framing.NONE
        return Framing.UNTIL_CLOSE

    @property
    def framing_line(self) -> bytes:
        """The header that announces the worker's own framing to the client."""
        if self.framing is Framing.CHUNKED:
            return b"transfer-encoding: chunked\r\n"
        if self.framing is Framing.UNTIL_CLOSE or self.status < 200 or self.status in (204, 304):
            return b""
        return b"content-length: %d\r\n" % self.length

    def line(self, name: bytes) -> bytes | None:
        """Return the first value of a header, None when it is absent."""
        return next((value for known, value in self.headers if known == name), None)


# Ours to say, whatever the worker says.
_OURS: Final = frozenset(
    (b"x-request-id", b"x-laneway-worker", b"x-laneway-lane", b"x-laneway-priority")
)
_ONCE: Final = frozenset((b"server", b"date"))


def _end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    dropped = HOP_BY_HOP | _OURS | {b"content-length"}
    for name, value in headers:
        if name == b"connection":
            dropped |= {token.strip().lower() for token in value.split(b",")}
    seen, kept = set(), []
    for name, value in headers:
        if name in dropped or (name in _ONCE and name in seen):
            continue
        seen.add(name)
        kept.append((name, value))
    return kept


class _Collector:
    """Receives httptools' callbacks for one head."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True


def parse_answer_head(raw: bytes) -> AnswerHead:
    """Parse a head that ends with its empty line. Raises MalformedHead.

    httptools is strict here: bare line feeds, folded lines, two lengths, a length beside chunks
    are all refused, so that worker and router can't disagree on where an answer ends.
    """
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
        raise MalformedHead(str(exc)) from exc
    if not collector.complete:
        raise MalformedHead("the head ends too early")
    status = parser.get_status_code()
    if status == 101:
        raise MalformedHead("an upgrade that nobody asked for")
    if status not in STATUS_LINES:
        raise MalformedHead(f"the status {status}, which HTTP does not have")
    named = [v.lower() for name, v in collector.headers if name == b"connection"]
    keep_alive = not any(b"close" in value for value in named)
    if parser.get_http_version() != "1.1":
        keep_alive = any(b"keep-alive" in value for value in named)
    return AnswerHead(status, collector.headers, keep_alive=keep_alive)


class PreparedHeads(dict[bytes, AnswerHead]):
    """Parsed heads by their exact bytes; forgets all when full, as dates change each second."""

    __slots__ = ()

    def __missing__(self, raw: bytes) -> AnswerHead:
        """Return the parsed form of `raw`. Raises MalformedHead."""
        head = parse_answer_head(raw)
        if len(raw) <= _PREPARED_BYTES_MAX:
            if len(self) >= _PREPARED_MAX:
                self.clear()
            self[raw] = head
        return head


def header_text(text: str) -> bytes:
    """Return `text` as a header value, percent-encoded where it is not plain ASCII."""
    return quote(text, safe=" !#$&'()*+,/:;=?@[]~").encode()


def error_answer(
    refused: Refused,
    *,
    request_id: str | None,
    keep_alive: bool,
    default_headers: Headers = (),
    more_lines: bytes = b"",
) -> bytes:
    """Return the whole answer to a refused request, head and JSON body."""
    body = refused.body()
    lines = [STATUS_LINES[refused.status]]
    lines += (b"%b: %b\r\n" % header for header in default_headers)
    lines.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body))
    if request_id is not None:
        lines.append(b"x-request-id: %b\r\n" % request_id.encode())
    lines += (f"{name}: {value}\r\n".encode() for name, value in refused.headers().items())
    if not keep_alive:
        lines.append(b"connection: close\r\n")
    return b"".join((*lines, more_lines, b"\r\n", body))
