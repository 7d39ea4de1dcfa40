"""Reading config.json: the old and the new form, the defaults, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint, make_model
from quire.errors import ModelError, UnknownArchitectureError
from quire.kv import KVLayerSpec
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.config import ModelConfig
from quire.models.families import ARCHITECTURES, FAMILIES
from quire.models.layers.attention import attention_of
from quire.models.weights import count_parameters

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory)


def test_a_published_model(tmp_path: Path) -> None:
    config = _read(tmp_path, QWEN3_0_6B)
    assert count_parameters(config) == 596_049_920  # the model card: 0.6 B, 0.44 B without embeddings
    assert config.kv_layers == (KVLayerSpec(8, 128, 128),) * 28
    assert (config.dtype, config.max_model_len) == ("bfloat16", 40960)
    assert {layer.qk_norm for layer in attention_of(config)} == {"head"}
    assert config.ropes[0].theta == 1e6


def _old_form(new: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a config as files on the hub were written before `rope_parameters`."""
    old = {**new, "torch_dtype": new["dtype"]}
    del old["dtype"]
    parameters = old.pop("rope_parameters")
    if "full_attention" in parameters:
        full, sliding = parameters["full_attention"], parameters["sliding_attention"]
        old["rope_local_base_freq"] = sliding["rope_theta"]
        parameters = full
        if new["architectures"] == ["Gemma3ForCausalLM"]:
            del old["layer_types"]
            old["sliding_window_pattern"] = 3
    old["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    kind = parameters.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}
    return old


@pytest.mark.parametrize("family", ["llama", "llama-3.1", "phi3", "gemma3", "olmo3", "qwen3"])
def test_old_and_new_form_read_the_same(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    new = json.loads(model.config.to_json_string(use_diff=False))
    new["architectures"] = [type(model).__name__]
    new["dtype"] = "float32"
    assert _read(tmp_path, _old_form(json.loads(json.dumps(new)))) == _read(tmp_path, new)


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("Qwen3ForCausalLn", "Qwen3ForCausalLM"),
        ("Gemma3ForConditionalGenerator", "Gemma3ForConditionalGeneration"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest(
    unknown: str, nearest: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownArchitectureError, match=rf"{unknown}, .* nearest by name: {nearest},"):
        _read(tmp_path, QWEN3_0_6B | {"architectures": [unknown]})


def test_a_long_unknown_architecture_makes_a_short_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        _read(tmp_path, QWEN3_0_6B | {"architectures": ["x" * 256]})
    assert len(str(caught.value)) < 500


def test_every_architecture_has_a_family() -> None:
    others = set(FAMILIES) - set(ARCHITECTURES.values())
    assert others == {"falcon_two_norms", "qwen3_next_split"}  # names of weights that some files have


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu6"}, "activation 'relu6'"),
        ({"torch_dtype": "int4"}, "dtype 'int4'"),
        ({"num_key_value_heads": 3}, "16 attention heads cannot share 3"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral'"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "1 short_factors; it needs 64"),
        ({"hidden_size": None}, "hidden_size"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1"),
        ({"layer_types": ["linear_attention"] * 28}, "layer type 'linear_attention'"),
        ({"layer_types": ["full_attention"], "use_sliding_window": True}, "1 layer_types for 28 layers"),
        ({"rope_scaling": ["linear"]}, "rope_scaling .* must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.inf}}, "rope_scaling.factor inf"),
        ({"rope_parameters": {"full_attention": {"rope_theta": math.nan}}}, "full_attention.rope_theta nan"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "more than one"),
        ({"hidden_size": 0}, "hidden_size 0; it must be an integer from 1 to 131072"),
        ({"hidden_size": True}, "hidden_size True"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers 1099511627776"),
        ({"num_hidden_layers": 10**4000}, "num_hidden_layers of 13288 bits"),
        ({"vocab_size": 1e9}, "vocab_size 1000000000.0"),
        ({"head_dim": -128}, "head_dim -128"),
        ({"head_dim": 0}, "head_dim 0"),
        ({"head_dim": 127}, "must be pairs"),
        (
            {"architectures": ["LlamaForCausalLM"], "head_dim": None, "hidden_size": 8},
            "num_attention_heads 16 and hidden_size 8, .* head_dim must say",
        ),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps nan"),
        ({"rope_theta": "1e6"}, "rope_theta '1e6'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'; it must be true or false"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures .* must be a list"),
        ({"layer_types": [["full_attention"]]}, "layer_types"),
        ({"quantization_config": ["gptq"]}, "quantization_config .* must be an object"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": None},
            "no entry 'num_experts_per_tok'",
        ),
    ],
)
def test_unusable_values_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        _read(tmp_path, QWEN3_0_6B | changes)


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "tie_word_embeddings", "head_dim"])
def test_null_counts_as_missing(name: str, tmp_path: Path) -> None:
    without = {key: value for key, value in QWEN3_0_6B.items() if key != name}
    assert _read(tmp_path, QWEN3_0_6B | {name: None}) == _read(tmp_path, without)


def test_missing_entry_is_named(tmp_path: Path) -> None:
    values = {key: value for key, value in QWEN3_0_6B.items() if key != "vocab_size"}
    with pytest.raises(ModelError, match="vocab_size"):
        _read(tmp_path, values)


def test_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds list, not an object"):
        read_model_config(tmp_path)


def test_the_parts_of_a_shared_block_are_checked(tmp_path: Path) -> None:
    make_checkpoint("zamba2", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelError, match="'xielu', which is not supported with gates"):
        _read(tmp_path, values | {"hidden_act": "xielu"})
