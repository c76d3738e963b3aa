"""What is seen of an answer from the side: first events, errors, progress, usage."""

from __future__ import annotations

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.runtime.sse import (
    FIRST_EVENT_BYTES_MAX,
    READS_MAX,
    TAIL_BYTES,
    EndOfAnswer,
    StreamScan,
    between_events,
    dechunked,
    event_error,
    first_chunked_event,
    first_event,
    has_output,
    told_error,
    usage_in,
)
from tests.runtime.raw_worker import DONE, USAGE, chunk, delta

QUEUE_FULL = "The request queue is full."


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_the_first_event_ends_with_any_of_the_line_ends(end: bytes) -> None:
    event = b"data: {}"
    assert first_event(event + end[:-1]) is None
    assert first_event(event + end + b"data: 2") == event
    assert first_event(b"\r\n" + event + end) == event


def test_comments_and_endless_events_are_not_waited_for() -> None:
    assert first_event(b": ping") == b""
    assert first_event(b"data: " + b"x" * FIRST_EVENT_BYTES_MAX) == b""
    assert first_event(b"") is None


FRAMES = [
    b'event: message_start\ndata: {"type":"message_start","message":{"content":[]}}',
    b'event: ping\ndata: {"type": "ping"}',
    b'event: response.created\ndata: {"type":"response.created","response":{"error":null}}',
    b'event:response.queued\ndata:{"type":"response.queued"}',
    b'event: response.in_progress\ndata: {"type":"response.in_progress","response":{}}',
    b"event: ping",
]
FAILED = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}'


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_what_only_says_that_an_answer_begins_is_not_the_first_event(end: bytes) -> None:
    line_end = end[: len(end) // 2]
    events = [event.replace(b"\n", line_end) for event in (*FRAMES, FAILED)]
    whole = b"".join(event + end for event in events)
    for cut in range(len(whole)):
        assert first_event(whole[:cut]) is None
    assert first_event(whole) == events[-1]
    assert first_event(whole + end + b"data: 2" + end) == events[-1]
    ends = [len(b"".join(e + end for e in events[:n])) for n in range(len(events) + 1)]
    assert {cut for cut in range(len(whole) + 1) if between_events(whole[:cut])} == set(ends)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 1_000])
def test_frames_are_passed_over_in_chunks_too(size: int) -> None:
    whole = b"\n\n".join((*FRAMES, FAILED, b"data: [DONE]", b""))
    raw = b"".join(chunk(whole[at : at + size]) for at in range(0, len(whole), size))
    found = [first_chunked_event(raw[:cut]) for cut in range(len(raw))]
    assert set(found) == {None, FAILED}
    payloads = [dechunked(raw[:cut]) for cut in range(len(raw))]
    assert found == [first_event(payload) for payload in payloads]


@pytest.mark.parametrize(
    "event",
    [
        b"event: pinged\ndata: 1",
        b"event: response.completed\ndata: {}",
        b"event: response.created_\ndata: {}",
        b"event: content_block_start\ndata: {}",
        b'data: {"type":"message_start"}',
        b"data: event: ping",
    ],
)
def test_any_other_event_is_the_first(event: bytes) -> None:
    assert first_event(b"event: ping\ndata: {}\n\n" + event + b"\n\n") == event


def test_behind_frames_comments_and_endless_events_are_not_waited_for() -> None:
    frame = FRAMES[0] + b"\n\n"
    assert first_event(frame + b": keep-alive") == b""
    assert first_event(frame + b"data: " + b"x" * FIRST_EVENT_BYTES_MAX) == b""


