"""The page at /docs: the OpenAPI document as one page of HTML that needs no script and no other server."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

_LIMITS = {  # JSON schema's words, in the order in which they are read
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
    "pattern": "matching {}",
}


def docs_page(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    source = resources.files("quire.server").joinpath("docs_page.html").read_text()
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(document=document, limits_in_words=limits_in_words, schema_name=_schema_name)


def limits_in_words(schema: dict[str, Any]) -> str:
    """Return the type and the limits of a field in words: `integer, at least 1, at most 128`."""
    forms = schema.get("anyOf") or schema.get("oneOf")
    if forms:
        return " or ".join(limits_in_words(form) for form in forms if form != {"type": "null"})
    if "$ref" in schema:
        return _schema_name(schema)
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return ", ".join(map(repr, schema["enum"]))
    if schema.get("type") == "null":
        return "not supported"
    limits = [words.format(schema[name]) for name, words in _LIMITS.items() if name in schema]
    return ", ".join([_type_of(schema), *limits])


def _type_of(schema: dict[str, Any]) -> str:
    if schema.get("type") == "array":
        return f"list of ({limits_in_words(schema.get('items', {}))})"
    return str(schema.get("type", "anything"))


def _schema_name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]
