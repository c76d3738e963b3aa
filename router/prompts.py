"""The prompt inside a request: how long it is, and hashes of its beginning.

The prompt is the text that the engine will prefill, in the order in which chat templates place it:
tools, system, messages. It is measured in bytes and hashed in blocks of 512: each block's hash
includes the ones before it, so two prompts share a hash exactly as far as they share their
beginning. What does not look like a prompt is left for the worker to judge. Pure; layer 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

import orjson

from router.core.types import Endpoint
from router.errors import Reason, Refused

BLOCK_BYTES: Final = 512
# A picture costs some hundred to two thousand tokens whatever its file weighs.
_MEDIA_BYTES_MAX: Final = 4096
# Shorter strings beside a picture are labels such as "image_url" or "auto".
_LABEL_CHARS_MAX: Final = 16
# Tool results hold parts of their own, once; deeper nesting is no prompt.
_DEPTH_MAX: Final = 4
# Four bytes a token is the core's first guess for text, so a prompt of ids counts the same.
_BYTES_PER_ID: Final = 4
# Of routes that only prefill (rerank, score, classify, tokenize): all that may hold text.
_LOOSE_FIELDS: Final = ("messages", "query", "documents", "text", "text_1", "text_2", "input",
                        "prompt", "items")  # fmt: skip


class Prompt:
    """Gathers a prompt: its size, and its beginning as far as blocks are hashed."""

    __slots__ = ("_parts", "_wanted", "size_bytes")

    def __init__(self, blocks_max: int) -> None:
        self.size_bytes = 0
        self._wanted = blocks_max * BLOCK_BYTES
        self._parts: list[bytes] = []

    def hashes(self, model: str | None) -> tuple[int, ...]:
        """Return one chained hash per whole block; seeded by the model, whose cache it is."""
        head = b"".join(self._parts)
        end = len(head) - BLOCK_BYTES + 1
        if end <= 0:
            return ()
        crc32 = zlib.crc32
        chained = crc32(model.encode()) if model else 0
        hashes = []
        for start in range(0, end, BLOCK_BYTES):
            chained = crc32(head[start : start + BLOCK_BYTES], chained)
            hashes.append(chained)
        return tuple(hashes)

    def add(self, text: str) -> None:
        """Append text."""
        data = text.encode()
        size = len(data)
        self.size_bytes += size
        if self._wanted > 0:
            self._parts.append(data if size <= self._wanted else data[: self._wanted])
            self._wanted -= size

    def loose(self, value: Any) -> None:
        """Append any JSON value by its own text."""
        self.add(value if type(value) is str else orjson.dumps(value).decode())

    def content(self, content: Any, depth: int = 0) -> None:
        """Append a string or a list of parts (text, pictures, sound, tool results)."""
        if type(content) is str:
            self.add(content)
        elif type(content) is list and depth < _DEPTH_MAX:
            for part in content:
                self._part(part, depth)

    def message(self, message: Any) -> None:
        """Append one message of a chat."""
        if type(message) is not dict:
            raise _bad("messages", "each message to be an object")
        # The role is part of the prompt: the same words from another speaker are another prefix.
        if type(role := message.get("role")) is str:
            self.add(role)
        content = message.get("content")
        if type(content) is str:
            self.add(content)
        else:
            self.content(content)
        if calls := message.get("tool_calls"):
            self.loose(calls)

    def batch(self, value: Any, name: str) -> int:
        """Append one prompt or several, as text or as token ids; return how many there are."""
        if value is None:
            return 1
        if type(value) is str:
            self.add(value)
            return 1
        if type(value) is not list:
            raise _bad(name, "a string, a list of strings or token ids")
        if not value or type(value[0]) is int:
            self._ids(value)
            return 1
        for prompt in value:
            if type(prompt) is list:
                self._ids(prompt)
            else:
                self.loose(prompt)
        return len(value)

    def _part(self, part: Any, depth: int) -> None:
        if type(part) is str:
            self.add(part)
        elif type(part) is dict:
            if type(text := part.get("text")) is str:
                self.add(text)
            elif type(inner := part.get("content")) in (str, list):
                self.content(inner, depth + 1)
            else:
                self._media(part)

    def _media(self, part: dict[str, Any]) -> None:
        """Append what names a picture or a sound: its URL or data, up to a bound.

        OpenAI nests it once: {"type": "image_url", "image_url": {"url": ...}}.
        """
        nested = (value.values() if type(value) is dict else (value,) for value in part.values())
        for value in (value for values in nested for value in values):
            if type(value) is str and len(value) > _LABEL_CHARS_MAX:
                self.add(value[:_MEDIA_BYTES_MAX])
                # The length tells two large files with the same beginning apart.
                self._parts.append(b"%d" % len(value))

    def _ids(self, ids: list[Any]) -> None:
        self.size_bytes += _BYTES_PER_ID * len(ids)
        if self._wanted > 0:
            data = orjson.dumps(ids[: self._wanted])[: self._wanted]
            self._parts.append(data)
            self._wanted -= len(data)


def prompt_reader(endpoint: Endpoint) -> Callable[[Prompt, dict[str, Any]], int]:
    """Return the function that takes the prompt of `endpoint` and says how many there are."""
    return _READERS[endpoint]


def _chat(prompt: Prompt, document: dict[str, Any]) -> int:
    if tools := document.get("tools"):
        prompt.loose(tools)
    if (system := document.get("system")) is not None:
        prompt.content(system)
    messages = document.get("messages")
    if messages is not None:
        if type(messages) is not list:
            raise _bad("messages", "a list of messages")
        for message in messages:
            prompt.message(message)
    return 1


def _responses(prompt: Prompt, document: dict[str, Any]) -> int:
    if tools := document.get("tools"):
        prompt.loose(tools)
    prompt.content(document.get("instructions"))
    value = document.get("input")
    if type(value) is list:
        for item in value:
            prompt.message(item)
    elif type(value) is str:
        prompt.add(value)
    elif value is not None:
        raise _bad("input", "a string or a list of items")
    return 1


def _completions(prompt: Prompt, document: dict[str, Any]) -> int:
    return prompt.batch(document.get("prompt"), "prompt")


def _generate(prompt: Prompt, document: dict[str, Any]) -> int:
    name = "text" if document.get("text") is not None else "input_ids"
    return prompt.batch(document.get(name), name)


def _embeddings(prompt: Prompt, document: dict[str, Any]) -> int:
    return prompt.batch(document.get("input"), "input")


def _other(prompt: Prompt, document: dict[str, Any]) -> int:
    for name in _LOOSE_FIELDS:
        if (value := document.get(name)) is not None:
            prompt.loose(value)
    return 1


def _bad(param: str, expected: str) -> Refused:
    return Refused(Reason.BAD_REQUEST, f"{param}: expected {expected}.", param=param)


_READERS: Final[dict[Endpoint, Callable[[Prompt, dict[str, Any]], int]]] = {
    Endpoint.CHAT: _chat,
    Endpoint.MESSAGES: _chat,
    Endpoint.RESPONSES: _responses,
    Endpoint.COMPLETIONS: _completions,
    Endpoint.GENERATE: _generate,
    Endpoint.EMBEDDINGS: _embeddings,
    Endpoint.OTHER: _other,
}
