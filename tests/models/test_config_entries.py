"""Every entry that `transformers` has in a family's class of configs: read as there, refused, or harmless."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import FAMILIES, make_model, save_checkpoint
from paged_harness import PagedHarness, random_prompts
from quire.errors import ModelError
from quire.models import config_entries
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.models.config_entries import HARMLESS
from quire.models.families import ARCHITECTURES
from quire.models.layers.attention import attention_of
from quire.models.reading import model_config

ARCHITECTURE_OF = {family: architecture for architecture, family in reversed(ARCHITECTURES.items())}
SHAPES = [name for name in FAMILIES if name not in ("llama-3.1", "smollm2", "gemma4-experts")]
# Entries by which a published config says what a model is; files without them are refused.
GIVEN = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
GIVEN |= {
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_positions",
    "n_embd",
    "n_layer",
    "n_head",
    "dim",
    "hidden_dim",
    "n_layers",
    "n_heads",
}


@pytest.fixture(autouse=True)
def _every_warning_shows() -> None:
    config_entries.warn_once.cache_clear()


def _class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture).config_class


def _fields(architecture: str) -> dict[str, Any]:
    """Return the entries of an architecture's configs and their defaults."""
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(_class(architecture))
    }


def _saved(architecture: str, **entries: Any) -> dict[str, Any]:
    """Return a config.json of small numbers."""
    values = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 6}
    values |= {"num_attention_heads": 32, "max_position_embeddings": 64}
    if "num_experts_per_tok" in _fields(architecture):
        values |= {"num_experts_per_tok": 2, "num_local_experts": 4}
        values |= {"moe_intermediate_size": 8} if "moe_intermediate_size" in _fields(architecture) else {}
    if architecture == "Llama4ForCausalLM":
        values |= {"num_experts_per_tok": 1, "interleave_moe_layer_step": 3}
    if "kv_lora_rank" in _fields(architecture):
        values |= {"num_key_value_heads": 32, "first_k_dense_replace": 1}
    if architecture.startswith(("Qwen2Moe", "Qwen3Moe", "Qwen3Next")):
        values |= {"mlp_only_layers": [0]}  # without such a layer, intermediate_size has no effect
    if architecture.startswith("Lfm2"):
        values |= {"full_attn_idxs": [1, 3], "block_multiple_of": 2}
    if architecture.startswith("Gemma4"):  # without such layers, use_double_wide_mlp has no effect
        values |= {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2}
    if architecture == "GraniteMoeHybridForCausalLM":
        values |= {"layer_types": ["mamba", "attention"] * 3}
    if architecture == "Gemma4ForCausalLM":
        values |= {"enable_moe_block": True, "num_experts": 9, "top_k_experts": 2}
        values |= {"moe_intermediate_size": 8}
    if architecture == "NemotronHForCausalLM":
        values |= {"layers_block_type": ["mamba", "moe", "attention", "mlp", "moe", "mamba"]}
    if architecture == "Zamba2ForCausalLM":
        values |= {"layers_block_type": ["mamba", "hybrid", "hybrid"] * 2}
    if architecture == "BambaForCausalLM":
        values |= {"attn_layer_indices": [1, 3]}
    if architecture == "FalconH1ForCausalLM":  # otherwise, some entries have no effect
        values |= {"mamba_rms_norm": True, "mamba_d_ssm": None}
    return {"architectures": [architecture], **values, **entries}


