"""JSON schemas made ready to be enforced: objects without invented keys, and no keyword silently ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

from quire.schemas.ecma_patterns import rust_pattern

MAX_SCHEMAS = 50_000  # within a schema, counted each time that one is walked through
_IN_SEVERAL = (
    "allOf",
    "if",
    "then",
    "else",
    "not",
    "dependentSchemas",
)  # that hold together with what is beside
_ONE_OF_SEVERAL = ("anyOf", "oneOf")
_COMBINING = (*_IN_SEVERAL, *_ONE_OF_SEVERAL, "$ref", "$dynamicRef", "$recursiveRef")
_OF_OBJECTS = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
    "required",
    "minProperties",
    "maxProperties",
)
_SAYS_WHAT_ELSE = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_MAPPINGS = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
_SCHEMAS = (
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    *("not", "if", "then", "else"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_UNENFORCED = frozenset(
    {"contentEncoding", "contentMediaType", "contentSchema", "disallow", "divisibleBy", "extends"}
)
_ENFORCED = frozenset(
    {
        *(*_COMBINING, *_OF_OBJECTS, *_SCHEMAS, *_LISTS, "nullable"),
        *("type", "enum", "const", "format", "pattern", "minLength", "maxLength", "uniqueItems"),
        *("minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
"""Formats that are enforced; all others are annotations."""

_DIALECTS = frozenset(
    {
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        *(f"http://json-schema.org/draft-0{number}/schema" for number in (3, 4, 6, 7)),
        "http://json-schema.org/schema",
    }
)
_NOT_ENFORCED = frozenset({"$schema", "$id", "$anchor", "$dynamicAnchor", "nullable", "x-guidance"})
_NEEDED = {"minContains": "contains", "maxContains": "contains", "then": "if", "else": "if"}
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_COUNTS = tuple(f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Properties"))
_BY_LETTERS = {name.casefold(): name for name in _ENFORCED}


def enforceable_schema(schema: Mapping[str, Any], *, closes_objects: bool) -> dict[str, Any]:
    """Return a schema of which an enforcer of JSON Schema ignores no constraint.

    An object that has `properties` and does not say whether it may have others may not, unless another part
    of the schema speaks of the same object and so may name more of them. `nullable` becomes a type,
    references lead to definitions of the whole schema, patterns are written as Rust reads them, formats that
    are not enforced are left out, and `propertyNames` becomes properties or a pattern of them. What OpenAPI's
    `discriminator` tells the alternatives of a `oneOf` apart by is required.

    Args:
        schema: as it was written.
        closes_objects: False: objects may have other properties as JSON Schema has it.

    Raises:
        ValueError: it is malformed, has a keyword that constrains and cannot be enforced, or is nested too
            deeply.
    """
    try:
        own = json.loads(json.dumps(schema))  # in which no two parts are the same object
        return _Rewriting(own, closes_objects=closes_objects).ready()
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts of a schema that are schemas themselves, definitions included."""
    for _, child, _ in _children(schema, is_open=True):
        yield child


