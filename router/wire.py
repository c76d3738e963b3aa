"""Read from request bodies the few fields that policy needs.

Bodies are forwarded as the client sent them; this module only looks, but for `rewritten`, which
makes the body of a request that is degraded. What it looks at is checked, so that a wrong type or
an absurd limit is answered here, with the field's name, instead of reaching the arithmetic of the
core. Everything else is the worker's business. Pure; layer 2.

`prompts` measures and hashes the prompt; here are the limits and the shape around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from router.config import PrefixSettings
from router.core.types import Endpoint, Priority, RequestSpec
from router.documents import document_of
from router.errors import Reason, Refused
from router.forms import form_field
from router.prompts import Prompt, measured, plain_chat, prompt_reader

# Above this a token limit is a mistake of the client; it also keeps sums far from any overflow.
TOKENS_MAX: Final = 2**31 - 1
SAMPLES_MAX: Final = 1024
_MODEL_CHARS_MAX: Final = 512
# The prompt of a form (audio) is taken to be no longer than a picture's.
_FORM_BYTES_MAX: Final = 4096
_RID_CHARS_MAX: Final = 256
# Longer ones go the general way, which copies less of a text.
_SHORT_BYTES_MAX: Final = 64 * 1024
_GENERATE: Final = Endpoint.GENERATE
_CHATS: Final = (Endpoint.CHAT, Endpoint.MESSAGES)
_P1: Final = Priority.P1

# In order of precedence; every one that is present is checked.
_LIMIT_FIELDS: Final[dict[Endpoint, tuple[str, ...]]] = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
}
_SAMPLE_FIELDS: Final[dict[Endpoint, tuple[str, ...]]] = {
    Endpoint.CHAT: ("n", "best_of"),
    Endpoint.COMPLETIONS: ("n", "best_of"),
}
# What a shorter answer would break: output of a given form, calls of tools, thoughts before it.
_GRAMMARS: Final = frozenset(("json_schema", "regex", "ebnf", "structural_tag"))
_FORM_FIELDS: Final[dict[Endpoint, frozenset[str]]] = {
    Endpoint.CHAT: _GRAMMARS | {"response_format", "tools", "functions"},
    Endpoint.COMPLETIONS: _GRAMMARS | {"response_format"},
    Endpoint.MESSAGES: frozenset(("tools", "output_format", "output_config", "thinking")),
    Endpoint.RESPONSES: frozenset(("tools", "text")),
    Endpoint.GENERATE: frozenset(("sampling_params",)),
}
_NO_FIELDS: Final[frozenset[str]] = frozenset()
_LEAST_FIELDS: Final = ("min_tokens", "min_new_tokens")


class BodyReader:
    """Reads the bodies of one family of routes; keeps nothing between calls."""

    __slots__ = (
        "_blocks_max",
        "_endpoint",
        "_form_fields",
        "_forms",
        "_limit_fields",
        "_read_prompt",
        "_sample_fields",
        "_seldom",
    )

    def __init__(self, endpoint: Endpoint, prefix: PrefixSettings, *, forms: bool = False) -> None:
        self._endpoint = endpoint
        self._forms = forms  # whether these routes take forms, too
        self._blocks_max = prefix.blocks_max if prefix.enabled else 0
        self._read_prompt: Callable[[Prompt, dict[str, Any]], int] = prompt_reader(endpoint)
        self._limit_fields = _LIMIT_FIELDS.get(endpoint, ())
        self._form_fields = _FORM_FIELDS.get(endpoint, _NO_FIELDS)
        self._sample_fields = _SAMPLE_FIELDS.get(endpoint, ())
        # All that matters of a chat but the model, messages, a limit and whether it is streamed:
        # nearly none has any of it. None: no chat.
        self._seldom: frozenset[str] | None = None
        if endpoint in _CHATS:
            fields = {"tools", "system", "rid", *self._limit_fields, *self._sample_fields}
            self._seldom = self._form_fields.union(fields) - {"max_tokens"}

    def read(
        self,
        content_type: bytes | None,
        body: bytes,
        *,
        request_id: str,
        tenant: str,
        priority: Priority = _P1,
    ) -> RequestSpec:
        """Return what policy needs to know. A form shows its model.

        Raises Refused: BAD_REQUEST, naming the field, for broken JSON and wrong types or values;
        UNSUPPORTED_MEDIA for what says that it is no JSON: nothing can reach a worker unread.
        """
        if content_type != b"application/json" and not _is_json(content_type):
            return self._read_form(content_type, body, request_id, tenant, priority)
        try:
            document = document_of(body)
        except ValueError as exc:
            raise _no_json(body, exc) from exc
        if type(document) is not dict:
            raise Refused(Reason.BAD_REQUEST, "The body must be a JSON object.")
        get = document.get
        model, stream = get("model"), get("stream", False)
        if model is not None and (type(model) is not str or not 0 < len(model) <= _MODEL_CHARS_MAX):
            raise _bad("model", f"a string of 1 to {_MODEL_CHARS_MAX} characters")
        if stream is not False and stream is not True:
            stream = _absent_stream(stream)
        seldom, max_tokens, text = self._seldom, get("max_tokens"), None
        fits = max_tokens is None or (type(max_tokens) is int and 0 < max_tokens <= TOKENS_MAX)
        if fits and seldom and len(body) <= _SHORT_BYTES_MAX and seldom.isdisjoint(document):
            text = plain_chat(get("messages"))
        if text is None:
            return self._read_any(
                document, request_id, tenant, model=model, stream=stream, priority=priority
            )
        size, prefix = measured(text, model, self._blocks_max)
        return RequestSpec(
            request_id,
            self._endpoint,
            model,
            tenant,
            stream,
            size,
            max_tokens,
            1,
            prefix,
            None,
            priority,
        )

    def _read_any(
        self,
        document: dict[str, Any],
        request_id: str,
        tenant: str,
        *,
        model: str | None,
        stream: bool,
        priority: Priority,
    ) -> RequestSpec:
        """The same for a document of whatever form."""
        max_tokens, samples = self._limits(document)
        prompt, rid = Prompt(), document.get("rid")
        prompts = self._read_prompt(prompt, document)
        size, prefix = prompt.measured(model, self._blocks_max)
        return RequestSpec(
            request_id,
            self._endpoint,
            model,
            tenant,
            stream,
            prompt_bytes=size,
            max_tokens=max_tokens,
            samples=samples if prompts == 1 else min(SAMPLES_MAX, samples * prompts),
            prefix=prefix,
            rid=rid if type(rid) is str and len(rid) <= _RID_CHARS_MAX else None,
            priority=priority,
            structured=not self._form_fields.isdisjoint(document) and self._asks_for_form(document),
        )

    def _read_form(
        self,
        content_type: bytes | None,
        body: bytes,
        request_id: str,
        tenant: str,
        priority: Priority,
    ) -> RequestSpec:
        """The same for a body that is not JSON: only forms are, on routes that take them."""
        if not (self._forms and _kind(content_type) == b"multipart/form-data"):
            raise _not_json(content_type, forms=self._forms)
        return RequestSpec(
            request_id,
            self._endpoint,
            _form_model(content_type or b"", body),
            tenant,
            prompt_bytes=min(len(body), _FORM_BYTES_MAX),
            priority=priority,
            fixed=True,
        )

    def _asks_for_form(self, document: dict[str, Any]) -> bool:
        """Whether some field that may ask for a form of output does."""
        return any(_asks_for_form(name, document.get(name)) for name in self._form_fields)

    def _limits(self, document: dict[str, Any]) -> tuple[int | None, int]:
        """Return max_tokens (None: absent) and the sequences generated per prompt."""
        if self._endpoint is _GENERATE:
            return _generate_limits(document)
        max_tokens = None
        for name in self._limit_fields:
            if (value := document.get(name)) is not None:
                limit = _count(value, name, least=1, most=TOKENS_MAX)
                max_tokens = limit if max_tokens is None else max_tokens
        samples = 1
        for name in self._sample_fields:
            if (value := document.get(name)) is not None:
                samples = max(samples, _count(value, name, least=1, most=SAMPLES_MAX))
        return max_tokens, samples


def rewritten(
    body: bytes, endpoint: Endpoint, *, max_tokens: int | None, model: str | None
) -> bytes:
    """Return the body of a degraded request: as it was, but for a smaller limit or another model.

    `body` is one that `BodyReader.read` took. Raises Refused when it is nested too deeply.
    """
    document = document_of(body)
    if model is not None:
        document["model"] = model
    if max_tokens is not None and endpoint is _GENERATE:
        params = document.setdefault("sampling_params", {}) or {}
        document["sampling_params"] = params
        for one in params if type(params) is list else [params]:
            _cut(one, ("max_new_tokens",), max_tokens)
    elif max_tokens is not None:
        _cut(document, _LIMIT_FIELDS.get(endpoint, ()), max_tokens)
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError as exc:
        raise Refused(Reason.BAD_REQUEST, "The body is nested too deeply.") from exc


def _cut(params: dict[str, Any], names: tuple[str, ...], most: int) -> None:
    """Bring the limit that `names` say to `most`; the last name is used when there is none."""
    present = [name for name in names if params.get(name) is not None]
    for name in present:
        params[name] = min(params[name], most)
    if not present:
        params[names[-1]] = most
    for name in _LEAST_FIELDS:
        if type(least := params.get(name)) is int and least > most:
            params[name] = most  # or the engine would refuse it


def _asks_for_form(name: str, value: Any) -> bool:
    """Whether a field that may ask for a form of output does."""
    if name == "sampling_params":
        sets = value if type(value) is list else [value]
        return any(type(one) is dict and any(map(one.get, _GRAMMARS)) for one in sets)
    if name in ("text", "output_config") and type(value) is dict:
        value = value.get("format")
    if type(value) is dict and value.get("type") in ("text", "disabled"):
        return False
    return bool(value)


def _is_json(content_type: bytes | None) -> bool:
    if content_type is None:
        return True  # SGLang reads a body without a type as JSON, too
    kind = _kind(content_type)
    return kind == b"application/json" or kind.endswith(b"+json")


def _kind(content_type: bytes | None) -> bytes:
    return (content_type or b"").partition(b";")[0].strip().lower()


def _not_json(content_type: bytes | None, *, forms: bool) -> Refused:
    wanted = "application/json" + (" or multipart/form-data" if forms else "")
    given = _kind(content_type).decode("latin-1")
    return Refused(
        Reason.UNSUPPORTED_MEDIA,
        f"The content-type is {given!r:.100}; this route wants {wanted}.",
        param="content-type",
    )


def json_fault(body: bytes, exc: ValueError) -> str:
    """Say in plain words why `body` is not JSON; `exc` is the parser's own reason."""
    try:
        body.decode()
    except UnicodeDecodeError as found:
        return f"it is no UTF-8 text at byte {found.start}"
    return str(exc)


