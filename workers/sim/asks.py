"""Read request bodies as SGLang does: `Ask` is what a body asks of the engine.

SGLang checks types leniently (a whole float or a number in a string is a number), ignores unknown
fields and does not check the model's name. Its errors differ by layer: a body of the wrong form is
a "Bad Request" with the validator's message, a broken rule a "BadRequestError", and /generate has a
shape of its own. All are status 400. /v1/messages and /v1/responses put the same into the shapes of
their APIs; what does not fit into the context is refused there before a stream begins, where SGLang
has just begun it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import orjson

COMPLETIONS_MAX_TOKENS: Final = 16
GENERATE_MAX_TOKENS: Final = 128
MESSAGE_TOKENS: Final = 5  # a chat template's share of each message
TEMPLATE_TOKENS: Final = 12
SEQUENCES_MAX: Final = 1024
INT64_MAX: Final = 2**63 - 1


class Api(StrEnum):
    """Families of answers."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    MESSAGES = "messages"
    RESPONSES = "responses"


class BadAsk(Exception):
    """A request that SGLang answers with 400 or 404; holds the whole body of that answer.

    `brief` is its reason in the words of /v1/messages, None where that API has no such case.
    """

    def __init__(
        self,
        body: dict[str, Any],
        streamed: bool = False,
        *,
        status: int = 400,
        brief: str | None = None,
    ) -> None:
        super().__init__(body)
        self.status = status
        self.body = body
        self.streamed = streamed  # answered as an event of a stream with status 200
        self.brief = brief


def rule_broken(message: str) -> BadAsk:
    """A well-formed request that breaks a rule."""
    return BadAsk(_error(message, "BadRequestError"), brief=message)


def _malformed(kind: str, where: str, message: str, value: object) -> BadAsk:
    item = {"type": kind, "loc": ("body", where), "msg": message, "input": value}
    body = _error(f"1 validation error:\n  {item!r:.2000}", "Bad Request")
    return BadAsk(body, brief=f"{where}: {message}" if where else message)


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": 400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one request asks for. `prompts` hold bytes as they are hashed into prefix blocks."""

    api: Api
    model: str
    prompts: tuple[bytes, ...]
    extra_tokens: int = 0  # of a chat template, per prompt
    samples: int = 1  # sequences per prompt
    max_tokens: int | None = None  # None: up to the end of the context
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    usage_always: bool = False  # usage in every chunk
    priority: int | None = None
    rids: tuple[str, ...] = ()
    is_batch: bool = False  # /generate answers a list of prompts with a list
    documents: tuple[str, ...] = ()
    repeated: Mapping[str, Any] = field(default_factory=dict)  # what /v1/responses says again


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises BadAsk."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise _malformed("json_invalid", str(exc.pos), "JSON decode error", {}) from exc
    if not isinstance(document, dict):
        raise _malformed("dict_type", "", "Input should be a valid dictionary", document)
    return document


def read_ask(api: Api, body: bytes) -> Ask:
    """Return what `body` asks for. Raises BadAsk."""
    return _READERS[api](read_json(body))


def _chat(body: dict[str, Any]) -> Ask:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise _malformed("missing", "messages", "Field required", body)
    if not messages:
        raise rule_broken("Messages cannot be empty.")
    prompt = b"".join(_message(message) for message in messages)
    limit = _whole(body, "max_completion_tokens")
    limit = _whole(body, "max_tokens") if limit is None else limit
    if limit is not None and limit < 0:
        raise rule_broken(f"max_new_tokens must be at least 0, got {limit}.")
    return Ask(
        api=Api.CHAT,
        prompts=(prompt,),
        extra_tokens=TEMPLATE_TOKENS + MESSAGE_TOKENS * len(messages),
        max_tokens=limit,
        samples=_samples(body),
        **_common(body),
    )


def _message(message: Any) -> bytes:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _malformed("union_tag_not_found", "messages", "Unable to extract tag", message)
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise _malformed("string_type", "messages", "Input should be a valid string", content)
    return f"{message['role']}\n{_text(content)}\n".encode("utf-8", "replace")


