"""Families with multi-head latent attention: DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.errors import ModelError
from quire.models.config import ModelConfig, RopeConfig
from quire.models.families.family import NAMES, Family
from quire.models.layer import LayerConfig
from quire.models.layers.latent_attention import LatentAttentionConfig
from quire.models.ropes import HFConfig, read_rope, read_score_factor


def _rope(hf: HFConfig, head_dim: int) -> tuple[RopeConfig]:
    return (read_rope(hf, hf["qk_rope_head_dim"]),)


def _with_latents(hf: HFConfig, base: ModelConfig, *, is_interleaved: bool) -> ModelConfig:
    """Give every layer latent attention in place of attention with heads of keys and values."""
    heads = hf["num_attention_heads"]
    if hf.get("num_key_value_heads", heads) != heads:
        raise ModelError(
            f"config.json has num_key_value_heads {hf['num_key_value_heads']}; latent attention has as many "
            f"as num_attention_heads, {heads}"
        )
    if hf.get("attention_bias"):
        raise ModelError("config.json has attention_bias true, which is not supported in latent attention")
    nope, rope = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    attention = LatentAttentionConfig(
        num_heads=heads,
        rope=base.ropes[0],
        scale=(nope + rope) ** -0.5 * read_score_factor(hf),
        q_lora_rank=hf.get("q_lora_rank", 0),
        kv_lora_rank=hf["kv_lora_rank"],
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=hf.get("v_head_dim") or hf["hidden_size"] // heads,
        rope_interleave=is_interleaved,
    )
    layers = (LayerConfig((attention, *layer.parts[1:])) for layer in base.layers)
    return replace(base, layers=tuple(layers))


def _minicpm3(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = _with_latents(hf, base, is_interleaved=False)
    return replace(
        config,
        embedding_scale=hf["scale_emb"],
        residual_scale=hf.get("scale_depth", math.sqrt(base.num_layers)) / math.sqrt(base.num_layers),
        logits_divisor=base.hidden_size / hf.get("dim_model_base", base.hidden_size),
    )


FAMILIES: dict[str, Family] = {
    "minicpm3": Family(
        _minicpm3,
        NAMES,
        {
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        ropes=_rope,
        architectures=("MiniCPM3ForCausalLM",),
    ),
}
