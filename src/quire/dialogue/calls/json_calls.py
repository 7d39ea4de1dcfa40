"""Calls as JSON: objects with a name and arguments, or a name followed by its arguments."""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from quire.dialogue.calls.grammar_writing import GrammarWriter
from quire.dialogue.calls.json_copying import copy_arguments, copy_value, decode_string
from quire.dialogue.calls.reading import MAX_NAME_LENGTH, CallReader, NotACallError, json_text
from quire.dialogue.calls.tools import Tool
from quire.dialogue.incoming_text import Reading

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_NUMBER = re.compile(r":[0-9]+$")
_SURPLUS = re.compile(r"[\s\]}]+")
_ARGUMENTS = ("{", '"')  # with which an object, and a string that holds one, begin
_AFTER_NO_ARGUMENTS = ("", "<", "`")  # the end of the text, a mark, the end of a fence
_AFTER_UNCLOSED = ("", "<", "]")  # where models leave the last brace out: these, and the end of a list


@dataclasses.dataclass(frozen=True, slots=True)
class JsonCalls:
    """`{"name": …, "arguments": {…}}`: one, several after each other, or a list of them.

    Args:
        name_key: under which it writes the name; "": the name itself is the key of the arguments.
        argument_key: under which it writes the arguments.
        id_key: under which it writes a number of the call before the name; "": nowhere.
    """

    name_key: str = "name"
    argument_key: str = "arguments"
    id_key: str = ""
    marks: ClassVar[tuple[str, ...]] = ()

    def read(self, reader: CallReader) -> Reading[None]:
        """See `CallNotation.read`."""
        text = reader.text
        yield from text.skip_space()
        yield from text.match("[")
        has_more = True
        while has_more:
            yield from _read_object(reader) if self.name_key else _read_keyed_object(reader)
            yield from text.whole_run(_SURPLUS)
            text.mark()
            has_separator = yield from text.match(",", ";")
            has_more = bool(has_separator) or (yield from text.peek()) == "{"

    def grammar(self, writer: GrammarWriter, tool: Tool) -> str:
        """See `CallNotation.grammar`."""
        head = f"{json_text(tool.name)}: "
        if self.name_key:
            head = f'"{self.name_key}": {json_text(tool.name)}, "{self.argument_key}": '
        begin = writer.literal("{" + head)
        if self.id_key:
            number = writer.json({"type": "string", "pattern": "^[0-9]{1,4}$"})
            before = writer.literal(f'{{"{self.id_key}": ')
            begin = f"{before} {number} {writer.literal(', ' + head)}"
        return f"{begin} {object_grammar(writer, tool)} {writer.literal('}')}"


def object_grammar(writer: GrammarWriter, tool: Tool) -> str:
    """Return the expression for a tool's arguments as a JSON object."""
    return writer.json({"type": "object", **tool.parameters})


def _read_object(reader: CallReader) -> Reading[None]:
    """Read one call; its arguments may come before its name, and the first ones count.

    Name and arguments may be in an object of their own, as in the messages of OpenAI's API.
    """
    text = reader.text
    is_inside = False  # that object
    arguments: list[str] = []
    has_arguments = False
    yield from reader.expect("{")
    while True:
        yield from text.skip_space()
        key: list[str] = []
        yield from decode_string(text, key.append, MAX_NAME_LENGTH)
        yield from reader.expect(":")
        yield from text.skip_space()
        if "".join(key) == "function" and not is_inside and (yield from text.match("{")):
            is_inside = True
            continue
        if "".join(key) in _NAME_KEYS and not reader.is_open:
            name: list[str] = []
            yield from decode_string(text, name.append, MAX_NAME_LENGTH)
            reader.begin(_whole_characters("".join(name)))
            reader.arguments("".join(arguments))
        elif "".join(key) in _ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            yield from copy_arguments(text, reader.arguments if reader.is_open else arguments.append)
        else:
            yield from copy_value(text, lambda part: None)
        yield from text.skip_space()
        if is_inside and (yield from text.match("}")):
            is_inside = False
            yield from text.skip_space()
        if not (yield from text.match(",")):
            break
    is_closed = yield from text.match("}")
    is_enough = has_arguments and (yield from text.peek()) in _AFTER_UNCLOSED
    if not reader.is_open or not (is_closed or is_enough):
        raise NotACallError
    reader.end()


