"""Settings from environment variables: LANEWAY_SECTION__NAME, and what is wrong with them.

Numbers and words are taken as they are. A list is JSON when it begins with a bracket, else its
items stand between commas; workers are then URLs. Whole sections and mappings are JSON. A name that
no setting has is a fault: it would be a setting that silently does nothing. Layer 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeGuard, get_args, get_origin

import orjson
from pydantic import BaseModel

PREFIX: Final = "LANEWAY_"
# Read by the commands that talk to routers and workers, and by the load test.
_OTHERS: Final = frozenset(("ADMIN_KEY", "ROUTER", "WORKER_KEY"))
_LOAD_TEST: Final = "LOAD_"
# What Kubernetes tells every pod of a service whose name begins with "laneway".
_SERVICE_NAME: Final = re.compile(
    r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
_SERVICE_PORT: Final = re.compile(r"(tcp|udp|sctp)://")


def from_environment(
    model: type[BaseModel], environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings in `environ` as `model` takes them, and a line for each fault."""
    document: dict[str, Any] = {}
    faults: list[str] = []
    # Shorter names first, so that LANEWAY_SERVER gives way to LANEWAY_SERVER__PORT.
    for variable in sorted(environ, key=lambda name: (len(name), name)):
        name = variable.upper()
        if not name.startswith(PREFIX):
            continue
        path = [part.lower() for part in name.removeprefix(PREFIX).split("__")]
        if path[0] not in model.model_fields:
            if not _is_another(name.removeprefix(PREFIX), environ[variable]):
                faults.append(f"{variable}: no setting has this name{_perhaps(name, model)}")
            continue
        try:
            value = _value(_annotation(model, path), environ[variable])
        except ValueError as exc:
            faults.append(f"{variable}: {exc}")
        else:
            _put(document, path, value)
    return document, faults


def _is_another(name: str, value: str) -> bool:
    if name in _OTHERS or name.startswith(_LOAD_TEST):
        return True
    if _SERVICE_NAME.fullmatch(name):
        return True
    return name.endswith("PORT") and _SERVICE_PORT.match(value) is not None


def _perhaps(name: str, model: type[BaseModel]) -> str:
    known = [PREFIX + "__".join(path).upper() for path in _paths(model)]
    # A name without its section first: PORT is rather the end of a name than a misspelt one.
    close = [full for full in known if full.endswith("__" + name.removeprefix(PREFIX))]
    close = close or get_close_matches(name, known, n=1)
    return f"; is {close[0]} meant?" if close else ""


def _paths(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*above, name)
        if _is_model(field.annotation):
            yield from _paths(field.annotation, (*above, name))


def _annotation(model: Any, path: list[str]) -> Any:
    """The type of the setting at `path`; None when there is none, which validation will say."""
    kind: Any = model
    for name in path:
        if _is_model(kind):
            field = kind.model_fields.get(name)
            kind = None if field is None else field.annotation
        else:
            kind = get_args(kind)[-1] if get_origin(kind) is dict else None
    return kind


def _is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _value(kind: Any, text: str) -> Any:
    """Read `text` for a setting of this type. Raises ValueError, without repeating it."""
    if get_origin(kind) is tuple:
        if text.lstrip().startswith("["):
            return _json(text, list, "a JSON list, or items with commas between them")
        items = [item.strip() for item in text.split(",")] if text.strip() else []
        return [{"url": item} for item in items] if _is_model(get_args(kind)[0]) else items
    if _is_model(kind) or get_origin(kind) is dict:
        return _json(text, dict, "a JSON object")
    return text


def _json(text: str, kind: type, wanted: str) -> Any:
    try:
        value = orjson.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise ValueError(f"wanted is {wanted}")  # noqa: TRY004 - the text is at fault, not a type
    return value


def _put(document: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, name = path
    for section in sections:
        inner = document.get(section)
        document[section] = document = inner if isinstance(inner, dict) else {}
    document[name] = value
