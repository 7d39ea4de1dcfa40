"""Wrong values in `quantization_config`: each is a `ModelError` that names the key and the value."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ModelError
from quire.models.checkpoints.quantized.description import StoredQuantization, describe_quantization

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq", "desc_act": False}
AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "gemm", "zero_point": True}


def _compressed(**weights: Any) -> dict[str, Any]:
    described = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    group = {"format": "pack-quantized", "weights": described | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "sparsity_config": {"format": "dense"},
    }


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FLOAT8 = _compressed(num_bits=8, type="float", strategy="block", block_structure=[128, 128])


@pytest.mark.parametrize(
    ("values", "key", "wrong"),
    [
        ({"quant_method": ["gptq"]}, "quant_method", "['gptq']"),
        (GPTQ | {"bits": 4.0}, "bits", "4.0"),
        (GPTQ | {"bits": 10**30}, "bits", str(10**30)),
        (GPTQ | {"bits": math.nan}, "bits", "nan"),
        (GPTQ | {"group_size": -2}, "group_size", "-2"),
        (GPTQ | {"group_size": True}, "group_size", "True"),
        (GPTQ | {"desc_act": "false"}, "desc_act", "'false'"),
        (GPTQ | {"checkpoint_format": {}}, "checkpoint_format", "{}"),
        (AWQ | {"version": 2}, "version", "2"),
        (AWQ | {"zero_point": "no"}, "zero_point", "'no'"),
        (AWQ | {"q_group_size": 2**40}, "q_group_size", str(2**40)),
        (_compressed() | {"config_groups": ["x"]}, "config_groups", "['x']"),
        (_compressed() | {"config_groups": {"a": 3}}, "config_groups.a", "3"),
        (_compressed() | {"sparsity_config": {"format": 3}}, "sparsity_config.format", "3"),
        (_compressed() | {"kv_cache_scheme": 1}, "kv_cache_scheme", "1"),
        (
            _compressed(num_bits="4"),
            "config_groups.group_0.weights.num_bits",
            "'4'",
        ),
        (_compressed(actorder=3), "config_groups.group_0.weights.actorder", "3"),
        (_compressed(symmetric="no"), "config_groups.group_0.weights.symmetric", "'no'"),
        (
            _compressed(group_size=math.inf),
            "config_groups.group_0.weights.group_size",
            "inf",
        ),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], key: str, wrong: str) -> None:
    with pytest.raises(ModelError, match=rf"quantization_config\.{key} .*{re.escape(wrong)}"):
        describe_quantization(values)


def test_the_widest_of_several_groups_is_planned() -> None:
    """Which matrices belong to which group is known when they are read."""
    by_row = {"format": "int-quantized", "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    of_activations = {"weights": None, "output_activations": {"num_bits": 8}}
    (in_groups,) = _compressed()["config_groups"].values()
    for groups in ([in_groups, by_row], [by_row, in_groups], [of_activations, in_groups, by_row]):
        values = _compressed() | {"config_groups": {str(place): group for place, group in enumerate(groups)}}
        assert describe_quantization(values).kind == "int8"
    values = _compressed() | {"config_groups": {"first": of_activations, "second": in_groups}}
    assert describe_quantization(values) == StoredQuantization("int4", 32)


WRONG: list[Any] = [0, -1, 7, 2**31, 10**30, 1e308, math.nan, math.inf, True, "x", [], {}, [[]], "x" * 5000]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([GPTQ, AWQ, FP8, _compressed(), FLOAT8]), st.data())
def test_any_wrong_value_is_a_model_error(values: dict[str, Any], data: st.DataObject) -> None:
    def change(holder: dict[str, Any]) -> dict[str, Any]:
        key = data.draw(st.sampled_from(sorted(holder)))
        inner = holder[key]
        is_deeper = isinstance(inner, dict) and inner and data.draw(st.booleans())
        return holder | {key: change(inner) if is_deeper else data.draw(st.sampled_from(WRONG))}

    try:
        stored = describe_quantization(change(values))
    except ModelError as error:
        assert "quant" in str(error)
        assert len(str(error)) < 1000
    else:
        assert 0 < stored.group_size <= 128
