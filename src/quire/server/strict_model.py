"""What all bodies of requests have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quire.errors import nearest_name

UNKNOWN_NAME = "unknown_name"
"""Type of the validation error about a name that a model does not have; `name` and `hint` in its context."""


class StrictModel(BaseModel):
    """No unknown names, no conversion between types, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, values: Any) -> Any:
        """Stop at the first unknown name; pydantic's own check would describe every one of a million."""
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name in values if isinstance(values, dict) else ():
            if name not in fields:
                known = [key for key, field in fields.items() if field.annotation is not type(None)]
                context = {"name": name, "hint": nearest_name(name, known)}
                raise PydanticCustomError(UNKNOWN_NAME, "unknown name", context)
        return values


def optional_field(cls: type, name: str, *, alias: str | None = None) -> Any:
    """Return an optional field described as the field `name` of a class of parameters."""
    [field] = [field for field in dataclasses.fields(cls) if field.name == name]
    return Field(None, alias=alias, description=field.metadata["help"])
