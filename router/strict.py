"""The base of everything that people configure: unknown names are faults, and so is true for 1.

Faults are said in words for whoever wrote the settings. Layer 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

_NUMBERS: Final = frozenset((int, float))


# What pydantic says in its own terms, by its types of errors; braces take the error's context.
_LIST, _MAPPING, _WHOLE = "must be a list", "must be a mapping", "must be a whole number"
_WORDS: Final[Mapping[str, str]] = {
    "extra_forbidden": "there is no such setting",
    "missing": "is required",
    "tuple_type": _LIST,
    "list_type": _LIST,
    "frozen_set_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "string_type": "must be text",
    "path_type": "must be a path",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "enum": "must be {expected}",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} entries or less",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} characters or less",
}


def in_plain_words(error: ErrorDetails) -> str:
    """Say what is wrong with a value, without the value and without Python's terms."""
    words = _WORDS.get(error["type"])
    if words is None:
        return error["msg"].removeprefix("Value error, ")
    return words.format(**error.get("ctx", {}))


class Strict(BaseModel):
    """Settings that are read once and never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is wanted: Python would read them as 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            kinds = {annotation, *get_args(annotation)}
            if kinds & _NUMBERS and bool not in kinds:
                raise ValueError("must be a number, not true or false")
        return value
