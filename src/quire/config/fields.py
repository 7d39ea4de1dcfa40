"""How knobs are declared: fields with default, unit and meaning, in classes that refuse unknown names."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from quire.errors import ConfigError, nearest_name
from quire.limits import violation

T = TypeVar("T")


def knob(
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    unit: str = "",
    help: str,
    environment_variable: str = "",
) -> Any:
    """Declare a field; its annotation carries its limits (see `quire.limits`).

    Args:
        default: value if it is not given.
        default_factory: makes the value if it is not given, instead of `default`.
        unit: what its number counts, or what its list holds, such as "tokens".
        help: what it means, what 0 or empty means; used by the command line and the documentation.
        environment_variable: where the command line takes it from if its flag is not given; empty: nowhere.
    """
    metadata = {"help": help, "unit": unit, "environment_variable": environment_variable}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def stands_for(cls: type, name: str, *, default: Any, help: str = "") -> Any:
    """Declare a field that stands for the field `name` of `cls`, whose limits and unit it has.

    Args:
        cls: the other class.
        name: name of its field.
        default: value if it is not given.
        help: what it means if that differs.
    """
    [field] = [field for field in dataclasses.fields(cls) if field.name == name]
    metadata = {**field.metadata, "stands_for": (cls, name)}
    if help:
        metadata["help"] = help
    return dataclasses.field(default=default, metadata=metadata)


def refuse_unknown_names(cls: type, names: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `names` holds a key that is not a field of the dataclass `cls`."""
    known = _field_names(cls)
    for name in names:
        if name not in known:
            raise ConfigError(f"{cls.__name__} has no field {name!r}; {nearest_name(name, known)}")


@functools.cache
def _field_names(cls: type) -> dict[str, None]:
    """Return the names of a dataclass's fields, in their order."""
    return {field.name: None for field in dataclasses.fields(cls)}


def _with_checked_names(cls: type[T]) -> type[T]:
    generated_init: Callable[..., None] = cls.__init__
    known = frozenset(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @functools.wraps(generated_init)
    def checked_init(self: Any, /, *values: Any, **named: Any) -> None:
        if not known.issuperset(named):
            if isinstance(self, SettableConfig):
                named = self.without_unsupported(named)
            refuse_unknown_names(cls, named)
        generated_init(self, *values, **named)

    cls.__init__ = checked_init  # type: ignore[assignment]
    return cls


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, knob))
def config(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only, slotted dataclass whose error about an unknown name helps."""
    return _with_checked_names(dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls))


class Choice(enum.StrEnum):
    """One of several, written as text; it also has a number, as in OpenVINO GenAI: its place among them."""

    def __int__(self) -> int:
        return list(type(self)).index(self)

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        members = list(cls)
        return members[value] if type(value) is int and 0 <= value < len(members) else None


class SettableConfig:
    """What the configurations have in common that are used as in OpenVINO GenAI.

    Attributes can be set, to nothing but fields; whoever uses the configuration checks its values then. Equal
    values make equal configurations, with equal hashes, and setting an attribute leaves the hash as it is.
    """

    __slots__ = ()
    UNSUPPORTED: ClassVar[Mapping[str, Any]] = {}
    """Names that OpenVINO GenAI has beside the fields, with the only value that each may have."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _field_names(type(self)):  # type: ignore[arg-type]
            object.__setattr__(self, name, value)
        else:
            refuse_unknown_names(type(self), self.without_unsupported({name: value}))

    def __getattr__(self, name: str) -> Any:
        if name in self.UNSUPPORTED:
            return copy.copy(self.UNSUPPORTED[name])
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __hash__(self) -> int:
        return hash(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self),), (None, self._values())  # type: ignore[attr-defined]

    def to_string(self) -> str:
        """Return the fields and their values, a line each."""
        lines = [f"  {name}: {_as_text(value)}\n" for name, value in self._values().items()]
        return f"{type(self).__name__} {{\n{''.join(lines)}}}"

    def copied(self) -> Self:
        """Return a copy of it and of the configurations that it holds.

        Raises:
            ConfigError: one that it holds has an invalid value.
        """
        nested = {name: one for name, one in self._values().items() if isinstance(one, SettableConfig)}
        copies = {name: one.copied() for name, one in nested.items()}
        return dataclasses.replace(self, **copies)  # type: ignore[type-var]

    def without_unsupported(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values to be set by name, but those of `UNSUPPORTED`.

        Raises:
            ConfigError: one of these would change.
        """
        for name in named.keys() & self.UNSUPPORTED.keys():
            if named[name] != self.UNSUPPORTED[name]:
                raise ConfigError(
                    f"{type(self).__name__}.{name} is {named[name]!r:.80}, but Quire does not support it; "
                    f"leave it at {self.UNSUPPORTED[name]!r}"
                )
        return {name: value for name, value in named.items() if name not in self.UNSUPPORTED}

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _field_names(type(self))}  # type: ignore[arg-type]


def _as_text(value: Any) -> str:
    if isinstance(value, SettableConfig):
        return value.to_string().replace("\n", "\n  ")
    if isinstance(value, enum.Enum):
        return value.name
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field, knob, stands_for))
def settable_config(*, kw_only: bool = True) -> Callable[[type[T]], type[T]]:
    """Like `config`, for a `SettableConfig`: its attributes can be set.

    Args:
        kw_only: whether fields can be given by keyword only, not in their order.
    """

    def decorate(cls: type[T]) -> type[T]:
        made = dataclasses.dataclass(kw_only=kw_only, slots=True)(cls)
        made.__hash__ = SettableConfig.__hash__  # type: ignore[assignment, method-assign]
        return _with_checked_names(made)

    return decorate


def check_limits(owner: Any) -> None:
    """Raise `ConfigError` for the first field of `owner` whose value is outside the field's limits."""
    if (found := violation(owner)) is not None:
        name, refusal = found
        raise ConfigError(f"{type(owner).__name__}.{name} {refusal}")


def refuse_partial_blocks(owner: Any, names: Iterable[str], block_size: int) -> None:
    """Raise `ConfigError` for the first of these fields that is not a multiple of `block_size` tokens."""
    for name in names:
        if (size := getattr(owner, name)) % block_size:
            raise ConfigError(
                f"{type(owner).__name__}.{name} is {size}; it must be a multiple of the block size, "
                f"SchedulerConfig.block_size {block_size}"
            )


def refuse_blank_key(owner: Any, name: str) -> None:
    """Raise `ConfigError` if a field that holds API keys has only spaces: that would let everyone in."""
    if (keys := getattr(owner, name)) and not keys.split():
        raise ConfigError(
            f"{type(owner).__name__}.{name} is {keys!r}, which holds no key; leave it empty to ask for none"
        )
