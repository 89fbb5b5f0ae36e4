"""The one decorator of every record: a frozen, checked, keyword-only dataclass.

Bad values are refused in files, in Python calls and in `dataclasses.replace`.
"""

from __future__ import annotations

from typing import Annotated, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

T = TypeVar("T")

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
"""A finite float of either sign."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite float > 0."""
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite float >= 0."""
Rate = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""A rate > 0; infinity stands for "free" in limits and counterfactuals. NaN fails `> 0`."""
Count = Annotated[int, Field(ge=0, strict=True)]
"""A whole number >= 0."""
PositiveCount = Annotated[int, Field(ge=1, strict=True)]
"""A whole number >= 1."""
Name = Annotated[str, Field(min_length=1)]
"""A text that is not empty."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Return `cls` as a frozen, keyword-only dataclass whose fields are checked."""
    config = ConfigDict(extra="forbid")
    return cast("type[T]", pydantic_dataclass(cls, frozen=True, kw_only=True, config=config))
