"""Numbers that llguidance cannot bound, against arithmetic with decimals."""

from __future__ import annotations

import decimal
import json
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_grammars import accepts, compiled, schema_accepts
from quire.errors import InvalidRequestError
from quire.schemas.json_schemas import enforceable_schema
from quire.schemas.wide_numbers import has_wide_numbers

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
EDGES = [2**53, 2**63, 2**64, 10**18, 10**19, 10**30, 987654321098765432109876543210]
integers = st.one_of(
    st.integers(-(10**25), 10**25),
    st.tuples(st.sampled_from([*EDGES, *(-edge for edge in EDGES)]), st.integers(-2, 2)).map(sum),
    st.integers(-20, 20),
)
numbers = st.one_of(
    integers.map(str),
    st.tuples(integers, st.integers(0, 30)).map(lambda pair: format(Decimal(pair[0]).scaleb(-pair[1]), "f")),
)


def near(bound: Decimal) -> list[Decimal]:
    exponent = min(bound.as_tuple().exponent, 0)
    steps = [Decimal((0, (1,), exponent - more)) for more in (0, 1)]
    return [bound, *(bound + sign * step for step in steps for sign in (1, -1)), -bound, bound * 2, bound / 2]


@settings(max_examples=60)
@given(st.booleans(), *(st.none() | integers for _ in range(4)), st.lists(numbers, max_size=4))
def test_numbers_within_bounds(is_integer, low, above, high, below, others):
    keys = {"minimum": low, "exclusiveMinimum": above, "maximum": high, "exclusiveMaximum": below}
    bounds = {key: bound for key, bound in keys.items() if bound is not None}
    schema = {"type": "integer" if is_integer else "number", **bounds}

    def is_valid(text: str) -> bool:
        number = Decimal(text)
        return (
            (low is None or number >= low)
            and (above is None or number > above)
            and (high is None or number <= high)
            and (below is None or number < below)
            and (not is_integer or "." not in text)
        )

    candidates = {*others, "0", "1", "-1", "0.5", "-0.5"}
    with decimal.localcontext(prec=100):
        candidates |= {format(one, "f") for bound in bounds.values() for one in near(Decimal(bound))}
    candidates = {
        text for text in candidates if len(text) < 60 and not (Decimal(text) == 0 and text[0] == "-")
    }
    try:
        grammar = compiled(json=json.dumps(schema))
    except InvalidRequestError:
        assert not any(map(is_valid, candidates))
        return
    wrong = [text for text in candidates if accepts(grammar, text) != is_valid(text)]
    assert wrong == [], schema


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (INT64, [2**63 - 1, -(2**63), 0, -7], [2**63, -(2**63) - 1]),
        (UINT64, [2**64 - 1, 2**63, 0], [2**64, -1]),
        ({"type": "integer", "minimum": 10**18}, [10**18, 10**40], [10**18 - 1, 0]),
        ({"type": "integer", "exclusiveMaximum": -(2**60)}, [-(2**60) - 1], [-(2**60), 0]),
        ({"const": 2**53 + 1}, [2**53 + 1], [2**53, 2**53 + 2]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [2**53 + 1], [2**53]),
        ({"type": "integer", "enum": [1e20, 0.5]}, [1e20, 10**20], [2**63 - 1, 0.5, 1]),
        ({"enum": [12345678901234567890, "é\x7f", {"b": [2**70], "a": None}], "type": ["integer", "object"]},
         [12345678901234567890, {"b": [2**70], "a": None}], ["é", 12345678901234567891]),
        ({"minimum": 2**60}, [2**60, "text", None, [1]], [5]),
        ({"type": ["integer", "null"], "maximum": 2**60}, [None, -5, 2**60], ["a", 2**60 + 1]),
        ({"type": "array", "items": INT64, "minItems": 1, "maxItems": 3}, [[1], [1, 2**63 - 1, 3]],
         [[], [2**63], [1, 2, 3, 4]]),
        ({"type": "array", "prefixItems": [INT64, {"type": "string"}], "items": False},
         [[], [1], [2, "a"]], [["a"], [1, "a", 2]]),
        ({"type": "array", "items": [UINT64], "additionalItems": {"type": "null"}}, [[3, None]], [[3, 4]]),
        ({"type": "object", "properties": {"a": INT64, "b": {"type": "string"}, "c": UINT64},
          "required": ["b"], "additionalProperties": False},
         [{"a": 2**63 - 1, "b": "x", "c": 0}, {"b": ""}, {"b": "", "c": 1}],
         [{}, {"a": 1}, {"b": "", "c": -1}]),
        ({"type": "object", "properties": {"a": INT64}, "required": ["z", "a"]},
         [{"a": 1, "z": [2], "q": 3}], [{"a": 1}, {"a": 2**63, "z": 1}]),
        ({"type": "object", "additionalProperties": UINT64}, [{}, {"x": 1, "é": 2}], [{"x": -1}]),
        ({"$defs": {"T": {"type": "object", "properties": {"id": UINT64, "t": {"$ref": "#/$defs/T"}}}},
          "$ref": "#/$defs/T"}, [{"id": 1, "t": {"id": 2**64 - 1}}], [{"t": {"t": {"id": 2**64}}}]),
        ({"properties": {"id": INT64, "next": {"$ref": "#"}}},
         [{"next": {"id": 5}}, 3], [{"next": {"id": 2**63}}]),
        ({"anyOf": [{"type": "string"}, INT64]}, ["a", 5], [None, 2**63]),
        ({"allOf": [INT64]}, [5], ["a"]),
        ({"type": "integer", "nullable": True, "maximum": 2**60}, [None, 5], [2**60 + 1]),
    ],
)  # fmt: skip
def test_what_wide_numbers_are_part_of(schema, valid, invalid):
    assert has_wide_numbers(enforceable_schema(schema, closes_objects=False))
    grammar = compiled(json=json.dumps(schema))
    assert [one for one in valid if not accepts(grammar, json.dumps(one, ensure_ascii=False))] == []
    assert [one for one in invalid if accepts(grammar, json.dumps(one, ensure_ascii=False))] == []


