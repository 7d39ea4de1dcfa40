"""Limits of fields, read from their annotations.

A field carries its limits as markers of `annotated_types`, as in `Annotated[int, Ge(1), Le(128)]`, or lists
its choices as a `Literal` or an enumeration of text. Values are checked against them here, by msgspec; the
command line and the documentation show them; request bodies are checked by pydantic, which reads the same
markers.

msgspec is imported at the first check, so that commands that only print something do without it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from quire.errors import nearest_name

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Timeout = Annotated[float, Gt(0), Le(10**6)]
"""Seconds."""

_BOUNDS: Mapping[type, str] = {  # markers, and what msgspec calls them
    Ge: "ge",
    Gt: "gt",
    Le: "le",
    Lt: "lt",
    MinLen: "min_length",
    MaxLen: "max_length",
}
_TYPES: Mapping[type, tuple[str, tuple[type, ...]]] = {
    str: ("text", (str,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("True or False", (bool,)),
}
_MAX_SHOWN_VALUE = 80  # characters


class BuiltIn:
    """Marks a field that names a class: one of the built-in ones, or any other by its dotted name."""

    def __init__(self, *names: str) -> None:
        self.names = names


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The valid values of one field.

    Args:
        annotation: of the field, with markers and without None.
        kind: its type without markers and without None; the type of the choices if it lists them.
        unit: what a number counts, or what a list or a mapping holds.
        is_optional: whether None is allowed.
        bounds: by msgspec's names; with those of the values if it is a mapping.
        choices: the possible values, or the names of the built-in classes; empty if neither is listed.
        takes_dotted_names: whether a dotted name is possible besides the choices.
    """

    annotation: Any
    kind: Any
    unit: str
    is_optional: bool
    bounds: Mapping[str, Any]
    choices: tuple[Any, ...]
    takes_dotted_names: bool

    @property
    def range(self) -> str:
        """The bounds of a number in words, such as "from 1 to 128" or "above 0"; empty if there are none."""
        bounds = {name: _number(limit) for name, limit in self.bounds.items() if limit != math.inf}
        if "ge" in bounds and "le" in bounds:
            return f"from {bounds['ge']} to {bounds['le']}"
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        return " and ".join(f"{words[name]} {bounds[name]}" for name in words if name in bounds)

    def refusal(self, value: Any) -> str:
        """Return what is wrong with a value that is not allowed: a sentence that its name begins."""
        most = self.bounds.get("max_length", math.inf)
        if isinstance(value, str | tuple | frozenset) and len(value) > most:
            held = (
                f"has {len(value)} characters"
                if isinstance(value, str)
                else f"holds {len(value)} {self.unit}"
            )
            return f"{held}; at most {most} fit"
        return f"is {value!r:.{_MAX_SHOWN_VALUE}}; {self.requirement(value)}"

    def requirement(self, value: Any) -> str:
        """Return what is asked of the field instead of a value that is not allowed."""
        if self.takes_dotted_names or self.choices:
            return self._choice(value)
        origin = typing.get_origin(self.kind)
        if origin is tuple:
            return f"it must hold {self.unit}"
        if origin is Mapping:
            most = f"at most {self.bounds['max_length']} " if "max_length" in self.bounds else ""
            return f"it must map {most}{self.unit}{self.range and ' to numbers '}{self.range}"
        return self._scalar(value)

    def _choice(self, value: Any) -> str:
        names = [name for name in self.choices if name != ""]
        if not isinstance(value, str) or self.kind is int:
            return f"it must be one of {', '.join(map(str, names))}"
        return nearest_name(value, names) if names else "give the dotted name of a class"

    def _scalar(self, value: Any) -> str:
        if dataclasses.is_dataclass(self.kind):
            return f"it must be {typing.cast(type, self.kind).__name__}"
        noun, types_ = _TYPES[self.kind]
        if type(value) not in types_:
            return f"it must be {noun}{self.range and ', '}{self.range}"
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        finite = "finite" if is_infinite and math.inf not in self.bounds.values() else ""
        return f"it must be {' and '.join(filter(None, (self.range, finite)))}"


@functools.cache
def limits_of(cls: type) -> Mapping[str, Limits]:
    """Return the limits of each field of a dataclass, by name.

    A field that stands for another has that field's limits, see `quire.config.stands_for`.
    """
    annotations = typing.get_type_hints(cls, include_extras=True)
    kinds = typing.get_type_hints(cls)
    found: dict[str, Limits] = {}
    for field in dataclasses.fields(cls):
        if "stands_for" in field.metadata:
            other, name = field.metadata["stands_for"]
            found[field.name] = limits_of(other)[name]
        else:
            unit = field.metadata.get("unit", "")
            found[field.name] = _limits(annotations[field.name], kinds[field.name], unit)
    return found


