"""Grammars of JSON schemas with numbers that llguidance, which counts in doubles, cannot bound exactly.

Such a number, and all that it is part of, become rules in Lark. Everything else is left to llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from quire.schemas.json_schemas import subschemas

SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` sets spaces: where any are allowed, a small model may go on for ever."""
_MIN_EXACT, _MAX_EXACT = 1e-9, 2**53 - 1
_MAX_DIGITS = 64  # of a bound, without the zeros at its end
_MAX_ITEMS = 1000
_MAX_LENGTH = 2**20  # of all rules, in characters
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OF_NUMBERS = (*_LOWER, *_UPPER, "multipleOf")
_OF_TYPES = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("prefixItems", "items", "additionalItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
}
_NOT_BESIDE = (
    *(
        "patternProperties",
        "minProperties",
        "maxProperties",
        "multipleOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
    ),
    *("contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "dependencies"),
    *("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef", "$recursiveAnchor"),
)
_IN_PLACE = ("$ref", "allOf", "anyOf", "enum", "const")
_ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
_KEY = r'/"([^"\\\x00-\x1F\x7F]|\\(["\\bfnrt]|u00[01][0-9a-f]|u007f))*"/'


def has_wide_numbers(schema: Mapping[str, Any]) -> bool:
    """Whether a schema has numbers that llguidance would not take exactly."""
    return not _is_plain(schema, {})


def json_rules(schema: Mapping[str, Any], name: str) -> list[str]:
    """Return Lark rules for a JSON value that is valid against a schema; the first is called `name`.

    Args:
        schema: made ready by `enforceable_schema`, with the definitions that it refers to.
        name: with which the names of all rules begin; in small letters.

    Raises:
        ValueError: a number that llguidance cannot bound is where it cannot be enforced.
    """
    try:
        return _Rules(schema, name).rules()
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


class _Rules:
    def __init__(self, schema: Mapping[str, Any], name: str) -> None:
        self._schema = schema
        self._name = name
        own = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        self._own = {**own, "x-guidance": SPACING}
        self._targets = {f"#/{key}/{one}": part for key in own for one, part in own[key].items()} | {
            "#": schema
        }
        self._names: dict[str, str] = {}  # of the rules of definitions
        self._rules: list[str] = []
        self._length = 0

    def rules(self) -> list[str]:
        """Return all rules."""
        self._rules.append("")
        self._rules[0] = f"{self._name}: {self._value(self._schema)}"
        return self._rules

    def _value(self, schema: Any) -> str:
        """Return an expression for a value."""
        if schema is True or _is_plain(schema, self._targets):
            bare = {} if schema is True else schema
            body = json.dumps({**bare, "x-guidance": SPACING})
            return self._rule("%json " + (json.dumps({**bare, **self._own}) if '"$ref"' in body else body))
        if others := [key for key in _NOT_BESIDE if key in schema]:
            raise _not_enforceable(others[0])
        in_place = [key for key in _IN_PLACE if key in schema]
        if not in_place:
            types = schema.get("type", _ALL_TYPES)
            types = [types] if isinstance(types, str) else types
            return self._one_of(self._of_type(schema, one) for one in types)
        beside = [key for key in (*in_place[1:], *_OF_NUMBERS, *_all_of(_OF_TYPES)) if key in schema]
        if "type" in schema and in_place[0] not in ("enum", "const"):
            beside.append("type")
        if beside or len(schema.get("allOf", ())) > 1:
            raise _not_enforceable(" and ".join([in_place[0], *beside]))
        match in_place[0]:
            case "$ref":
                return self._definition(schema["$ref"])
            case "anyOf" | "allOf":
                return self._one_of(self._value(one) for one in schema[in_place[0]] if one is not False)
        values = schema.get("enum", [schema.get("const")])
        valid = [one for one in values if _has_type(one, schema.get("type"))]
        return self._one_of(_literal(text) for one in valid for text in _spellings(one))

    def _of_type(self, schema: Mapping[str, Any], type_name: str) -> str:
        keys = _OF_NUMBERS if type_name in ("number", "integer") else _OF_TYPES.get(type_name, ())
        own = {"type": type_name, **{key: schema[key] for key in keys if key in schema}}
        if _is_plain(own, self._targets):
            return self._value(own)
        match type_name:
            case "object":
                return self._object(own)
            case "array":
                return self._array(own)
        return self._terminal(_number(own, is_integer=type_name == "integer"))

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        additional = schema.get("additionalProperties", True)
        names = [*properties, *(name for name in dict.fromkeys(required) if name not in properties)]
        after = first = '""'  # the rest, after a property and before any
        if additional is not False:
            taken = " | ".join(_literal(_json(name)) for name in names)
            key = self._terminal(f"{_KEY} & ~({taken})" if taken else _KEY)
            further = self._rule(f'{key} ": " {self._value(additional)}')
            after = self._rule(f'(", " {further})*')
            first = self._rule(f"({further} {after})?")
        for name in reversed(names):
            value = properties.get(name, additional)
            if value is not False:
                entry = self._rule(f"{_literal(_json(name) + ': ')} {self._value(value)}")
                if name in required:
                    after, first = self._rule(f'", " {entry} {after}'), self._rule(f"{entry} {after}")
                else:
                    first = self._rule(f"{entry} {after} | {first}")
                    after = self._rule(f'(", " {entry})? {after}')
            elif name in required:
                raise ValueError(f"no value is valid for the required property {name!r:.60}")
        return self._rule(f'"{{" {first} "}}"')

    def _array(self, schema: Mapping[str, Any]) -> str:
        items, others = schema.get("items", True), schema.get("additionalItems", True)
        prefix = schema.get("prefixItems", [])
        if isinstance(items, list):
            prefix, items = items, others
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if False in prefix:
            prefix, items = prefix[: prefix.index(False)], False
        if items is False:
            most = min(len(prefix), len(prefix) if most is None else most)
        if most is not None and least > most:
            raise ValueError(f"no array has at least {least} and at most {most} items")
        if max(least, most or 0) > _MAX_ITEMS:
            raise ValueError(
                f"an array of at least {least} and at most {most} items has numbers beyond {_MAX_EXACT}, or "
                f"close to 0; it may have at most {_MAX_ITEMS}"
            )
        item = "" if items is False else self._value(items)
        values = [self._value(one) for one in prefix[:most]]
        values += [item] * ((least if most is None else most) - len(values))
        rest = f'(", " {item})*' if most is None else '""'
        if most is None and not values:
            return self._rule(f'"[" ({item} {rest})? "]"')
        for index in reversed(range(len(values))):
            separated = f'", " {values[index]} {rest}' if index else f"{values[index]} {rest}"
            rest = self._rule(separated if index < least else f"({separated})?")
        return self._rule(f'"[" {rest} "]"')

    def _definition(self, reference: str) -> str:
        if reference not in self._names:
            place = len(self._rules)
            self._names[reference] = self._rule("")
            body = self._value(self._targets[reference])
            self._rules[place] = f"{self._names[reference]}: {body}"
        return self._names[reference]

    def _one_of(self, expressions: Iterable[str]) -> str:
        alternatives = list(expressions)
        if not alternatives:
            raise ValueError("no value is valid against one of its parts")
        return self._rule(" | ".join(alternatives))

    def _rule(self, body: str) -> str:
        return self._named(f"{self._name}v{len(self._rules)}", body)

    def _terminal(self, body: str) -> str:
        return self._named(f"{self._name.upper()}V{len(self._rules)}", body)

    def _named(self, name: str, body: str) -> str:
        self._length += len(body)
        if self._length > _MAX_LENGTH:
            raise ValueError(
                f"its numbers beyond {_MAX_EXACT}, or close to 0, take more than {_MAX_LENGTH} characters of "
                "rules; leave out some of their bounds"
            )
        self._rules.append(f"{name}: {body}")
        return name


def _is_plain(schema: Any, targets: Mapping[str, Any]) -> bool:
    """Whether llguidance takes all numbers of a schema and its references' targets exactly."""
    seen, pending = set(), [schema]
    while pending:
        one = pending.pop()
        if id(one) in seen or not isinstance(one, Mapping):
            continue
        seen.add(id(one))
        bounds = [one[key] for key in (*_LOWER, *_UPPER) if not isinstance(one.get(key, False), bool)]
        if any(bound and not _MIN_EXACT <= abs(bound) <= _MAX_EXACT for bound in bounds):
            return False
        if any(map(_has_wide_number, (one.get("const"), one.get("enum")))):
            return False
        pending += [*subschemas(one), targets.get(one.get("$ref", ""))]
    return True


def _has_wide_number(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_has_wide_number, value))
    return isinstance(value, int | float) and abs(value) > _MAX_EXACT


