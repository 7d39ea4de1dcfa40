"""Calls with values in a notation of their own, converted to JSON as they come: Python's, and Gemma's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from quire.dialogue.call_reading import CallReader, Emit, NotACallError, escaped, json_text
from quire.dialogue.grammar_writing import GrammarWriter
from quire.dialogue.incoming_text import IncomingText, Reading
from quire.dialogue.json_copying import hexadecimal
from quire.dialogue.tagged_calls import require_plain, require_plain_object, unwritable
from quire.dialogue.tools import Tool

_WORD = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS: Mapping[str, str] = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_JSON_BRACKETS = {"(": "[", ")": "]"}
_QUOTED = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclasses.dataclass(frozen=True, slots=True)
class PythonicCalls:
    """`[name(key=value, …), …]`, with values as Python or JSON has them.

    Args:
        in_list: whether brackets are around all calls; if not, each stands on a line of its own.
    """

    in_list: bool = True
    marks: ClassVar[tuple[str, ...]] = ()

    def read(self, reader: CallReader) -> Reading[None]:
        """See `CallNotation.read`."""
        text = reader.text
        if self.in_list:
            yield from reader.expect("[")
        while True:
            yield from text.skip_space()
            name = yield from reader.name()
            yield from reader.expect("(")
            reader.begin(name)
            yield from _read_members(reader, key_end="=", closing=")", quote="")
            reader.end()
            if self.in_list and (yield from reader.expect(",", "]")) == "]":
                return
            yield from text.skip_space()
            if not self.in_list and not (yield from text.peek()).isidentifier():
                return

    def grammar(self, writer: GrammarWriter, tool: Tool) -> str:
        """See `CallNotation.grammar`; JSON's values are understood, too."""
        arguments = _members_grammar(writer, tool, "=", ", ", writer.json)
        return f"{writer.literal(tool.name + '(')} {arguments} {writer.literal(')')}"


