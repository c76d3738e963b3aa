"""What the load client sends and what the fake workers answer, byte for byte.

Both sides import this module, so the client knows the only right answer to each request. A
chunk of a stream differs from the next in its stamp alone: 19 digits of CLOCK_MONOTONIC, taken
as the worker writes it. Pure.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Final

MODEL: Final = "bench-model"
STAMP: Final = b'"content":"t'
STAMP_DIGITS: Final = 19
SSE_DONE: Final = b"data: [DONE]\n\n"

_CREATED = 1_764_000_000
_ANSWER_ID = "c0ffee00c0ffee00c0ffee00c0ffee00"
_NO_STAMP = b"0" * STAMP_DIGITS
_PLACE = b"NUMBER0NUMBER"
_ALPHABET = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike "
    "november oscar papa quebec romeo sierra tango uniform victor whiskey"
)


def compact_json(value: object) -> bytes:
    """`value` as JSON without spaces, the way SGLang writes it."""
    return json.dumps(value, separators=(",", ":")).encode()


def completion(model: str) -> bytes:
    """The body of every plain completion, 675 bytes for the usual model name."""
    message = {
        "role": "assistant",
        "content": "The quick brown fox jumps over the lazy dog. " * 6,
        "reasoning_content": None,
        "tool_calls": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": "length",
        "matched_stop": None,
    }
    usage = {
        "prompt_tokens": 311,
        "total_tokens": 375,
        "completion_tokens": 64,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }
    return compact_json(
        {
            "id": _ANSWER_ID,
            "object": "chat.completion",
            "created": _CREATED,
            "model": model,
            "choices": [choice],
            "usage": usage,
        }
    )


def event(model: str, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    """One server-sent event of a streamed completion."""
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish_reason,
        "matched_stop": None,
    }
    return b"data: %b\n\n" % compact_json(
        {
            "id": _ANSWER_ID,
            "object": "chat.completion.chunk",
            "created": _CREATED,
            "model": model,
            "choices": [choice],
            "usage": None,
        }
    )


@dataclass(frozen=True, slots=True)
class StreamParts:
    """The events of a stream: role, stamped chunks, finish, [DONE]."""

    first: bytes
    before_stamp: bytes
    after_stamp: bytes
    finish: bytes

    def whole(self, stamps: list[bytes]) -> bytes:
        """The body of a stream whose chunks have these stamps, one at least."""
        between = self.after_stamp + self.before_stamp
        start = self.first + self.before_stamp
        return start + between.join(stamps) + self.after_stamp + self.finish + SSE_DONE


def stream_parts(model: str) -> StreamParts:
    """The events that a worker serving `model` streams."""
    chunk = event(model, {"content": f"t{_NO_STAMP.decode()} "})
    before, after = chunk.split(_NO_STAMP)
    return StreamParts(
        first=event(model, {"role": "assistant", "content": ""}),
        before_stamp=before,
        after_stamp=after,
        finish=event(model, {"content": ""}, "length"),
    )


def stamps_of(body: bytes) -> list[bytes]:
    """What stands where stamps belong in a streamed body."""
    return [piece[:STAMP_DIGITS] for piece in body.split(STAMP)[1:]]


def stamps_ascend(stamps: list[bytes]) -> bool:
    """Whether each is a stamp and later than the one before: no chunk repeated or overtaken."""
    all_digits = all(len(stamp) == STAMP_DIGITS and stamp.isdigit() for stamp in stamps)
    return all_digits and stamps == sorted(set(stamps))


def chat_bodies(
    model: str, *, stream: bool, tokens: int, body_bytes: int, count: int = 64
) -> list[tuple[bytes, bytes]]:
    """Conversations of about `body_bytes` each, in two halves: a 12-digit number goes between.

    All share a system prompt; the number stands at the end of the last message and makes every
    request new, so that prefix caches see one shared and one fresh part.
    """
    rnd = random.Random(7)
    system = "You are a helpful assistant. " + _text(rnd, 400)
    halves = []
    for _ in range(count):
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": _text(rnd, 300)},
            {"role": "assistant", "content": _text(rnd, 250)},
            {
                "role": "user",
                "content": _text(rnd, max(20, body_bytes - 1260)) + f" {_PLACE.decode()}",
            },
        ]
        body = json.dumps(
            {
                "model": model,
                "messages": messages,
                "max_tokens": tokens,
                "temperature": 0.7,
                "top_p": 0.95,
                "stream": stream,
            }
        ).encode()
        before, after = body.split(_PLACE)
        halves.append((before, after))
    return halves


def _text(rnd: random.Random, length: int) -> str:
    alphabet = _ALPHABET.split()
    words: list[str] = []
    size = 0
    while size < length:
        words.append(rnd.choice(alphabet))
        size += len(words[-1]) + 1
    return " ".join(words)[:length]
