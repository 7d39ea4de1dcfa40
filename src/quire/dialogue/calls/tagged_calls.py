"""Calls in tags: a name, then keys and values as plain text, whose types the tool's schema knows."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from quire.dialogue.calls.grammar_writing import ANNOTATIONS, GrammarWriter
from quire.dialogue.calls.literals import json_of
from quire.dialogue.calls.reading import CallReader, NotACallError, escaped, json_text
from quire.dialogue.calls.tools import Tool
from quire.dialogue.incoming_text import Reading
from quire.errors import InvalidRequestError

_UNENFORCED = frozenset(
    {"pattern", "minLength", "maxLength", "format", "anyOf", "oneOf", "allOf", "const", "$ref"}
)
_UNENFORCED_OF_OBJECTS = frozenset(
    {
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const"),
        *("minProperties", "maxProperties", "patternProperties", "propertyNames", "dependentSchemas"),
    }
)
_NAMING = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "items"})
"""Keys that say which type a value has."""
_MAX_REFERENCES = 8  # from one to the next
_TYPES_BY_KEY = {"properties": "object", "items": "array"}
_TYPES_OF_CONSTANTS = {"true": "boolean", "false": "boolean", "null": "null"}
_TYPES: Mapping[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    str: ("string",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class TaggedCalls:
    """A name and its parameters, each key and value between tags.

    Where no mark begins a value, it is on lines of its own: a line break at each end is not part of it.

    Args:
        name_begin, name_end: around the name; `name_end` may be empty.
        key_begin, key_end: around a key.
        value_begin, value_end: around a value.
        call_end: after the last value; may be empty.
        line_end, after_key: white space that the model writes after the name and each value, and after a key.
    """

    name_begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    call_end: str
    line_end: str = "\n"
    after_key: str = "\n"

    @property
    def marks(self) -> tuple[str, ...]:
        """See `CallNotation.marks`."""
        name, key = (self.name_begin, self.name_end), (self.key_begin, self.key_end)
        return tuple(filter(None, (*name, *key, self.value_begin, self.value_end, self.call_end)))

    def read(self, reader: CallReader) -> Reading[None]:
        """See `CallNotation.read`."""
        text = reader.text
        if self.name_begin:
            yield from reader.expect(self.name_begin)
        has_more = True
        while has_more:
            yield from self._read_call(reader)
            yield from text.skip_space()
            has_more = bool(self.name_begin) and bool((yield from text.match(self.name_begin)))

    def _read_call(self, reader: CallReader) -> Reading[None]:
        """Read a call after the mark that begins its name."""
        text = reader.text
        yield from text.skip_space()
        name = yield from reader.name()
        if self.name_end:
            yield from reader.expect(self.name_end)
        elif (yield from text.peek()) not in ("<", "\n"):
            raise NotACallError
        reader.begin(name)
        separator = "{"
        yield from text.skip_space()
        while (yield from text.match(self.key_begin)):
            key, _ = yield from _whole_text_before(reader, (self.key_end,))
            if self.value_begin:
                yield from reader.expect(self.value_begin)
            reader.arguments(f"{separator}{json_text(key.strip())}: ")
            yield from self._read_value(reader, reader.parameter(key.strip()))
            separator = ", "
            yield from text.skip_space()
        if self.call_end:
            yield from reader.expect(self.call_end)
        elif not (yield from text.peek()) and text.is_cut_off:
            raise NotACallError
        reader.arguments("}" if separator == ", " else "")
        reader.end()

    def grammar(self, writer: GrammarWriter, tool: Tool) -> str:
        """See `CallNotation.grammar`."""
        require_plain_object(tool)
        required = tool.parameters.get("required", ())
        parts = [writer.literal(f"{self.name_begin}{tool.name}{self.name_end}{self.line_end}")]
        for name, schema in tool.parameters.get("properties", {}).items():
            if self.key_end in name or name != name.strip():
                raise unwritable(tool, name)
            head = f"{self.key_begin}{name}{self.key_end}{self.after_key}{self.value_begin}"
            value = self._value_grammar(writer, tool, schema)
            expression = f"{writer.literal(head)} {value} {writer.literal(self.line_end)}"
            parts.append(expression if name in required else f"({expression})?")
        if self.call_end:
            parts.append(writer.literal(self.call_end))
        return " ".join(parts)

    def _value_grammar(self, writer: GrammarWriter, tool: Tool, schema: Any) -> str:
        """Return the expression for a value and its end."""
        schema = _without_reference(schema if isinstance(schema, Mapping) else {}, tool.parameters)
        end = self.value_end if self.value_begin else f"{self.after_key}{self.value_end}"
        if "string" not in _types_of(schema, tool.parameters):
            return f"{writer.json(schema, tool.parameters)} {writer.literal(end)}"
        if "enum" in schema:
            values = (one if isinstance(one, str) else json_text(one) for one in schema["enum"])
            return f"{writer.one_of(map(writer.literal, values))} {writer.literal(end)}"
        if tool.strict:
            require_plain(tool, schema)
        return writer.text_up_to(self.value_end)

    def _read_value(self, reader: CallReader, schema: Mapping[str, Any]) -> Reading[None]:
        markers: tuple[str, ...] = (self.value_end,)
        if not self.value_begin:
            yield from reader.text.match("\n")
            markers = ("\n" + self.value_end, self.value_end)
        types = reader.types.get(id(schema))
        if types is None:
            types = reader.types[id(schema)] = _types_of(schema, reader.schema)
        if types - {"string"}:
            value, _ = yield from _whole_text_before(reader, markers)
            reader.arguments(_typed(value, types))
            return
        reader.arguments('"')
        marker = ""
        while not marker:
            part, marker = yield from reader.text.piece_before(markers)
            if not part and not marker:
                raise NotACallError
            reader.arguments(escaped(part))
        reader.arguments('"')


def unwritable(tool: Tool, name: str) -> InvalidRequestError:
    """Return the error about a parameter whose name the format cannot write."""
    return InvalidRequestError(
        f"tool {tool.name!r} has a parameter {name!r:.80}, a name that the format of this model's calls "
        "cannot write; use letters and digits",
        param="tools",
    )


def require_plain(tool: Tool, schema: Mapping[str, Any]) -> None:
    """Refuse a schema of a text with more constraints than its type.

    Raises:
        InvalidRequestError: it does.
    """
    unenforced = sorted(_UNENFORCED & schema.keys())
    if unenforced:
        raise InvalidRequestError(
            f"tool {tool.name!r} is strict, and its schema has {unenforced[0]!r} for a string, which cannot "
            "be enforced in the format of this model's calls; leave it out, or set strict to false",
            param="tools",
        )


def require_plain_object(tool: Tool) -> None:
    """Refuse a schema with more constraints than each argument's own schema and `required`.

    Raises:
        InvalidRequestError: it does, and the tool is strict.
    """
    if not tool.strict:
        return
    unenforced = sorted(_UNENFORCED_OF_OBJECTS & tool.parameters.keys())
    properties = tool.parameters.get("properties", {})
    missing = [name for name in tool.parameters.get("required", ()) if name not in properties]
    if unenforced or missing:
        problem = (
            repr(unenforced[0]) if unenforced else f"the required {missing[0]!r:.80} not in its properties"
        )
        raise InvalidRequestError(
            f"tool {tool.name!r} is strict, and its schema has {problem}, which cannot be enforced in the "
            "format of this model's calls; put all arguments into properties, or set strict to false",
            param="tools",
        )


def _whole_text_before(reader: CallReader, markers: tuple[str, ...]) -> Reading[tuple[str, str]]:
    parts: list[str] = []
    while True:
        part, marker = yield from reader.text.piece_before(markers)
        parts.append(part)
        if marker:
            return "".join(parts), marker
        if not part:
            raise NotACallError


def _types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows, as far as it names them; "string" if it names none.

    Args:
        schema: schema of a value.
        root: the schema that it is part of, to which its references refer.
    """
    types: set[str] = set()
    followed: set[str] = set()  # references
    pending = [schema]
    while pending:
        one = pending.pop()
        if not isinstance(one, Mapping):
            continue
        if one.get("nullable") is True:
            types.add("null")
        reference = one.get("$ref")
        if (named := _named_types(one)) is not None:
            types.update(named)
        elif (parts := _parts_of(one)) is not None:
            pending += parts
        elif not isinstance(reference, str):
            types.add("string")
        elif reference not in followed:
            followed.add(reference)
            pending.append(_referred(root, reference))
    return frozenset(types)


