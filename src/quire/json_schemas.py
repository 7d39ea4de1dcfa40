"""JSON schemas made ready to be enforced: objects without invented keys, and no keyword silently ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
_BY_LETTERS = {name.casefold(): name for name in _ENFORCED}


def enforceable_schema(schema: Mapping[str, Any], *, closes_objects: bool) -> dict[str, Any]:
    """Return a schema of which an enforcer of JSON Schema ignores no constraint.

    An object that has `properties` and does not say whether it may have others may not, unless another part
    of the schema speaks of the same object and so may name more of them. `nullable` becomes a type.

    Args:
        schema: as it was written.
        closes_objects: False: objects may have other properties as JSON Schema has it.

    Raises:
        ValueError: it has a keyword that constrains and cannot be enforced, or is nested too deeply.
    """
    try:
        open_definitions = _definitions_in_open_places(schema) if closes_objects else None
        is_open = open_definitions is None
        ready = _ready(schema, is_open=is_open)
        for key in _DEFINITIONS:
            definitions = schema.get(key)
            if isinstance(definitions, Mapping):
                ready[key] = {
                    name: _ready_value(one, is_open=is_open or f"#/{key}/{name}" in (open_definitions or ()))
                    for name, one in definitions.items()
                }
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    return ready


def _definitions_in_open_places(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the definitions that must stay open, by reference; None: everything must."""
    seen: set[tuple[str, bool]] = set()
    pending: list[tuple[Any, bool]] = [(schema, False)]
    while pending:
        one, is_open = pending.pop()
        for reference, target_is_open in _references(one, is_open=is_open):
            target = _definition(schema, reference)
            if target is None and target_is_open:
                return None
            if target is not None and (reference, target_is_open) not in seen:
                seen.add((reference, target_is_open))
                pending.append((target, target_is_open))
    return {reference for reference, is_open in seen if is_open}


def _references(schema: Any, *, is_open: bool) -> Iterator[tuple[str, bool]]:
    """Yield each reference in a schema, and whether its target must stay open."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield reference, is_open or _is_combined(schema)
    for key, child, child_is_open in _children(schema, is_open=is_open):
        if key not in _DEFINITIONS:
            yield from _references(child, is_open=child_is_open)


def _definition(schema: Mapping[str, Any], reference: str) -> Any:
    """Return what a reference to one of the schema's own definitions means; None: it is another reference."""
    parts = reference.split("/")
    if len(parts) != 3 or parts[0] != "#" or parts[1] not in _DEFINITIONS:
        return None
    definitions = schema.get(parts[1])
    return definitions.get(parts[2]) if isinstance(definitions, Mapping) else None


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


def _ready(schema: Mapping[str, Any], *, is_open: bool) -> dict[str, Any]:
    """Return a schema without what cannot be left as it is."""
    _require_enforced(schema)
    children = _children(schema, is_open=is_open)
    ready: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPPINGS and isinstance(value, Mapping):
            ready[key] = {name: _ready_value(*next(children)[1:]) for name in value}
        elif key in _LISTS and isinstance(value, list):
            ready[key] = [_ready_value(*next(children)[1:]) for _ in value]
        elif key in _SCHEMAS:
            ready[key] = _ready_value(*next(children)[1:])
        elif key != "nullable" and not (key == "uniqueItems" and value is False):
            ready[key] = value
    if not is_open and _may_be_closed(schema):
        ready["additionalProperties"] = False
    return _with_null(ready) if schema.get("nullable") is True else ready


def _ready_value(schema: Any, is_open: bool) -> Any:
    return _ready(schema, is_open=is_open) if isinstance(schema, Mapping) else schema


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


def _require_enforced(schema: Mapping[str, Any]) -> None:
    for key, value in schema.items():
        if key in _UNENFORCED or (key in ("exclusiveMinimum", "exclusiveMaximum") and value is True):
            raise ValueError(
                f"the keyword {key!r} with the value {value!r:.40} cannot be enforced; leave it out"
            )
        meant = _BY_LETTERS.get(key.replace("_", "").replace("-", "").casefold())
        if meant is not None and key not in _ENFORCED:
            raise ValueError(f"{key!r} is no keyword of JSON Schema; did you mean {meant!r}?")
