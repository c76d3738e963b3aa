"""Read engine profiles from YAML: the built-in ones, or a file of the same form."""

from __future__ import annotations

from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from workers.engine_model import EngineProfile

_FIELDS = {field.name: field.type for field in fields(EngineProfile)}


class BadProfiles(ValueError):
    """A profiles file that cannot be used; says where and why."""


def load_profiles(path: Path | None = None) -> dict[str, EngineProfile]:
    """Return the profiles of `path` by name, or the built-in ones.

    Raises BadProfiles, naming the profile and the field, for anything but known positive numbers.
    """
    source = path or files("workers").joinpath("engine_profiles.yaml")
    try:
        document = yaml.safe_load(source.read_text(encoding="utf-8"))
    except OSError as exc:
        raise BadProfiles(f"{source}: {exc.strerror or exc}") from exc
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        raise BadProfiles(f"{source}: not YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(document, dict) or not document:
        raise BadProfiles(f"{source}: expected profiles by name")
    return {str(name): _profile(str(name), values) for name, values in document.items()}


def _profile(name: str, values: Any) -> EngineProfile:
    if not isinstance(values, dict):
        raise BadProfiles(f"{name}: expected fields of a profile, got {values!r:.80}")
    for key, value in values.items():
        if key not in _FIELDS:
            raise BadProfiles(f"{name}.{key}: unknown; known are {', '.join(_FIELDS)}")
        whole = _FIELDS[key] == "int"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise BadProfiles(f"{name}.{key}: expected a number, got {value!r:.80}")
        if not 0 <= value < 1e12 or (whole and value == 0):
            raise BadProfiles(f"{name}.{key}: {value} is out of range")
    try:
        return EngineProfile(**values)
    except TypeError as exc:
        raise BadProfiles(f"{name}: {exc}") from exc
