"""OLMo 2 and 3, with norms after the sub-layers, OLMoE, and OLMo-Hybrid."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import (
    FOUR_NORM_NAMES,
    NAMES,
    Family,
    layer_windows,
    read_delta_net,
    with_attention_biases,
    with_experts,
    with_two_ropes,
)
from quire.models.layer import LayerConfig, SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.ropes import HFConfig, read_two_ropes


def _olmo2(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = with_attention_biases(hf, base).changed(SubLayerConfig, pre_norm=False, post_norm=True)
    return config.changed(AttentionConfig, qk_norm="full")


def _olmo3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    windows = layer_windows(hf, lambda layer: (layer + 1) % 4 != 0)
    return with_two_ropes(_olmo2(hf, base), windows, _olmo3_ropes(hf, base.kv_specs[0].key_head_dim))


def _olmoe(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return with_experts(
        with_attention_biases(hf, base).changed(AttentionConfig, qk_norm="full"),
        [True] * base.num_layers,
        num_experts=hf.get("num_experts") or hf["num_local_experts"],
        experts_per_token=hf.get("num_experts_per_tok", 8),
        inner_size=hf["intermediate_size"],
        normalize=bool(hf.get("norm_topk_prob", False)),
    )


def _olmo3_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    return read_two_ropes(hf, head_dim, sliding_theta=5e5)


def _olmo_hybrid(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Layers with attention have norms behind sub-layers, and the others before them."""
    heads = hf["num_attention_heads"]
    key_dim = hf.get("linear_key_head_dim") or int(
        0.75 * base.hidden_size / hf.get("linear_num_key_heads", heads)
    )
    usual = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
    }
    delta_net = read_delta_net(
        ChainMap(hf, usual),  # type: ignore[arg-type]
        norm_eps=1e-5,
        max_strength=2.0 if hf["linear_allow_neg_eigval"] else 1.0,
    )
    layers = range(base.num_layers)
    types = hf.get("layer_types")
    attending = {layer for layer in layers if layer % 4 == 3} or {base.num_layers - 1}
    if types is not None:
        attending = {layer for layer in layers if types[layer] == "full_attention"}
    is_rotated = (hf.get("rope_parameters") or {}).get("rope_theta", 0) is not None
    normed_behind = _olmo2(hf, base)
    if not is_rotated:
        normed_behind = normed_behind.changed(AttentionConfig, rope=None)
    recurrent = LayerConfig((delta_net, base.layers[0].parts[1]))
    return replace(
        base,
        layers=tuple(normed_behind.layers[i] if i in attending else recurrent for i in layers),
    )


FAMILIES: dict[str, Family] = {
    "olmoe": Family(
        _olmoe,
        NAMES,
        {"rms_norm_eps": 1e-5},
        architectures=("OlmoeForCausalLM",),
        fixed={"clip_qkv": None},
    ),
    "olmo2": Family(
        _olmo2, NAMES | FOUR_NORM_NAMES, {"rms_norm_eps": 1e-5}, architectures=("Olmo2ForCausalLM",)
    ),
    "olmo3": Family(
        _olmo3,
        NAMES | FOUR_NORM_NAMES,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        ropes=_olmo3_ropes,
        architectures=("Olmo3ForCausalLM",),
    ),
    "olmo_hybrid": Family(
        _olmo_hybrid,
        NAMES
        | {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
            "delta_q": "linear_attn.q_proj",
            "delta_k": "linear_attn.k_proj",
            "delta_v": "linear_attn.v_proj",
            "delta_q_conv": "linear_attn.q_conv1d",
            "delta_k_conv": "linear_attn.k_conv1d",
            "delta_v_conv": "linear_attn.v_conv1d",
            "delta_z": "linear_attn.g_proj",
            "delta_b": "linear_attn.b_proj",
            "delta_a": "linear_attn.a_proj",
            "delta_norm": "linear_attn.o_norm",
            "delta_out": "linear_attn.o_proj",
        },
        {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
        architectures=("OlmoHybridForCausalLM",),
        layer_types=("full_attention", "linear_attention"),
    ),
}
