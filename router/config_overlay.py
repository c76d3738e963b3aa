"""Changes of a configuration document as JSON merge patches (RFC 7396).

A patch names the members that change; null takes one away, so that its default holds again, and a
list is replaced whole. An overlay is the one patch that makes of the document of file, environment
and flags the document in force. Layer 0: pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from router.config import BadConfig
from router.yaml_text import DEPTH_MAX

# What stands for a secret wherever a configuration is shown.
HIDDEN: Final = "**********"
_NONE: Final = object()
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def patched(document: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`document` as `patch` changes it; neither of them is touched."""
    out = dict(document)
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        elif isinstance(value, Mapping):
            below = out.get(name)
            out[name] = patched(below if isinstance(below, Mapping) else {}, value)
        else:
            out[name] = value
    return out


def patch_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The least patch that makes `new` of `old`.

    A member that becomes null is taken away: a patch cannot say null, and the two mean the same for
    every setting whose default is null.
    """
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        below = old.get(name)
        if below == value and type(below) is type(value):
            continue
        if value is None:
            patch[name] = None
            continue
        if isinstance(value, Mapping):
            inner = patch_between(below if isinstance(below, Mapping) else {}, value)
            if inner or not isinstance(below, Mapping):
                patch[name] = inner
        else:
            patch[name] = value
    return patch


def without(
    patch: Mapping[str, Any], taken: Mapping[str, Any], before: Mapping[str, Any] = _NOTHING
) -> dict[str, Any]:
    """`patch` without what it says of members that `taken`, another patch, speaks of too.

    `before` is the document that `taken` changes. What `patch` takes away whole stays away when
    `taken` only changes something inside it: a tenant that was removed must not be back, with its
    keys, because its weight changed.
    """
    out: dict[str, Any] = {}
    for name, value in patch.items():
        if name not in taken:
            out[name] = value
            continue
        said, was = taken[name], before.get(name)
        if isinstance(value, Mapping) and isinstance(said, Mapping):
            inner = without(value, said, was if isinstance(was, Mapping) else _NOTHING)
            if inner:
                out[name] = inner
        elif value is None and isinstance(said, Mapping) and isinstance(was, Mapping):
            out[name] = None
    return out


def rebased(
    theirs: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    base: Mapping[str, Any] = _NOTHING,
) -> dict[str, Any]:
    """`theirs` with what changed from `before` to `after`, all of them patches, word by word.

    `base` is the document below `after`. What they took away meanwhile stays away when the change
    is only of something inside it.
    """
    out = dict(theirs)
    for name in dict.fromkeys((*before, *after)):
        old, new, there = before.get(name, _NONE), after.get(name, _NONE), out.get(name, _NONE)
        if new == old and type(new) is type(old):
            continue
        if new is _NONE:
            out.pop(name, None)
        elif not isinstance(new, Mapping):
            out[name] = new
        elif (inner := _rebased_inside(there, old, new, base.get(name))) is _NONE:
            out.pop(name, None)
        else:
            out[name] = inner
    return out


def _rebased_inside(there: Any, old: Any, new: Mapping[str, Any], below: Any) -> Any:
    """What becomes of one member of which `new` says something inside it."""
    known = isinstance(old, Mapping)
    if there is None and (known or (old is _NONE and isinstance(below, Mapping))):
        return None
    if isinstance(there, Mapping) or (there is _NONE and known):
        inside = (there, old, below)
        there_, old_, below_ = (x if isinstance(x, Mapping) else _NOTHING for x in inside)
        return rebased(there_, old_, new, below_) or (_NONE if there is _NONE else {})
    return new


def paths_of(patch: Mapping[str, Any], above: str = "") -> list[str]:
    """The settings of which `patch` speaks."""
    paths: list[str] = []
    for name, value in patch.items():
        path = f"{above}.{name}" if above else name
        paths += paths_of(value, path) if isinstance(value, Mapping) and value else [path]
    return paths


def check_patch(patch: Mapping[str, Any]) -> None:
    """Raise BadConfig for a patch that sends back the mask under which secrets are shown.

    Also for one that is nested deeper than a file may be: no other function here may be given it.
    """
    if deep := [name for name, value in patch.items() if _is_deep(value)]:
        raise BadConfig([f"{name}: it is nested deeper than {DEPTH_MAX} levels" for name in deep])
    if faults := _masks(patch, ""):
        raise BadConfig(faults)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH_MAX):
        items = (
            item.values() if isinstance(item, Mapping) else item
            for item in level if isinstance(item, Mapping | list)
        )  # fmt: skip
        level = [inner for item in items for inner in item]
    return bool(level)


def _masks(value: Any, path: str) -> list[str]:
    if isinstance(value, Mapping):
        named = ((f"{path}.{name}" if path else name, item) for name, item in value.items())
        return [fault for where, item in named for fault in _masks(item, where)]
    if isinstance(value, list):
        return [f for i, item in enumerate(value) for f in _masks(item, f"{path}.{i}")]
    if value == HIDDEN:
        return [f"{path}: this is what hides a secret, not the secret itself"]
    return []
