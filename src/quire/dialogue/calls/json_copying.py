"""JSON values in incoming text, copied as they come."""

from __future__ import annotations

import re

from quire.dialogue.calls.reading import Emit, NotACallError, escaped
from quire.dialogue.incoming_text import IncomingText, Reading

MAX_DEPTH = 200
"""Of brackets: as many as Python's parser takes, and far fewer than its reader of JSON."""

MAX_NUMBER_LENGTH = 4300
"""Characters of a number: Python reads no longer integer from text."""

_SPACE = re.compile(r"[ \t\n\r]+")
_WORD = re.compile(r"[0-9A-Za-z+.-]+")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_ESCAPED_IN_STRING = re.compile(r"[\x00-\x1f\ud800-\udfff]+")
_RAW_IN_STRING = re.compile(r'[^"\\]+')
_ONE_IN_STRING = re.compile(r'[^"\\]')
_HEX = re.compile(r"[0-9A-Fa-f]")
_CLOSING = {"{": "}", "[": "]"}
_SIMPLE_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def copy_arguments(text: IncomingText, emit: Emit) -> Reading[None]:
    """Pass a call's arguments on: an object, the object encoded in a string, or nothing for null.

    Raises:
        NotACallError: they are malformed, or something else.
    """
    if (yield from text.peek()) == '"':
        yield from _copy_encoded_object(text, emit)
    elif not (yield from text.match("null")):
        yield from copy_object(text, emit)


def copy_object(text: IncomingText, emit: Emit) -> Reading[None]:
    """Pass an object on, see `copy_value`.

    Raises:
        NotACallError: it is malformed, or no object.
    """
    if (yield from text.peek()) != "{":
        raise NotACallError
    yield from copy_value(text, emit)


def _copy_encoded_object(text: IncomingText, emit: Emit) -> Reading[None]:
    """Pass on the object that a string holds; an empty one holds none."""
    held = IncomingText()
    reading = _copy_only_object(held, emit)

    def more(part: str) -> None:
        held.add(part)
        next(reading, None)

    yield from decode_string(text, more)
    held.end()
    next(reading, None)


def _copy_only_object(text: IncomingText, emit: Emit) -> Reading[None]:
    yield from text.skip_space()
    if not (yield from text.peek()):
        return
    yield from copy_object(text, emit)
    yield from text.skip_space()
    if (yield from text.peek()):
        raise NotACallError


def copy_value(text: IncomingText, emit: Emit) -> Reading[None]:
    """Pass a JSON value on as it comes, verbatim but for control characters in strings, which are escaped.

    Raises:
        NotACallError: the text ends first, or something follows that no JSON value has there, or it has more
            than `MAX_DEPTH` brackets in one another or a number of more than `MAX_NUMBER_LENGTH` characters.
    """
    closings: list[str] = []
    is_first = is_next = False  # in the innermost brackets: nothing has come yet, or a value has
    while True:
        character = yield from _next_character(text, emit)
        if (is_first or is_next) and character == closings[-1]:
            emit((yield from text.match(closings.pop())))
            is_first, is_next = False, True
        else:
            if is_next:
                yield from _copy_mark(text, emit, ",")
                character = yield from _next_character(text, emit)
            if closings and closings[-1] == "}":
                yield from _copy_string(text, emit)
                yield from _next_character(text, emit)
                yield from _copy_mark(text, emit, ":")
                character = yield from _next_character(text, emit)
            is_first = character in _CLOSING
            is_next = not is_first
            if is_first:
                closings.append(_CLOSING[character])
                emit((yield from text.match(character)))
            else:
                yield from _copy_scalar(text, emit, character)
        if len(closings) > MAX_DEPTH:
            raise NotACallError
        if not closings:
            return


def _next_character(text: IncomingText, emit: Emit) -> Reading[str]:
    """Copy white space, and return the character after it."""
    while (character := (yield from text.peek())) and (space := text.run(_SPACE)):
        emit(space)
    return character


def _copy_mark(text: IncomingText, emit: Emit, mark: str) -> Reading[None]:
    if not (yield from text.match(mark)):
        raise NotACallError
    emit(mark)


def _copy_scalar(text: IncomingText, emit: Emit, first: str) -> Reading[None]:
    if first == '"':
        yield from _copy_string(text, emit)
        return
    word = yield from text.whole_run(_WORD, MAX_NUMBER_LENGTH)
    if len(word) > MAX_NUMBER_LENGTH or not _SCALAR.fullmatch(word):
        raise NotACallError
    emit(word)


def _copy_string(text: IncomingText, emit: Emit) -> Reading[None]:
    yield from _copy_mark(text, emit, '"')
    while True:
        character = yield from text.peek()
        if part := text.run(_IN_STRING):
            emit(part)
        elif part := text.run(_ESCAPED_IN_STRING):
            emit(escaped(part))
        elif character == '"':
            emit((yield from text.match('"')))
            return
        else:
            emit((yield from _escape(text)))


def decode_string(text: IncomingText, emit: Emit, max_length: int | None = None) -> Reading[None]:
    """Pass on the text of a JSON string; characters of two escapes come as two surrogates.

    Raises:
        NotACallError: no string comes next, the text ends first, or it is longer than `max_length`.
    """
    if not (yield from text.match('"')):
        raise NotACallError
    pattern = _RAW_IN_STRING if max_length is None else _ONE_IN_STRING
    length = 0
    while True:
        character = yield from text.peek()
        if part := text.run(pattern):
            emit(part)
            length += len(part)
        elif character == '"':
            yield from text.match('"')
            return
        else:
            escape = yield from _escape(text)
            emit(_SIMPLE_ESCAPES.get(escape[1]) or chr(int(escape[2:], 16)))
            length += 1
        if max_length is not None and length > max_length:
            raise NotACallError


def _escape(text: IncomingText) -> Reading[str]:
    """Read an escape verbatim.

    Raises:
        NotACallError: no escape of JSON comes next.
    """
    if not (yield from text.match("\\")):
        raise NotACallError
    kind = yield from one_character(text)
    if kind == "u":
        return "\\u" + (yield from hex_digits(text, 4))
    if kind not in _SIMPLE_ESCAPES:
        raise NotACallError
    return "\\" + kind


def hex_digits(text: IncomingText, number: int) -> Reading[str]:
    """Read this many hexadecimal digits.

    Raises:
        NotACallError: there are fewer.
    """
    digits = ""
    while len(digits) < number:
        digit = yield from one_character(text)
        if not _HEX.fullmatch(digit):
            raise NotACallError
        digits += digit
    return digits


def one_character(text: IncomingText) -> Reading[str]:
    """Return the next character; "" at the end."""
    character: str = yield from text.peek()
    yield from text.match(character)
    return character