def _all_of(names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for one in names.values():
        yield from one


def _has_type(value: Any, types: str | Sequence[str] | None) -> bool:
    types = [types] if isinstance(types, str) else types
    if types is None:
        return True
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int() | float():
            return "number" in types or ("integer" in types and value == int(value))
        case str():
            return "string" in types
    return ("array" if isinstance(value, list) else "object") in types


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _spellings(value: Any) -> list[str]:
    """Return how a value may be written: a large double with or without an exponent."""
    if isinstance(value, float) and abs(value) > _MAX_EXACT:
        return [_json(value), format(Decimal(repr(value)), "f")]
    return [_json(value)]


def _literal(text: str) -> str:
    """Return an expression for a text."""
    return json.dumps(text)


def _not_enforceable(what: str) -> ValueError:
    return ValueError(
        f"numbers beyond {_MAX_EXACT}, or closer to 0 than {_MIN_EXACT}, cannot be enforced beside or within "
        f"{what}"
    )


def _number(schema: Mapping[str, Any], *, is_integer: bool) -> str:
    """Return a Lark terminal's body for numbers within a schema's bounds, written without exponents."""
    if (low := _tightest(schema, _LOWER, max)) is not None and is_integer:
        low = _whole(low, ROUND_CEILING, 1)
    if (high := _tightest(schema, _UPPER, min)) is not None and is_integer:
        high = _whole(high, ROUND_FLOOR, -1)
    parts = []
    if high is None or high[0] >= 0:
        parts.append(_magnitude(low if low and low[0] >= 0 else None, high, is_integer=is_integer))
    if low is None or low[0] < 0:
        least = (high[0].copy_negate(), high[1]) if high and high[0] < 0 else (Decimal(0), True)
        most = None if low is None else (low[0].copy_negate(), low[1])
        parts.append(f'"-" ({_magnitude(least, most, is_integer=is_integer)})')
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        raise ValueError(f"no number is between minimum {low[0]} and maximum {high[0]}")
    return " | ".join(f"({part})" for part in parts)


_Bound = tuple[Decimal, bool]  # a number, and whether it is excluded itself


def _tightest(schema: Mapping[str, Any], keys: tuple[str, str], choose: Any) -> _Bound | None:
    bounds = [
        (Decimal(str(schema[key])), key == keys[1])
        for key in keys
        if not isinstance(schema.get(key, False), bool)
    ]
    if not bounds:
        return None
    number = choose(bound for bound, _ in bounds)
    return number, (number, True) in bounds


def _whole(bound: _Bound, rounding: str, step: int) -> _Bound:
    number = bound[0].to_integral_value(rounding)
    return (Decimal(int(number) + step) if bound[1] and number == bound[0] else number), False


def _magnitude(low: _Bound | None, high: _Bound | None, *, is_integer: bool) -> str:
    """Return a Lark expression for numbers without a sign within bounds, which are at least 0."""
    conditions = []
    if low is not None and low[0] > 0:
        conditions.append(_at_least(low[0], is_integer=is_integer))
    if high is not None:
        conditions.append(_at_most(high[0], is_integer=is_integer))
    if not conditions:
        conditions.append(_at_least(Decimal(0), is_integer=is_integer))
    excluded = [_equal(bound[0]) for bound in (low, high) if bound is not None and bound[1]]
    return " & ".join(
        [f"/{'|'.join(condition)}/" for condition in conditions] + [f"~/{one}/" for one in excluded]
    )


def _digits(number: Decimal) -> tuple[str, str]:
    """Return the digits of a number before and after its point, there without zeros at the end.

    Raises:
        ValueError: it has too many.
    """
    whole, _, fraction = format(number, "f").partition(".")
    if len((whole + fraction).strip("0")) > _MAX_DIGITS:
        raise ValueError(f"the bound {number:.6e} has more than {_MAX_DIGITS} digits")
    return whole, fraction.rstrip("0")


def _equal(number: Decimal) -> str:
    whole, fraction = _digits(number)
    return rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?"


def _at_least(number: Decimal, *, is_integer: bool) -> Iterator[str]:
    """Yield regular expressions, one of which each number matches that is not smaller."""
    whole, fraction = _digits(number)
    rest = "" if is_integer else r"(\.[0-9]+)?"
    yield f"[1-9][0-9]{{{len(whole)},}}{rest}"
    same = whole if fraction else whole.rstrip("0") or whole
    for index, digit in enumerate(same):
        if digit != "9":
            yield f"{same[:index]}[{int(digit) + 1}-9][0-9]{{{len(whole) - index - 1}}}{rest}"
    if not fraction:
        yield f"{same}[0-9]{{{len(whole) - len(same)}}}{rest}"
        return
    for index, digit in enumerate(fraction):
        if digit != "9":
            yield rf"{whole}\.{fraction[:index]}[{int(digit) + 1}-9][0-9]*"
    yield rf"{whole}\.{fraction}[0-9]*"


def _at_most(number: Decimal, *, is_integer: bool) -> Iterator[str]:
    """Yield regular expressions, one of which each number matches that is not larger."""
    whole, fraction = _digits(number)
    rest = "" if is_integer else r"(\.[0-9]+)?"
    if len(whole) > 1:
        yield f"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){rest}"
    for index, digit in enumerate(whole):
        smallest = int(index == 0 and len(whole) > 1)
        if int(digit) > smallest:
            yield f"{whole[:index]}[{smallest}-{int(digit) - 1}][0-9]{{{len(whole) - index - 1}}}{rest}"
    yield whole if is_integer or fraction else rf"{whole}(\.0+)?"
    for index, digit in enumerate(fraction):
        yield rf"{whole}\.{fraction[: index + 1]}" + ("0*" if index == len(fraction) - 1 else "")
        if digit != "0":
            yield rf"{whole}\.{fraction[:index]}[0-{int(digit) - 1}][0-9]*"
