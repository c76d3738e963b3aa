"""The base of everything that people configure: unknown names are faults, and so is true for 1.

Layer 0.
"""

from __future__ import annotations

from typing import Any, Final, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_NUMBERS: Final = frozenset((int, float))


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
                raise ValueError("a number is wanted, not true or false")
        return value
