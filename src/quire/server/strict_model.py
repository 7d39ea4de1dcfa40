"""What all bodies of requests have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quire.errors import nearest_name
from quire.limits import Limits, limits_of, unmarked

_RANGE_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")

UNKNOWN_NAME = "unknown_name"
"""Type of the validation error about a name that a model does not have; `name` and `hint` in its context."""


class StrictModel(BaseModel):
    """No unknown names, no conversion between types, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, values: Any) -> Any:
        """Stop at the first unknown name; pydantic's own check would describe every one of a million."""
        names = _names_of(cls)
        for name in values if isinstance(values, dict) else ():
            if name not in names:
                known = [key for key, is_supported in names.items() if is_supported]
                context = {"name": name, "hint": nearest_name(name, known)}
                raise PydanticCustomError(UNKNOWN_NAME, "unknown name", context)
        return values


@functools.cache
def _names_of(cls: type[BaseModel]) -> Mapping[str, bool]:
    """Return the names that a model's body may have, and which of them are supported."""
    return {
        field.alias or name: field.annotation is not type(None) for name, field in cls.model_fields.items()
    }


def optional_field(cls: type, name: str, *, alias: str | None = None) -> Any:
    """Return an optional field described as the field `name` of a class of parameters."""
    [field] = [field for field in dataclasses.fields(cls) if field.name == name]
    return Field(None, alias=alias, description=field.metadata["help"])


def body_fields(cls: type, *, exclude: Collection[str] = ()) -> dict[str, Any]:
    """Return an optional field for each of a class of parameters, for `pydantic.create_model`.

    It has the same limits and description. A tuple becomes a list; as in the class, duplicates are dropped
    before its length is checked.
    """
    return {
        name: (_body_type(limits) | None, optional_field(cls, name))
        for name, limits in limits_of(cls).items()
        if name not in exclude
    }


def _body_type(limits: Limits) -> Any:
    if typing.get_origin(limits.kind) is tuple:
        entry = typing.get_args(unmarked(limits.annotation))[0]
        constraint = Field(fail_fast=True, max_length=limits.bounds.get("max_length"))
        entries = types.GenericAlias(list, (entry,))
        return Annotated[entries, constraint, BeforeValidator(_distinct)]
    if typing.get_origin(limits.kind) is Mapping:
        return Annotated[limits.annotation, WrapValidator(_mapping_check(limits))]
    if limits.range:
        return Annotated[limits.annotation, WrapValidator(_range_check(limits.range))]
    return limits.annotation


def _distinct(entries: Any) -> Any:
    """Return the entries of a list, each once; anything else is left for pydantic to refuse."""
    try:
        return list(dict.fromkeys(entries)) if isinstance(entries, list) else entries
    except TypeError:
        return entries


def _mapping_check(limits: Limits) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """Return a validator that says once what the mapping must be, and looks at few enough entries only."""
    most = limits.bounds["max_length"]

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        with contextlib.suppress(ValidationError):
            if not isinstance(value, dict) or len(value) <= most:
                return validate(value)
        raise PydanticCustomError("mapping", "{requirement}", {"requirement": limits.requirement(value)})

    return check


def _range_check(limits: str) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """Return a validator that names the whole range, where pydantic names only the end that was exceeded."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            if error.errors()[0]["type"] not in _RANGE_ERRORS:
                raise
        raise PydanticCustomError("out_of_range", "it must be {limits}", {"limits": limits})

    return check
