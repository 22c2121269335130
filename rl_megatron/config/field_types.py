"""The decorator `section` of every dataclass of the configuration, and the types of its numbers."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)
Section = TypeVar("Section")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section(cls: type[Section]) -> type[Section]:
    """Return `cls` as a section of the configuration: a frozen dataclass, whose values pydantic checks."""
    return dataclass(frozen=True, config=_STRICT, kw_only=True)(cls)  # pyright: ignore[reportReturnType]  # it is cls


def _no_switch(value: Any) -> Any:
    """Return `value` unless it is a bool, which Python would accept as the number 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Number = BeforeValidator(_no_switch)
Positive = Annotated[int, Field(ge=1), Number]
NonNegative = Annotated[int, Field(ge=0), Number]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), Number]
ClosedFraction = Annotated[float, Field(ge=0.0, le=1.0), Number]
PositiveFloat = Annotated[float, Field(gt=0.0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0.0), Number]