def _named_types(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the types that a schema names itself; None: it names none."""
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return [name for value in values for name in _TYPES[type(value)]] if isinstance(values, list) else []
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return [one for one in named if isinstance(one, str)]
    return next(([name] for key, name in _TYPES_BY_KEY.items() if key in schema), None)


def _parts_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the alternatives or conjuncts that a schema consists of; None: there are none."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return list(schema[key])
    if isinstance(schema.get("allOf"), list):
        return [one for one in schema["allOf"] if isinstance(one, Mapping) and not _NAMING.isdisjoint(one)]
    return None


def _without_reference(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with its references replaced by their targets, up to a limit."""
    for _ in range(_MAX_REFERENCES):
        if isinstance(reference := schema.get("$ref"), str):
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            target = _referred(root, reference)
            if any(rest[key] != target[key] for key in rest.keys() & target.keys() - ANNOTATIONS):
                break
            schema = {**target, **rest}
    return schema


def _referred(root: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    """Return the part of a schema that a reference names; an object's if it is another schema's."""
    target: Any = root if reference.startswith("#") else None
    for part in reference.split("/")[1:]:
        name = urllib.parse.unquote(part).replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else {"type": "object"}


def _typed(text: str, types: frozenset[str]) -> str:
    """Return the JSON of the value in `text`: of one of these types, or else a string.

    Where it may be a string, other values are only those that JSON and templates write.
    """
    spelling = text.strip()
    constant = "null" if spelling == "None" else spelling.lower()
    if _TYPES_OF_CONSTANTS.get(constant) in types:
        return constant
    try:
        written = json_of(spelling, allows_python="string" not in types)
    except NotACallError:
        return json_text(text)
    value = json.loads(written)
    if type(value) is not str and not types.isdisjoint(_TYPES[type(value)]):
        return written
    if type(value) is float and value.is_integer() and "integer" in types:
        return str(int(value))
    return json_text(text)
