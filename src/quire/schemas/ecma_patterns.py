"""Patterns of JSON schemas, which are ECMA-262's regular expressions, written as Rust's.

The notations look alike and differ: in Rust's, `[` begins a class within a class, `&&` intersects two, `\\d`
is any digit of Unicode, and `\\cA` is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NESTING = 64  # groups
_MAX_CODE_POINT = 0x10FFFF
_DIGITS = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = (
    *((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
_QUANTIFIER = re.compile(r"([*+?]|\{([0-9]{1,9})(,([0-9]{0,9}))?\})\??")
_LIKE_A_QUANTIFIER = re.compile(r"\{[0-9]*(,[0-9]*)?\}")  # in linear time
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"[pP]\{([A-Za-z0-9_]+(?:=[A-Za-z0-9_]+)?)\}")
_GROUP_NAME = re.compile(r"\?<[^\W\d][\w$]*>")

_Ranges = tuple[tuple[int, int], ...]


def rust_pattern(pattern: str) -> str:
    """Return a pattern as Rust's regular expressions have it.

    Raises:
        ValueError: it is malformed, or uses what cannot be enforced, with its position.
    """
    return _Translation(pattern).whole()


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def whole(self) -> str:
        """Return the translation."""
        whole = self._alternatives(0)
        if self._at < len(self._pattern):
            raise self._error("nothing that ')' would close")
        return whole

    def _alternatives(self, depth: int) -> str:
        texts = [""]
        while (char := self._next()) and char != ")":
            if char == "|":
                self._at += 1
                texts.append("")
            else:
                texts[-1] += self._term(char, depth)
        return "|".join(texts)

    def _term(self, char: str, depth: int) -> str:
        if char in "^$":
            self._at += 1
            if self._quantifier():
                raise self._error(f"a repetition of {char!r}")
            return char
        if char in "*+?" or _LIKE_A_QUANTIFIER.match(self._pattern, self._at):
            raise self._error("a repetition of nothing")
        if char == "(":
            atom = self._group(depth)
        elif char == "[":
            atom = self._class()
        elif char == ".":
            self._at += 1
            atom = _class_text(_LINE_ENDS, is_negated=True)
        else:
            atom = self._class_of_one()
        return atom + self._quantifier()

    def _group(self, depth: int) -> str:
        if depth == MAX_NESTING:
            raise self._error(f"more than {MAX_NESTING} groups within each other")
        for start in ("(?=", "(?!", "(?<=", "(?<!"):
            if self._pattern.startswith(start, self._at):
                raise self._error("a lookaround, which cannot be enforced")
        self._at += 1
        if self._next() == "?":
            name = _GROUP_NAME.match(self._pattern, self._at)
            if name is None and not self._pattern.startswith("?:", self._at):
                raise self._error("a kind of group that is not supported")
            self._at += 2 if name is None else len(name.group())
        inside = self._alternatives(depth + 1)
        if self._next() != ")":
            raise self._error("no ')', which would close a group")
        self._at += 1
        return f"(?:{inside})"

    def _class_of_one(self) -> str:
        ranges, properties = self._characters(in_class=False)
        return _char_text(ranges[0][0]) if _is_one(ranges) else _class_text(ranges, properties)

    def _class(self) -> str:
        start = self._at
        self._at += 1
        is_negated = self._next() == "^"
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        properties = ""
        while self._next() != "]":
            if not self._next():
                raise self._error("no ']', which would close the class", start)
            place = self._at
            low, its_properties = self._characters(in_class=True)
            properties += its_properties
            if not (self._next() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("", "]")):
                ranges += low
                continue
            dash = self._at
            self._at += 1
            high, its_properties = self._characters(in_class=True)
            if its_properties or not _is_one(low) or not _is_one(high):  # as in [\w-.]: '-' is itself
                self._at = dash
                ranges += low
                self._characters(in_class=True)
                ranges.append((ord("-"), ord("-")))
                continue
            if high[0][0] < low[0][0]:
                raise self._error("a range that ends before it begins", place)
            ranges.append((low[0][0], high[0][0]))
        self._at += 1
        return _class_text(ranges, properties, is_negated=is_negated)

    def _characters(self, *, in_class: bool) -> tuple[_Ranges, str]:
        """Read a character or an escape: the characters that it stands for, and properties of Unicode."""
        char = self._next()
        self._at += 1
        if char != "\\":
            return ((ord(char), ord(char)),), ""
        escape = self._next()
        if (found := _PROPERTY.match(self._pattern, self._at)) is not None:
            self._at = found.end()
            return (), f"\\{escape}{{{found[1]}}}"
        if (ranges := _SETS.get(escape.lower())) is not None:
            self._at += 1
            return (ranges if escape.islower() else _complement(ranges)), ""
        code = self._escaped(escape, in_class=in_class)
        return ((code, code),), ""

    def _escaped(self, escape: str, *, in_class: bool) -> int:
        """Return the character that an escape stands for, having read it."""
        start = self._at - 1
        if (found := _HEX.match(self._pattern, self._at)) is not None:
            self._at = found.end()
            return self._code(int(found[1] or found[2] or found[3], 16), start)
        self._at += 1
        following = self._next()
        if escape in _CONTROLS:
            return _CONTROLS[escape]
        if escape == "c" and following.isascii() and following.isalpha():
            self._at += 1
            return ord(following) % 32
        if escape == "0" and not following.isdigit():
            return 0
        if escape == "b" and in_class:
            return 0x8
        if escape in ("b", "B"):
            raise self._error("a word boundary, which cannot be enforced", start)
        if (escape.isdigit() and escape != "0") or (escape == "k" and following == "<"):
            raise self._error("a reference to a group, which cannot be enforced", start)
        if not escape or escape.isalnum():
            raise self._error("an escape that ECMA-262 does not have", start)
        return ord(escape)

    def _code(self, code: int, start: int) -> int:
        if 0xD800 <= code <= 0xDBFF and (low := _LOW_SURROGATE.match(self._pattern, self._at)):
            self._at = low.end()
            return 0x10000 + ((code & 0x3FF) << 10) + (int(low[1], 16) & 0x3FF)
        if 0xD800 <= code <= 0xDFFF or code > _MAX_CODE_POINT:
            raise self._error("an escape that is no whole character", start)
        return code

    def _quantifier(self) -> str:
        """Return how often what comes before is repeated, having read it; laziness makes no difference."""
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            if _LIKE_A_QUANTIFIER.match(self._pattern, self._at):
                raise self._error("a repetition that is not {m}, {m,} or {m,n}")
            return ""
        if found[4] and int(found[4]) < int(found[2]):
            raise self._error("a repetition with fewer at most than at least")
        self._at = found.end()
        if self._next() and self._next() in "*+?":
            raise self._error("a repetition of a repetition")
        return found[1]

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _error(self, what: str, position: int | None = None) -> ValueError:
        position = self._at if position is None else position
        return ValueError(f"the pattern {self._pattern!r:.100} has {what}, at character {position + 1}")


def _is_one(ranges: _Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _complement(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    complement, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            complement.append((start, low - 1))
        start = max(start, high + 1)
    return (*complement, (start, _MAX_CODE_POINT)) if start <= _MAX_CODE_POINT else tuple(complement)


def _class_text(
    ranges: _Ranges | list[tuple[int, int]], properties: str = "", *, is_negated: bool = False
) -> str:
    """Return a class as Rust has it.

    llguidance takes the escapes `\\"` and `\\\\` for members of any class that has all control characters. So
    one that lacks one of the two, or may lack it, goes without U+0000, which hardly any text has.
    """
    if properties:
        return f"[[{'^' * is_negated}{properties}{_ranges_text(ranges)}]&&[^{_char_text(0)}]]"
    if not ranges:  # [] is no character, [^] any
        ranges, is_negated = [(0, _MAX_CODE_POINT)], not is_negated
    members = _complement(ranges) if is_negated else ranges
    if _has(members, 0) and not (_has(members, ord('"')) and _has(members, ord("\\"))):
        ranges = [*_complement([*_complement(ranges), (0, 0)])] if not is_negated else [*ranges, (0, 0)]
    return f"[{'^' * is_negated}{_ranges_text(ranges)}]"


def _has(ranges: Iterable[tuple[int, int]], code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    return "".join(
        _char_text(low) if low == high else f"{_char_text(low)}-{_char_text(high)}" for low, high in ranges
    )


def _char_text(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and (char.isalnum() or char == "_") else f"\\x{{{code:X}}}"
