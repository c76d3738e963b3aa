"""What a load test wants to know of one streamed answer: first token, end, faults.

`StreamMeter` reads the lines of an SSE answer as they come. The first token is the first event
with text in it: headers, comments, the role event of chats and empty deltas do not count, since a
user sees none of them. An answer that names an error, or ends without `[DONE]`, has failed however
good its status was. Pure; times are seconds on the caller's clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


class StreamFailed(Exception):
    """An answer that a user would not accept. The message is short: reports are grouped by it."""


@dataclass(slots=True)
class StreamMeter:
    """The measurements of one answer. Feed it with `line`, then ask `check_ended`."""

    first_token_at: float | None = None
    last_token_at: float | None = None
    events: int = 0  # events with text; about the tokens
    output_tokens: int | None = None  # as the answer's usage says
    done: bool = False

    def line(self, line: bytes, *, now: float) -> None:
        """Take one line of the answer. Raises StreamFailed at an error event."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise StreamFailed("an event is not JSON") from None
        if not isinstance(event, dict):
            raise StreamFailed("an event is not an object")
        if event.get("error") or event.get("object") == "error":
            raise StreamFailed(f"error event: {error_name(event)}")
        self._usage(event)
        if has_text(event):
            self.events += 1
            self.last_token_at = now
            if self.first_token_at is None:
                self.first_token_at = now

    def check_ended(self) -> None:
        """Raise StreamFailed unless the answer ended as a good one does."""
        if not self.done:
            raise StreamFailed("the stream was cut: no [DONE]")
        if self.first_token_at is None:
            raise StreamFailed("the stream had no token")

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between tokens after the first; None with fewer than two."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        tokens = self.output_tokens or self.events
        return (self.last_token_at - self.first_token_at) / (tokens - 1) if tokens > 1 else None

    def _usage(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.output_tokens = usage["completion_tokens"]


def has_text(event: dict[str, Any]) -> bool:
    """Whether an event of any of the streaming APIs carries generated text."""
    if event.get("text"):  # SGLang's own /generate
        return True
    choices = event.get("choices")
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        delta = choice.get("delta")
        parts = delta if isinstance(delta, dict) else choice
        if any(parts.get(key) for key in ("content", "reasoning_content", "tool_calls", "text")):
            return True
    return False


def error_name(document: Any) -> str:
    """A short name of the error in a body or event: its code or type, in any of the shapes met."""
    error = document.get("error", document) if isinstance(document, dict) else document
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "unnamed")[:80]
    return str(error)[:80]