class _Document:
    """A schema whose references can be followed.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self._bases: dict[int, str] = {}  # the URI to which references of a schema are relative
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._index(root, "")

    def target(self, schema: Mapping[str, Any]) -> Any:
        """Return what a schema's `$ref` leads to.

        Raises:
            ValueError: it leads to nothing in the document.
        """
        reference, base = schema["$ref"], self._bases[id(schema)]
        try:
            whole = base + reference if reference.startswith("#") else urljoin(base, reference)
            uri, fragment = urldefrag(whole)
            target = self._part(uri, unquote(fragment))
        except (LookupError, ValueError):
            raise ValueError(
                f"the reference {reference!r:.80} leads to nothing in the schema; other documents are not "
                "read"
            ) from None
        if isinstance(target, dict) and id(target) not in self._bases:  # it is where no schema is expected
            self._index(target, uri)
        return target

    def _part(self, uri: str, fragment: str) -> Any:
        part = self._resources[uri]
        if fragment and not fragment.startswith("/"):
            return self._anchors[uri, fragment]
        for token in fragment.split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            part = part[int(key)] if isinstance(part, list) else part[key]
        if not isinstance(part, dict | bool):
            raise LookupError
        return part

    def _index(self, schema: Any, base: str) -> None:
        """Note the URIs and anchors of a schema and all within it."""
        pending = [(schema, base)]
        while pending:
            schema, base = pending.pop()
            if not isinstance(schema, dict):
                continue
            if isinstance(own_id := schema.get("$id"), str):
                base = urldefrag(urljoin(base, own_id)).url
                self._resources.setdefault(base, schema)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(key), str):
                    self._anchors.setdefault((base, anchor), schema)
            self._bases[id(schema)] = base
            pending += [(child, base) for child in subschemas(schema)]


class _Rewriting:
    """Makes a document enforceable.

    Args:
        root: the document.
        closes_objects: see `enforceable_schema`.
    """

    def __init__(self, root: dict[str, Any], *, closes_objects: bool) -> None:
        self._document = _Document(root)
        self._closes_objects = closes_objects
        self._definitions = {
            id(one): f"#/{key}/{quote(name.replace('~', '~0').replace('/', '~1'))}"
            for key in _DEFINITIONS
            if isinstance(definitions := root.get(key), dict)
            for name, one in definitions.items()
            if isinstance(one, dict)
        }
        self._further: list[tuple[str, Any]] = []  # targets of references that become definitions, named
        self._names: dict[int, str] = {}  # theirs
        self._open: set[int] = set()  # targets that must stay open
        self._num_schemas = 0

    def ready(self) -> dict[str, Any]:
        """Return the document, enforceable."""
        root = self._document.root
        is_open = not self._closes_objects or self._has_open_part()
        ready = self._ready(root, is_open=is_open)
        for key in _DEFINITIONS:
            if isinstance(definitions := root.get(key), dict):
                ready[key] = {
                    name: self._ready_value(one, is_open=is_open or id(one) in self._open)
                    for name, one in definitions.items()
                }
        for name, target in self._further:  # grows
            ready.setdefault("$defs", {})[name] = self._ready_value(target, is_open=is_open)
        return ready

    def _has_open_part(self) -> bool:
        """Note which definitions must stay open, and return whether something else must."""
        seen: set[tuple[int, bool]] = set()
        pending: list[tuple[Any, bool]] = [(self._document.root, False)]
        while pending:
            one, is_open = pending.pop()
            for target, target_is_open in self._targets(one, is_open=is_open):
                if target_is_open and id(target) not in self._definitions:
                    return True
                if (id(target), target_is_open) not in seen:
                    seen.add((id(target), target_is_open))
                    pending.append((target, target_is_open))
        self._open = {target for target, is_open in seen if is_open}
        return False

    def _targets(self, schema: Any, *, is_open: bool) -> Iterator[tuple[Any, bool]]:
        """Yield what each reference in a schema leads to, and whether that must stay open."""
        if not isinstance(schema, dict):
            return
        self._count()
        if isinstance(schema.get("$ref"), str) and isinstance(target := self._document.target(schema), dict):
            yield target, is_open or _is_combined(schema)
        for key, child, child_is_open in _children(schema, is_open=is_open):
            if key not in _DEFINITIONS:
                yield from self._targets(child, is_open=child_is_open)

    def _ready(self, schema: dict[str, Any], *, is_open: bool) -> dict[str, Any]:
        """Return a schema without what cannot be left as it is, and without its definitions."""
        self._count()
        _require_enforced(schema)
        if "propertyNames" in schema:
            self._replace_property_names(schema)
        children = (one for one in _children(schema, is_open=is_open) if one[0] not in _DEFINITIONS)
        ready: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _DEFINITIONS:
                continue
            if key in _MAPPINGS and isinstance(value, dict):
                ready[key] = {name: self._ready_value(*next(children)[1:]) for name in value}
            elif key in _LISTS and isinstance(value, list):
                ready[key] = [self._ready_value(*next(children)[1:]) for _ in value]
            elif key in _SCHEMAS:
                ready[key] = self._ready_value(*next(children)[1:])
            elif _constrains(key, schema):
                ready[key] = self._reference(schema) if key == "$ref" else value
        if not is_open and _may_be_closed(schema):
            ready["additionalProperties"] = False
        ready = {key: _enforceable(key, value) for key, value in ready.items() if _constrains(key, schema)}
        _make_exclusive(ready)
        if "oneOf" in ready:
            ready["oneOf"] = self._told_apart(schema, ready["oneOf"])
        return _with_null(ready) if schema.get("nullable") is True else ready

    def _count(self) -> None:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise ValueError(
                f"the schema has more than {MAX_SCHEMAS} parts, counting those that references repeat; let "
                "them lead to $defs"
            )

    def _ready_value(self, schema: Any, is_open: bool) -> Any:
        if not isinstance(schema, dict):
            return schema
        is_never = schema.get("not") is True or schema.get("not") == {}
        return False if is_never else self._ready(schema, is_open=is_open)

    def _replace_property_names(self, schema: dict[str, Any]) -> None:
        """Say by other keywords what names properties have, where nothing else says it."""
        names = self._without_reference(schema["propertyNames"])
        if not isinstance(names, dict) or names.get("type", "string") != "string":
            return
        _require_enforced(names)
        keys = {key for key in names if key in _ENFORCED and _constrains(key, names)} - {"type"}
        value = schema.get("additionalProperties", True)
        if not keys:
            del schema["propertyNames"]
            return
        if not schema.keys().isdisjoint(("properties", "patternProperties")):
            return
        if keys in ({"enum"}, {"const"}):
            listed = names["enum"] if "enum" in names else [names["const"]]
            schema["properties"] = {name: value for name in listed if isinstance(name, str)}
        elif keys == {"pattern"}:
            schema["patternProperties"] = {names["pattern"]: value}
        elif keys <= {"minLength", "maxLength"}:
            least, most = int(names.get("minLength", 0)), names.get("maxLength", "")
            schema["patternProperties"] = {f"^[^]{{{least},{most and int(most)}}}$": value}
        else:
            return
        del schema["propertyNames"]
        schema["additionalProperties"] = False

    def _told_apart(self, schema: Mapping[str, Any], alternatives: list[Any]) -> list[Any]:
        """Return ready alternatives of a oneOf, each with the property that tells them apart."""
        discriminator = schema.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if not isinstance(name, str):
            return alternatives
        told_apart = []
        for alternative, ready in zip(schema["oneOf"], alternatives, strict=True):
            target = self._without_reference(alternative)
            properties = target.get("properties") if isinstance(target, dict) else None
            if isinstance(properties, dict) and isinstance(ready, dict) and name in properties:
                required = dict.fromkeys([*ready.get("required", []), name])
                told_apart.append({**ready, "required": list(required)})
            else:
                told_apart.append(ready)
        return told_apart

    def _without_reference(self, schema: Any) -> Any:
        """Return what a schema that is a reference, and no more, leads to; others are themselves."""
        if not isinstance(schema, dict) or [key for key in schema if key in _ENFORCED] != ["$ref"]:
            return schema
        return self._document.target(schema)

    def _reference(self, schema: Mapping[str, Any]) -> str:
        """Return a schema's reference as one to a definition of the document, which parts can take along."""
        target = self._document.target(schema)
        if (own := self._definitions.get(id(target))) is not None:
            return own
        if id(target) not in self._names:
            taken = self._document.root.get("$defs", {})
            name = f"reference-{len(self._further)}"
            while name in taken:
                name += "-"
            self._names[id(target)] = name
            self._further.append((name, target))
        return f"#/$defs/{self._names[id(target)]}"


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Whether several parts of a schema may speak of the same object."""
    num_combining = sum(key in schema for key in _COMBINING)
    return (
        num_combining > 1
        or any(key in schema for key in _IN_SEVERAL)
        or (num_combining == 1 and any(key in schema for key in _OF_OBJECTS))
    )


def _children(schema: Mapping[str, Any], *, is_open: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yield (keyword, part, whether its objects must stay open) of the parts that are schemas themselves."""
    is_open = is_open or _is_combined(schema)
    for key, value in schema.items():
        if key in _MAPPINGS and isinstance(value, Mapping):
            for one in value.values():
                yield key, one, is_open or key in _DEFINITIONS
        elif key in _LISTS and isinstance(value, list):
            for one in value:
                yield key, one, is_open
        elif key in _SCHEMAS:
            yield key, value, is_open