@pytest.mark.parametrize(
    ("document", "status", "message"),
    [
        ({"error": {"message": "full", "type": "SERVICE_UNAVAILABLE", "code": 503}}, 503, "full"),
        ({"error": {"message": "full", "code": "503"}}, 503, "full"),
        ({"error": {"error": {"object": "error", "message": "no", "code": 400}}}, 400, "no"),
        ({"error": {"message": "no", "type": "invalid_request_error"}}, 400, "no"),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, 503, "x"),
        ({"error": {"message": 5, "code": "model_not_found", "type": "not_found_error"}}, 404, ""),
        ({"error": {"code": True}}, 500, ""),
        ({"error": "broken"}, 500, "broken"),
        ({"error": {}}, 500, ""),
        (
            {"meta_info": {"finish_reason": {"type": "abort", "status_code": 503, "message": "f"}}},
            503,
            "f",
        ),
        (
            {"type": "response.failed", "response": {"error": {"message": QUEUE_FULL}}},
            503,
            QUEUE_FULL,
        ),
        ({"response": {"error": {"message": "503: no encoder"}}}, 503, "no encoder"),
    ],
)
def test_errors_are_known_in_all_their_shapes(
    document: dict[str, object], status: int, message: str
) -> None:
    error = event_error(b"event: error\ndata: " + orjson.dumps(document))
    assert error is not None
    assert (error.status, error.message) == (status, message)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"delta":{"content":"\\"error\\" is a word"}}]}',
        b'data: {"text":"error","error":null}',
        b'data: {"error"',
        b'data: ["error"]',
        b'data: {"meta_info":{"finish_reason":{"type":"abort"}},"x":"error"}',
        b'data: {"meta_info":{"finish_reason":{"type":"abort","message":"Aborted"}}}',
        b'data: {"response":{"error":null}}',
        b'data: {"response":{"error":{"code":"server_error","message":"The input is too long"}}}',
        b'data: {"response":{"error":{"code":"server_error","message":7}}}',
        b'data: {"response":"x","type":"error"}',
        b"data: [DONE]",
        b"",
    ],
)
def test_what_is_no_error_is_not_taken_for_one(event: bytes) -> None:
    assert event_error(event) is None


@pytest.mark.parametrize(
    ("message", "status", "rest"),
    [
        ("503: The request queue is full.", 503, QUEUE_FULL),
        ("500: Decode transfer failed\nfor 1", 500, "Decode transfer failed\nfor 1"),
        ("404: gone", 404, "gone"),
    ],
)
def test_a_status_before_the_message_of_a_body_is_told(
    message: str, status: int, rest: str
) -> None:
    body = orjson.dumps({"error": {"message": message, "type": "x", "param": None, "code": 400}})
    error = told_error(body)
    assert error is not None
    assert (error.status, error.message) == (status, rest)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"The model \'503: x\' does not exist"}}',
        b'{"error":{"message":"5033: x"}}',
        b'{"error":{"message":"200: x"}}',
        b'{"error":{"message":"503"}}',
        b'{"error":{"message":503}}',
        b'{"error":"503: x"}',
        b'{"message":"503: x"}',
        b'["503: x"]',
        b'{"error":{"message":"503: x"}',
        b"",
    ],
)
def test_no_status_is_read_into_other_bodies(body: bytes) -> None:
    assert told_error(body) is None


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":3}}', (7, None, 3)),
        (
            b'{"usage":{"prompt_tokens":7,"completion_tokens":3,'
            b'"prompt_tokens_details":{"cached_tokens":4}},"metadata":{"weight_version":"1"}}',
            (7, 4, 3),
        ),
        (b'{"type":"message_delta","usage":{"input_tokens":9,"output_tokens":2}}', (9, None, 2)),
        (
            b'{"text":"\\"completion_tokens\\": 99","meta_info":{"prompt_tokens":5,'
            b'"completion_tokens":6,"cached_tokens":1}}',
            (5, 1, 6),
        ),
        (b'{"usage": {"prompt_tokens": 7, "total_tokens": 7}}', (7, None, None)),
    ],
)
def test_usage_is_read_in_all_its_shapes(text: bytes, figures: tuple[int | None, ...]) -> None:
    usage = EndOfAnswer(text).usage()
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == figures


