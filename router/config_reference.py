"""Writes configs/laneway.yaml from the fields of `Config`: each default with its one-line comment.

The description, default and range of a setting have one home, the field itself; this file turns
them into YAML, and a test holds the shipped file equal to what it returns. Layer 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from router.config import Config
from router.contract import Lane, WorkerSpec
from router.model_settings import ModelSettings
from router.tenant_settings import TenantSettings

_HEAD: Final = """\
# Every setting of Laneway at its default. Made by `laneway check-config --defaults`; a file of
# your own needs only what differs. Each setting is also an environment variable, upper case with
# two underscores between the levels: LANEWAY_QUEUE__DEPTH_MAX=500. Flags win over both.
"""
# Collections of models have no defaults of their own: an entry is shown as a comment.
_ENTRIES: Final[dict[str, tuple[str, type[BaseModel]]]] = {
    "workers": ("- ", WorkerSpec),
    "models": ("my-model:", ModelSettings),
    "tenants": ("acme:", TenantSettings),
}


def reference_yaml() -> str:
    """Return the whole reference file."""
    return _HEAD + "".join(_top(name, field) for name, field in Config.model_fields.items())


def _top(name: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        comment = (type(default).__doc__ or "").strip().splitlines()[0]
        return "\n".join(["", f"# {comment}", f"{name}:", *_settings(default, "  ")]) + "\n"
    lines = ["", f"# {field.description}"]
    if name in _ENTRIES:
        lines += [f"#   {line}" for line in _entry(*_ENTRIES[name])]
    return "\n".join([*lines, f"{name}: {_plain(default)}"]) + "\n"


def _settings(section: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield f"{indent}# {field.description}"
            yield f"{indent}{name}:"
            yield from _settings(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_plain(value)}  # {_comment(field)}"


def _entry(opening: str, model: type[BaseModel]) -> Iterator[str]:
    """Lines of one example entry of a collection, optional fields at their defaults."""
    first = True
    if opening.endswith(":"):
        yield opening
        opening, first = "  ", False
    for name, field in model.model_fields.items():
        required = field.is_required()
        value = (
            "http://10.0.0.7:30000" if required else field.get_default(call_default_factory=True)
        )
        lead = opening if first else "  "
        first = False
        if isinstance(value, BaseModel):
            yield f"{lead}{name}:  # {field.description}"
            yield from _settings(value, "    ")
        else:
            yield f"{lead}{name}: {_plain(value)}  # {_comment(field)}"


def _comment(field: FieldInfo) -> str:
    text = field.description or ""
    limits = _limits(field)
    return f"{text} [{limits}]" if limits else text


def _limits(field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    if choices:
        return " | ".join(choices)
    low, high = "", ""
    for limit in field.metadata:
        match limit:
            case Ge(ge=bound):
                low = f"{_plain(bound)}.."
            case Gt(gt=bound):
                low = f"above {_plain(bound)}, "
            case Le(le=bound):
                high = f"{_plain(bound)}" if low.endswith("..") else f"up to {_plain(bound)}"
            case Lt(lt=bound):
                high = f"below {_plain(bound)}"
            case _:
                pass  # lengths and patterns do not fit a line
    return low + high


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return []


def _plain(value: Any) -> str:
    """`value` as YAML on one line."""
    if isinstance(value, frozenset):
        value = sorted(str(item) for item in value)
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        value = [item.value if isinstance(item, Lane) else item for item in value]
    return str(
        yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    )