@pytest.mark.parametrize("largest", [1.7976931348623157e308, 5e-324, 2.5e300])
def test_bounds_at_the_edges_of_doubles(largest):
    schema = {"type": "number", "minimum": -largest, "maximum": largest}
    text = format(Decimal(repr(largest)), "f")
    above = format(Decimal(repr(largest)) * Decimal("1.01"), "f")
    for sign in ("", "-"):
        assert schema_accepts(schema, sign + text)
        assert not schema_accepts(schema, sign + above)
    assert schema_accepts(schema, "0")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({**INT64, "multipleOf": 3}, ["multipleOf", str(2**53 - 1)]),
        ({"patternProperties": {"a": INT64}}, ["patternProperties"]),
        ({"properties": {"a": INT64}, "maxProperties": 2}, ["maxProperties"]),
        ({"oneOf": [INT64, {"type": "null"}]}, ["oneOf"]),
        ({"allOf": [INT64, {"minimum": 3}]}, ["allOf"]),
        ({"anyOf": [INT64], "minimum": 3}, ["anyOf", "minimum"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": INT64}, "type": "integer"}, ["$ref", "type"]),
        ({"type": "integer", "minimum": 2**64, "maximum": 2**63}, ["minimum", "maximum"]),
        ({"type": "integer", "minimum": int("12345678" * 10)}, ["64 digits"]),
        ({"items": INT64, "maxItems": 5000}, ["5000", "1000"]),
        ({"not": INT64}, ["not"]),
        ({"items": INT64, "uniqueItems": True}, ["uniqueItems"]),
        ({"properties": {"a": INT64}, "dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
    ],
)
def test_what_is_refused(schema, words):
    with pytest.raises(InvalidRequestError) as caught:
        compiled(json=json.dumps(schema))
    assert all(word in str(caught.value) for word in words), str(caught.value)
