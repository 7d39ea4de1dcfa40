"""Every family against `transformers` on random checkpoints: greedy tokens and logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import FAMILIES, make_model, save_checkpoint
from paged_harness import PagedHarness, generate, random_prompts
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.models.layers.experts import ExpertsConfig
from quire.models.weights import count_parameters

NUM_NEW = 48
PROMPT_LENGTHS = [1, 5, 40, 83]
LONG_FACTORS = [1.0 + 0.3 * i for i in range(8)]
SHORT_FACTORS = [1.0 + 0.05 * i for i in range(8)]


def _longrope(original: int) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": LONG_FACTORS,
            "short_factor": SHORT_FACTORS,
            "original_max_position_embeddings": original,
        },
        "original_max_position_embeddings": original,
        "sliding_window": None,
    }


# What families allow beyond their usual shape: (name, family, overrides of the config).
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    *((family, family, {}) for family in FAMILIES),
    ("llama-linear", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    (
        "llama-dynamic",
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    (
        "qwen3-yarn",
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    ("phi3-longrope-short", "phi3", _longrope(512)),
    ("mistral-full", "mistral", {"sliding_window": None}),
    (
        "qwen2-windows",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    (
        "smollm3-windows",
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 13, "attention_bias": True, "mlp_bias": True},
    ),
    ("gemma-silu", "gemma", {"hidden_act": "silu"}),
    ("gemma-legacy-gelu", "gemma", {"hidden_act": "gelu"}),
    ("gemma2-other-hidden-act", "gemma2", {"hidden_act": "relu2"}),
    ("gemma3-default-layers", "gemma3", {"layer_types": None, "num_hidden_layers": 7}),
    ("mixtral-window", "mixtral", {"sliding_window": 15}),
    (
        "qwen3_moe-sparse-step",
        "qwen3_moe",
        {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [], "num_hidden_layers": 2},
    ),
    (
        "qwen3_moe-windows",
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2},
    ),
    ("gpt_neox-in-turn", "gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("falcon-heads", "falcon", {"multi_query": False, "bias": True, "parallel_attn": False}),
    ("falcon-groups", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    (
        "falcon-one-norm",
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    (
        "gpt2-scales",
        "gpt2",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "scale_attn_weights": False,
            "n_inner": None,
            "intermediate_size": None,
        },
    ),
    ("gpt_bigcode-heads", "gpt_bigcode", {"multi_query": False}),
    ("stablelm-parallel", "stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("exaone4-no-windows", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 5}),
    (
        "hunyuan-alpha",
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}},
    ),
    (
        "hunyuan-yarn",
        "hunyuan_v1_dense",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    (
        "phimoe-longrope",
        "phimoe",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "long_factor": LONG_FACTORS,
                "short_factor": SHORT_FACTORS,
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    (
        "granitemoehybrid-dense",
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
    ),
    (
        "granitemoehybrid-time-limits",
        "granitemoehybrid",
        {"mamba_n_groups": 1, "time_step_limit": [0.5, 0.8], "mamba_conv_bias": False},
    ),
    ("falcon_h1-norm-before-gate", "falcon_h1", {"mamba_norm_before_gate": True}),
    (
        "falcon_h1-without-norm",
        "falcon_h1",
        {
            "mamba_rms_norm": False,
            "mamba_d_ssm": None,
            "mamba_n_heads": 8,
            "projectors_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "attention_in_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
        },
    ),
    (
        "nemotron_h-biases",
        "nemotron_h",
        {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "time_step_min": 0.6},
    ),
    ("nemotron_h-latent", "nemotron_h", {"moe_latent_size": 20, "mlp_bias": True}),
    ("zamba2-plain", "zamba2", {"use_shared_attention_adapter": False, "use_mem_rope": False}),
    ("zamba2-biases", "zamba2", {"num_mem_blocks": 2, "add_bias_linear": True, "time_step_min": 0.6}),
    ("olmo_hybrid-no-rope", "olmo_hybrid", {"rope_parameters": {"rope_theta": None}}),
    ("olmo_hybrid-default-layers", "olmo_hybrid", {"layer_types": None, "linear_allow_neg_eigval": False}),
    ("olmo2-bias", "olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
]


def _load(model: Any, directory: Path, dtype: str = "auto") -> Any:
    save_checkpoint(model, directory)
    return load_decoder(directory, read_model_config(directory), dtype)


def _reference_logits(model: Any, prompt: list[int], new: list[int]) -> torch.Tensor:
    """Return transformers' logits at each position from which a token of `new` came."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + new[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].float()


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("family", "overrides"), [v[1:] for v in VARIANTS], ids=[v[0] for v in VARIANTS])
def test_greedy_tokens_and_logits_equal_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(family, **overrides)
    decoder = _load(model, tmp_path)
    buffers = [tensor for name, tensor in model.named_buffers() if name in model.state_dict()]
    assert count_parameters(decoder.config) == sum(p.numel() for p in (*model.parameters(), *buffers))
    prompts = random_prompts(PROMPT_LENGTHS, vocab_size=decoder.config.vocab_size)
    whole = generate(decoder, prompts, num_new=NUM_NEW)
    chunked = generate(decoder, prompts, num_new=NUM_NEW, chunk=11, seed=1)
    for prompt, one, other in zip(prompts, whole, chunked, strict=True):
        expected = _reference_logits(model, prompt, one.token_ids)
        # Equal at each position given equal tokens before it: the greedy continuations are the same.
        assert one.token_ids == expected.argmax(-1).tolist()
        assert other.token_ids == one.token_ids
        torch.testing.assert_close(one.logits, expected, atol=3e-3 if family == "zamba2" else 1e-4, rtol=0)


