"""Reads GBNF, as llama.cpp's guide describes it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quire.grammar.gbnf.nodes import (
    MAX_CODE_POINT,
    SURROGATES,
    Alternatives,
    Chars,
    Node,
    Reference,
    Repeat,
    Sequence,
)

MAX_NESTING = 64  # parentheses
MAX_REPETITIONS = 2000  # as in llama.cpp
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FIRST_RULE = re.compile(r"(?:\s|#[^\n]*(?:\n|\Z))*[^\s:\"/|#]+[ \t]*::=")
_NUMBER = re.compile(r"[0-9]+")
_HEX = re.compile(r"[0-9A-Fa-f]+")


_ANY = Chars(((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, MAX_CODE_POINT)))


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is written in GBNF: its first rule is `name ::= ...`, as none can be in Lark."""
    return _FIRST_RULE.match(grammar) is not None


class Parser:
    """Reads GBNF."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._references: dict[str, int] = {}  # where each name is first referred to

    def rules(self) -> dict[str, Node]:
        """Return the body of each rule by name."""
        rules: dict[str, Node] = {}
        self._skip(lines=True)
        while self._at < len(self._text):
            start = self._at
            name = self._match(_NAME, "a rule (name ::= ...)")
            self._skip(lines=False)
            if not self._take("::="):
                raise self._error(f"expected ::= after the name {name!r:.60}")
            if name in rules:
                raise self._error(f"the rule {name!r:.60} is defined twice", start)
            self._skip(lines=True)
            rules[name] = self._alternatives(0)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("expected an item, or the end of the rule")
            self._skip(lines=True)
        for name, place in self._references.items():
            if name not in rules:
                raise self._error(f"the rule {name!r:.60} is not defined", place)
        if "root" not in rules:
            raise ValueError("it has no rule 'root'")
        return rules

    def _alternatives(self, depth: int) -> Node:
        items = [self._sequence(depth)]
        while self._take("|"):
            self._skip(lines=True)
            items.append(self._sequence(depth))
        return items[0] if len(items) == 1 else Alternatives(tuple(items))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        num_repeats = 0
        while (char := self._text[self._at : self._at + 1]) and char not in "|)\r\n":
            if char in "*+?{":
                if not items:
                    raise self._error(f"there is nothing before {char!r} to repeat")
                num_repeats += 1
                if num_repeats > MAX_NESTING:
                    raise self._error(f"an item has more than {MAX_NESTING} repetitions")
                items[-1] = Repeat(items[-1], *self._repetitions())
            elif (item := self._item(char, depth)) is not None:
                items.append(item)
                num_repeats = 0
            else:
                break
            self._skip(lines=depth > 0)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self, char: str, depth: int) -> Node | None:
        """Read a literal, a class, a reference or a group; None: there is none."""
        if char == "(":
            return self._group(depth)
        if char in "<!":
            raise self._error("tokens (<...> and !<...>) are not supported; write their text")
        if _NAME.match(char):
            start = self._at
            name = self._match(_NAME, "a name")
            self._references.setdefault(name, start)
            return Reference(name)
        if char not in '".[':
            return None
        self._at += 1
        if char == ".":
            return _ANY
        return self._literal() if char == '"' else self._class()

    def _group(self, depth: int) -> Node:
        if depth == MAX_NESTING:
            raise self._error(f"more than {MAX_NESTING} parentheses are open")
        start = self._at
        self._at += 1
        self._skip(lines=True)
        group = self._alternatives(depth + 1)
        if not self._take(")"):
            raise self._error("expected ')', which closes the group at", self._at, start)
        return group

    def _literal(self) -> Node:
        start, items = self._at - 1, []
        while not self._take('"'):
            place = self._at
            code = self._char("the text", start)
            if SURROGATES[0] <= code <= SURROGATES[1]:
                raise self._error(f"U+{code:04X} is half of a character", place)
            items.append(Chars(((code, code),)))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _class(self) -> Node:
        start = self._at - 1
        is_negated = self._take("^")
        ranges = []
        while not self._take("]"):
            place = self._at
            low = high = self._char("the class", start)
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char("the class", start)
            if high < low:
                raise self._error("the range ends before it begins", place)
            ranges.append((low, high))
        if not ranges:
            raise self._error("the class is empty", start)
        chosen = _complement([*_complement(ranges), SURROGATES])
        if is_negated:
            chosen = _complement([*chosen, SURROGATES])
        if not chosen:
            raise self._error("no character is in the class", start)
        return Chars(tuple(chosen))

    def _char(self, what: str, start: int) -> int:
        """Read a character or an escape, and return its code point."""
        place = self._at
        if self._at >= len(self._text):
            raise self._error(f"{what} does not end", start)
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return ord(char)
        escape = self._text[self._at : self._at + 1]
        self._at += 1
        if escape in _ESCAPES:
            return ord(_ESCAPES[escape])
        num_digits = _HEX_ESCAPES.get(escape, 0)
        digits = self._text[self._at : self._at + num_digits]
        if not num_digits:
            raise self._error(f"the escape \\{escape} is not known", place)
        if len(digits) < num_digits or not _HEX.fullmatch(digits):
            raise self._error(f"\\{escape} needs {num_digits} hexadecimal digits", place)
        self._at += num_digits
        if int(digits, 16) > MAX_CODE_POINT:
            raise self._error(f"there is no character U+{digits}", place)
        return int(digits, 16)

    def _repetitions(self) -> tuple[int, int | None]:
        start = self._at
        self._at += 1
        if (sign := self._text[start]) != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        self._skip(lines=True)
        least = self._count()
        most: int | None = least
        if self._take(","):
            self._skip(lines=True)
            most = None if self._text[self._at : self._at + 1] == "}" else self._count()
        if not self._take("}"):
            raise self._error("expected '}' after the number of repetitions")
        if most is not None and most < least:
            raise self._error("fewer repetitions are allowed than are needed", start)
        return least, most

    def _count(self) -> int:
        start = self._at
        digits = self._match(_NUMBER, "a number of repetitions")
        if len(digits) > len(str(MAX_REPETITIONS)) or int(digits) > MAX_REPETITIONS:
            raise self._error(f"{digits:.20} repetitions are too many; at most {MAX_REPETITIONS} fit", start)
        self._skip(lines=True)
        return int(digits)

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error(f"expected {what}")
        self._at = match.end()
        return match.group()

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self._at)
        if is_there:
            self._at += len(text)
        return is_there

    def _skip(self, *, lines: bool) -> None:
        """Pass over spaces and comments, and over ends of lines if `lines`."""
        while (char := self._text[self._at : self._at + 1]) and char in (" \t#\r\n" if lines else " \t#"):
            if char != "#":
                self._at += 1
                continue
            while self._text[self._at : self._at + 1] not in ("", "\r", "\n"):
                self._at += 1

    def _error(self, message: str, *places: int) -> ValueError:
        """Return the error about the first place, by default the current one."""
        shown = [self._place(place) for place in (places or (self._at,))]
        return ValueError(f"{shown[0]}: {' '.join([message, *shown[1:]])}")

    def _place(self, position: int) -> str:
        line = self._text.count("\n", 0, position) + 1
        column = position - self._text.rfind("\n", 0, position)
        return f"line {line}, column {column}"


def _complement(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of code points that are in none of these."""
    complement, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            complement.append((start, low - 1))
        start = max(start, high + 1)
    if start <= MAX_CODE_POINT:
        complement.append((start, MAX_CODE_POINT))
    return complement