def usual(details: str, rest: str = "") -> bytes:
    """The end of a plain answer of SGLang."""
    counts = '"prompt_tokens":311,"total_tokens":375,"completion_tokens":64'
    return f'{{"usage":{{{counts},"prompt_tokens_details":{details}{rest}}}}}'.encode()


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        (usual("null", ',"reasoning_tokens":0'), (311, None, 64)),
        (usual('{"cached_tokens":256}', ',"reasoning_tokens":0'), (311, 256, 64)),
        (usual("null"), (311, None, 64)),
        # Written in the usual way but for something behind it, which counts as in any other form.
        (usual("null", ',"completion_tokens":65'), (311, None, 65)),
        (usual("null", ',"details":{"cached_tokens":7}'), (311, 7, 64)),
        (usual('{"cached_tokens":256,"text_tokens":1}'), (311, 256, 64)),
        (usual("null").replace(b"311", b"3" * 16), (None, None, 64)),
        (usual("null") + usual("null").replace(b"64", b"66"), (311, None, 66)),
    ],
)
def test_usage_in_its_usual_form_is_read_as_in_any_other(
    text: bytes, figures: tuple[int | None, ...]
) -> None:
    usage = usage_in(text)
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == figures


@pytest.mark.parametrize("text", [b"", b'{"usage":null}', b'"completion_tokens\\": 5', b"\xff\x00"])
def test_no_usage_is_unknown_and_not_zero(text: bytes) -> None:
    assert EndOfAnswer(text).usage() is None


def scanned(reads: list[bytes]) -> StreamScan:
    scan = StreamScan()
    for read in reads:
        scan.reads.append(read)
        if len(scan.reads) >= READS_MAX:
            scan.fold()
    scan.fold()
    return scan


@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 4000), max_size=30),
)
def test_events_and_usage_are_counted_whatever_the_cuts(texts: list[str], cuts: list[int]) -> None:
    whole = b"".join(delta(orjson.dumps(t).decode()[1:-1]) for t in texts) + USAGE + DONE
    edges = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
    reads = [whole[a:b] for a, b in pairwise(edges)]
    scan = scanned(reads)
    usage = scan.ended().usage()
    assert usage is not None
    assert usage.output_tokens == 3
    payload = dechunked(whole)
    assert scan.events == payload.count(b"data:")


def test_a_stream_sent_letter_by_letter_shows_its_usage() -> None:
    payload = dechunked(delta("a") * 30 + USAGE + DONE)
    scan = scanned([chunk(payload[i : i + 1]) for i in range(len(payload))])
    usage = scan.ended().usage()
    assert usage is not None
    assert (usage.output_tokens, scan.events) == (3, 32)


def test_memory_is_bounded_whatever_comes() -> None:
    scan = StreamScan()
    for read in [b"x" * 200_000, b"y" * 10, b"data: " + b"z" * 3000] * 50:
        scan.reads.append(read)
        scan.fold()
        assert len(scan._tail) <= TAIL_BYTES
        assert not scan.reads


@pytest.mark.parametrize(
    ("tail", "chunked", "expected"),
    [
        (delta("a"), True, True),
        (chunk(b"data: 1\r\n\r\n"), True, True),
        (chunk(b"data: 1\n"), True, False),
        (b"data: 1\n\n", False, True),
        (b"data: 1", False, False),
    ],
)
def test_it_is_known_whether_a_stream_broke_between_events(
    tail: bytes, chunked: bool, expected: bool
) -> None:
    assert EndOfAnswer(tail).between_events(chunked=chunked) is expected


def test_an_error_among_the_last_events_is_found() -> None:
    error = chunk(b'data: {"error":{"message":"timeout reached","code":503}}\n\n')
    found = scanned([delta("a"), error, DONE]).ended().error()
    assert found is not None
    assert found.status == 503
    assert scanned([delta("error"), DONE]).ended().error() is None