def _strange(default: Any) -> Any:
    """Return a value of the same type that means something else."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, float):
        return default + 0.5
    if isinstance(default, int):
        return default + 1 if default else 3
    return {str: "strange", type(None): 7}.get(type(default), ["strange"])


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_no_entry_of_the_class_is_passed_over_in_silence(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails where a new transformers has an entry that Quire does not know."""
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    saved = _saved(architecture, **windows)
    plain = model_config(saved)
    for name, default in _fields(architecture).items():
        if name in HARMLESS | {"dtype", "rope_parameters", "layer_types", "original_max_position_embeddings"}:
            continue  # what is not harmless has tests of its own
        if name == "tie_word_embeddings" and plain.pooling is not None:
            continue  # there is no output layer
        caplog.clear()
        config_entries.warn_once.cache_clear()
        strange = _strange(saved.get(name, default) if isinstance(default, bool) else default)
        if name == "local_attention":  # of which half counts
            strange += 1
        try:
            config = model_config(_saved(architecture, **{**windows, name: strange}))
        except ModelError:
            continue
        assert config != plain or name in caplog.text, f"{name}: {strange!r}"


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_missing_entries_are_those_of_the_class(architecture: str) -> None:
    written = {
        name: default
        for name, default in _fields(architecture).items()
        if name not in GIVEN | {"architectures", "dtype"}
    }
    for switch in ({}, {"use_sliding_window": True}):
        plain = _saved(architecture, **switch)
        plain["architectures"] = [architecture]
        for name, default in written.items():
            assert model_config({**plain, name: plain.get(name, default)}) == model_config(plain), name


def test_entries_of_no_class_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        model_config(
            _saved("LlamaForCausalLM", residual_multiplier=0.3, use_alibi=True, depth="x", off=False)
        )
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "does not read: depth, residual_multiplier, use_alibi" in record.message


def test_what_an_architecture_does_not_use_may_have_any_value() -> None:
    plain = _saved("LlamaForCausalLM")
    unused = {
        "num_local_experts": 0,
        "sliding_window_pattern": "LLLG",
        "sliding_window": [8, 0],
        "num_experts": 0,
    }
    assert model_config({**plain, **unused}) == model_config(plain)


def test_null_is_none_also_where_entries_have_other_names() -> None:
    scales = [
        attention_of(model_config(_saved("MiMoV2FlashForCausalLM", **entries)))[0].output_scale
        for entries in ({}, {"attention_value_scale": None}, {"layernorm_epsilon": None})
    ]
    assert scales == [0.707, 1.0, 0.707]


def test_another_type_of_model_than_its_architecture_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for model_type in ("mistral", None, "ministral"):
        model_config(_saved("MistralForCausalLM", model_type=model_type))
    (record,) = caplog.records
    assert "model_type 'ministral'" in record.message


def test_entries_of_a_rope_that_its_type_does_not_have_are_named(caplog: pytest.LogCaptureFixture) -> None:
    scaling = {"type": "linear", "factor": 2.0, "beta_fast": 3.0, "mscale": 0}
    model_config(_saved("LlamaForCausalLM", rope_scaling=scaling))
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "beta_fast; it computes without them"
    ]


