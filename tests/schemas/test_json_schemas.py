"""Schemas that can be enforced: what is closed, what must stay open, and what is refused."""

import json
from urllib.parse import unquote

import pytest

from quire.schemas.json_schemas import enforceable_schema

A = {"properties": {"a": {"type": "string"}}}
CLOSED_A = {**A, "additionalProperties": False}
B = {"properties": {"b": {"type": "string"}}, "required": ["b"]}
OPEN = {"additionalProperties": True}
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
        ({"minimum": 3, "exclusiveMinimum": True}, {"exclusiveMinimum": 3}),
        ({"maximum": 3, "exclusiveMaximum": False}, {"maximum": 3}),
        ({"items": {"not": {}}}, {"items": False}),
        ({"propertyNames": {"type": "string", "title": "K"}, **OPEN}, OPEN),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": A},
            {"properties": {"a": CLOSED_A, "b": CLOSED_A}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"pattern": "^k"}}},
            {
                "patternProperties": {"^k": True},
                "additionalProperties": False,
                "$defs": {"K": {"pattern": "^k"}},
            },
        ),
        (
            {"propertyNames": {"maxLength": 2}},
            {"patternProperties": {r"^[\x{0}-\x{10FFFF}]{0,2}$": True}, "additionalProperties": False},
        ),
        (
            {"discriminator": {"propertyName": "a"}, "oneOf": [A, {"$ref": "#/$defs/A"}], "$defs": {"A": A}},
            {
                "discriminator": {"propertyName": "a"},
                "oneOf": [{**CLOSED_A, "required": ["a"]}, {"$ref": "#/$defs/A", "required": ["a"]}],
                "$defs": {"A": CLOSED_A},
            },
        ),
        (
            {"properties": {"a": {"$ref": "#"}}, "$defs": {"B": {}}},
            {
                "properties": {"a": {"$ref": "#/$defs/reference-0"}},
                "additionalProperties": False,
                "$defs": {
                    "B": {},
                    "reference-0": {
                        "properties": {"a": {"$ref": "#/$defs/reference-0"}},
                        "additionalProperties": False,
                    },
                },
            },
        ),
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
        ({"exclusiveMinimum": True}, ["exclusiveMinimum"]),
        ({"minimum": "3"}, ["minimum", "'3'", "a number"]),
        ({"maximum": True}, ["maximum", "a number"]),
        ({"multipleOf": 0}, ["multipleOf", "greater than 0"]),
        ({"minLength": -1}, ["minLength", "whole number"]),
        ({"items": {"maxItems": 1.5}}, ["maxItems", "1.5"]),
        ({"type": ["string", "colour"]}, ["type", "colour"]),
        ({"type": []}, ["type"]),
        ({"required": True}, ["required", "list of names"]),
        ({"required": [1]}, ["required"]),
        ({"properties": {"a": 3}}, ["properties", "schemas"]),
        ({"properties": [A]}, ["properties"]),
        ({"$defs": {"a": None}}, ["defs"]),
        ({"anyOf": []}, ["anyOf", "list of schemas"]),
        ({"allOf": A}, ["allOf"]),
        ({"enum": "a"}, ["enum", "a list"]),
        ({"pattern": 3}, ["pattern", "text"]),
        ({"format": None}, ["format", "text"]),
        ({"additionalProperties": "no"}, ["additionalProperties", "a schema"]),
        ({"uniqueItems": 1}, ["uniqueItems", "true or false"]),
        ({"$ref": 3}, ["ref", "text"]),
        ({"$schema": "https://example.com/mine"}, ["schema", "example.com"]),
        ({"$ref": "#/nowhere"}, ["#/nowhere", "leads to nothing"]),
        ({"$ref": "other.json"}, ["other.json", "other documents"]),
        ({"$ref": "#name"}, ["#name"]),
        ({"patternProperties": {"[0-9]": {}, "\\d": {}}}, ["patternProperties", "the same"]),
        (
            {"items": {"$ref": "#/components/a"}, "components": {"a": {"contentEncoding": "x"}}},
            ["contentEncoding"],
        ),
        ({"properties": {"a": {"min_length": 3}}}, ["min_length", "minLength"]),
        ({"$defs": {"A": {"additionalproperties": False}}}, ["additionalProperties"]),
    ],
)
def test_what_would_be_ignored_is_refused(schema, words):
    with pytest.raises(ValueError, match=words[0]) as caught:
        ready(schema)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "x:y", "x-guidance": {}}, {}),
        ({"type": "string", "format": "path"}, {"type": "string"}),
        ({"type": "string", "format": "uuid"}, {"type": "string", "format": "uuid"}),
        ({"maxItems": 2.0, "minLength": 0}, {"maxItems": 2, "minLength": 0}),
        ({"then": False, "minContains": 2, "unevaluatedItems": True, "not": False}, {}),
        ({"pattern": "^\\d[&&]\\/$"}, {"pattern": "^[0-9][\\x{26}\\x{26}]\\x{2F}$"}),
        ({"patternProperties": {"\\d": {"pattern": "."}}},
         {"patternProperties": {"[0-9]": {"pattern": "[^\\x{A}\\x{D}\\x{2028}-\\x{2029}]"}}}),
    ],
)  # fmt: skip
def test_what_is_written_otherwise(schema, expected):
    assert enforceable_schema(schema, closes_objects=False) == expected


