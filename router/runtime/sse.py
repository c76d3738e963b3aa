"""Look at an answer from the side: its first event, its progress, its usage.

Nothing here can delay or change the bytes. Raw bytes are looked at as they came, chunk framing
included: a framing line is never mistaken for what is searched, and it is cut out where it could
stand in the middle of it. Memory is bounded: an event without end costs no more than any other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import orjson

from router.core.types import Usage

# SGLang repeats the instructions and tools of a request in two events before the first token.
FIRST_EVENT_BYTES_MAX: Final = 128 * 1024
_MESSAGE_CHARS_MAX: Final = 500
# Enough for the last events of a stream: finish, usage, [DONE]; or for the end of a plain answer.
TAIL_BYTES: Final = 2048
# While a stream runs: an event with usage, and the end mark behind it.
_RUNNING_TAIL_BYTES: Final = 1024
# Reads gathered before they are looked at together; looking costs, gathering hardly does.
READS_MAX: Final = 16
READ_BYTES_MAX: Final = 4096
# Reads shorter than this on average are mostly framing: tokens sent letter by letter.
_TINY_READ_BYTES: Final = 48

_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
# An event that only says that an answer begins: an engine that is full sends it, too.
_FRAME: Final = re.compile(
    rb"event: ?(?:message_start|ping|response\.(?:created|queued|in_progress))[\r\n]"
)
_FRAMING: Final = re.compile(rb"\r\n[0-9a-fA-F]{1,8}\r\n")
_MARK: Final = b"data:"
_LINE_MARK: Final = b"\ndata:"  # in text that a model writes, a line end is escaped
_PART_BYTES: Final = len(_LINE_MARK) - 1  # of a mark that is cut in two, at most on either side
_FINISH: Final = b'"finish_reason":'
_DONE_BYTES_MAX: Final = 24  # of the end mark and the framing behind it
# A chat's only choice: with text, or with nothing but its role. Inside a text, quotes are escaped.
_USUAL_DELTA: Final = re.compile(
    rb'"choices":\[\{"index":\d+,"delta":\{(?:"role":(?:null|"\w*"),?)?(?:"content":"([^"])|'
    rb'(?:"content":(?:null|""),?)?(?:"reasoning_content":null,?)?(?:"tool_calls":null)?\})'
)
# Behind the last token: its reason to end, usage, the end mark.
_CLOSING_EVENTS_MAX: Final = 5

# Statuses by the error types that OpenAI's and Anthropic's shapes carry instead of a code.
_STATUS_BY_TYPE: Final = {
    "overloaded_error": 503,
    "SERVICE_UNAVAILABLE": 503,
    "rate_limit_error": 429,
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "authentication_error": 401,
    "not_found_error": 404,
    "timeout_error": 504,
}
# /v1/responses tells a status in front of the message, a stream of it none: then these are 503.
_STATUS_TOLD: Final = re.compile(r"([45]\d\d): (.*)", re.DOTALL)
_UNAVAILABLE: Final = frozenset(
    (
        "The request queue is full.",
        "The request is aborted by a higher priority request.",
        "Request waiting timeout reached.",
        "Request running timeout reached.",
    )
)


@dataclass(frozen=True, slots=True)
class ReportedError:
    """An error that an answer reports in an event or its body, with the status it stands for."""

    status: int
    message: str


def first_event(payload: bytes) -> bytes | None:
    """Return the first event of a stream that says more than that an answer begins.

    None while it is not complete. Empty when there is nothing to wait for: a comment comes first,
    or the event grows too long.
    """
    while True:
        payload = payload.lstrip(b"\r\n")
        if payload.startswith(b":"):
            return b""
        end = payload.find(b"\n\n")
        if end < 0:
            if (found := _EVENT_END.search(payload)) is None:
                return None if len(payload) < FIRST_EVENT_BYTES_MAX else b""
            end = found.start()
        if _FRAME.match(payload) is None:
            return payload[:end]
        payload = payload[end:]


def between_events(payload: bytes) -> bool:
    """Whether a stream that came so far does not end within an event."""
    return not payload.lstrip(b"\r\n") or payload.endswith(_EVENT_ENDS)


def _data_of(event: bytes) -> bytes:
    """Return what the data lines of an event hold."""
    if event.startswith(_MARK) and b"\n" not in event and b"\r" not in event:
        return event[5:].strip()  # as nearly all are
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"\n".join(line[5:] for line in lines if line.startswith(_MARK)).strip()


def has_output(event: bytes) -> bool:
    """Whether an event brings text, reasoning or a tool call: for SGLang, a token.

    Not so: the role at the beginning, the reason of the end, usage, `[DONE]`, and the frame around
    the deltas of Anthropic's and the Responses API. What is not understood counts as output.
    """
    usual = _USUAL_DELTA.search(event)
    if usual is not None and event.count(b'"delta":') == 1 and b'"type":' not in event:
        return usual[1] is not None
    data = _data_of(event)
    return data != b"[DONE]" and _says_output(data)


def _says_output(data: bytes) -> bool:
    try:
        document = orjson.loads(data)
    except ValueError:
        return True
    if not isinstance(document, dict):
        return True
    if isinstance(kind := document.get("type"), str):
        return kind.endswith((".delta", "_block_delta"))
    if isinstance(choices := document.get("choices"), list):
        return any(map(_brings, choices))
    return True


def _brings(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    return any(value for name, value in delta.items() if name != "role")


def event_error(event: bytes) -> ReportedError | None:
    """Return the error that one event reports.

    SGLang refuses a streamed request with status 200 and an error event; /generate does it with an
    ordinary event whose finish_reason is an abort.
    """
    if b'"error"' not in event and b'"abort"' not in event:
        return None
    try:
        document = orjson.loads(_data_of(event))
    except ValueError:
        return None
    return _reported(document) if isinstance(document, dict) else None


def told_error(body: bytes) -> ReportedError | None:
    """Return the error that the body of a 400 of /v1/responses tells with a status of its own.

    SGLang has no other way there to say that its queue is full: `503: The request queue is full.`
    """
    try:
        document = orjson.loads(body)
    except ValueError:
        return None
    error = document.get("error") if isinstance(document, dict) else None
    return _told(error.get("message")) if isinstance(error, dict) else None


def _told(message: Any) -> ReportedError | None:
    """Return the error of which only the message tells the status, if it does."""
    if not isinstance(message, str):
        return None
    if message in _UNAVAILABLE:
        return ReportedError(503, message)
    told = _STATUS_TOLD.match(message)
    return ReportedError(int(told[1]), _text(told[2])) if told is not None else None


def _reported(document: dict[str, Any]) -> ReportedError | None:
    error = document.get("error")
    if isinstance(error, dict):
        nested = error.get("error")
        error = nested if isinstance(nested, dict) else error
        by_type = _STATUS_BY_TYPE.get(str(error.get("type")), 500)
        code = _status_code(error.get("code"))
        return ReportedError(code or by_type, _text(error.get("message")))
    if error is not None:
        return ReportedError(500, _text(error))
    response = document.get("response")
    if isinstance(response, dict):
        failed = response.get("error")
        return _told(failed.get("message")) if isinstance(failed, dict) else None
    meta = document.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        status = _status_code(reason.get("status_code"))
        return ReportedError(status, _text(reason.get("message"))) if status else None
    return None


def _text(value: Any) -> str:
    return value[:_MESSAGE_CHARS_MAX] if isinstance(value, str) else ""


def _status_code(value: Any) -> int | None:
    try:
        code = int(value)
    except (TypeError, ValueError):
        return None
    return code if 400 <= code <= 599 else None


def first_chunked_event(raw: bytes) -> bytes | None:
    """Return `first_event` of a stream that is chunked."""
    event = first_event(dechunked(raw, chunks_max=1))  # nearly always the first chunk holds it
    return event if event is not None else first_event(dechunked(raw))


def dechunked(raw: bytes, *, chunks_max: int | None = None) -> bytes:
    """Return the payload in the beginning of a chunked body, as far as it came."""
    pieces: list[bytes] = []
    position = 0
    while len(pieces) != chunks_max and (line_end := raw.find(b"\r\n", position)) >= 0:
        try:
            size = int(raw[position:line_end].partition(b";")[0], 16)
        except ValueError:
            break
        start = line_end + 2
        pieces.append(raw[start : start + size])
        position = start + size + 2
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _last_events(text: bytes) -> list[bytes]:
    """Split the end of a stream into events, of which the last `_CLOSING_EVENTS_MAX` are whole."""
    if b"\r" in text:
        return _EVENT_END.split(text)
    return text.rsplit(b"\n\n", _CLOSING_EVENTS_MAX)


class StreamScan:
    """Progress and end of one stream. The relay appends each read to `reads`, and calls `fold`
    when there are READS_MAX of them or one is long: folding is what costs.
    """

    __slots__ = ("_per_read", "_tail", "events", "first", "reads")

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.events = 0  # in what is folded
        self._per_read = 1.0  # events, when they were last counted
        self.first = b""  # the first event, when it is known
        self._tail = b"\n\r\n"  # as behind an event, and before every later chunk

    def fold(self, keep_bytes: int = _RUNNING_TAIL_BYTES) -> None:
        """Count the events of the gathered reads and keep only their end."""
        reads = self.reads
        if not reads:
            return
        tail = self._tail
        new, count = b"".join(reads), len(reads)
        if len(new) < _TINY_READ_BYTES * count:
            whole = _FRAMING.sub(b"", tail + new)
            events = max(0, whole.count(_LINE_MARK) - tail.count(_LINE_MARK))
        else:
            # A mark may begin in the last read: one byte less than a mark cannot hold a whole one.
            border = tail[-_PART_BYTES:] + new[:_PART_BYTES]
            events = new.count(_LINE_MARK) + border.count(_LINE_MARK)
            whole = tail + new if len(new) < keep_bytes else new
        self.events += events
        self._per_read = events / count
        self._tail = whole[-keep_bytes:]
        reads.clear()

    def progress(self) -> int:
        """Guess the events so far without looking at the gathered reads: cheap, often asked."""
        return self.events + int(self._per_read * len(self.reads))

    def output_events(self) -> int:
        """Count the events so far that bring output: exact for one sample, a few more for several.

        Only the first event and those at the end can be without any, so only they are read, and
        only when this is asked.
        """
        self.fold()
        if self.first:
            self.events -= not has_output(self.first)
            self.first = b""
        return max(0, self.events - self._closing_events())

    def _closing_events(self) -> int:
        """Count those at the end that bring nothing: a part of one, and what follows the output."""
        tail = self._tail
        if (end := tail.rfind(b"\n\n")) < 0:
            end = max(tail.rfind(b"\r\n\r\n"), tail.rfind(b"\r\r"), 0)
        count = int(tail.find(_MARK, end) >= 0)
        at = tail.rfind(_FINISH)
        finished = at >= 0 and tail[at + len(_FINISH) :].lstrip().startswith(b'"')
        if finished or tail.find(b"[DONE]", -_DONE_BYTES_MAX) >= 0:
            whole = _FRAMING.sub(b"", tail[:end])
            for event in _last_events(whole)[:-_CLOSING_EVENTS_MAX:-1]:
                if _MARK in event:
                    if has_output(event):
                        break
                    count += 1
        return count

    def ended(self) -> EndOfAnswer:
        """Return what the end of the stream says."""
        self.fold(TAIL_BYTES)
        return EndOfAnswer(self._tail)


class EndOfAnswer:
    """The last bytes of an answer, streamed or plain, raw or not."""

    __slots__ = ("_text",)

    def __init__(self, tail: bytes) -> None:
        tail = tail[-TAIL_BYTES:]
        if b"\r\n" in tail:
            tail = _FRAMING.sub(b"", tail)
        self._text = tail

    def usage(self) -> Usage | None:
        """Return the token counts that the worker reported; None when it reported none."""
        return usage_in(self._text)

    def error(self) -> ReportedError | None:
        """Return the error that the stream's last events report."""
        if b'"error"' not in self._text and b'"abort"' not in self._text:
            return None
        events = _last_events(self._text)[-4:]
        return next((error for event in events if (error := event_error(event))), None)

    def between_events(self, *, chunked: bool) -> bool:
        """Whether a stream that broke off did so between two events; `chunked`: after a chunk."""
        text = self._text.removesuffix(b"\r\n") if chunked else self._text
        return text.endswith(_EVENT_ENDS)


