"""JSON values in incoming text, copied as they come."""

from __future__ import annotations

import re

from quire.dialogue.call_reading import Emit, NotACallError, escaped
from quire.dialogue.incoming_text import IncomingText, Reading

_BETWEEN_BRACKETS = re.compile(r"[\s,:0-9A-Za-z+.-]+")
_LITERAL = re.compile(r"[0-9A-Za-z+.-]+")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_RAW_IN_STRING = re.compile(r'[^"\\]+')
_ONE_IN_STRING = re.compile(r'[^"\\]')
_CONTROL = re.compile(r"[\x00-\x1f]+")
_HEX = re.compile(r"[0-9A-Fa-f]")
_CLOSING = {"{": "}", "[": "]"}
_SIMPLE_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def copy_value(text: IncomingText, emit: Emit) -> Reading[None]:
    """Pass a JSON value on as it comes, verbatim but for control characters in strings, which are escaped.

    Raises:
        NotACallError: the text ends first, or something follows that no JSON value has there.
    """
    first = yield from text.peek()
    if first == '"':
        yield from _copy_string(text, emit)
    elif first in _CLOSING:
        yield from _copy_bracketed(text, emit)
    else:
        literal = yield from text.whole_run(_LITERAL)
        if not literal:
            raise NotACallError
        emit(literal)


def _copy_bracketed(text: IncomingText, emit: Emit) -> Reading[None]:
    closings: list[str] = []
    while True:
        character = yield from text.peek()
        if part := text.run(_BETWEEN_BRACKETS):
            emit(part)
        elif character == '"':
            yield from _copy_string(text, emit)
        elif character in _CLOSING:
            closings.append(_CLOSING[character])
            emit((yield from text.match(character)))
        elif character and character == closings[-1]:
            emit((yield from text.match(character)))
            closings.pop()
            if not closings:
                return
        else:
            raise NotACallError


def _copy_string(text: IncomingText, emit: Emit) -> Reading[None]:
    emit((yield from text.match('"')))
    while True:
        character = yield from text.peek()
        if part := text.run(_IN_STRING):
            emit(part)
        elif part := text.run(_CONTROL):
            emit(escaped(part))
        elif not character:
            raise NotACallError
        elif character == '"':
            emit((yield from text.match('"')))
            return
        else:
            yield from text.match("\\")
            if not (yield from text.peek()):
                raise NotACallError
            emit("\\" + (yield from _one_character(text)))


def decode_string(text: IncomingText, emit: Emit, max_length: int | None = None) -> Reading[None]:
    """Pass on what a JSON string stands for.

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
        elif character == "\\":
            emit((yield from decoded_escape(text)))
            length += 1
        if not character or (max_length is not None and length > max_length):
            raise NotACallError


def decoded_escape(text: IncomingText) -> Reading[str]:
    """Return the character that an escape of JSON stands for.

    Raises:
        NotACallError: JSON has no such escape.
    """
    yield from text.match("\\")
    kind = yield from _one_character(text)
    if kind in _SIMPLE_ESCAPES:
        return _SIMPLE_ESCAPES[kind]
    if kind != "u":
        raise NotACallError
    unit = yield from hexadecimal(text, 4)
    if 0xD800 <= unit < 0xDC00:
        if not (yield from text.match("\\u")):
            return "\ufffd"
        low = yield from hexadecimal(text, 4)
        if not 0xDC00 <= low < 0xE000:
            return "\ufffd"
        return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))
    return "\ufffd" if 0xDC00 <= unit < 0xE000 else chr(unit)


def hexadecimal(text: IncomingText, num_digits: int) -> Reading[int]:
    """Return a number of so many hexadecimal digits.

    Raises:
        NotACallError: there are fewer.
    """
    digits = ""
    for _ in range(num_digits):
        digit = yield from _one_character(text)
        if not _HEX.fullmatch(digit):
            raise NotACallError
        digits += digit
    return int(digits, 16)


def _one_character(text: IncomingText) -> Reading[str]:
    character: str = yield from text.peek()
    yield from text.match(character)
    return character
