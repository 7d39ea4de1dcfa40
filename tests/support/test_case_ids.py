from __future__ import annotations

import functools

import pytest

from case_ids import MAX_LENGTH, case_id
from quire import SamplingParams


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"temperature": -0.1, "stop": ["a", "b"]}, "temperature=-0.1,stop=[a,b]"),
        ([[1, 2], []], "[[1,2],[]]"),
        ({}, "empty"),
        (b"a\n", "b'a\\n'"),
        (SamplingParams(n=2, seed=1), "SamplingParams(n=2,seed=1)"),
        (functools.partial(max, 1, key=abs), "[max,1,key=abs]"),
        ((int, None, "two\nlines"), "[int,None,two lines]"),
    ],
)
def test_a_case_is_named_by_what_it_holds(value, name):
    assert case_id(value) == name


@pytest.mark.parametrize("value", ["text", 3, 0.5, None, True, int])
def test_what_pytest_names_is_left_to_it(value):
    assert case_id(value) is None


def test_long_values_are_cut():
    assert len(case_id(list(range(1000)))) == MAX_LENGTH
