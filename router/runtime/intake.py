"""Reading requests: what uvicorn's protocol does with bytes, for the requests that we take.

httptools finds the requests. One of an inference route becomes a `Taken` with its bounded body; its
head alone decides whether the body is kept at all. Anything else is handed to uvicorn as if nothing
had been in between. A request that can't be read is refused in its turn, behind the answers that
are due before it, and ends the connection.

No other protocol is ever accepted. A request that offers one stands for itself, with the body that
its head declares; httptools would take all behind such a head for the other protocol, so it reads
the head a second time, without the offer.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import Reason, Refused
from router.runtime.front import Front, Taken, bodies_full
from router.runtime.heads import HEAD_BYTES_MAX, Headers
from router.runtime.outbox import Outbox
from router.runtime.repeats import KnownHead, length_of
from router.wire import BodyReader

_OLD: Final = ("0.9", "1.0")
# Further requests that a client may send before its first one is answered.
_PIPELINE_MAX: Final = 16
# What connections above the limit may ask.
_LIVENESS: Final = frozenset((b"/livez", b"/liveness"))
_TENANT_PATH: Final = b"/t/"
# A client whose heads differ this often in a row is not compared any more.
_COMPARED_MAX: Final = 4


class Intake(HttpToolsProtocol):
    """The reading half of a client connection; `InferenceProtocol` is the whole."""

    front: ClassVar[Front]
    _outbox: Outbox

    # Defaults stand in the class: most connections never change most of them.
    _active: Any = None  # the cycle whose answer is due: a Taken, or uvicorn's own
    _receiving = True  # a request has begun, or the first one is awaited
    _in_head = True
    _unproductive = 0  # bytes read since the last that was of a body or ended a request
    _counted = 0  # bytes of a body, behind a known head, that httptools won't read
    _ready = False  # the active request may be able to start
    _offered = False  # the head that was just read offers another protocol
    _deaf = False  # what still comes is dropped
    _surplus = False  # there were too many connections when this one came
    _since = 0.0  # nothing changed since then; 0: the next sweep says
    _known: KnownHead | None = None
    _compared = 0  # heads in a row that were not the known one
    _peer = b"unknown"
    _forwarded_line = b""
    _trusted = False  # the peer is a proxy whose word on tenants counts

    def _start_active(self) -> None:
        """Start the request whose turn it is, as far as it has come."""
        raise AssertionError("the whole protocol says how")

    def _cut_asgi(self, refused: Refused) -> None:  # noqa: ARG002 - for the whole protocol
        """End the connection inside the body of a request that is uvicorn's."""
        raise AssertionError("the whole protocol says how")

    def _begin(self, taken: Taken, body: bytes) -> None:  # noqa: ARG002 - for the whole protocol
        """Start a request whose turn it is and whose body is whole."""
        raise AssertionError("the whole protocol says how")

    def data_received(self, data: bytes) -> None:
        """Read requests, and start the one whose turn it is."""
        if self._known is not None:
            data = self._take_known_heads(self._known, data)
        if not data or self._deaf:
            return
        if self._counted:
            data = self._take_counted(data)
        # Whether a request begins with `data`, and no other is answered or still being read.
        first = (
            not self._unproductive
            and self._active is None
            and (not self._receiving or self.cycle is None)
        )
        self._unproductive += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as exc:
            why = exc.__context__  # what a callback raised
            malformed = Refused(Reason.BAD_REQUEST, f"Not a valid HTTP request: {exc}.")
            self._refuse_unread(why if isinstance(why, Refused) else malformed)
        except httptools.HttpParserUpgrade as exc:
            self._pass_over_offers(memoryview(data)[exc.args[0] :])
        else:
            if self._unproductive > HEAD_BYTES_MAX:
                malformed = Refused(Reason.BAD_REQUEST, "The framing of the body is too long.")
                self._refuse_unread(_head_too_large() if self._in_head else malformed)
        if first and self._compared < _COMPARED_MAX and not self._deaf:
            self._learn(data)
        if self._ready:
            self._ready = False
            self._start_active()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """A request begins. uvicorn's scope is made later, and only if it is needed."""
        self.url = b""
        self.headers = []
        self._in_head = self._receiving = True
        self._since = 0.0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are dropped: nothing may be added after the head was judged."""
        if self._in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the request, or leave it to ASGI."""
        self._in_head = False
        if self._unproductive > HEAD_BYTES_MAX:
            _check_size(self.url, self.headers)  # it may have come whole in one read
        _check_lines(self.headers, http_1_0=self.parser.get_http_version() in _OLD)
        if self.parser.should_upgrade():
            self._offered = True  # httptools stops here; the head comes again, without the offer
            return
        target = self.url
        if target[:1] != b"/":
            self.url = target = _origin_form(target)  # uvicorn would find no path in "http://x"
        path, _, query = target.partition(b"?")
        if self._surplus and path not in _LIVENESS and self._too_many():
            self._refuse_unread(self._connections_full())
            return
        reader = self.front.readers.get(path)
        if reader is None:
            target, reader = self._spelt_plainly(path, query, target)
        if reader is None or self.parser.get_method() != b"POST":
            self._leave_to_asgi()
            return
        http_1_0 = self.parser.get_http_version() != "1.1"
        head = self.front.rules.read(self.headers)
        head.reader, head.target, head.http_1_0 = reader, target, http_1_0
        if head.forwarded_for is None:
            head.lines += self._forwarded_line
        else:
            head.lines += b"x-forwarded-for: %b, %b\r\n" % (head.forwarded_for, self._peer)
        taken = Taken(head, keep_alive=not http_1_0 and self.parser.should_keep_alive())
        previous, self.cycle = self.cycle, taken  # type: ignore[assignment]
        if previous is None or previous.response_complete:
            self._active = taken
        else:
            self.pipeline.appendleft((taken, None))  # type: ignore[arg-type]
            if len(self.pipeline) >= _PIPELINE_MAX:
                self.flow.pause_reading()
        self._judge(taken, self.headers, head.content_length)

    def _spelt_plainly(
        self, path: bytes, query: bytes, target: bytes
    ) -> tuple[bytes, BodyReader | None]:
        """Return the target, and its reader, of a path that says one of ours in another way.

        RFC 3986 6.2.2: an encoded letter is the letter, and the ASGI side decodes as well. A proxy
        may name the tenant in the path: /t/NAME/v1/... is /v1/... with the tenant's header.
        """
        if b"%" in path:
            path = unquote_to_bytes(path)
        name = b""
        if self._trusted and path.startswith(_TENANT_PATH):
            name, _, rest = path.removeprefix(_TENANT_PATH).partition(b"/")
            path = b"/" + rest
        if (reader := self.front.readers.get(path)) is not None:
            target = path + b"?" + query if query else path
            if name:
                self.headers.append((self.front.config.auth.tenant_header.encode(), name))
        return target, reader

    def on_body(self, body: bytes | memoryview) -> None:
        """Keep a part of a body, up to the limit; only parts of ours are views."""
        self._unproductive = 0
        taken: Any = self.cycle
        if type(taken) is not Taken:
            super().on_body(body)  # type: ignore[arg-type]
        elif taken.refused is None:
            size = len(body)
            taken.size += size
            taken.body.append(body)
            front = self.front
            front.driver.bodies_bytes += size
            if taken.size > front.body_bytes_max:
                self._refuse_large(taken)
            elif front.driver.bodies_bytes > front.bodies_bytes_max:
                self._refuse_unread(bodies_full())

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self._offered:
            return  # only its head was read yet
        self._unproductive = 0
        self._receiving = False
        self._since = 0.0
        newest: Any = self.cycle
        if type(newest) is Taken:
            newest.complete = True
            self._ready = True
        else:
            super().on_message_complete()

    # Heads and bodies

    def _leave_to_asgi(self) -> None:
        """Do what uvicorn would have done with the head."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers.extend(headers)
        self.expect_100_continue = (b"expect", b"100-continue") in headers
        super().on_headers_complete()

    def _too_many(self) -> bool:
        return len(self.connections) > self.front.connections_max

    def _connections_full(self) -> Refused:
        return Refused(Reason.CONNECTIONS_FULL, "Too many connections; try again later.")

    def _judge(self, taken: Taken, headers: Headers, length: int | None) -> None:
        """Decide by the head alone what can be; the body of a refused request is not kept."""
        front, head = self.front, taken.head
        if length is not None and length > front.body_bytes_max:
            self._refuse_large(taken)
            return
        try:
            if head.refused is not None:
                raise head.refused
            tier = None
            if self._trusted:
                taken.tenant, tier = front.proxied(headers)
            else:
                taken.tenant = front.authenticate(headers)
            taken.standing = front.standings[taken.tenant, head.claim, tier]
        except Refused as refused:
            taken.refused = refused.with_traceback(None)  # its frames hold what was read
        if head.expects_continue:
            self._ready = True

    def _take_known_heads(self, known: KnownHead, data: bytes) -> bytes:
        """Take the requests at the beginning of `data` whose head is known; return the rest."""
        flow = self.flow
        while data and self._active is None and not (self._receiving or self._deaf):
            if flow.write_paused:
                break  # it has to wait, which `_start_active` sees to
            if (place := known.matched(data)) is None:
                self._compared += 1
                if self._compared >= _COMPARED_MAX:
                    self._known = None
                break
            start, length = place
            end = start + length
            taken = Taken(known.head, keep_alive=True)
            self.cycle = self._active = taken  # type: ignore[assignment]
            self._compared, self._since = 0, 0.0
            taken.tenant, taken.standing = known.tenant, known.standing
            if length > self.front.body_bytes_max:
                self._refuse_large(taken)
            if len(data) < end:
                if len(data) > start:
                    self.on_body(memoryview(data)[start:])
                self._counted = end - len(data)
                self._receiving = True
                self._start_taken()
            else:
                taken.complete = True
                if taken.refused is None:
                    self._begin(taken, data[start:end])
                else:
                    self._start_taken()
            data = data[end:]
        return data

    def _start_taken(self) -> None:
        """Start a request with a known head, as far as it has come."""
        self._ready = False
        self._start_active()

    def _learn(self, data: bytes) -> None:
        """Remember the head of `data`, which was just judged, in case the client repeats it."""
        taken = self._active
        if type(taken) is not Taken or taken.refused is not None or not taken.keep_alive:
            return
        if taken.head.expects_continue:
            return  # each of them has to be answered
        if (found := length_of(data, whole=taken.complete)) is not None:
            self._known = KnownHead(
                *found, head=taken.head, tenant=taken.tenant, standing=taken.standing
            )

    def _drop_body(self, taken: Taken) -> None:
        """Count what `taken` keeps of its body no longer; whoever takes it over counts it."""
        self.front.driver.bodies_bytes -= taken.size
        taken.size = 0

    def _refuse_large(self, taken: Taken) -> None:
        limit = self.front.body_bytes_max
        refused = Refused(Reason.BODY_TOO_LARGE, f"The body is larger than {limit} bytes.")
        self._drop_body(taken)
        taken.refuse_unread(refused)
        self._deaf = self._ready = True

    def _refuse_unread(self, refused: Refused) -> None:
        """Refuse the request that is being read, in its turn, and read nothing more."""
        self._deaf = True
        current: Any = self.cycle
        if type(current) is Taken and not current.complete:
            self._drop_body(current)
            current.refuse_unread(refused)
            self._ready = True
        elif current is not None and type(current) is not Taken and current.more_body:
            self._cut_asgi(refused)
        else:
            taken = Taken.unreadable(refused)
            previous, self.cycle = self.cycle, taken  # type: ignore[assignment]
            if previous is None or previous.response_complete:
                self._active = taken
            else:
                self.pipeline.appendleft((taken, None))  # type: ignore[arg-type]
            self._ready = True

    def _pass_over_offers(self, rest: memoryview) -> None:
        """Read the head that was just read once more, without its offer, and then the `rest`.

        "Upgrade: h2c" is what Java's client offers with every first request.
        """
        while self._offered:
            self._offered = False
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if method == b"CONNECT":
                self._refuse_unread(Refused(Reason.METHOD_NOT_ALLOWED, "This is no proxy."))
                return
            lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
            lines += (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            try:
                self.parser.feed_data(b"\r\n".join((*lines, b"\r\n")))
                self.parser.feed_data(rest)
            except httptools.HttpParserError as exc:
                message = f"Not a valid HTTP request: {exc}."
                self._refuse_unread(Refused(Reason.BAD_REQUEST, message))
            except httptools.HttpParserUpgrade as exc:
                rest = rest[exc.args[0] :]

    def _take_counted(self, data: bytes) -> bytes:
        """Take what is the body's; return what follows it."""
        body, rest = data[: self._counted], data[self._counted :]
        self._counted -= len(body)
        self.on_body(body)
        if not self._counted:
            self.on_message_complete()
        return rest