@dataclasses.dataclass(frozen=True, slots=True)
class BareKeyCalls:
    """`call:name{key:value, …}`: keys are bare, and strings stand between marks of their own.

    Args:
        quote: stands before and after a string.
    """

    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        """See `CallNotation.marks`."""
        return (self.quote,)

    def read(self, reader: CallReader) -> Reading[None]:
        """See `CallNotation.read`."""
        yield from reader.expect("call:")
        name = yield from reader.name()
        yield from reader.expect("{")
        reader.begin(name)
        yield from _read_members(reader, key_end=":", closing="}", quote=self.quote)
        reader.end()

    def grammar(self, writer: GrammarWriter, tool: Tool) -> str:
        """See `CallNotation.grammar`; lists and objects are as in JSON, which is understood, too."""
        quote = writer.literal(self.quote)

        def value(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
            if schema.get("type") != "string":
                return writer.json(schema, root)
            if isinstance(schema.get("enum"), list):
                return f"{quote} {writer.one_of(writer.literal(str(one)) for one in schema['enum'])} {quote}"
            if tool.strict:
                require_plain(tool, schema)
            return f"{quote} {writer.text_up_to(self.quote)}"

        arguments = _members_grammar(writer, tool, ":", ",", value)
        return f"{writer.literal(f'call:{tool.name}{{')} {arguments} {writer.literal('}')}"


def _members_grammar(
    writer: GrammarWriter,
    tool: Tool,
    key_end: str,
    separator: str,
    value: Callable[[Mapping[str, Any], Mapping[str, Any]], str],
) -> str:
    """Return the expression for the arguments: the required ones first."""
    require_plain_object(tool)
    required = tool.parameters.get("required", ())
    groups: tuple[list[str], list[str]] = ([], [])
    for name, schema in tool.parameters.get("properties", {}).items():
        if not _WORD.fullmatch(name):
            raise unwritable(tool, name)
        known = schema if isinstance(schema, Mapping) else {}
        expression = f"{writer.literal(name + key_end)} {value(known, tool.parameters)}"
        groups[name not in required].append(expression)
    return writer.optional_list(*groups, separator)


def _read_members(reader: CallReader, *, key_end: str, closing: str, quote: str) -> Reading[None]:
    """Read the arguments up to `closing`."""
    text = reader.text
    separator = "{"
    yield from text.skip_space()
    while not (yield from text.match(closing)):
        key = yield from text.whole_run(_WORD)
        if not key:
            raise NotACallError
        yield from reader.expect(key_end)
        reader.arguments(f"{separator}{json_text(key)}: ")
        yield from _convert(text, reader.arguments, quote)
        separator = ", "
        yield from text.skip_space()
        if not (yield from text.match(",")):
            yield from reader.expect(closing)
            break
        yield from text.skip_space()
    reader.arguments("}" if separator == ", " else "")


def _convert(text: IncomingText, emit: Emit, quote: str) -> Reading[None]:
    """Pass a value on as JSON.

    Raises:
        NotACallError: the text ends first, or is no value.
    """
    closings: list[str] = []
    needs_comma = False  # before the next value of the innermost brackets
    while True:
        yield from text.skip_space()
        character = yield from text.peek()
        if closings and character == closings[-1]:
            yield from text.match(character)
            emit(_JSON_BRACKETS.get(character, character))
            closings.pop()
            needs_comma = True
        elif closings and needs_comma:
            if not (yield from text.match(",")):
                raise NotACallError
            needs_comma = False
            yield from text.skip_space()
            if (yield from text.peek()) != closings[-1]:
                emit(", ")
            continue
        else:
            if closings and closings[-1] == "}":
                yield from _convert_key(text, emit, quote)
            needs_comma = yield from _convert_scalar_or_opening(text, emit, quote, closings)
        if not closings:
            return


def _convert_key(text: IncomingText, emit: Emit, quote: str) -> Reading[None]:
    character = yield from text.peek()
    if character in _QUOTED or (quote and character == quote[0]):
        yield from _convert_string(text, emit, quote)
    else:
        word = yield from text.whole_run(_WORD)
        if not word:
            raise NotACallError
        emit(json_text(word))
    yield from text.skip_space()
    if not (yield from text.match(":")):
        raise NotACallError
    emit(": ")
    yield from text.skip_space()


def _convert_scalar_or_opening(
    text: IncomingText, emit: Emit, quote: str, closings: list[str]
) -> Reading[bool]:
    """Convert a scalar, or the beginning of a list or an object; return whether it was a scalar."""
    character = yield from text.peek()
    if character in _CLOSING:
        yield from text.match(character)
        emit(_JSON_BRACKETS.get(character, character))
        closings.append(_CLOSING[character])
        return False
    if character in _QUOTED or (quote and character == quote[0]):
        yield from _convert_string(text, emit, quote)
        return True
    word = yield from text.whole_run(_WORD)
    if not word:
        raise NotACallError
    emit(_WORDS.get(word) or (word if _NUMBER.fullmatch(word) else json_text(word)))
    return True


def _convert_string(text: IncomingText, emit: Emit, quote: str) -> Reading[None]:
    if quote and (yield from text.match(quote)):
        yield from _convert_plain_string(text, emit, quote)
        return
    delimiter = yield from text.match('"', "'")
    if not delimiter:
        raise NotACallError
    emit('"')
    while True:
        character = yield from text.peek()
        if not character:
            raise NotACallError
        if part := text.run(_QUOTED[delimiter]):
            emit(escaped(part))
        elif character == delimiter:
            yield from text.match(delimiter)
            emit('"')
            return
        else:
            emit(escaped((yield from _escape(text))))


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
    """Return the character that an escape of Python stands for; an unknown one stands for itself."""
    yield from text.match("\\")
    kind = yield from text.peek()
    yield from text.match(kind)
    if kind in _NUM_DIGITS:
        code = yield from hexadecimal(text, _NUM_DIGITS[kind])
        if 0xD800 <= code < 0xDC00 and (yield from text.match("\\u")):  # JSON writes such characters as two
            low = yield from hexadecimal(text, 4)
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else 0xFFFD
        is_character = code <= 0x10FFFF and not 0xD800 <= code < 0xE000
        return chr(code) if is_character else "\ufffd"
    if kind == "\n":
        return ""
    return _ESCAPES.get(kind, "\\" + kind)
