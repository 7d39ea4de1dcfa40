"""Public names of a package that are imported when first used. Imports nothing that takes time."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # what type checkers take for true; importing `typing` would cost milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_attributes(
    package: dict[str, Any], homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Args:
        package: its `globals()`, where a name stays once it is imported.
        homes: the module of each name.
    """

    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(importlib.import_module(homes[name]), name)
        return value

    def names() -> list[str]:
        return sorted({*package, *homes})

    return get_attribute, names
