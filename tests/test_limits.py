"""What a field's annotation says of its values: which are allowed, and what is said of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from quire.config import config, knob
from quire.limits import BuiltIn, limits_of, violation

NOTES = "at most 2 names to numbers or booleans"


@config
class Part:
    size: int = knob(default=1, help="")


@config
class Example:
    count: Annotated[int, Ge(1), Le(9)] = knob(default=1, unit="things", help="How many.")
    share: Annotated[float, Gt(0), Lt(1)] = knob(default=0.5, help="")
    speed: float = knob(default=1.0, help="")
    rate: Annotated[float, Gt(0), Le(math.inf)] = knob(default=1.0, help="")
    limit: Annotated[int, Ge(-(2**31)), Le(2**31 - 1)] | None = knob(default=None, help="")
    method: Literal["fast", "slow"] = knob(default="fast", help="")
    group: Literal[32, 64] = knob(default=32, help="")
    name: Annotated[str, MaxLen(3)] = knob(default="", help="")
    words: Annotated[tuple[Annotated[str, MinLen(1)], ...], MaxLen(2)] = knob(
        default=(), unit="words", help=""
    )
    biases: Mapping[int, Annotated[float, Ge(-1), Le(1)]] = knob(default_factory=dict, unit="ids", help="")
    notes: Annotated[Mapping[Annotated[str, MaxLen(3)], int | bool], MaxLen(2)] = knob(
        default_factory=dict, unit="names to numbers or booleans", help=""
    )
    policy: Annotated[str | Any, BuiltIn("fifo", "lifo")] = knob(default="fifo", help="")
    part: Part = knob(default=Part(), help="")
    flag: bool = knob(default=False, help="")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"count": 9, "share": 0.999, "speed": -1e300, "rate": math.inf, "limit": 2**31 - 1},
        {"speed": 3, "limit": None, "method": "slow", "group": 64, "name": "abc"},
        {"words": ("a", "b"), "biases": {5: -1, 6: 1.0}, "part": Part(size=2), "flag": True},
        {"notes": {"a": 1, "b": True}},
        {"policy": "my.module.Policy"},
        {"policy": object()},
    ],
)
def test_allowed(values):
    assert violation(Example(**values)) is None


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        ("count", 0, "is 0; it must be from 1 to 9"),
        ("count", 10, "is 10; it must be from 1 to 9"),
        ("count", True, "is True; it must be a whole number, from 1 to 9"),
        ("count", 2.0, "is 2.0; it must be a whole number, from 1 to 9"),
        ("count", None, "is None; it must be a whole number, from 1 to 9"),
        ("share", 1, "is 1; it must be above 0 and below 1"),
        ("share", math.nan, "is nan; it must be above 0 and below 1 and finite"),
        ("speed", math.inf, "is inf; it must be finite"),
        ("speed", math.nan, "is nan; it must be finite"),
        ("speed", "1", "is '1'; it must be a number"),
        ("rate", math.nan, "is nan; it must be above 0"),
        ("limit", 2**31, "is 2147483648; it must be from -2^31 to 2^31 - 1"),
        ("method", "fats", "is 'fats'; did you mean 'fast'?"),
        ("method", 1, "is 1; it must be one of fast, slow"),
        ("group", 33, "is 33; it must be one of 32, 64"),
        ("group", "32", "is '32'; it must be one of 32, 64"),
        ("name", "abcd", "has 4 characters; at most 3 fit"),
        ("name", 5, "is 5; it must be text"),
        ("words", ("a", "b", "c"), "holds 3 words; at most 2 fit"),
        ("words", ("a", ""), "is ('a', ''); it must hold words"),
        ("words", "a", "is 'a'; it must hold words"),
        ("biases", {1: 2.0}, "is {1: 2.0}; it must map ids to numbers from -1 to 1"),
        ("biases", {"1": 1.0}, "is {'1': 1.0}; it must map ids to numbers from -1 to 1"),
        ("notes", {"a": 1, "b": 1, "c": 1}, "is {'a': 1, 'b': 1, 'c': 1}; it must map " + NOTES),
        ("notes", {"a": 1.5}, "is {'a': 1.5}; it must map " + NOTES),
        ("notes", {"abcd": 1}, "is {'abcd': 1}; it must map " + NOTES),
        ("policy", "lifu", "is 'lifu'; did you mean 'lifo'?"),
        ("part", {"size": 1}, "is {'size': 1}; it must be Part"),
        ("flag", 1, "is 1; it must be True or False"),
    ],
)
def test_refused(name, value, refusal):
    assert violation(Example(**{name: value})) == (name, refusal)


def test_a_long_value_is_shown_shortened():
    _, refusal = violation(Example(method="x" * 1000))
    assert len(refusal) < 150


def test_limits_can_be_shown():
    limits = limits_of(Example)
    assert (limits["count"].kind, limits["count"].range, limits["count"].unit) == (
        int,
        "from 1 to 9",
        "things",
    )
    assert (limits["limit"].kind, limits["limit"].is_optional) == (int, True)
    assert (limits["group"].kind, limits["group"].choices) == (int, (32, 64))
    assert limits["policy"].takes_dotted_names
    assert limits["words"].kind == tuple[str, ...]
