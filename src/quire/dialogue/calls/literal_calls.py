"""Calls as in Python, and as Gemma writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from quire.dialogue.calls.grammar_writing import GrammarWriter
from quire.dialogue.calls.json_calls import JsonCalls
from quire.dialogue.calls.literals import WORD, convert_value, skip_blanks
from quire.dialogue.calls.reading import MAX_NAME_LENGTH, CallReader, NotACallError, json_text
from quire.dialogue.calls.tagged_calls import require_plain, require_plain_object, unwritable
from quire.dialogue.calls.tools import Tool
from quire.dialogue.incoming_text import Reading


@dataclasses.dataclass(frozen=True, slots=True)
class PythonicCalls:
    """`[name(key=value, …), …]`, with values as Python or JSON has them; or a list of objects in JSON.

    Args:
        in_list: whether brackets are around all calls; if not, each is on a line of its own.
    """

    in_list: bool = True
    marks: ClassVar[tuple[str, ...]] = ()

    def read(self, reader: CallReader) -> Reading[None]:
        """See `CallNotation.read`."""
        text = reader.text
        if self.in_list:
            yield from reader.expect("[")
            yield from skip_blanks(text)
            if (yield from text.peek()) == "{":
                yield from JsonCalls().read(reader)
                return
        while True:
            yield from skip_blanks(text)
            name = yield from reader.name()
            yield from reader.expect("(")
            reader.begin(name)
            yield from _read_arguments(reader)
            reader.end()
            if not (yield from self._has_more(reader)):
                return

    def _has_more(self, reader: CallReader) -> Reading[bool]:
        """Read what follows a call; return whether another one does.

        Raises:
            NotACallError: neither another call nor the end of the list follows.
        """
        text = reader.text
        yield from skip_blanks(text)
        if not self.in_list:
            has_separator = yield from text.match(";")
            yield from skip_blanks(text)
            return bool(has_separator) or (yield from text.peek()).isidentifier()
        if (yield from reader.expect(",", "]")) == "]":
            return False
        yield from skip_blanks(text)
        return not (yield from text.match("]"))

    def grammar(self, writer: GrammarWriter, tool: Tool) -> str:
        """See `CallNotation.grammar`; JSON's values are understood, too."""
        arguments = _members_grammar(writer, tool, "=", ", ", writer.json)
        return f"{writer.literal(tool.name + '(')} {arguments} {writer.literal(')')}"


@dataclasses.dataclass(frozen=True, slots=True)
class BareKeyCalls:
    """`call:name{key:value, …}`: keys are bare, and strings are between marks of their own.

    Args:
        quote: encloses a string.
    """

    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        """See `CallNotation.marks`."""
        return (self.quote,)

    def read(self, reader: CallReader) -> Reading[None]:
        """See `CallNotation.read`."""
        text = reader.text
        yield from reader.expect("call:")
        while True:
            name = yield from reader.name()
            yield from text.skip_space()
            if (yield from text.peek()) != "{":
                raise NotACallError
            reader.begin(name)
            yield from convert_value(text, reader.arguments, self.quote)
            reader.end()
            yield from text.skip_space()
            if not (yield from text.match("call:")):
                return

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
        if not WORD.fullmatch(name):
            raise unwritable(tool, name)
        known = schema if isinstance(schema, Mapping) else {}
        expression = f"{writer.literal(name + key_end)} {value(known, tool.parameters)}"
        groups[name not in required].append(expression)
    return writer.optional_list(*groups, separator)


def _read_arguments(reader: CallReader) -> Reading[None]:
    """Read arguments with their keys, and the parenthesis after them."""
    text = reader.text
    keys: set[str] = set()
    yield from skip_blanks(text)
    while not (yield from text.match(")")):
        key = yield from text.whole_run(WORD, MAX_NAME_LENGTH)
        yield from skip_blanks(text)
        if not key or len(key) > MAX_NAME_LENGTH or key in keys or not (yield from text.match("=")):
            raise NotACallError
        reader.arguments(f"{', ' if keys else '{'}{json_text(key)}: ")
        keys.add(key)
        yield from convert_value(text, reader.arguments)
        yield from skip_blanks(text)
        if not (yield from text.match(",")):
            yield from reader.expect(")")
            break
        yield from skip_blanks(text)
    reader.arguments("}" if keys else "")
