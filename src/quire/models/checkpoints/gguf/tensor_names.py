"""Tensor names in GGUF files, by those of a Hugging Face checkpoint: of each layer, without the layer.

Names: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py. Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
MIXTRAL_NAMES = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
FOUR_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA4_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
GEMMA4_EXPERT_NAMES = {
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_proj": "ffn_gate_exps",
    "experts.up_proj": "ffn_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
LFM2_NAMES = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
LFM2_MOE_NAMES = {
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
}
QWEN35_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
QWEN3_NEXT_NAMES = {"linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba"}
GRANITE_MOE_NAMES = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.experts.up_proj": "ffn_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.gate_proj": "ffn_gate_shexp",
    "shared_mlp.up_proj": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_MAMBA_NAMES = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
GRANITE_HYBRID_NAMES = {
    **{f"mamba.{name}": stored for name, stored in _MAMBA_NAMES.items()},
    "shared_mlp.gate_proj": "ffn_gate",
    "shared_mlp.up_proj": "ffn_up",
    "shared_mlp.output_linear": "ffn_down",
}
FALCON_H1_NAMES = {
    **{f"mamba.{name}": stored for name, stored in _MAMBA_NAMES.items()},
    "pre_ff_layernorm.weight": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
NEMOTRON_H_NAMES = {
    "norm": "attn_norm",
    **{f"mixer.{name}": stored for name, stored in _MAMBA_NAMES.items()},
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}
GPT_OSS_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}
QWEN2_MOE_NAMES = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GLM4_NAMES = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
DEEPSEEK_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
KIMI_LINEAR_NAMES = {
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    "self_attn.f_a_proj": "ssm_f_a",
    "self_attn.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.o_norm": "ssm_norm",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{
        f"block_sparse_moe.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")
    },
}
LLAMA4_NAMES = {
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
MIMO2_NAMES = {
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
_LAYER = re.compile(r"(?:model|backbone)\.layers\.(?P<layer>\d+)\.(?P<rest>.*)")
_FUSED = re.compile(r"(?P<layer>blk\.\d+\.)ffn_(?P<half>gate|up)_exps\.weight")
_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<number>\d+)\.(?P<rest>.*)")


def stored_tensor(name: str, names: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the tensor that holds a weight, and which expert's part of it; None: the whole.

    For `model.layers.3.mlp.experts.7.up_proj.weight` that is `blk.3.ffn_up_exps.weight` and 7.

    Args:
        name: of the weight in a Hugging Face checkpoint.
        names: the layers' tensors by their names there.

    Raises:
        KeyError: the architecture has no such tensor.
    """
    if name in MODEL_NAMES:
        return MODEL_NAMES[name], None
    found = _LAYER.fullmatch(name)
    if found is None:
        raise KeyError(name)
    layer, rest = found["layer"], found["rest"]
    if rest in names:
        return f"blk.{layer}.{names[rest]}", None
    stem, _, kind = rest.rpartition(".")
    expert = _EXPERT.fullmatch(stem)
    if expert is not None:
        stem = f"{expert['experts']}.{expert['rest']}"
    return f"blk.{layer}.{names[stem]}.{kind}", None if expert is None else int(expert["number"])


def fused_tensor(stored: str) -> tuple[str, int] | None:
    """Return the tensor of gates and of what they multiply, if this is one of experts, and which half it is.

    For `blk.3.ffn_up_exps.weight` that is `blk.3.ffn_gate_up_exps.weight` and 1.
    """
    found = _FUSED.fullmatch(stored)
    if found is None:
        return None
    return f"{found['layer']}ffn_gate_up_exps.weight", ("gate", "up").index(found["half"])