def _read_keyed_object(reader: CallReader) -> Reading[None]:
    """Read one call, an object whose only key is the name."""
    name: list[str] = []
    yield from reader.expect("{")
    yield from reader.text.skip_space()
    yield from decode_string(reader.text, name.append, MAX_NAME_LENGTH)
    yield from reader.expect(":")
    yield from reader.text.skip_space()
    reader.begin(_whole_characters("".join(name)))
    yield from copy_arguments(reader.text, reader.arguments)
    yield from reader.expect("}")
    reader.end()


def _whole_characters(text: str) -> str:
    """Return text in which pairs of surrogates are replaced by their characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclasses.dataclass(frozen=True, slots=True)
class NamedCalls:
    """A name, then its arguments as an object.

    Args:
        separator: is between name and arguments; some models leave it out. It may be white space.
        kind: text that may precede the name, with another separator.
        prefix: text that may precede the name.
        numbered: whether a colon and the number of the call follow the name.
        fence: what may begin and end the arguments.
        id_begin: text that may follow the name, with the call's id.
    """

    separator: str
    kind: str = ""
    prefix: str = ""
    numbered: bool = False
    id_begin: str = ""
    fence: tuple[str, str] = ("", "")

    @property
    def marks(self) -> tuple[str, ...]:
        """See `CallNotation.marks`."""
        return tuple(mark for mark in (self.separator, self.id_begin) if mark.strip())

    def read(self, reader: CallReader) -> Reading[None]:
        """See `CallNotation.read`."""
        text = reader.text
        yield from text.skip_space()
        name = (yield from reader.name()).removeprefix(self.prefix)
        name = _NUMBER.sub("", name) if self.numbered else name
        if self.id_begin and (yield from text.match(self.id_begin)):
            yield from reader.name()
        yield from text.skip_space()
        has_separator = yield from text.match(self.separator)
        yield from text.skip_space()
        if has_separator and name == self.kind and (yield from text.peek()) != "{":
            name = yield from reader.name()
            yield from text.skip_space()
        opening, closing = self.fence
        if opening and (yield from text.match(opening)):
            yield from text.skip_space()
        character = yield from text.peek()
        is_cut_off = text.is_cut_off and not character
        is_over = has_separator and character in _AFTER_NO_ARGUMENTS and not is_cut_off
        if not is_over and character not in _ARGUMENTS and not (yield from text.match("null")):
            raise NotACallError
        reader.begin(name)
        if character in _ARGUMENTS:
            yield from copy_arguments(text, reader.arguments)
        reader.end()
        yield from text.whole_run(_SURPLUS)
        if closing:
            yield from text.match(closing)

    def grammar(self, writer: GrammarWriter, tool: Tool) -> str:
        """See `CallNotation.grammar`."""
        opening, closing = self.fence
        head = f"{self.kind}{self.separator}{tool.name}\n" if self.kind else f"{tool.name}{self.separator}"
        begin, end = (f"{opening}\n", f"\n{closing}") if opening else ("", "")
        before = writer.literal(head + begin)
        if self.numbered:
            number = writer.json({"type": "integer", "minimum": 0, "maximum": 9999})
            before = (
                f"{writer.literal(f'{self.prefix}{tool.name}:')} {number} {writer.literal(self.separator)}"
            )
        return f"{before} {object_grammar(writer, tool)} {writer.literal(end)}"


@dataclasses.dataclass(frozen=True, slots=True)
class ListedOrNamedCalls:
    """A list of objects, or a name followed by its arguments; distinguished by the first character."""

    listed: JsonCalls
    named: NamedCalls

    @property
    def marks(self) -> tuple[str, ...]:
        """See `CallNotation.marks`."""
        return self.named.marks

    def read(self, reader: CallReader) -> Reading[None]:
        """See `CallNotation.read`."""
        yield from reader.text.skip_space()
        is_listed = (yield from reader.text.peek()) in ("[", "{")
        yield from (self.listed if is_listed else self.named).read(reader)

    def grammar(self, writer: GrammarWriter, tool: Tool) -> str:
        """See `CallNotation.grammar`; models that have a token between name and arguments write these."""
        is_named = writer.is_token(self.named.separator)
        return (self.named if is_named else self.listed).grammar(writer, tool)
