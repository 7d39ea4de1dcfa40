"""Schemas that can be enforced: what is closed, what must stay open, and what is refused."""

import json

import pytest

from quire.json_schemas import enforceable_schema

A = {"properties": {"a": {"type": "string"}}}
CLOSED_A = {**A, "additionalProperties": False}
B = {"properties": {"b": {"type": "string"}}, "required": ["b"]}
REF = {"$ref": "#/$defs/A"}


def ready(schema):
    return enforceable_schema(schema, closes_objects=True)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"prefixItems": [A, True]}, {"prefixItems": [CLOSED_A, True]}),
        ({"properties": {"properties": A}},
         {"properties": {"properties": CLOSED_A}, "additionalProperties": False}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED_A}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"anyOf": [REF, B], "$defs": {"A": A}},
         {"anyOf": [REF, {**B, "additionalProperties": False}], "$defs": {"A": CLOSED_A}}),
        ({**REF, "definitions": {"A": A}, "$defs": {"A": {"items": REF}}},
         {**REF, "definitions": {"A": CLOSED_A}, "$defs": {"A": {"items": REF}}}),
        ({"type": "string", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"type": "array", "uniqueItems": False, "nullable": False}, {"type": "array"}),
    ],
)  # fmt: skip
def test_what_is_closed(schema, expected):
    before = json.dumps(schema)
    assert ready(schema) == expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "integer"}},
        {**A, "patternProperties": {"^x": {"type": "string"}}},
        {**A, "required": ["b"]},
        {**A, "minProperties": 2},
        {"allOf": [A, B]},
        {**A, "anyOf": [B, {"required": ["a"]}]},
        {**A, "allOf": [{"properties": {"c": A}}]},
        {"anyOf": [A, B], "required": ["b"]},
        {"anyOf": [A, B], "oneOf": [A, B]},
        {**REF, **B, "$defs": {"A": A}},
        {"allOf": [REF, B], "$defs": {"A": A}},
        {"allOf": [REF, B], "$defs": {"A": {"items": {"$ref": "#/$defs/C"}}, "C": A}},
        {"items": {"allOf": [{"$ref": "#/items"}]}, **A},
        {"enum": [{"properties": {}}], "default": {"properties": {}}},
    ],
)
def test_what_stays_open(schema):
    assert ready(schema) == schema


def test_a_definition_that_is_used_in_both_ways_stays_open():
    schema = {"properties": {"x": REF, "y": {"allOf": [REF, B]}}, "$defs": {"A": A}}
    assert ready(schema) == {**schema, "additionalProperties": False}


def test_schemas_as_they_are():
    schema = {"items": A, "$defs": {"A": A}}
    assert enforceable_schema(schema, closes_objects=False) == schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"items": {"contentEncoding": "base64"}}, ["contentEncoding", "base64"]),
        ({"minimum": 3, "exclusiveMinimum": True}, ["exclusiveMinimum"]),
        ({"properties": {"a": {"min_length": 3}}}, ["min_length", "minLength"]),
        ({"$defs": {"A": {"additionalproperties": False}}}, ["additionalProperties"]),
    ],
)
def test_what_would_be_ignored_is_refused(schema, words):
    with pytest.raises(ValueError, match=words[0]) as caught:
        ready(schema)
    assert all(word in str(caught.value) for word in words)


def test_names_of_properties_are_no_keywords():
    schema = {"properties": {name: {} for name in ("nullable", "min_length", "contentEncoding", "$ref")}}
    assert ready(schema) == {**schema, "additionalProperties": False}


def test_a_schema_that_is_nested_too_deeply():
    schema = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested"):
        ready(schema)
