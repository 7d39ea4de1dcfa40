"""Base model of all request bodies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quire.errors import nearest_name
from quire.limits import Limits, limits_of, unmarked
from quire.server.wire.leniency import MAX_IGNORED_NAMES, Ignorable, Leniency, typo_hint
from quire.server.wire.other_names import with_own_names

_RANGE_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")

UNKNOWN_NAME = "unknown_name"
"""Type of the validation error about an unknown name (context: `name`, `hint`)."""


TAG_PREFIX = "="
"""Prefix of union tags, which are not part of a field's path."""

Unsupported: TypeAlias = None
Ignored = Annotated[None, Ignorable()]


def _require_finite(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite", "its numbers must be at most 1.8e308") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_require_finite)]
"""An object that can be encoded as JSON again; parsers accept too large numbers such as 1e999."""


class StrictModel(BaseModel):
    """No type conversion, no NaN or infinity, and ignored names only as `Leniency` allows.

    The `Leniency` is the validation context; without it, validation is strict.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    path_prefix: ClassVar[str] = ""
    """Prefix of a field's path in the whole body."""

    names_of_other_servers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Aliases and the paths of their fields; refused by a strict server."""

    @model_validator(mode="before")
    @classmethod
    def _known_names_only(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        if not isinstance(info.context, Leniency) or info.context.is_strict:
            return _without_unknown_names(cls, values)
        kept = _without_ignored_names(cls, values, info.context)
        cls.adapt(kept, info.context)
        return kept

    @classmethod
    def adapt(cls, values: dict[str, Any], leniency: Leniency) -> None:
        """Convert other servers' values in place; not called by a strict server."""


def _without_unknown_names(cls: type[StrictModel], values: dict[str, Any]) -> dict[str, Any]:
    """Refuse the first unknown name; pydantic's own check would describe all, perhaps a million."""
    names = _names_of(cls)
    for name in values:
        if name not in names:
            known = [key for key, known in names.items() if known.is_supported]
            raise PydanticCustomError(
                UNKNOWN_NAME, "unknown name", {"name": name, "hint": nearest_name(name, known)}
            )
    return values


def _without_ignored_names(
    cls: type[StrictModel], values: dict[str, Any], leniency: Leniency
) -> dict[str, Any]:
    """Return fields with an effect; report the others, and refuse those that look like typos."""
    names = _names_of(cls)
    kept: dict[str, Any] = {}
    if others := cls.names_of_other_servers:
        values = with_own_names(values, others)
    for name, value in values.items():
        known = names.get(name)
        if known is None:
            hint = typo_hint(name, _names_meant(cls))
            if hint is None and not leniency.ignore(cls.path_prefix + name):
                hint = f"and at most {MAX_IGNORED_NAMES} ignored names are accepted"
            if hint is not None:
                raise PydanticCustomError(UNKNOWN_NAME, "unknown name", {"name": name, "hint": hint})
        elif known.is_ignorable:
            if value not in _DEFAULTS_ELSEWHERE or type(value) is int:  # 0 equals False
                leniency.ignore(cls.path_prefix + name)
        elif known.is_supported or value not in _NOTHING:
            kept[name] = int(value) if known.takes_integer and _is_integral(value) else value
    return kept


def _is_integral(value: Any) -> bool:
    return type(value) is float and value.is_integer() and abs(value) < 2**53


_NOTHING: tuple[Any, ...] = (None, False, "", "none", [], {})
"""Values of unsupported fields that ask for nothing."""

_DEFAULTS_ELSEWHERE: tuple[Any, ...] = (*_NOTHING, "auto", "default")


@dataclasses.dataclass(frozen=True, slots=True)
class _KnownName:
    is_supported: bool
    is_ignorable: bool
    takes_integer: bool


@functools.cache
def _names_of(cls: type[BaseModel]) -> Mapping[str, _KnownName]:
    """Return the names allowed in a model's body."""
    return {
        field.alias or name: _KnownName(
            is_supported=field.annotation is not type(None),
            is_ignorable=any(isinstance(marker, Ignorable) for marker in field.metadata),
            takes_integer=_takes_integer(field.annotation),
        )
        for name, field in cls.model_fields.items()
    }


@functools.cache
def supported_names(cls: type[BaseModel]) -> frozenset[str]:
    """Return the names allowed in a model's body that have an effect."""
    return frozenset(name for name, known in _names_of(cls).items() if known.is_supported)


@functools.cache
def _names_meant(cls: type[StrictModel]) -> frozenset[str]:
    """Return the names to compare typos with."""
    return supported_names(cls).union(cls.names_of_other_servers)


def _takes_integer(annotation: Any) -> bool:
    """Return whether one of the forms of a field is an integer."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _takes_integer(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return any(map(_takes_integer, arguments))
    return annotation is int


def text_or_list(list_tag: str, meaning: str) -> Discriminator:
    """Return a discriminator between a string, tagged `=text`, and a list; others are refused."""

    def form_of(value: Any) -> str | None:
        return "=text" if isinstance(value, str) else list_tag if isinstance(value, list) else None

    return Discriminator(form_of, custom_error_type="form", custom_error_message=f"it must be {meaning}")


def optional_field(cls: type, name: str, *, alias: str | None = None) -> Any:
    """Return an optional field described as the field `name` of a class of parameters."""
    [field] = [field for field in dataclasses.fields(cls) if field.name == name]
    return Field(None, alias=alias, description=field.metadata["help"])


def body_fields(cls: type, *, exclude: Collection[str] = ()) -> dict[str, Any]:
    """Return optional fields for all fields of a class of parameters, for `pydantic.create_model`.

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
    """Return the unique entries of a list; other values are left for pydantic to refuse."""
    try:
        return list(dict.fromkeys(entries)) if isinstance(entries, list) else entries
    except TypeError:
        return entries


def _mapping_check(limits: Limits) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """Return a validator that reports a mapping's requirement once, and bounds the checked entries."""
    most = limits.bounds["max_length"]

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        with contextlib.suppress(ValidationError):
            if not isinstance(value, dict) or len(value) <= most:
                return validate(value)
        raise PydanticCustomError("mapping", "{requirement}", {"requirement": limits.requirement(value)})

    return check


def _range_check(limits: str) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """Return a validator that reports the whole range, unlike pydantic, which reports one end."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            if error.errors()[0]["type"] not in _RANGE_ERRORS:
                raise
        raise PydanticCustomError("out_of_range", "it must be {limits}", {"limits": limits})

    return check