@pytest.mark.formats
def test_dense_layers_of_kimi_have_the_names_of_transformers_or_those_published(tmp_path: Path) -> None:
    path = save_checkpoint(make_model("kimi_linear"), tmp_path)
    weights = load_file(path / "model.safetensors")
    load_decoder(path, read_model_config(path))
    renamed = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): weights[name] for name in weights}
    assert renamed.keys() != weights.keys()
    save_file(renamed, path / "model.safetensors")
    load_decoder(path, read_model_config(path))


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "phi3", "qwen3_moe"])
def test_greedy_tokens_equal_generate_with_a_cache(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    prompt = random_prompts([30], vocab_size=model.config.vocab_size)[0]
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0
        )
    decoder = _load(model, tmp_path)
    assert generate(decoder, [prompt], num_new=NUM_NEW)[0].token_ids == expected[0, len(prompt) :].tolist()


def test_longrope_takes_the_long_factors_for_a_longer_model(tmp_path: Path) -> None:
    # transformers picks the long factors once a sequence passes the original length; Quire for every
    # sequence of a model that may, so compare where both take them: prompts longer than that.
    model = make_model("phi3", **_longrope(32))
    decoder = _load(model, tmp_path)
    prompts = random_prompts([40, 100], vocab_size=decoder.config.vocab_size)
    for prompt, generated in zip(prompts, generate(decoder, prompts, num_new=NUM_NEW, chunk=13), strict=True):
        expected = _reference_logits(model, prompt, generated.token_ids)
        torch.testing.assert_close(generated.logits, expected, atol=1e-4, rtol=0)


# The stated bound for bfloat16: at the median position, the root-mean-square error against float32
# arithmetic over the same weights is at most this share of the logits' root mean square. (The median, because
# a mixture of experts may send a token elsewhere after a rounding.) Dense families also stay below the error
# of transformers' own bfloat16.
BFLOAT16_BOUND = 0.025
BFLOAT16_BOUND_OF_ZAMBA2 = 0.08  # between norms, random blocks make much of a rounding, also in float32


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("family", list(FAMILIES))
def test_bfloat16_logits_are_within_the_stated_bound(family: str, tmp_path: Path) -> None:
    model = make_model(family, dtype="bfloat16")
    decoder = _load(model, tmp_path)
    assert decoder.dtype == torch.bfloat16
    prompt = random_prompts([150], vocab_size=decoder.config.vocab_size)[0]
    ours = decoder.logits(PagedHarness(decoder, [150]).step([0], [0], [prompt]))
    theirs = _reference_logits(model, prompt[:1], [*prompt[1:], 0])
    exact = _reference_logits(model.float(), prompt[:1], [*prompt[1:], 0])
    assert _median_error(ours, exact) < (BFLOAT16_BOUND_OF_ZAMBA2 if family == "zamba2" else BFLOAT16_BOUND)
    if not any(isinstance(part, ExpertsConfig) for part in decoder.config.parts):
        assert _median_error(ours, exact) < _median_error(theirs, exact)


def _median_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return ((logits - exact).square().mean(-1).sqrt() / exact.square().mean().sqrt()).median().item()


def test_float16_runs(tmp_path: Path) -> None:
    model = make_model("llama")
    decoder = _load(model, tmp_path, dtype="float16")
    prompt = random_prompts([20], vocab_size=decoder.config.vocab_size)[0]
    ours = decoder.logits(PagedHarness(decoder, [20]).step([0], [0], [prompt]))
    assert _median_error(ours, _reference_logits(model, prompt[:1], [*prompt[1:], 0])) < BFLOAT16_BOUND
