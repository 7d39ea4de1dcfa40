"""Compiled grammars that were used last, as many as fit."""

from __future__ import annotations

from collections import OrderedDict

from quire.grammar.interface import Grammar
from quire.structured_outputs import StructuredOutputsParams


class GrammarCache:
    """Grammars in their initial state, by specification; the least recently used are removed first.

    Args:
        max_bytes: that all grammars may have together; one that is larger is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[StructuredOutputsParams, tuple[Grammar, int]] = OrderedDict()

    def get(self, spec: StructuredOutputsParams) -> Grammar | None:
        """Return the grammar of a specification, which has now been used; None: it is not here."""
        entry = self._entries.get(spec)
        if entry is None:
            return None
        self._entries.move_to_end(spec)
        return entry[0]

    def put(self, spec: StructuredOutputsParams, grammar: Grammar, num_bytes: int) -> None:
        """Keep a grammar of this size, and remove others if there is no room."""
        self._remove(spec)
        if num_bytes > self._max_bytes:
            return
        self._entries[spec] = grammar, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def clear(self) -> None:
        """Remove everything."""
        self._entries.clear()
        self._num_bytes = 0

    def _remove(self, spec: StructuredOutputsParams) -> None:
        _, num_bytes = self._entries.pop(spec, (None, 0))
        self._num_bytes -= num_bytes