def _may_be_closed(schema: Mapping[str, Any]) -> bool:
    """Whether a schema names all properties that an object needs, and says nothing of others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    if any(key in schema for key in (*_SAYS_WHAT_ELSE, *_COMBINING)):
        return False
    least = schema.get("minProperties", 0)
    has_enough = not isinstance(least, int | float) or least <= len(properties)
    return has_enough and all(isinstance(name, str) and name in properties for name in required)


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows null, too."""
    return {"anyOf": [schema, {"type": "null"}]}


def _make_exclusive(schema: dict[str, Any]) -> None:
    """Write the bounds of draft 4 and OpenAPI 3.0, `exclusiveMinimum` being true, as later drafts do."""
    for exclusive, bound in _BOUNDS.items():
        if isinstance(is_exclusive := schema.get(exclusive), bool):
            del schema[exclusive]
            if is_exclusive:
                schema[exclusive] = schema.pop(bound)


def _constrains(key: str, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword of a schema may exclude anything, or may have to be refused."""
    value = schema.get(key)
    if key in _NOT_ENFORCED or (key in _NEEDED and _NEEDED[key] not in schema):
        return False
    if key in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        return value is not True
    return (
        not (key in ("uniqueItems", "not") and value is False)
        and not (key == "format" and value not in _FORMATS)
        and not (key == "if" and "then" not in schema and "else" not in schema)
    )


def _enforceable(key: str, value: Any) -> Any:
    """Return a keyword's value as the enforcer reads it."""
    if key == "pattern":
        return rust_pattern(value)
    if key == "patternProperties":
        patterns = {rust_pattern(pattern): schema for pattern, schema in value.items()}
        if len(patterns) < len(value):
            raise ValueError("two patterns of 'patternProperties' mean the same; leave out one of them")
        return patterns
    return int(value) if key in _COUNTS else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in _TYPES


def _is_list_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_REQUIREMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (
        lambda value: _is_type(value) or (_is_list_of(value, _is_type) and bool(value)),
        f"a type or a list of types, of {', '.join(sorted(_TYPES))}",
    ),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "required": (lambda value: _is_list_of(value, _is_text), "a list of names"),
    "$schema": (
        lambda value: _is_text(value) and value.rstrip("#") in _DIALECTS,
        "that of a draft of JSON Schema, as https://json-schema.org/draft/2020-12/schema",
    ),
    "items": (lambda value: _is_schema(value) or _is_list_of(value, _is_schema), "a schema"),
    **dict.fromkeys(
        _COUNTS,
        (lambda value: _is_number(value) and value >= 0 and value == int(value), "a whole number from 0"),
    ),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "a number")),
    **dict.fromkeys(_BOUNDS, (lambda value: isinstance(value, int | float), "a number")),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number greater than 0"),
    **dict.fromkeys(("pattern", "format", "$ref"), (_is_text, "text")),
    **dict.fromkeys(("uniqueItems", "nullable"), (lambda value: isinstance(value, bool), "true or false")),
    **dict.fromkeys(
        _MAPPINGS,
        (
            lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())),
            "an object whose values are schemas",
        ),
    ),
    **dict.fromkeys(
        ("allOf", "anyOf", "oneOf", "prefixItems"),
        (lambda value: _is_list_of(value, _is_schema) and bool(value), "a list of schemas"),
    ),
    **dict.fromkeys([key for key in _SCHEMAS if key != "items"], (_is_schema, "a schema")),
}


def _require_enforced(schema: Mapping[str, Any]) -> None:
    for key, value in schema.items():
        lacks_bound = value is True and key in _BOUNDS and _BOUNDS[key] not in schema
        if key in _UNENFORCED or lacks_bound:
            raise ValueError(
                f"the keyword {key!r} with the value {value!r:.40} cannot be enforced; leave it out"
            )
        meant = _BY_LETTERS.get(key.replace("_", "").replace("-", "").casefold())
        if meant is not None and key not in _ENFORCED:
            raise ValueError(f"{key!r} is no keyword of JSON Schema; did you mean {meant!r}?")
        is_right, what = _REQUIREMENTS.get(key, (None, ""))
        if is_right is not None and not is_right(value):
            raise ValueError(f"the keyword {key!r} is {value!r:.60}; it must be {what}")
