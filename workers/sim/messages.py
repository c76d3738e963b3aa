"""Answers of /v1/messages in Anthropic's shapes, as SGLang makes them of a chat's. Pure.

One sequence per answer. The prompt's usage comes with the first token; what of it was cached is
counted apart, as Anthropic does.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any, Final

import orjson

from workers.sim.answers import Sequence, named_event
from workers.sim.asks import Ask
from workers.sim.text import TokenRing

_STOP_REASONS: Final = {"length": "max_tokens", "stop": "end_turn", "abort": "end_turn"}
_BEFORE_TEXT, _AFTER_TEXT = named_event(
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "\x00"},
    }
).split(b"\\u0000")


def error_body(kind: str, message: str) -> bytes:
    """Return an error as this API tells it."""
    return orjson.dumps(_error(kind, message))


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesShape:
    """Events with names, of which the last says that the message stops."""

    end_mark = b""

    def __init__(self, ask: Ask, ring: TokenRing) -> None:
        self._ask = ask
        self._ring = ring
        self._block = False  # whether the block of text has begun

    def at_once(self, sequence: Sequence) -> bytes:  # noqa: ARG002
        """Nothing but the head."""
        return b""

    def opening(self, sequence: Sequence) -> bytes:
        """The message without its content, and what the prompt took."""
        return self._start(sequence, {**_input(sequence), "output_tokens": 0})

    def piece(self, sequence: Sequence, made: int) -> bytes:
        """One delta of the block; the first one comes behind the block's beginning."""
        text = self._ring.text(sequence.offset, sequence.sent, made - sequence.sent)
        delta = _BEFORE_TEXT + text + _AFTER_TEXT
        if self._block:
            return delta
        self._block = True
        block = {"type": "text", "text": ""}
        return (
            named_event({"type": "content_block_start", "index": 0, "content_block": block}) + delta
        )

    def closing(self, sequence: Sequence) -> bytes:
        """The rest, the end of the block, the reason, and the end of the message."""
        rest = self.piece(sequence, sequence.made) if sequence.made > sequence.sent else b""
        told = {
            "type": "message_delta",
            "delta": {"stop_reason": _STOP_REASONS[sequence.ending or "stop"]},
            "usage": {"output_tokens": sequence.made},
        }
        return rest + self._block_stop() + named_event(told) + named_event({"type": "message_stop"})

    def failure(self, sequence: Sequence) -> bytes:
        """An error event in a stream that is whole all the same."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        start = b"" if sequence.opened else self._start(sequence, usage)
        error = named_event(_error("overloaded_error", sequence.error or ""))
        return start + self._block_stop() + error + named_event({"type": "message_stop"})

    def plain(self, sequences: Several[Sequence]) -> bytes:
        """The whole message."""
        (sequence,) = sequences
        text = self._ring.text(sequence.offset, 0, sequence.made).decode()
        usage = {**_input(sequence), "output_tokens": sequence.made}
        stop_reason = _STOP_REASONS[sequence.ending or "stop"]
        return orjson.dumps(
            self._message(sequence, [{"type": "text", "text": text}])
            | {"stop_reason": stop_reason, "usage": usage}
        )

    def refusal(self, message: str) -> tuple[int, bytes]:  # noqa: ARG002
        """Of a 5xx this API never tells the reason."""
        return 503, error_body("overloaded_error", "Internal server error")

    def _start(self, sequence: Sequence, usage: dict[str, Any]) -> bytes:
        message = self._message(sequence, []) | {"usage": usage}
        return named_event({"type": "message_start", "message": message})

    def _block_stop(self) -> bytes:
        return named_event({"type": "content_block_stop", "index": 0}) if self._block else b""

    def _message(self, sequence: Sequence, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{sequence.request.id}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._ask.model,
        }


def _input(sequence: Sequence) -> dict[str, int]:
    cached = sequence.request.cached_tokens
    told = {"input_tokens": sequence.request.prompt_tokens - cached}
    return told | {"cache_read_input_tokens": cached} if cached else told
