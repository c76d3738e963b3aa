"""The prompt inside a request: how long it is, and hashes of its beginning.

The prompt is the text that the engine will prefill, in the order in which chat templates place it:
tools, system, messages. It is measured in bytes and hashed in the blocks of the prefix index: each
block's hash includes the ones before it, so two prompts share hashes as far as they share their
beginning, and behind the first 32 kB as far as they share the bytes that are sampled there. What
does not look like a prompt is left for the worker to judge. Pure; layer 2.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final, cast

import orjson

from router.core.prefix import (
    BLOCK_BYTES,
    SAMPLED_BYTES,
    STRIDE_BYTES,
    WHOLE_BLOCKS,
    WHOLE_BYTES,
    Block,
    blocks_of,
    bytes_of,
)
from router.core.types import Endpoint
from router.errors import Reason, Refused

_JOINED_CHARS_MAX: Final = 64 * 1024
# Of longer prompts, those of many small parts are joined, too: a copy costs less than their slices.
_JOINED_MEAN_CHARS_MAX: Final = 4096
_TEXT: Final = frozenset((str,))
_BLOCK: Final = Struct(f"{BLOCK_BYTES}s")
_STRIDE: Final = Struct(f"{STRIDE_BYTES // SAMPLED_BYTES}s")  # what is sampled of one
_hash: Final[Callable[[object], Block]] = hash  # not called an int, see `Block`
# A picture costs some hundred to two thousand tokens whatever its file weighs.
_MEDIA_CHARS_MAX: Final = 4096
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
    """Gathers a prompt, then measures it and hashes its beginning."""

    __slots__ = ("_ids_bytes", "_parts")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._ids_bytes = 0  # what token ids count more, or less, than their digits

    def measured(self, model: str | None, blocks_max: int) -> tuple[int, tuple[int, ...]]:
        """Return what `measured` does of all that was gathered."""
        parts = self._parts
        chars = sum(map(len, parts))
        if chars > max(_JOINED_CHARS_MAX, len(parts) * _JOINED_MEAN_CHARS_MAX) and all(
            map(str.isascii, parts)
        ):
            size, prefix = chars, _hashes(model, *_picked(parts, min(blocks_of(chars), blocks_max)))
        else:
            size, prefix = measured("".join(parts), model, blocks_max)
        return size + self._ids_bytes, prefix

    def add(self, text: str) -> None:
        """Append text."""
        self._parts.append(text)

    def loose(self, value: Any) -> None:
        """Append any JSON value by its own text."""
        self._parts.append(value if type(value) is str else _json(value))

    def content(self, content: Any, depth: int = 0) -> None:
        """Append a string or a list of parts (text, pictures, sound, tool results)."""
        if type(content) is str:
            self.add(content)
        elif type(content) is list and depth < _DEPTH_MAX:
            for part in content:
                self._part(part, depth)

    def messages(self, messages: list[Any], name: str) -> None:
        """Append the messages of a chat."""
        texts = plain_texts(messages)
        if texts is None:
            self._mixed(messages, name)
        else:
            self._parts += texts

    def _mixed(self, messages: list[Any], name: str) -> None:
        """Append messages that may hold more than text, or are none."""
        append = self._parts.append
        for message in messages:
            if type(message) is not dict:
                raise _bad(name, "each item to be an object")
            # The role is part of the prompt: the same words of another speaker are another prefix.
            role, content = message.get("role"), message.get("content")
            if type(role) is str:
                append(role)
            if type(content) is str:
                append(content)
            else:
                self.content(content)
            if len(message) > 2 and (calls := message.get("tool_calls")):
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
                # The length tells two large files with the same beginning apart.
                self._parts.append(f"{value[:_MEDIA_CHARS_MAX]}{len(value)}")

    def _ids(self, ids: list[Any]) -> None:
        text = _json(ids)
        self._parts.append(text)
        self._ids_bytes += _BYTES_PER_ID * len(ids) - len(text)


def measured(text: str, model: str | None, blocks_max: int) -> tuple[int, tuple[int, ...]]:
    """Return the size in bytes, and one chained hash per block or stride, `blocks_max` at most."""
    if text.isascii():  # Python knows without a look
        size = len(text)
        blocks = min(size // BLOCK_BYTES, blocks_max)
        if blocks > WHOLE_BLOCKS:
            return size, _hashes(model, *_picked([text], min(blocks_of(size), blocks_max)))
        return size, _hashes(model, text[: blocks * BLOCK_BYTES].encode(), b"") if blocks else ()
    data = text.encode()
    size = len(data)
    blocks = min(blocks_of(size), blocks_max)
    sampled = data[WHOLE_BYTES + SAMPLED_BYTES - 1 : bytes_of(blocks) : SAMPLED_BYTES]
    whole = data[: min(WHOLE_BYTES, bytes_of(blocks))]
    return size, _hashes(model, whole, sampled) if blocks else ()


def _picked(parts: list[str], blocks: int) -> tuple[bytes, bytes]:
    """What is hashed of a text in ASCII, in parts: whole at its beginning, and sampled behind it.

    The rest is not joined, which would only copy it.
    """
    whole, sampled = [], []
    start, end = 0, bytes_of(blocks)
    first = min(WHOLE_BYTES, end)
    for part in parts:
        if start >= end:
            break
        if start < first:
            whole.append(part[: first - start])
        if start + len(part) > first:
            at = max(first - start, 0)
            at += (-1 - start - at) % SAMPLED_BYTES
            sampled.append(part[at : end - start : SAMPLED_BYTES])
        start += len(part)
    return "".join(whole).encode(), "".join(sampled).encode()


def _hashes(model: str | None, whole: bytes, sampled: bytes) -> tuple[int, ...]:
    """One chained hash per block of `whole` text and per stride `sampled`.

    The chain begins with the model, whose cache it is. Hashes are Python's own: 64 bits, and of
    another key in each process, so that no client can make two of them collide.
    """
    chained = _hash(model)
    hashes = [chained := _hash((chained, block)) for (block,) in _BLOCK.iter_unpack(whole)]
    if sampled:
        hashes += [chained := _hash((chained, some)) for (some,) in _STRIDE.iter_unpack(sampled)]
    return cast("tuple[int, ...]", tuple(hashes))


def plain_chat(messages: Any) -> str | None:
    """Return the text of messages that have a role and a text each, and nothing else.

    As nearly all have. None: some are others.
    """
    try:
        if type(messages) is list and sum(map(len, messages)) == 2 * len(messages):
            parts: list[str] = []
            for message in messages:
                parts += message["role"], message["content"]
            return "".join(parts)
    except (KeyError, TypeError):
        pass
    return None


def plain_texts(messages: list[Any]) -> list[str] | None:
    """The same, as one text after the other."""
    try:
        if sum(map(len, messages)) == 2 * len(messages):
            texts = [message[name] for message in messages for name in ("role", "content")]
            return texts if _TEXT.issuperset(map(type, texts)) else None
    except (KeyError, TypeError):
        pass
    return None


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
        prompt.messages(messages, "messages")
    return 1


def _responses(prompt: Prompt, document: dict[str, Any]) -> int:
    if tools := document.get("tools"):
        prompt.loose(tools)
    prompt.content(document.get("instructions"))
    value = document.get("input")
    if type(value) is list:
        prompt.messages(value, "input")
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


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as exc:  # it writes less deep than it reads
        raise Refused(Reason.BAD_REQUEST, "The body is nested too deeply.") from exc


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