V = {"type": "integer", "maximum": 9}


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"nullable": True, "properties": {"v": V}}, "#/properties/v"),
        ({"properties": {"a": {"nullable": True, "items": {"nullable": True, "anyOf": [V]}}}},
         "#/properties/a/items/anyOf/0"),
        ({"allOf": [{"nullable": True, "prefixItems": [{}, V]}]}, "#/allOf/0/prefixItems/1"),
        ({"components": {"schemas": {"V": V}}}, "#/components/schemas/V"),
        ({"$defs": {"a/b~c%d": V}}, "#/$defs/a~1b~0c%25d"),
        ({"properties": {"a b": V}}, "#/properties/a%20b"),
        ({"$defs": {"a": {"$defs": {"b": V}}}}, "#/$defs/a/$defs/b"),
        ({"$defs": {"a": {**V, "$anchor": "here"}}}, "#here"),
        ({"items": {**V, "$dynamicAnchor": "here"}}, "#here"),
        ({"$id": "http://example.com/a/b", "items": {**V, "$id": "c"}}, "c"),
        ({"$id": "http://a.b/a/b", "items": {"$id": "/c", "$defs": {"d": {**V, "$anchor": "e"}}}}, "../c#e"),
        ({"$id": "urn:a:b", "definitions": {"v": V}}, "#/definitions/v"),
        ({"$defs": {"reference-0": {}}, "items": V}, "#/items"),
    ],
)  # fmt: skip
def test_references_lead_to_definitions(schema, reference):
    schema = {**schema, "not": {"$ref": reference}}
    rewritten = enforceable_schema(schema, closes_objects=False)
    ready = rewritten if "not" in rewritten else rewritten["anyOf"][0]
    _, key, name = ready["not"]["$ref"].split("/")
    assert rewritten[key][unquote(name).replace("~1", "/").replace("~0", "~")] == V


def test_a_reference_to_what_may_be_null_leads_to_both():
    schema = {"items": {**V, "nullable": True, "$anchor": "v"}, "not": {"$ref": "#v"}}
    rewritten = enforceable_schema(schema, closes_objects=False)
    assert rewritten["$defs"]["reference-0"] == rewritten["items"] == {"anyOf": [V, {"type": "null"}]}


def test_references_to_what_is_referred_to_elsewhere_end():
    schema = {"items": {"items": {"$ref": "#/items"}}, "not": {"$ref": "#/items/items"}}
    rewritten = enforceable_schema(schema, closes_objects=True)
    assert len(rewritten["$defs"]) == 2
    assert rewritten["$defs"]["reference-0"] == {"items": {"$ref": "#/$defs/reference-0"}}


def test_names_of_properties_are_no_keywords():
    schema = {"properties": {name: {} for name in ("nullable", "min_length", "contentEncoding", "$ref")}}
    assert ready(schema) == {**schema, "additionalProperties": False}


def test_a_schema_that_is_nested_too_deeply():
    schema = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested"):
        ready(schema)


def test_references_that_repeat_much_of_the_schema():
    depth, schema = 150, {}
    for _ in range(depth):
        schema = {"items": schema}
    references = [{"$ref": "#" + "/items" * number} for number in range(1, depth)]
    wide = {f"p{number}": {} for number in range(5000)}
    innermost = schema
    while "items" in innermost:
        innermost = innermost["items"]
    innermost["properties"] = wide
    with pytest.raises(ValueError, match="50000 parts"):
        ready({**schema, "anyOf": references})
