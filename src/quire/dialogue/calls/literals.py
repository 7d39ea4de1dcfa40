"""Values as Python's literals, and as Gemma writes them, converted to JSON as they come.

JSON's values are understood, too. Of what Python can write, JSON has no complex numbers, infinities, bytes
and sets: these are no values here.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping

from quire.dialogue.calls.json_copying import (
    MAX_DEPTH,
    MAX_NUMBER_LENGTH,
    copy_value,
    hex_digits,
    one_character,
)
from quire.dialogue.calls.reading import MAX_NAME_LENGTH, Emit, NotACallError, escaped, json_text
from quire.dialogue.incoming_text import IncomingText, Reading

WORD = re.compile(r"[\w.+-]+")
"""A number, a constant, or a key without quotes."""

_NUMBER = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CONSTANTS: Mapping[str, str] = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_UNQUOTED = {quote: re.compile(rf"[^{quote}\\\r]+") for quote in "\"'"}
_QUOTES = tuple(quote * times for quote in _UNQUOTED for times in (1, 3))
_RAW_OF_PREFIX = {"": False, "u": False, "r": True}
_PREFIX = re.compile(r"[A-Za-z]+")
_ESCAPES = dict(zip("abfnrtv\\'\"", "\a\b\f\n\r\t\v\\'\"", strict=True))
_NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_OCTAL = re.compile(r"[0-7]")
_CHARACTER_NAME = re.compile(r"[^}]")
_MAX_CHARACTER_NAME = 100
_REST_OF_LINE = re.compile(r"[^\n]+")
_BARE_KEY = re.compile(r"[^:,{}\[\]()]+")


def convert_value(text: IncomingText, emit: Emit, quote: str = "") -> Reading[None]:
    """Pass a value on as JSON.

    Args:
        text: that begins with the value.
        emit: takes each piece.
        quote: encloses a string without escapes; where there is such a mark, keys and texts may also come
            without it. "": as in Python.

    Raises:
        NotACallError: the text ends first, or is no value, or one with more than `MAX_DEPTH` brackets in one
            another or a number of more than `MAX_NUMBER_LENGTH` characters.
    """
    brackets = _Brackets(emit)
    is_first = is_next = False  # in the innermost brackets: nothing has come yet, or a value has
    while True:
        yield from skip_blanks(text)
        if brackets.closings and (yield from text.match(brackets.closings[-1])):
            brackets.close(is_empty=is_first)
            is_first, is_next = False, True
        elif is_next:
            if not (yield from text.match(",")):
                raise NotACallError
            brackets.make_tuple()
            is_next = False
        else:
            if brackets.closings and not is_first:
                brackets.write(", ")
            if brackets.closings[-1:] == ["}"]:
                yield from _convert_key(text, brackets.write, quote)
            bracket = yield from text.match(*_CLOSING)
            is_first, is_next = bool(bracket), not bracket
            if bracket:
                brackets.open(bracket)
            else:
                yield from _convert_scalar(text, brackets.write, quote)
        if not brackets.closings:
            return


def json_of(written: str, *, allows_python: bool) -> str:
    """Return the JSON of the value that a text is.

    Args:
        written: a value in JSON.
        allows_python: whether it may also be a literal of Python's.

    Raises:
        NotACallError: it is neither.
    """
    try:
        return _whole_value(copy_value, written)
    except NotACallError:
        if not allows_python:
            raise
        return _whole_value(convert_value, written)


def _whole_value(read_value: Callable[[IncomingText, Emit], Reading[None]], written: str) -> str:
    text = IncomingText()
    text.add(written)
    text.end()
    parts: list[str] = []

    def read() -> Reading[None]:
        yield from read_value(text, parts.append)
        yield from text.skip_space()
        if (yield from text.peek()):
            raise NotACallError

    next(read(), None)
    return "".join(parts)


def skip_blanks(text: IncomingText) -> Reading[None]:
    """Consume white space, comments and line breaks after a backslash, as Python does in brackets."""
    while True:
        yield from text.skip_space()
        if (yield from text.match("#")):
            yield from text.whole_run(_REST_OF_LINE)
        elif not (yield from text.match("\\\n", "\\\r\n")):
            return


class _Brackets:
    """The brackets that are open around what is written.

    What follows a parenthesis is held back until it is known whether that begins a tuple, a list in JSON, or
    is only there to group.

    Args:
        emit: takes each piece.

    Attributes:
        closings: the closing bracket of each, in the text that is read.
    """

    def __init__(self, emit: Emit) -> None:
        self.closings: list[str] = []
        self._ends: list[str] = []  # what closes each in JSON; "" while that is unknown
        self._emit = emit
        self._held: list[str] = []
        self._unknown: list[int] = []  # places in what is held of beginnings that are unknown

    def write(self, text: str) -> None:
        """Add to what is in the brackets."""
        if self._unknown:
            self._held.append(text)
        else:
            self._emit(text)

    def open(self, bracket: str) -> None:
        """Begin a list, a dictionary, or an expression in parentheses.

        Raises:
            NotACallError: there are too many in one another.
        """
        if len(self.closings) == MAX_DEPTH:
            raise NotACallError
        self.closings.append(_CLOSING[bracket])
        if bracket == "(":
            self._unknown.append(len(self._held))
            self.write("")
            self._ends.append("")
        else:
            self.write(bracket)
            self._ends.append(_CLOSING[bracket])

    def make_tuple(self) -> None:
        """Note that the innermost brackets, if they are parentheses, do not only group."""
        if not self._ends[-1]:
            self._ends[-1] = "]"
            self._decide("[")

    def close(self, *, is_empty: bool) -> None:
        """End the innermost brackets."""
        if is_empty:
            self.make_tuple()
        if not self._ends[-1]:
            self._decide("")
        self.closings.pop()
        self.write(self._ends.pop())

    def _decide(self, beginning: str) -> None:
        self._held[self._unknown.pop()] = beginning
        if not self._unknown:
            self._emit("".join(self._held))
            self._held.clear()


def _convert_key(text: IncomingText, emit: Emit, quote: str) -> Reading[None]:
    character = yield from text.peek()
    if quote and character not in (*_UNQUOTED, quote[0]):
        bare = (yield from text.whole_run(_BARE_KEY, MAX_NAME_LENGTH)).strip()
        if not bare or len(bare) > MAX_NAME_LENGTH:
            raise NotACallError
        emit(json_text(bare))
    else:
        parts: list[str] = []
        yield from _convert_scalar(text, parts.append, quote)
        key = "".join(parts)
        emit(key if key.startswith('"') else json_text(json_text(json.loads(key))))
    yield from skip_blanks(text)
    if not (yield from text.match(":")):
        raise NotACallError
    emit(": ")
    yield from skip_blanks(text)


def _convert_scalar(text: IncomingText, emit: Emit, quote: str) -> Reading[None]:
    if quote and (yield from text.match(quote)):
        yield from _convert_plain_string(text, emit, quote)
        return
    sign = yield from text.match("-", "+")
    if sign:
        yield from skip_blanks(text)
    word = yield from text.whole_run(WORD, MAX_NUMBER_LENGTH)
    if len(word) > MAX_NUMBER_LENGTH:
        raise NotACallError
    if not sign and (yield from text.peek()) in _UNQUOTED:
        yield from _convert_strings(text, emit, word)
    elif not sign and word in _CONSTANTS:
        emit(_CONSTANTS[word])
    elif number := _json_number(word):
        emit(sign.replace("+", "") + number)
    elif quote and word:
        emit(json_text(sign + word))
    else:
        raise NotACallError


def _json_number(word: str) -> str:
    """Return the JSON of a number of Python's without a sign; "" if it is none that JSON has."""
    if not (word.isascii() and (word[:1].isdigit() or word.startswith("."))):
        return ""
    try:
        is_float = not word.lower().startswith(("0x", "0o", "0b")) and any(mark in word for mark in ".eE")
        value = float(word) if is_float else int(word, 0)
        return word if _NUMBER.fullmatch(word) else json.dumps(value, allow_nan=False)
    except ValueError:
        return ""