def violation(owner: Any) -> tuple[str, str] | None:
    """Return the first field of a dataclass object whose value is not allowed, and `Limits.refusal` of it."""
    cls: type = type(owner)
    if _checker(cls)(owner):
        return None
    for name, limits in limits_of(cls).items():
        value = getattr(owner, name)
        if not _allows(limits, value):
            return name, limits.refusal(value)
    raise AssertionError(f"each field of {owner!r} is valid by itself")


def _limits(annotation: Any, kind: Any, unit: str) -> Limits:
    marked, kind = _without_none(annotation), _without_none(kind)
    choices = _listed_choices(kind)
    built_in = [marker for marker in _markers(marked) if isinstance(marker, BuiltIn)]
    mapping = typing.get_origin(kind) is Mapping and unmarked(marked)
    return Limits(
        annotation=marked,
        kind=type(choices[0]) if choices else kind,
        unit=unit,
        is_optional=marked is not annotation,
        bounds=_bounds(marked) | (_bounds(typing.get_args(mapping)[1]) if mapping else {}),
        choices=choices or tuple(name for marker in built_in for name in marker.names),
        takes_dotted_names=bool(built_in),
    )


def _listed_choices(kind: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal` or of an enumeration; empty for any other type."""
    if isinstance(kind, enum.EnumType):
        return tuple(member.value for member in typing.cast(type[enum.Enum], kind))
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    members = typing.get_args(annotation)
    if types.NoneType not in members:
        return annotation
    return Union[tuple(member for member in members if member is not types.NoneType)]  # noqa: UP007


def _markers(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__metadata__", ())


def unmarked(annotation: Any) -> Any:
    """Return an annotation without its markers."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def _bounds(annotation: Any) -> dict[str, Any]:
    return {
        _BOUNDS[type(marker)]: getattr(marker, _BOUNDS[type(marker)])
        for marker in _markers(annotation)
        if type(marker) in _BOUNDS
    }


def _number(limit: float) -> str:
    """Return a limit in words: the ends of integers of 32 and 64 bits as powers."""
    for bits in (31, 63):
        if limit == 2**bits - 1:
            return f"2^{bits} - 1"
        if limit == -(2**bits):
            return f"-2^{bits}"
    return str(limit)


@functools.cache
def _checker(cls: type) -> Callable[[Any], bool]:
    """Return what tells whether the fields of an object of `cls` all have values that are allowed."""
    import msgspec

    named = [(name, _checked_field_type(limits)) for name, limits in limits_of(cls).items()]
    form = msgspec.defstruct(cls.__name__, named)
    others = [(name, limits) for name, limits in limits_of(cls).items() if _needs_python(limits)]

    def check(owner: Any) -> bool:
        try:
            msgspec.convert(owner, form, strict=True, from_attributes=True)
        except msgspec.ValidationError:
            return False
        return all(_allows_in_python(limits, getattr(owner, name)) for name, limits in others)

    return check


def _allows(limits: Limits, value: Any) -> bool:
    import msgspec

    try:
        msgspec.convert(value, _checked_field_type(limits), strict=True)
    except msgspec.ValidationError:
        return False
    return not _needs_python(limits) or _allows_in_python(limits, value)


def _needs_python(limits: Limits) -> bool:
    return limits.takes_dotted_names or dataclasses.is_dataclass(limits.kind)


def _allows_in_python(limits: Limits, value: Any) -> bool:
    """Check what msgspec does not: names of classes, and objects that it would rather convert."""
    if value is None and limits.is_optional:
        return True
    if limits.takes_dotted_names:
        return not isinstance(value, str) or "." in value or value in limits.choices
    return isinstance(value, limits.kind)


def _checked_field_type(limits: Limits) -> Any:
    checked = _checked_type(limits.annotation)
    return Union[checked, None] if limits.is_optional else checked  # noqa: UP007


def _checked_type(annotation: Any) -> Any:
    """Return an annotation with its markers as msgspec has them; a float without bounds must be finite."""
    import msgspec

    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return Any
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_checked_type, arguments))]  # noqa: UP007
    if origin is tuple:
        return tuple[_checked_type(arguments[0]), ...]  # type: ignore[misc]
    if origin is Mapping:
        return Mapping[_checked_type(arguments[0]), _checked_type(arguments[1])]  # type: ignore[misc]
    if annotation is not float and origin is not Annotated:
        return annotation
    bounds = _bounds(annotation)
    kind = arguments[0] if arguments else float
    if kind is float:
        if not bounds.keys() & {"ge", "gt"}:
            bounds["ge"] = -sys.float_info.max
        if not bounds.keys() & {"le", "lt"}:
            bounds["le"] = sys.float_info.max
    else:
        kind = _checked_type(kind)
    finite = {name: limit for name, limit in bounds.items() if limit != math.inf}
    return Annotated[kind, msgspec.Meta(**finite)]