def _text(content: Any) -> str:
    """The text in the content of a message, that of results of tools included."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return "".join(_text(part.get("text") or part.get("content")) for part in parts)
    return content if isinstance(content, str) else ""


def _anthropic(body: dict[str, Any]) -> Ask:
    """Of /v1/messages, which SGLang makes a chat."""
    if not body.get("model"):
        raise _malformed("missing", "model", "Field required", body)
    limit = _whole(body, "max_tokens")
    if limit is None:
        raise _malformed("missing", "max_tokens", "Field required", body)
    if limit <= 0:
        message = "Value error, max_tokens must be positive"
        raise _malformed("value_error", "max_tokens", message, limit)
    return replace(conversation(body), api=Api.MESSAGES, max_tokens=limit)


def conversation(body: dict[str, Any]) -> Ask:
    """Return what the system's and the others' messages of Anthropic's API ask. Raises BadAsk."""
    system = _text(body.get("system"))
    messages = body.get("messages")
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") not in _ANTHROPIC_ROLES:
                told = "Input should be 'user', 'assistant' or 'system'"
                raise _malformed("literal_error", f"messages.{index}.role", told, message)
        messages = [{"role": "system", "content": system}] * bool(system) + messages
    options: dict[str, Any] = {name: body[name] for name in ("model", "stream") if name in body}
    return _chat({"messages": messages, **options})


_ANTHROPIC_ROLES: Final = ("user", "assistant", "system")
# What an answer of /v1/responses says again of its request, with what stands where it is not said.
_REPEATED: Final[Mapping[str, Any]] = {
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": (),
    "instructions": None,
    "max_output_tokens": None,
    "store": True,
    "temperature": None,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
    "metadata": {},
}
_RESERVED_TOKENS: Final = 2  # of max_output_tokens, for marks around the text


def _responses(body: dict[str, Any]) -> Ask:
    """Of /v1/responses, as a server without a store of responses reads it."""
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise _malformed("missing", "input", "Field required", body)
    if not isinstance(body.get("model"), str):
        raise rule_broken("1 validation error: model: Input should be a valid string")
    for name in ("previous_response_id", "background"):
        if body.get(name):
            raise store_disabled(name)
    if instructions := body.get("instructions"):
        items = [{"role": "system", "content": instructions}, *items]
    # Calls of tools and their results have no role.
    named = [{"role": "tool", **item} if isinstance(item, dict) else item for item in items]
    ask = _chat({"messages": named, "model": body.get("model"), "stream": body.get("stream")})
    limit = _whole(body, "max_output_tokens")
    if limit is not None and limit < _RESERVED_TOKENS:
        raise rule_broken(f"max_new_tokens must be at least 0, got {limit - _RESERVED_TOKENS}.")
    rid = body.get("request_id")
    return replace(
        ask,
        api=Api.RESPONSES,
        max_tokens=None if limit is None else limit - _RESERVED_TOKENS,
        rids=(rid,) if isinstance(rid, str) else (),
        repeated={name: body.get(name, usual) for name, usual in _REPEATED.items()},
    )


def no_such_model(model: str) -> BadAsk:
    """What /v1/responses says of a model, unlike the other routes, that is not served here."""
    error = _error(f"The model '{model}' does not exist", "invalid_request_error")
    return BadAsk({**error, "param": "model", "code": 404}, status=404)


def store_disabled(param: str) -> BadAsk:
    """What needs responses to be kept, which SGLang does with --enable-response-store only."""
    error = _error(
        "Response store is disabled. Stateful Responses require --enable-response-store on a "
        "standalone server; response storage is unavailable in PD mode.",
        "invalid_request_error",
    )
    return BadAsk({**error, "param": param})


def _completions(body: dict[str, Any]) -> Ask:
    prompts, _ = _prompts(body.get("prompt"), "prompt")
    limit = _whole(body, "max_tokens")
    if limit is not None and limit <= 0:
        raise _malformed("value_error", "max_tokens", "max_tokens must be positive", limit)
    return Ask(
        api=Api.COMPLETIONS,
        prompts=prompts,
        max_tokens=COMPLETIONS_MAX_TOKENS if limit is None else limit,
        samples=_samples(body),
        **_common(body),
    )


def _generate(body: dict[str, Any]) -> Ask:
    source = body.get("text") if body.get("text") is not None else body.get("input_ids")
    if source is None:
        raise _generate_error("Either text, input_ids or input_embeds should be provided.", body)
    sampling = body.get("sampling_params")
    if isinstance(sampling, list):
        sampling = sampling[0] if sampling else None  # one set for the batch is what people send
    if sampling is not None and not isinstance(sampling, dict):
        raise _malformed("dict_type", "sampling_params", "Input should be a dictionary", sampling)
    sampling = sampling or {}
    limit = _whole(sampling, "max_new_tokens")
    if limit is not None and limit < 0:
        raise _generate_error(f"max_new_tokens must be at least 0, got {limit}.", body)
    prompts, is_batch = _prompts(source, "text")
    common = _common(body)
    for name in ("min_tokens", "ignore_eos"):
        common.pop(name)
    return Ask(
        api=Api.GENERATE,
        prompts=prompts,
        is_batch=is_batch,
        max_tokens=GENERATE_MAX_TOKENS if limit is None else limit,
        samples=_samples(sampling),
        min_tokens=_whole(sampling, "min_new_tokens") or 0,
        ignore_eos=_flag(sampling, "ignore_eos"),
        **common,
    )