def _convert_strings(text: IncomingText, emit: Emit, prefix: str) -> Reading[None]:
    """Convert strings that follow each other, and are one."""
    emit('"')
    is_there = True
    while is_there:
        is_raw = _RAW_OF_PREFIX.get(prefix.lower())
        if is_raw is None:
            raise NotACallError
        yield from _convert_string(text, emit, is_raw=is_raw)
        yield from skip_blanks(text)
        prefix = yield from text.whole_run(_PREFIX, 1)
        is_there = (yield from text.peek()) in _UNQUOTED
    if prefix:
        raise NotACallError
    emit('"')


def _convert_string(text: IncomingText, emit: Emit, *, is_raw: bool) -> Reading[None]:
    quote = yield from text.match(*_QUOTES)
    while not (yield from text.match(quote)):
        if part := text.run(_UNQUOTED[quote[0]]):
            emit(escaped(part))
        elif part := (yield from text.match("\r\n", "\r")):
            emit("\\n")
        elif part := (yield from text.match(quote[0])):
            emit(escaped(part))
        elif not is_raw:
            emit(escaped((yield from _escape(text))))
        elif part := (yield from text.match("\\")):
            emit(escaped(part + (yield from text.match("\\", quote[0]))))
        else:
            raise NotACallError


def _convert_plain_string(text: IncomingText, emit: Emit, quote: str) -> Reading[None]:
    """Convert the rest of a string that has no escapes."""
    emit('"')
    marker = ""
    while not marker:
        part, marker = yield from text.piece_before((quote,))
        if not part and not marker:
            raise NotACallError
        emit(escaped(part))
    emit('"')


def _escape(text: IncomingText) -> Reading[str]:
    """Return the character of a Python escape; an unknown escape stays as it is.

    Raises:
        NotACallError: the text ends first, or there is no such character.
    """
    yield from text.match("\\")
    kind = yield from one_character(text)
    if kind in _ESCAPES:
        return _ESCAPES[kind]
    if kind in ("\n", "\r"):
        yield from text.match("\n" if kind == "\r" else "")
        return ""
    if _OCTAL.match(kind):
        return chr(int(kind + (yield from text.whole_run(_OCTAL, 1)), 8))
    if kind in _NUM_HEX_DIGITS:
        code = int((yield from hex_digits(text, _NUM_HEX_DIGITS[kind])), 16)
        if code > sys.maxunicode:
            raise NotACallError
        return chr(code)
    if kind == "N":
        return (yield from _named_character(text))
    if not kind:
        raise NotACallError
    return "\\" + kind


def _named_character(text: IncomingText) -> Reading[str]:
    if not (yield from text.match("{")):
        raise NotACallError
    name = yield from text.whole_run(_CHARACTER_NAME, _MAX_CHARACTER_NAME)
    yield from text.match("}")
    try:
        character = unicodedata.lookup(name)
    except KeyError:
        raise NotACallError from None
    if len(character) > 1:  # a sequence of characters, whose name no escape has
        raise NotACallError
    return character