def test_a_chunked_beginning_is_taken_apart_as_far_as_it_came() -> None:
    raw = b"3;ext=1\r\nabc\r\n4\r\nde"
    assert dechunked(raw) == b"abcde"
    assert dechunked(b"zz\r\n") == b""
    assert dechunked(b"5") == b""


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{"content":null},"finish_reason":"length"}]}\n\n'
LAST_DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("event", "brings"),
    [
        (ROLE.strip(), False),
        (FINISH.strip(), False),
        (b"data:[DONE]", False),
        (b'data: {"choices":[],"usage":{"completion_tokens":8}}', False),
        (b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}', False),
        (b'data: {"choices":[{"delta":{"role":"assistant","content":"a"}}]}', True),
        (b'data: {"choices":[{"delta":{"content":null,"reasoning_content":"a"}}]}', True),
        (b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', True),
        (b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}', True),
        (b'data: {"choices":[{"text":"","finish_reason":"stop"}]}', False),
        (b'data: {"text":"a","meta_info":{}}', True),
        (b'event: message_start\ndata: {"type":"message_start"}', False),
        (b'event: message_delta\ndata: {"type":"message_delta"}', False),
        (b'event: x\r\ndata: {"type":"content_block_delta"}', True),
        (b'data: {"type":"response.output_text.delta"}', True),
        (b'data: {"type":"response.output_text.done"}', False),
        (b"data: what", True),
        (b"data: 3", True),
    ],
)
def test_only_what_brings_output_counts_as_such(event: bytes, brings: bool) -> None:
    assert has_output(event) is brings


NAMES = st.sampled_from(("role", "content", "reasoning_content", "tool_calls"))
VALUES = st.sampled_from((None, "", "a", '"}', "assistant", [], [{"type": "function"}]))


@given(st.dictionaries(NAMES, VALUES), st.booleans(), st.integers(1, 2))
def test_what_is_seen_at_a_glance_is_what_reading_the_event_says(
    delta: dict[str, object], logprobs: bool, choices: int
) -> None:
    choice = {"index": 0, "delta": delta, **({"logprobs": None} if logprobs else {})}
    event = b"data: " + orjson.dumps({"id": "x", "choices": [choice] * choices, "usage": None})
    spaced = event.replace(b'"choices":', b'"choices": ')  # which is never usual
    assert has_output(event) is has_output(spaced)


@given(st.lists(st.integers(1, 3), min_size=READS_MAX, max_size=80))
def test_a_guess_of_the_progress_is_no_further_off_than_the_reads_at_hand(sizes: list[int]) -> None:
    scan = StreamScan()
    for size in sizes:
        scan.reads.append(delta("a") * size)
        if len(scan.reads) >= READS_MAX:
            scan.fold()
    assert abs(scan.progress() - sum(sizes)) <= 2 * len(scan.reads)
    assert len(scan.reads) < READS_MAX


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 20_000), max_size=12),
    st.lists(st.booleans(), min_size=64, max_size=64),
    st.booleans(),
)
def test_eight_tokens_are_eight_whatever_stands_around_them(
    tokens: int, cuts: list[int], asked: list[bool], chunked: bool
) -> None:
    token = b'data: {"choices":[{"delta":{"content":"data: %d"},"finish_reason":null}]}\n\n'
    events = [ROLE, *(token % n for n in range(tokens))]
    events += [FINISH, LAST_DONE]
    whole = b"".join(chunk(event) if chunked else event for event in events)
    places = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    scan = StreamScan()
    counts = []
    for (start, end), ask in zip(pairwise(places), asked, strict=False):
        scan.reads.append(whole[start:end])
        if not start:
            scan.first = ROLE.strip()
        if ask:
            counts.append(scan.output_events())
    scan.ended()
    counts.append(scan.output_events())
    assert counts == sorted(counts)
    assert counts[-1] == tokens
