"""Versions of a configuration: what changed from one to the next, in a form that may be shown.

Secrets never appear: API keys are named as in the access log, by the first digits of their hash,
so that it can be seen which one came or went; all other secrets are masked. Layer 0: pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

import orjson
from pydantic import BaseModel, SecretStr

from router.config import Config
from router.config_overlay import HIDDEN

# Settings (section.name) or sections that a running router cannot change: each with the reason.
FIXED: Final[Mapping[str, str]] = {
    "server.host": "the socket is open",
    "server.port": "the socket is open",
    "server.tls": "the listener has its certificates",
    "server.access_log": "the log is open",
    "relays.count": "its processes run",
    "redis": "connections to it are open",
    "cluster.sync_interval_s": "the exchange with other routers has its rhythm",
    "cluster.ttl_s": "the exchange with other routers has its rhythm",
    "policy.seed": "random numbers are drawn from it already",
}
CHANGES_MAX: Final = 200
ConfigSourceName = Literal["start", "file", "signal", "api", "cluster"]
_DIGEST_CHARS: Final = 12
# user:password@ in an address.
_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that changed. `old` and `new` are as shown; absent: there was, or is, none."""

    path: str
    old: Any
    new: Any
    absent: tuple[bool, bool] = (False, False)

    def as_json(self) -> dict[str, Any]:
        """The change for people and programs; a side that is absent has no member."""
        sides = (("old", self.old), ("new", self.new))
        told = {name: v for (name, v), gone in zip(sides, self.absent, strict=True) if not gone}
        return {"path": self.path, **told}

    def __str__(self) -> str:
        sides = ((self.old, self.absent[0]), (self.new, self.absent[1]))
        old, new = ("nothing" if gone else orjson.dumps(v).decode() for v, gone in sides)
        return f"{self.path}: {old} -> {new}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigVersion:
    """A configuration that was, or is, in force.

    `number` counts from 1 at the start of the router. `digest` is the same wherever the same
    settings are in force. `overlay` is what was patched over file, environment and flags.
    """

    number: int
    digest: str
    at: float  # seconds on the wall clock, for people
    source: ConfigSourceName
    who: str  # the file's path, an admin key's name, another router
    changes: tuple[Change, ...]  # the first CHANGES_MAX
    changes_total: int
    document: Mapping[str, Any]  # what all sources and the overlay say together; with its secrets
    overlay: Mapping[str, Any]  # likewise

    def as_json(self) -> dict[str, Any]:
        """The version without its settings."""
        return {
            "number": self.number,
            "digest": self.digest,
            "at": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds"),
            "source": self.source,
            "who": self.who,
        }


def digest_of(config: Config) -> str:
    """Twelve hexadecimal digits that tell configurations apart, wherever their routers listen."""
    document = plain(config, secret=lambda s: sha256(s.get_secret_value().encode()).hexdigest())
    for name in ("host", "port", "tls"):  # each router's own
        del document["server"][name]
    text = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    return sha256(text).hexdigest()[:_DIGEST_CHARS]


def shown(value: Any) -> Any:
    """`value`, a configuration or a part of one, as JSON without secrets."""
    return plain(value, secret=lambda s: HIDDEN)  # noqa: ARG005 - none of it may be seen


def shown_overlay(overlay: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The words of `overlay` as they are shown where `config` is what came of them."""
    return _as_shown(overlay, shown(config))


def _as_shown(overlay: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in overlay.items():
        whole = there.get(name) if value is not None else None
        if isinstance(value, Mapping) and isinstance(whole, Mapping):
            whole = _as_shown(value, whole)
        out[name] = whole
    return out


def changes_between(old: Config, new: Config) -> tuple[Change, ...]:
    """What changed, setting by setting; a worker is named by its id, a mapping's entry by name."""
    return tuple(_changes(old, new, ""))


def fixed_changes(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Those of `changes` that only a restart can make."""
    return tuple(c for c in changes if any(f"{c.path}.".startswith(f"{f}.") for f in FIXED))


def as_running(wanted: Config, running: Config) -> Config:
    """`wanted` with the settings that cannot change as they are in `running`."""
    for path in FIXED:
        section, _, name = path.partition(".")
        part = getattr(running, section)
        if name:
            kept = getattr(part, name)
            part = getattr(wanted, section).model_copy(update={name: kept})
        wanted = wanted.model_copy(update={section: part})
    return wanted


def plain(value: Any, *, secret: Callable[[SecretStr], str]) -> Any:
    """`value` as JSON has it; `secret` says what stands for one."""
    match value:
        case BaseModel():
            return {n: plain(getattr(value, n), secret=secret) for n in type(value).model_fields}
        case dict():
            return {str(name): plain(item, secret=secret) for name, item in value.items()}
        case frozenset():
            return sorted(plain(item, secret=secret) for item in value)
        case tuple() | list():
            keys = bool(value) and all(isinstance(item, SecretStr) for item in value)
            return [_key_name(v) if keys else plain(v, secret=secret) for v in value]
        case _:
            return _plain_leaf(value, secret)


def _plain_leaf(value: Any, secret: Callable[[SecretStr], str]) -> Any:
    match value:
        case SecretStr():
            return secret(value)
        case Enum():
            return value.value
        case Path():
            return str(value)
        case str():
            return _PASSWORD.sub(HIDDEN, value)
        case None | bool() | int() | float():
            return value
        case _:  # a network, for one
            return str(value)


def _key_name(key: SecretStr) -> str:
    return f"key-{sha256(key.get_secret_value().encode()).hexdigest()[:8]}"


def _changes(old: Any, new: Any, path: str) -> Iterator[Change]:
    before, after = _inner(old, path), _inner(new, path)
    if before is None or after is None:
        if old != new:
            yield Change(path, _entry(old), _entry(new), (old is _MISSING, new is _MISSING))
        return
    for name in dict.fromkeys((*before, *after)):
        where = f"{path}.{name}" if path else name
        yield from _changes(before.get(name, _MISSING), after.get(name, _MISSING), where)


def _inner(value: Any, path: str) -> Mapping[str, Any] | None:
    """What has names of its own in `value`; None when it is one setting."""
    match value:
        case BaseModel():
            return {name: getattr(value, name) for name in type(value).model_fields}
        case dict():
            return value
        case tuple() if path == "workers":
            return {spec.worker_id: spec for spec in value}
        case _:
            return None


def _entry(value: Any) -> Any:
    """A setting as shown, or of a whole entry that came or went only what it says itself."""
    if value is _MISSING:
        return None
    if isinstance(value, BaseModel):
        said = value.model_fields_set
        return {n: _entry(getattr(value, n)) for n in type(value).model_fields if n in said}
    return shown(value)