_FIGURE: Final = re.compile(
    rb'"(prompt|input|cached|cache_read_input|completion|output)_tokens"\s*:\s*(\d{1,15})\b'
)
# The same three as SGLang's chat and completion answers write them, found in one step.
_USUAL: Final = re.compile(
    rb'"usage":\{"prompt_tokens":(\d{1,15}),"total_tokens":\d+,"completion_tokens":(\d{1,15}),'
    rb'"prompt_tokens_details":(?:null|\{"cached_tokens":(\d{1,15})\})(?:,"reasoning_tokens":\d+)?'
)
# Which figure of `Usage` each name stands for.
_PLACE: Final = {
    b"prompt": 0,
    b"input": 0,
    b"cached": 1,
    b"cache_read_input": 1,
    b"completion": 2,
    b"output": 2,
}


def usage_in(text: bytes) -> Usage | None:
    """Return the token counts that stand in the end of an answer; None when there are none.

    The last figure of a name counts, as streams may repeat them. Text that the model wrote cannot
    be taken for a figure: its quotation marks are escaped.
    """
    # Most of a plain answer is text; the figures stand behind the last of these names.
    start = text.rfind(b'"usage"')
    usual = _USUAL.match(text, start) if start >= 0 else None
    if usual is not None and text.find(b'_tokens"', usual.end()) < 0:
        prompt, output, cached = usual.groups()
        return Usage(int(prompt), None if cached is None else int(cached), int(output))
    if start < 0:
        start = max(0, text.rfind(b'"meta_info"'))
    if text.find(b'_tokens"', start) < 0:
        return None
    figures: list[int | None] = [None, None, None]
    for name, figure in _FIGURE.findall(text, start):
        figures[_PLACE[name]] = int(figure)
    if figures[0] is None and figures[2] is None:
        return None
    return Usage(*figures)
