"""What counts as the first token, and what as a failed answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.streaming import StreamFailed, StreamMeter, error_name


def fed(*events: Any, start_at: float = 1.0) -> StreamMeter:
    """A meter that was given events one second apart."""
    meter = StreamMeter()
    for n, event in enumerate(events):
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        meter.line(b"data: " + data + b"\n", now=start_at + n)
        meter.line(b"\n", now=start_at + n)
    return meter


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


@pytest.mark.parametrize(
    "nothing",
    [
        delta(role="assistant", content=""),
        delta(content=None, reasoning_content=None),
        {"choices": []},
        {"text": "", "meta_info": {}},
        {"choices": [{"index": 0, "text": ""}]},
    ],
)
def test_an_event_without_text_is_no_first_token(nothing: dict[str, Any]) -> None:
    meter = fed(nothing, delta(content="a"))
    assert meter.first_token_at == 2.0
    assert meter.events == 1


@pytest.mark.parametrize(
    "token",
    [
        delta(content="a"),
        delta(reasoning_content="a"),
        delta(tool_calls=[{"index": 0}]),
        {"choices": [{"index": 0, "text": "a"}]},
        {"text": "a", "meta_info": {}},
    ],
)
def test_text_of_any_streaming_api_is_a_first_token(token: dict[str, Any]) -> None:
    meter = fed(token, b"[DONE]")
    assert meter.first_token_at == 1.0
    meter.check_ended()


def test_comments_are_no_tokens() -> None:
    meter = StreamMeter()
    meter.line(b": heart-beat\n", now=1.0)
    meter.line(b"event: ping\n", now=1.0)
    assert meter.first_token_at is None


def test_the_mean_time_between_tokens_is_by_usage_where_there_is_one() -> None:
    events = (delta(content="a"), delta(content="b"), delta(content="c"))
    assert fed(*events).inter_token_s == 1.0
    assert fed(*events, {"choices": [], "usage": {"completion_tokens": 5}}).inter_token_s == 0.5
    assert fed(delta(content="a")).inter_token_s is None


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ({"error": {"message": "x", "code": "upstream_error"}}, "upstream_error"),
        ({"error": {"message": "x", "type": "server_error", "code": None}}, "server_error"),
        ({"object": "error", "message": "x", "code": 503}, "503"),
        ({"error": "gone"}, "gone"),
    ],
)
def test_an_error_event_fails_the_answer(event: dict[str, Any], name: str) -> None:
    assert error_name(event) == name
    with pytest.raises(StreamFailed, match=name):
        fed(delta(content="a"), event)


@pytest.mark.parametrize("data", [b"{", b"[]", b"12"])
def test_an_event_that_cannot_be_read_fails_the_answer(data: bytes) -> None:
    with pytest.raises(StreamFailed, match="event"):
        fed(data)


def test_an_answer_that_is_cut_or_empty_has_failed() -> None:
    with pytest.raises(StreamFailed, match=r"no \[DONE\]"):
        fed(delta(content="a")).check_ended()
    with pytest.raises(StreamFailed, match="no token"):
        fed(delta(role="assistant"), b"[DONE]").check_ended()