def _check_size(target: bytes, headers: Headers) -> None:
    """Raise Refused for a head above the limit."""
    size = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > HEAD_BYTES_MAX:
        raise _head_too_large()


def _check_lines(headers: Headers, *, http_1_0: bool) -> None:
    """Raise Refused for what RFC 9112 forbids (3.2, 6.1) and httptools lets pass."""
    names = [name for name, _ in headers]
    if (hosts := names.count(b"host")) != 1 and (hosts or not http_1_0):
        raise Refused(Reason.BAD_REQUEST, f"A request has one Host header, this one {hosts}.")
    if b"transfer-encoding" in names:
        coding = headers[names.index(b"transfer-encoding")][1]
        if coding.strip().lower() != b"chunked":
            raise Refused(Reason.BAD_REQUEST, "Of transfer codings only chunked is known here.")
        if http_1_0:  # a proxy before this one may have taken the body to end elsewhere
            raise Refused(Reason.BAD_REQUEST, "Before HTTP/1.1 there are no transfer codings.")


def _head_too_large() -> Refused:
    message = f"The request's head, its URL included, is longer than {HEAD_BYTES_MAX} bytes."
    return Refused(Reason.HEAD_TOO_LARGE, message)


def _origin_form(target: bytes) -> bytes:
    """Return the path and query of a request target in absolute form."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    path: bytes = url.path or b"/"
    return path + b"?" + url.query if url.query else path
