"""What structured output may be asked for, and what does not go with it."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, InvalidRequestError
from quire.front.openvino.generation_config import GenerationConfig, StructuredOutputConfig
from quire.sampling_params import SamplingParams
from quire.structured_outputs import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_SCHEMA_BYTES,
    ReasoningParams,
    StructuredOutputsParams,
)

OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["no field", "exactly one of json, regex, choice and grammar"]),
        ({"regex": "a", "choice": ["a"]}, ["regex, choice", "exactly one"]),
        ({"json": "{"}, ["json is not JSON", "column 2"]),
        ({"json": "5"}, ["json is 5", "object"]),
        ({"json": True}, ["json is true", "object"]),
        ({"json": "[" * 60_000}, ["not JSON", "recursion"]),
        ({"json": {"maximum": float("nan")}}, ["not JSON"]),
        ({"json": '{"maximum": 1e999}'}, ["not JSON"]),
        ({"json": {"enum": {1}}}, ["not JSON", "set"]),
        ({"json": {"const": "é" * (MAX_SCHEMA_BYTES // 2)}}, ["bytes", str(MAX_SCHEMA_BYTES)]),
        ({"regex": 5}, ["regex is 5", "text"]),
        ({"regex": "\ud800"}, ["lone surrogate", "position 0"]),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, [str(MAX_GRAMMAR_BYTES + 1), str(MAX_GRAMMAR_BYTES)]),
        ({"grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}, [str(MAX_GRAMMAR_BYTES + 1)]),
        ({"choice": "ab"}, ["choice is 'ab'", "list"]),
        ({"choice": []}, ["at least one"]),
        ({"choice": ["a", 1]}, ["choice is 1", "text"]),
        ({"choice": [str(number) for number in range(MAX_CHOICES + 1)]}, ["1025", "1024"]),
        ({"choice": ["a" * (MAX_SCHEMA_BYTES // 2), "b" * (MAX_SCHEMA_BYTES // 2 + 1)]}, ["65537"]),
    ],
)
def test_what_cannot_be_asked_for(fields, words):
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == "structured_outputs"
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a" * MAX_GRAMMAR_BYTES},
        {"choice": ("a" * MAX_SCHEMA_BYTES,)},
        {"choice": tuple(map(str, range(MAX_CHOICES)))},
        {"json": "{}" + " " * (MAX_SCHEMA_BYTES - 2)},
    ],
    ids=["regex", "one choice", "many choices", "json"],
)
def test_limits_are_the_last_allowed_values(fields):
    [(name, value)] = fields.items()
    assert getattr(StructuredOutputsParams(**fields), name) == value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=3))
def test_a_schema_given_as_a_dict_is_the_same_as_its_text(schema):
    spec = StructuredOutputsParams(json=schema)
    assert json.loads(spec.json) == schema
    assert spec == StructuredOutputsParams(json=spec.json)
    assert hash(spec) == hash(StructuredOutputsParams(json=spec.json))


@pytest.mark.parametrize(
    "fields", [{"json": OBJECT}, {"regex": "a|é"}, {"choice": ["b", "a", "b"]}, {"grammar": 'start: "a"'}]
)
def test_it_crosses_processes_inside_the_sampling_parameters(fields):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    if "choice" in fields:
        assert params.structured_outputs.choice == ("b", "a")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"beam_width": 2}, "structured_outputs"),
    ],
)
def test_what_does_not_go_with_a_grammar(fields, param):
    with pytest.raises(InvalidRequestError, match=param) as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("value", [{"regex": "a"}, "a", OBJECT])
def test_another_type_is_refused(value):
    with pytest.raises(InvalidRequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs=value)


@pytest.mark.parametrize(
    ("name", "ours", "text"),
    [
        ("json_schema", "json", '{"type": "object"}'),
        ("regex", "regex", "a+"),
        ("grammar", "grammar", "start: /a/"),
    ],
)
def test_the_pipeline_takes_it_under_its_own_names(name, ours, text):
    structure = StructuredOutputConfig()
    setattr(structure, name, text)
    config = GenerationConfig(structured_output_config=structure).validate()
    assert config.sampling_params(8).structured_outputs == StructuredOutputsParams(**{ours: text})
    with pytest.raises(ConfigError, match="did you mean 'regex'"):
        structure.regexp = "a"


def test_the_pipeline_refuses_another_end_of_sequence_with_it():
    config = GenerationConfig(structured_output_config=StructuredOutputConfig(regex="a"), eos_token_id=3)
    with pytest.raises(ConfigError, match="eos_token_id is 3"):
        config.sampling_params(8, model_eos_token_ids=[2])
    with pytest.raises(InvalidRequestError, match="no field"):
        GenerationConfig(structured_output_config=StructuredOutputConfig()).validate()


def test_where_a_structure_may_begin_the_output():
    reasoning = ReasoningParams(start="<think>", start_token_ids=(1,), end="</think>")
    is_open = ReasoningParams(is_open=True, end="</think>")
    assert StructuredOutputsParams(regex="a").may_begin_output
    assert StructuredOutputsParams(regex="a", reasoning=reasoning).may_begin_output
    assert not StructuredOutputsParams(regex="a", reasoning=is_open).may_begin_output
    assert not StructuredOutputsParams(reasoning=reasoning).may_begin_output