@pytest.mark.parametrize(
    ("architecture", "entries", "message"),
    [
        ("Qwen3ForCausalLM", {"is_causal": False}, "bidirectional"),
        ("LlamaForCausalLM", {"per_layer_config": {"1": {"num_key_value_heads": 1}}}, "per_layer_config"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "rotates the whole of a head"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 6}, "has a window of 4096 tokens"),
        ("LlamaForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "has no window"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "has no window"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "1 layer_types for 6 layers"),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "same for all layers",
        ),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_theta": 5.0}}, "for full_attention and one"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "without factor, which it needs"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "longrope only"),
        ("FalconForCausalLM", {"alibi": True}, "alibi True; it must be False"),
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, "which make no Falcon"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention True; it must be False"),
        (
            "Gemma4UnifiedForCausalLM",
            {"num_kv_shared_layers": 5},
            "num_kv_shared_layers 5 of 6 layers, which leaves none",
        ),
        (
            "Gemma4ForCausalLM",
            {"vocab_size_per_layer_input": 63},
            "vocab_size_per_layer_input 63; there must be a row for each of vocab_size 64",
        ),
        ("Gemma4UnifiedForCausalLM", {"per_layer_config": {"6": {}}}, "config.6 {}; .* head_dim, num_key_"),
        ("Gemma4UnifiedForCausalLM", {"per_layer_config": {"1": {"hidden_size": 8}}}, "differ in head_dim"),
        (
            "Gemma4UnifiedForCausalLM",
            {"per_layer_config": {"1": {"head_dim": 8}}},
            r"heads of \[8, 256\] .* more than",
        ),
        ("Gemma4UnifiedForCausalLM", {"per_layer_config": {"1": {"head_dim": -8}}}, "1.head_dim -8; it must"),
        ("Gemma4UnifiedForCausalLM", {"use_bidirectional_attention": "all"}, "bidirectional"),
        ("Gemma4UnifiedForCausalLM", {"rope_scaling": {"factor": 2.0}}, "has rope_parameters by layer type"),
        ("GraniteMoeHybridForCausalLM", {"time_step_limit": [0.1]}, "must be two numbers from 0 on"),
        ("GraniteMoeHybridForCausalLM", {"mamba_d_head": 3}, "do not make up the 512 features"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_groups": 3}, "which 3 groups cannot serve"),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "alibi"}, "must be rope or nope"),
        (
            "FalconH1ForCausalLM",
            {"attention_in_multiplier": 0.5, "attention_bias": True},
            "attention_in_multiplier 0.5 and attention_bias",
        ),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [0.5]}, "has 1 ssm_multipliers"),
        ("NemotronHForCausalLM", {"layers_block_type": ["mlp"]}, "1 layers_block_type for 6 layers"),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": None, "hybrid_override_pattern": "M-*EX-"},
            "layers_block_type 'X'; known: linear_attention",
        ),
        ("Zamba2ForCausalLM", {"layers_block_type": None}, "has no entry 'layer_types'"),
        ("Zamba2ForCausalLM", {"layers_block_type": ["hybrid"]}, "has 1 layer_types for 6 layers"),
        ("Zamba2ForCausalLM", {"num_key_value_heads": 8}, "num_key_value_heads 8; it must be 32 in this"),
        (
            "Zamba2ForCausalLM",
            {"hybrid_layer_ids": [0]},
            r"hybrid_layer_ids \[0\]; it must be \[1, 2, 4, 5\]",
        ),
        ("Zamba2ForCausalLM", {"tie_word_embeddings": False}, "tie_word_embeddings False; it must be True"),
        ("Zamba2ForCausalLM", {"use_long_context": True}, "use_long_context True; it must be False"),
        ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope False; it must be True"),
        ("KimiLinearForCausalLM", {"linear_attn_config": {"num_heads": 0}}, "linear_num_heads 0; it must be"),
        ("KimiLinearForCausalLM", {"linear_attn_config": 3}, "linear_attn_config 3; it must be an object"),
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": {"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4, 5]}},
            "together they must be the numbers from 1 to 6",
        ),
        ("KimiLinearForCausalLM", {"mlp_layer_types": ["dense", "none"]}, "each must be dense or sparse"),
        ("MiMoV2FlashForCausalLM", {"swa_head_dim": 64}, "swa_head_dim 64; it must be 192 in this"),
        ("MiMoV2FlashForCausalLM", {"rope_theta": 1e6}, "rope_theta 1000000.0; it must be 5000000.0 in this"),
        ("MiMoV2FlashForCausalLM", {"moe_layer_freq": [0, 1, 0, 1, 1, 1]}, "moe_layer_freq .* must be .0, 1"),
        ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, "num_experts_per_tok 2; it must be 1"),
        ("Llama4ForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "known: full_attention, chunked_"),
        (
            "Llama4ForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "use_qk_norm and rotations with the factor 1.13",
        ),
        ("GptOssForCausalLM", {"swiglu_limit": 6.0}, "swiglu_limit 6.0; it must be 7.0"),
    ],
)
def test_what_changes_numbers_and_is_not_computed_is_refused(
    architecture: str, entries: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(_saved(architecture, **entries))


# Another value of each entry, of those that are true or false or numbers, which are derived, aside.
OTHER = {
    "hidden_act": "gelu",
    "hidden_activation": "gelu",
    "activation": "relu2",
    "activation_function": "relu2",
    "summary_activation": "tanh",
    "head_dim": 20,
    "num_key_value_heads": 1,
    "num_kv_heads": 2,
    "num_ln_in_parallel_attn": 1,
    "sliding_window": 7,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "no_rope_layer_interval": 3,
    "no_rope_layers": None,
    "layer_rope_theta": [1e3] * 3,
    "moe_topk": [3, 1],
    "layer_types": None,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
    "num_experts_per_tok": 1,
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.5,
    "original_max_position_embeddings": 100,
    "rms_norm_eps": 0.03,
    "norm_eps": 0.03,
    "full_attn_idxs": [0],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_norm_min": 1e-9,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 14,
    "kv_lora_rank": 26,
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_expand": 4,
    "attn_layer_indices": [0, 2],
    "n_mamba_heads": 16,
    "mamba_ngroups": 4,
    "mamba_num_heads": 12,
    "n_groups": 4,
    "mlp_hidden_act": "silu",
    "moe_latent_size": 20,
    "mamba_ssm_cache_dtype": "bfloat16",
    "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp"],
    "mtp_layers_block_type": ["mlp"],
    "mamba_d_ssm": 256,
    "mlp_multipliers": [1.7, 0.3],
    "ssm_multipliers": [1.2, 0.4, 0.6, 1.4, 0.5],
    "mamba_n_groups": 4,
    "time_step_limit": [0.4, 0.9],
    "position_embedding_type": "rope",
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "num_kv_shared_layers": 2,
    "moe_layers": [0, 2],
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "kimi_linear")
# Refused unless they say what is usual; the architectures for which they are read.
REFUSED = {
    "alibi": ("falcon",),
    "add_cross_attention": ("gpt2", "gpt_bigcode"),
    "parallel_attn": ("falcon",),
    "attn_logit_softcapping": ("gemma3",),
    "clip_qkv": ("olmoe",),
    "hidden_act": (
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "olmo_hybrid",
        "kimi_linear",
        "granitemoehybrid",
        "falcon_h1",
        "bamba",
    ),
    "qk_layernorm": ("phi", "stablelm"),
    "num_experts_per_tok": ("llama4",),
    "swiglu_alpha": ("gpt_oss",),
    "swiglu_limit": ("gpt_oss",),
    "use_qk_norm": ("cohere",),
    "attention_bias": (*LATENT, "falcon_h1", "nemotron_h"),  # beside a factor of inputs
    "mamba_proj_bias": ("falcon_h1", "nemotron_h"),
    "num_key_value_heads": (*LATENT, "zamba2"),
    "use_conv_bias": ("zamba2",),
    "use_long_context": ("zamba2",),
    "mamba_hidden_act": ("nemotron_h",),
    # without effect there, which is logged
    **dict.fromkeys(("n_shared_experts", "residual_in_fp32", "sliding_window"), ("nemotron_h",)),
    "head_dim": ("deepseek_v2", "minicpm3"),  # without effect, which is logged
    "norm_topk_prob": ("deepseek_v2",),
    "mlp_bias": ("deepseek_v2",),
    "topk_method": ("deepseek_v2",),
}
FIXED = GIVEN - {"num_experts_per_tok"} | {
    "architectures", "dtype", "rope_parameters", "transformers_version", "id2label", "label2id",
    "problem_type", "use_bidirectional_attention", "is_encoder_decoder", "return_dict", "use_cache",
    "output_hidden_states", "output_router_logits", "bos_token_id", "eos_token_id", "pad_token_id",
    "tie_word_embeddings",
}  # fmt: skip


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("family", SHAPES)
def test_all_entries_at_other_values_give_the_logits_of_transformers(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Harmless ones, too."""
    config = make_model(family).config
    fields = _fields(ARCHITECTURE_OF[family]).keys() - FIXED
    values = {name: getattr(config, name) for name in fields - vars(config).keys()} | vars(config)
    overrides = {name: OTHER.get(name, _strange(values[name])) for name in fields}
    for name, refusing in REFUSED.items():
        if family in refusing:
            del overrides[name]
    if family == "olmo_hybrid":
        overrides |= {"linear_key_head_dim": 39, "linear_value_head_dim": 13}
        overrides["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    if family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        overrides["head_dim"] = 24  # a quarter of it is rotated
        overrides["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    if family == "zamba2":
        overrides["layers_block_type"] = ["linear_attention", "hybrid", "linear_attention"]
    if family == "lfm2_moe":
        del overrides["layer_types"]  # transformers cannot do without
    if family.startswith("gemma4"):
        overrides["layer_types"] = ["full_attention", "sliding_attention"] * (config.num_hidden_layers // 2)
        overrides["layer_types"][-1] = "full_attention"  # as the class does
    if family in ("granitemoehybrid", "kimi_linear"):
        overrides["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    if family == "gemma4":
        overrides |= {"num_experts": 9, "moe_intermediate_size": 40}
    if family == "phimoe":
        del overrides["num_experts_per_tok"]  # always 2
    changed = make_model(family, **overrides)
    save_checkpoint(changed, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    given = {name: value for name, value in overrides.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values | given))
    decoder = load_decoder(tmp_path, read_model_config(tmp_path))
    (prompt,) = random_prompts([40], vocab_size=decoder.config.vocab_size)
    with torch.no_grad():
        wanted = changed(torch.tensor([prompt])).logits[0]
    assert not [record for record in caplog.records if record.name.startswith("quire")]
    found = decoder.logits(PagedHarness(decoder, [len(prompt)]).step([0], [0], [prompt]))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


# What the published files of some models have beside the shape, as far as it could be taken for strange.
PUBLISHED: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {
        "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128,
        "hidden_dropout": 0.0, "hybrid_override_pattern": "ME*M-E", "layer_norm_epsilon": 1e-05,
        "layers_block_type": None, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
        "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "mlp_bias": False,
        "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 6,
        "num_key_value_heads": 2, "num_local_experts": None, "num_logits_to_keep": 1,
        "rescale_prenorm_residual": True, "residual_in_fp32": False, "routed_scaling_factor": 2.5,
        "sliding_window": None, "ssm_state_size": 128, "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
        "topk_group": 1, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True,
    },
    "KimiLinearForCausalLM": {
        "first_k_dense_replace": 1, "head_dim": 8, "hidden_act": "silu", "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 6], "head_dim": 128, "kda_layers": [1, 2, 3, 5], "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear",
        "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 256,
        "num_local_experts": None,
        "num_experts_per_token": 8, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "topk_group": 1,
        "use_grouped_topk": True, "v_head_dim": 128,
    },
    "MiMoV2FlashForCausalLM": {
        "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "attention_bias": False,
        "attention_chunk_size": 128, "attention_value_scale": 0.707, "head_dim": 192,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "layernorm_epsilon": 1e-05, "model_type": "mimo_v2_flash",
        "moe_intermediate_size": 2048, "moe_layer_freq": [0, 1, 1, 1, 1, 1], "n_group": 1,
        "n_routed_experts": 256, "n_shared_experts": None, "norm_topk_prob": True, "num_key_value_heads": 4,
        "num_local_experts": None, "partial_rotary_factor": 0.334, "rope_theta": 5000000,
        "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128,
        "sliding_window_size": 128, "swa_head_dim": 192, "swa_num_attention_heads": 32,
        "swa_num_key_value_heads": 8, "swa_rope_theta": 10000, "swa_v_head_dim": 128, "topk_group": 1,
        "topk_method": "noaux_tc", "v_head_dim": 128,
    },
    "FalconH1ForCausalLM": {
        "attention_bias": False, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
        "attn_layer_indices": None, "embedding_multiplier": 5.656854249492381, "head_dim": 64,
        "key_multiplier": 0.39, "lm_head_multiplier": 0.0195, "mamba_chunk_size": 128,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24,
        "mamba_norm_before_gate": False, "mamba_proj_bias": False,
        "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False, "mlp_expansion_factor": 8,
        "mlp_multipliers": [0.88, 0.58], "model_type": "falcon_h1", "num_logits_to_keep": 1,
        "projectors_bias": False, "rope_scaling": None, "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
        "ssm_out_multiplier": 0.23,
    },
    "GraniteMoeHybridForCausalLM": {
        "attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12,
        "init_method": "mup", "layer_types": ["mamba"] * 5 + ["attention"], "logits_scaling": 3,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8,
        "mamba_proj_bias": False, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
        "num_experts_per_tok": 0, "num_local_experts": 0, "output_router_logits": False,
        "position_embedding_type": "nope", "residual_multiplier": 0.246, "rope_scaling": None,
        "rope_theta": 10000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192,
    },
    "Qwen2ForCausalLM": {
        "attention_dropout": 0.0, "bos_token_id": 151643, "initializer_range": 0.02, "max_window_layers": 28,
        "model_type": "qwen2", "rms_norm_eps": 1e-6, "sliding_window": 131072, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    },
    "Qwen3_5MoeForCausalLM": {
        "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2),
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [], "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_experts": 256, "num_local_experts": None,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
        "shared_expert_intermediate_size": 512,
    },
    "LlamaForCausalLM": {
        "_name_or_path": "x", "attention_bias": False, "is_llama_config": True, "mlp_bias": False,
        "model_type": "llama", "pretraining_tp": 1, "rope_interleaved": False, "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"}, "eos_token_id": [1, 2], "max_sequence_length": 2048,
    },
    "Phi3ForCausalLM": {
        "attention_bias": False, "auto_map": {"AutoConfig": "x--y"}, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "model_type": "phi3", "original_max_position_embeddings": 64, "sliding_window": 262144,
        "partial_rotary_factor": 1.0,
    },
    "Gemma3ForCausalLM": {
        "_sliding_window_pattern": 6, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": None,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "model_type": "gemma3_text",
        "rope_local_base_freq": 10000, "rope_theta": 1000000.0, "use_bidirectional_attention": False,
    },
    "SmolLM3ForCausalLM": {
        "layer_types": ["full_attention"] * 6, "max_window_layers": 28, "model_type": "smollm3",
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1, 1], "pretraining_tp": 2,
        "sliding_window": None, "use_sliding_window": False,
    },
    "GptOssForCausalLM": {
        "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "model_type": "gpt_oss",
        "num_key_value_heads": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 150000,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                         "original_max_position_embeddings": 4096, "truncate": False},
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "Olmo3ForCausalLM": {
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2, "model_type": "olmo3",
        "num_hidden_layers": 8, "rope_theta": 500000, "sliding_window": 4096,
        "rope_scaling": {"attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 8, "rope_type": "yarn"},
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", list(PUBLISHED))
def test_published_files_are_read_without_a_word(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    model_config(_saved(architecture, **PUBLISHED[architecture]))
    assert not caplog.records


def test_an_object_of_linear_attention_says_what_entries_of_their_own_do() -> None:
    published = _saved("KimiLinearForCausalLM", **PUBLISHED["KimiLinearForCausalLM"])
    sizes = {"head_dim": 24, "num_heads": 5, "short_conv_kernel_size": 3}
    layers = {"full_attn_layers": [1, 4], "kda_layers": [2, 3, 5, 6]}
    types = ["full_attention" if layer in (0, 3) else "linear_attention" for layer in range(6)]
    own = {"linear_head_dim": 24, "linear_num_heads": 5, "linear_conv_kernel_dim": 3, "layer_types": types}
    config = model_config({**published, "linear_attn_config": sizes | layers})
    assert config == model_config({**published, "linear_attn_config": None, **own})
    assert [layer.state is None for layer in config.layers] == [True, False, False, True, False, False]


def test_windows_of_mimo_are_said_in_either_way() -> None:
    published = _saved("MiMoV2FlashForCausalLM", **PUBLISHED["MiMoV2FlashForCausalLM"])
    config = model_config(published)
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    ropes = {"full_attention": rope | {"rope_theta": 5e6}, "sliding_attention": rope | {"rope_theta": 1e4}}
    saved = {"sliding_window": 129, "sliding_window_size": None, "rope_parameters": ropes}
    assert config == model_config(published | saved)
    specs = config.kv_specs
    assert [spec.window for spec in specs] == [0, 129, 129, 129, 129, 0]
    assert [spec.num_kv_heads for spec in specs] == [4, 8, 8, 8, 8, 4]
    assert {(spec.key_head_dim, spec.value_head_dim) for spec in specs} == {(192, 128)}
