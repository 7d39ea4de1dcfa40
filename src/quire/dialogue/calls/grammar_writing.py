"""Grammars in llguidance's dialect of Lark, written rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.schemas.wide_numbers import SPACING, has_wide_numbers, json_rules
from quire.structured_outputs import MAX_GRAMMAR_BYTES

ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment", "$schema", "$id"})
_NAMED_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")


class GrammarWriter:
    """A grammar under construction. Methods return expressions; rules that these need are added.

    They raise `ValueError` where the grammar becomes too large, or a schema cannot be enforced.

    Args:
        marks: texts that may be tokens of their own.
        token_id_of: the id of the token that was added to the model's vocabulary as a text, if any.
    """

    def __init__(self, marks: Iterable[str], token_id_of: Callable[[str], int | None]) -> None:
        found = {mark: token_id_of(mark) for mark in marks}
        self._token_ids = {mark: token_id for mark, token_id in found.items() if token_id is not None}
        self._rules: list[str] = []
        self._length = 0  # of these, in characters

    def grammar(self, start: str) -> str:
        """Return the whole grammar, whose output is `start`."""
        self._add(f"start: {start}")
        return "\n".join([*self._rules, ""])

    def literal(self, text: str) -> str:
        """Return an expression for a text; marks in it that are tokens come as these."""
        if not text:
            return '""'
        marks = sorted(self._token_ids, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        return " ".join(
            f"<[{self._token_ids[part]}]>" if part in self._token_ids else json.dumps(part)
            for part in parts
            if part
        )

    def is_token(self, mark: str) -> bool:
        """Whether a mark is a token of its own."""
        return mark in self._token_ids

    def one_of(self, alternatives: Iterable[str]) -> str:
        """Return an expression for any of these."""
        return self._rule(" | ".join(alternatives))

    def json(self, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> str:
        """Return an expression for a JSON value that is valid against a schema.

        Args:
            schema: schema of the value.
            root: the schema that it is part of, to which its references refer.
        """
        bare = _without_annotations(schema)
        if root is not None and '"$ref"' in json.dumps(bare):
            own = {key: root[key] for key in ("$defs", "definitions") if key in root}
            bare |= _without_annotations(own)
        if not has_wide_numbers(bare):
            return self._rule("%json " + json.dumps({**bare, "x-guidance": SPACING}))
        name = f"r{len(self._rules)}"
        for line in json_rules(bare, name):
            self._add(line)
        return name

    def text_up_to(self, end: str, without: Iterable[str] = ()) -> str:
        """Return an expression for any text that ends with `end`, and has neither it nor `without` before."""
        if end in self._token_ids:
            return f"{self.text_without({end, *without})} {self.literal(end)}"
        others = [mark for mark in without if mark != end]
        return self._rule(self._terminal(f"(?s:.*){_pattern(end)}", others), "[lazy]")

    def text_without(self, marks: Iterable[str], start: str = "") -> str:
        """Return an expression for a text without any of `marks` that begins with no character of `start`."""
        first = rf"\s*[^\s{_pattern(start)}]" if start else ""
        return self._rule(self._terminal(f"{first}(?s:.*)", marks))

    def optional_list(self, required: Sequence[str], optional: Sequence[str], separator: str) -> str:
        """Return an expression for all of `required` and any of `optional`, in order and separated."""
        between = json.dumps(separator)
        rest = '""'  # what may follow the i-th optional entry
        first = ['""']
        for entry in reversed(optional):
            first.append(f"{entry} {rest}")
            rest = self._rule(f"({between} {entry})? {rest}")
        if not required:
            return self.one_of(first)
        return f" {between} ".join(required) + f" {rest}"

    def _terminal(self, pattern: str, excluded: Iterable[str]) -> str:
        name = f"T{len(self._rules)}"
        without = "".join(f" & ~/(?s:.*){_pattern(mark)}(?s:.*)/" for mark in sorted(excluded))
        self._add(f"{name}: /{pattern}/{without}")
        return name

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._add(f"{name}{attributes}: {body}")
        return name

    def _add(self, rule: str) -> None:
        self._length += len(rule) + 1
        if self._length > MAX_GRAMMAR_BYTES:
            raise ValueError(f"a grammar may have at most {MAX_GRAMMAR_BYTES} bytes")
        self._rules.append(rule)


def _pattern(text: str) -> str:
    """Return a regular expression for a text, between slashes."""
    return re.sub(r"[^A-Za-z0-9_]", lambda found: rf"\x{{{ord(found[0]):x}}}", text)


def _without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without its annotations, such as descriptions."""
    return {key: _stripped(key, value) for key, value in schema.items() if key not in ANNOTATIONS}


def _stripped(key: str, value: Any) -> Any:
    if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {
            name: _without_annotations(one) if isinstance(one, Mapping) else one
            for name, one in value.items()
        }
    if isinstance(value, Mapping) and key not in ("const", "enum"):
        return _without_annotations(value)
    if isinstance(value, list) and key not in ("const", "enum", "required", "type"):
        return [_without_annotations(one) if isinstance(one, Mapping) else one for one in value]
    return value
