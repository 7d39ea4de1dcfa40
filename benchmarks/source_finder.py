"""Importing Quire from the sources of another checkout, wherever it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class SourceFinder:
    """Finds Quire's modules in a directory; to be the first of `sys.meta_path`."""

    def __init__(self, source: str) -> None:
        self._source = source

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by `import`."""
        if name.partition(".")[0] != "quire":
            return None
        return PathFinder.find_spec(name, [self._source] if path is None else path, target)
