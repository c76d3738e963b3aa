"""Answers of /v1/responses in the shapes of OpenAI's Responses API, as SGLang makes them. Pure.

One sequence per answer, which becomes one message; nothing is kept of it, as on a server that runs
without --enable-response-store.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import Any, Final

import orjson

from workers.sim.answers import Sequence, named_event
from workers.sim.asks import Ask
from workers.sim.text import TokenRing

_STATUSES: Final = {"length": "incomplete", "stop": "completed", "abort": "failed"}


def error_body(error: Mapping[str, Any]) -> bytes:
    """Return an error as this API tells it, which is OpenAI's way, from SGLang's."""
    kind = error["type"].replace("BadRequestError", "invalid_request_error")
    told = {
        "message": error["message"],
        "type": kind,
        "param": error["param"],
        "code": error["code"],
    }
    return orjson.dumps({"error": told})


class ResponsesShape:
    """Events with names and numbers; the first two come before any token."""

    end_mark = b""

    def __init__(self, ask: Ask, ring: TokenRing) -> None:
        self._ask = ask
        self._ring = ring
        self._number = 0  # of the next event
        self._item = False  # whether the message has begun

    def at_once(self, sequence: Sequence) -> bytes:
        """The response that begins."""
        begun = self._response(sequence, "in_progress")
        events = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=begun) for kind in events)

    def opening(self, sequence: Sequence) -> bytes:  # noqa: ARG002
        """The message begins with its first text."""
        return b""

    def piece(self, sequence: Sequence, made: int) -> bytes:
        """One delta; the first one comes behind the message's beginning."""
        text = self._ring.text(sequence.offset, sequence.sent, made - sequence.sent)
        return self._begin(sequence) + self._event(
            "response.output_text.delta",
            **_place(sequence),
            delta=text.decode(),
            logprobs=[],
        )

    def closing(self, sequence: Sequence) -> bytes:
        """The rest, the end of the message, and the response as it is in the end."""
        rest = self.piece(sequence, sequence.made) if sequence.made > sequence.sent else b""
        status = _STATUSES[sequence.ending or "stop"]
        done = self._response(sequence, status, whole=True)
        return rest + self._end_of_item(sequence) + self._event(f"response.{status}", response=done)

    def failure(self, sequence: Sequence) -> bytes:
        """A response that failed, which begins all the same."""
        begun = b"" if self._number else self.at_once(sequence)
        rest = self.piece(sequence, sequence.made) if sequence.made > sequence.sent else b""
        failed = self._response(sequence, "failed", whole=True)
        end = self._end_of_item(sequence)
        return begun + rest + end + self._event("response.failed", response=failed)

    def plain(self, sequences: Several[Sequence]) -> bytes:
        """The whole response."""
        (sequence,) = sequences
        status = _STATUSES[sequence.ending or "stop"]
        return orjson.dumps(self._response(sequence, status, whole=True))

    def refusal(self, message: str) -> tuple[int, bytes]:
        """A 503 is told as a mistake of the client."""
        kind = "invalid_request_error"
        return 400, error_body(
            {"message": f"503: {message}", "type": kind, "param": None, "code": 400}
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        return named_event({"type": kind, **fields, "sequence_number": number})

    def _begin(self, sequence: Sequence) -> bytes:
        if self._item:
            return b""
        self._item = True
        item = self._message(sequence, "in_progress", [])
        return self._event("response.output_item.added", output_index=0, item=item) + self._event(
            "response.content_part.added", **_place(sequence), part=_part("")
        )

    def _end_of_item(self, sequence: Sequence) -> bytes:
        if not self._item:
            return b""
        part = self._part_of(sequence)
        item = self._message(sequence, "completed", [part])
        place = _place(sequence)
        return (
            self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
            + self._event("response.content_part.done", **place, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
        )

    def _part_of(self, sequence: Sequence) -> dict[str, Any]:
        return _part(self._ring.text(sequence.offset, 0, sequence.made).decode())

    def _message(
        self, sequence: Sequence, status: str, content: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "id": _item_id(sequence),
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": "final_answer",
        }

    def _response(self, sequence: Sequence, status: str, *, whole: bool = False) -> dict[str, Any]:
        output = []
        if whole and sequence.made:
            output = [self._message(sequence, "completed", [self._part_of(sequence)])]
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        error = None
        if status == "failed":
            message = sequence.error or "Aborted"
            error = {"code": "server_error", "message": message}
        return {
            "id": sequence.request.id,
            "object": "response",
            "created_at": sequence.created,
            "model": self._ask.model,
            "output": output,
            "status": status,
            "usage": _usage(sequence) if whole else None,
            **self._ask.repeated,
            "error": error,
            "incomplete_details": reason,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "text": {"format": {"type": "text"}} if output else None,
        }


def _item_id(sequence: Sequence) -> str:
    return f"msg_{sequence.request.id.removeprefix('resp_')}"


def _place(sequence: Sequence) -> dict[str, Any]:
    return {"item_id": _item_id(sequence), "output_index": 0, "content_index": 0}


def _part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _usage(sequence: Sequence) -> dict[str, Any]:
    request, made = sequence.request, sequence.made
    begun = request.started_at is not None
    prompt, cached = (request.prompt_tokens, request.cached_tokens) if begun else (0, 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + made,
    }
