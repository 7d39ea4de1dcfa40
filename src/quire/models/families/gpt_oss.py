"""gpt-oss: attention with sinks, and experts with biases and a clamped activation."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.families.family import NAMES, Family, layer_windows, with_attention_biases, with_experts
from quire.models.layers.attention import AttentionConfig
from quire.models.ropes import HFConfig

_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _gpt_oss(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    for name in ("experts_per_token", "initial_context_length"):
        hf.get(name)  # published, and has no effect
    for name, known in _SWIGLU.items():
        if hf[name] != known:
            raise ModelError(f"config.json has {name} {hf[name]!r:.100}; only {known} is computed")
    windows = layer_windows(hf, lambda layer: layer % 2 == 0)
    attention = with_attention_biases(hf, base).changed(AttentionConfig, window=windows, has_sinks=True)
    return with_experts(
        attention,
        [True] * base.num_layers,
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["intermediate_size"],
        normalize=True,
        bias=True,
        activation="clamped_swiglu",
    )


FAMILIES: dict[str, Family] = {
    "gpt_oss": Family(
        _gpt_oss,
        NAMES | {"router": "mlp.router"},
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            **_SWIGLU,
        },
        architectures=("GptOssForCausalLM",),
    ),
}