def _generate_error(message: str, body: dict[str, Any]) -> BadAsk:
    return generate_error(message, streamed=_flag(body, "stream"))


def generate_error(message: str, *, streamed: bool) -> BadAsk:
    """An error in /generate's own shape; in a stream it is an event."""
    if not streamed:
        return BadAsk({"error": {"message": message}})
    kind = {"type": "invalid_request_error", "code": 400, "retryable": False}
    return BadAsk({"error": {"message": message, **kind}}, streamed=True)


def _embeddings(body: dict[str, Any]) -> Ask:
    prompts, _ = _prompts(body.get("input"), "input")
    return Ask(api=Api.EMBEDDINGS, model=_model(body), prompts=prompts)


def _rerank(body: dict[str, Any]) -> Ask:
    query, documents = body.get("query"), body.get("documents")
    if not isinstance(query, str):
        raise _malformed("string_type", "query", "Input should be a valid string", query)
    if not isinstance(documents, list) or not all(isinstance(d, str) for d in documents):
        raise _malformed("list_type", "documents", "Input should be a list of strings", documents)
    if not documents:
        raise rule_broken("Documents cannot be empty.")
    prompts = tuple(f"{query}\n{document}".encode("utf-8", "replace") for document in documents)
    return Ask(api=Api.RERANK, model=_model(body), prompts=prompts, documents=tuple(documents))


_READERS: Final[Mapping[Api, Callable[[dict[str, Any]], Ask]]] = {
    Api.CHAT: _chat,
    Api.COMPLETIONS: _completions,
    Api.GENERATE: _generate,
    Api.EMBEDDINGS: _embeddings,
    Api.RERANK: _rerank,
    Api.MESSAGES: _anthropic,
    Api.RESPONSES: _responses,
}


def _common(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    rid = body.get("rid")
    rids = rid if isinstance(rid, list) else [rid] if isinstance(rid, str) else []
    return {
        "model": _model(body),
        "stream": _flag(body, "stream"),
        "include_usage": _flag(options, "include_usage"),
        "usage_always": _flag(options, "continuous_usage_stats"),
        "ignore_eos": _flag(body, "ignore_eos"),
        "min_tokens": _whole(body, "min_tokens") or 0,
        "priority": _whole(body, "priority"),
        "rids": tuple(str(one) for one in rids),
    }


def _model(body: dict[str, Any]) -> str:
    model = body.get("model")
    return model if isinstance(model, str) else "default"


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _malformed("bool_type", name, "Input should be a valid boolean", value)


def _whole(body: dict[str, Any], name: str) -> int | None:
    """Return an integer field as the validator of SGLang reads it. Raises BadAsk."""
    value = body.get(name)
    if value is None:
        return None
    text = isinstance(value, str) and len(value) < 20 and value.strip().lstrip("+-").isdecimal()
    whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
    if not (isinstance(value, int) or text or whole):
        raise _malformed("int_parsing", name, "Input should be a valid integer", value)
    number = int(value)
    if abs(number) > INT64_MAX:
        raise _malformed("int_parsing_size", name, "Unable to parse input string", number)
    return number


def _samples(body: dict[str, Any]) -> int:
    samples = _whole(body, "n")
    if samples is None:
        return 1
    if not 1 <= samples <= SEQUENCES_MAX:
        raise rule_broken(f"n must be between 1 and {SEQUENCES_MAX}, got {samples}.")
    return samples


def _prompts(value: Any, name: str) -> tuple[tuple[bytes, ...], bool]:
    """Return prompts as bytes, four to a token id, and whether they came as a batch."""
    if isinstance(value, str):
        return (value.encode("utf-8", "replace"),), False
    if isinstance(value, list) and value:
        if all(isinstance(one, int) for one in value):
            return (_ids(value),), False
        if all(isinstance(one, str) for one in value):
            return tuple(one.encode("utf-8", "replace") for one in value), True
        if all(isinstance(one, list) and all(isinstance(i, int) for i in one) for one in value):
            return tuple(_ids(one) for one in value), True
    if value is None:
        raise _malformed("missing", name, "Field required", None)
    raise _malformed("string_type", name, "Input should be a valid string", value)


def _ids(numbers: list[int]) -> bytes:
    return b"".join((number & 0xFFFFFFFF).to_bytes(4, "big") for number in numbers)
