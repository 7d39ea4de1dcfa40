"""What parametrized cases are called, so that a failure says what failed without its table."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping

MAX_LENGTH = 60  # characters of one value


def case_id(value: object) -> str | None:
    """Return a name for a value of a parameter; None: pytest has one, as for strings, numbers and types."""
    if not isinstance(value, Mapping | list | tuple | set | frozenset | bytes) and not _is_composed(value):
        return None
    # The environment, where pytest writes the name of the running test, cannot hold lone surrogates.
    text = _written(value).encode(errors="backslashreplace").decode().replace("\n", " ") or "empty"
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"


def _is_composed(value: object) -> bool:
    return isinstance(value, functools.partial) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _written(value: object) -> str:
    if isinstance(value, Mapping):
        shown = itertools.islice(value.items(), MAX_LENGTH)
        return ",".join(f"{key}={_written(one)}" for key, one in shown)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=_written)
    elif isinstance(value, functools.partial):
        value = [value.func, *value.args, *([value.keywords] if value.keywords else [])]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value[:MAX_LENGTH]))}]"  # each is a character or more
    if _is_composed(value):
        return f"{type(value).__name__}({_written(_changed_fields(value))})"
    if hasattr(value, "__name__"):
        return value.__name__
    # The address in an object's usual text differs between processes that must agree on the names.
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else str(value)


def _changed_fields(value: object) -> dict[str, object]:
    """Return the fields of a dataclass that have no default or not their default."""
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.repr and _written(getattr(value, field.name)) != _written(_default(field))
    }


def _default(field: dataclasses.Field) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