def _form_model(content_type: bytes, body: bytes) -> str | None:
    model = form_field(content_type, body, "model") or None
    if model is not None and len(model) > _MODEL_CHARS_MAX:
        raise _bad("model", f"a string of 1 to {_MODEL_CHARS_MAX} characters")
    return model


def _bad(param: str, expected: str) -> Refused:
    return Refused(Reason.BAD_REQUEST, f"{param}: expected {expected}.", param=param)


def _no_json(body: bytes, exc: ValueError) -> Refused:
    return Refused(Reason.BAD_REQUEST, f"The body is not valid JSON: {json_fault(body, exc)}.")


def _absent_stream(stream: Any) -> bool:
    """Read a null as if nothing were said."""
    if stream is not None:
        raise _bad("stream", "true or false")
    return False


def _count(value: Any, param: str, *, least: int, most: int) -> int:
    """Check an integer. By `type` and not isinstance: true is not a number here."""
    if type(value) is not int or not least <= value <= most:
        raise _bad(param, f"an integer from {least} to {most}")
    return value


def _generate_limits(document: dict[str, Any]) -> tuple[int | None, int]:
    """Limits of /generate: in sampling_params, one object for all or a list, one per prompt."""
    value = document.get("sampling_params")
    if value is None:
        return None, 1
    if type(value) is dict:
        sets = [("sampling_params", value)]
    elif type(value) is list and all(type(item) is dict for item in value):
        sets = [(f"sampling_params[{index}]", item) for index, item in enumerate(value)]
    else:
        raise _bad("sampling_params", "an object or a list of objects")
    limits, samples = [], 1
    for path, params in sets:
        if (limit := params.get("max_new_tokens")) is not None:
            # SGLang takes 0 here: prefill only, to warm the cache or to score a prompt.
            limits.append(_count(limit, f"{path}.max_new_tokens", least=0, most=TOKENS_MAX))
        if (n := params.get("n")) is not None:
            samples = max(samples, _count(n, f"{path}.n", least=1, most=SAMPLES_MAX))
    known = limits and len(limits) == len(sets)
    return (max(1, *limits) if known else None), samples
