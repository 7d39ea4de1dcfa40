"""The model shapes of the comparison: sizes of published models, as their config.json has them.

Plain Python only: every worker imports this module in its own environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMALLEST_VOCABULARY = 151_936  # prompts have no larger token ids
END_OF_TEXT_ID = 257  # the tokenizer's only special token


@dataclass(frozen=True)
class ModelShape:
    """A model by its config.json, and the type of its GGUF file in int4."""

    config: dict[str, Any]
    gguf_type: str = "q4_k_m"

    @property
    def kv_values(self) -> int:
        """Elements of one token's keys and values if each layer kept them for its largest heads."""
        head = max(self.config["head_dim"], self.config.get("global_head_dim", 0))
        return 2 * self.config["num_hidden_layers"] * self.config["num_key_value_heads"] * head


def _shape(architecture: str, gguf_type: str = "q4_k_m", **config: Any) -> ModelShape:
    common = {
        "architectures": [architecture],
        "dtype": "bfloat16",
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "use_cache": True,
    }
    return ModelShape(common | config, gguf_type)


def _qwen3(**config: Any) -> ModelShape:
    return _shape(
        "Qwen3ForCausalLM",
        model_type="qwen3",
        vocab_size=151_936,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        attention_bias=False,
        max_position_embeddings=40_960,
        rope_theta=1_000_000,
        tie_word_embeddings=True,
        **config,
    )


SHAPES = {
    "0.6b": _qwen3(hidden_size=1_024, intermediate_size=3_072, num_hidden_layers=28, num_attention_heads=16),
    "4b": _qwen3(hidden_size=2_560, intermediate_size=9_728, num_hidden_layers=36, num_attention_heads=32),
    "qwen3.5-0.8b": _shape(
        "Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        vocab_size=248_320,
        hidden_size=1_024,
        intermediate_size=3_584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        hidden_act="silu",
        attention_bias=False,
        max_position_embeddings=262_144,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
    ),
    # 4 of 24 layers.
    "gpt-oss-20b": _shape(
        "GptOssForCausalLM",
        "mxfp4",
        model_type="gpt_oss",
        vocab_size=201_088,
        hidden_size=2_880,
        intermediate_size=2_880,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        experts_per_token=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        swiglu_limit=7.0,
        hidden_act="silu",
        attention_bias=True,
        max_position_embeddings=131_072,
        initial_context_length=4_096,
        rms_norm_eps=1e-5,
        rope_theta=150_000,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4_096,
        },
        tie_word_embeddings=False,
    ),
    # 6 of 48 layers.
    "qwen3-30b-a3b": _shape(
        "Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        vocab_size=151_936,
        hidden_size=2_048,
        intermediate_size=6_144,
        moe_intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        hidden_act="silu",
        attention_bias=False,
        max_position_embeddings=40_960,
        rope_theta=1_000_000,
        tie_word_embeddings=False,
    ),
    "gemma4-e2b": _shape(
        "Gemma4ForCausalLM",
        model_type="gemma4_text",
        vocab_size=262_144,
        vocab_size_per_layer_input=262_144,
        hidden_size=1_536,
        hidden_size_per_layer_input=256,
        intermediate_size=6_144,
        use_double_wide_mlp=True,
        num_hidden_layers=35,
        num_kv_shared_layers=20,
        num_attention_heads=8,
        num_key_value_heads=1,
        num_global_key_value_heads=None,
        head_dim=256,
        global_head_dim=512,
        attention_k_eq_v=False,
        sliding_window=512,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        enable_moe_block=False,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        max_position_embeddings=131_072,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
        tie_word_embeddings=True,
    ),
}
