"""Small random checkpoints of every family, written by `transformers`, with a tokenizer beside them.

Norm weights, biases and router weights are randomized too, so that a wrong mapping cannot pass unseen.
Sliding windows are shorter than the sequences that tests run.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 384

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

_MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
}
_GRANITE_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}

_FALCON_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.2,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.6, 1.4],
    "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8],
}

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}

# family: (config class, what differs from the common shape)
_SHARED = {
    "num_experts": 7,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-3.1": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 24,
            "intermediate_size": 40,
            "intermediate_size_mlp": 112,
            "num_hidden_layers": 4,
            "num_local_experts": 5,
            "moe_layers": [1, 3],
            "no_rope_layers": [1, 1, 0, 1],
            "attention_chunk_size": 11,
            "floor_scale": 7,
            "attn_scale": 0.3,
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 12, "head_dim": 24}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 24,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 512,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma": ("GemmaConfig", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 10,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 9,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-experts": (
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedTextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "sliding_window": 14,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "smollm2": ("LlamaConfig", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 72}),
    "smollm3": (
        "SmolLM3Config",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 11,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granite": (
        "GraniteConfig",
        {**_GRANITE_MULTIPLIERS, "tie_word_embeddings": True},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {**_GRANITE_MULTIPLIERS, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 40},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            **_GRANITE_MULTIPLIERS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "tie_word_embeddings": True,
        },
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {
            "attention_multiplier": 0.3,
            "num_hidden_layers": 3,
            "sliding_window": 11,
            "layer_rope_theta": [0, 1e4, 5e5],
        },
    ),
    "bamba": ("BambaConfig", {**_MAMBA, "attn_layer_indices": [1], "mamba_n_groups": 1}),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_MAMBA,
            **_FALCON_MULTIPLIERS,
            "num_hidden_layers": 2,
            "mamba_n_heads": 6,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "num_hidden_layers": 5,
            "head_dim": 24,
            "ssm_state_size": 24,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "adapter_rank": 12,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 24,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            **_SHARED,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "mlp_only_layers": [1],
            **_SHARED,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_key_heads": 2,  # as wide as those of values: transformers saves thirds of filters
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_SHARED,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 2}),
    "glm": ("GlmConfig", {"head_dim": 24}),
    "glm4": ("Glm4Config", {"head_dim": 24, "num_attention_heads": 6}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_hidden_layers": 3,
        },
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 24, "tie_word_embeddings": True}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 3,
            "use_bias": True,
        },
    ),
    "phi": ("PhiConfig", {"num_key_value_heads": 4, "rope_parameters": _PARTIAL}),
    "phimoe": (
        "PhimoeConfig",
        {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True, "sliding_window": 13},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "cohere2": (
        "Cohere2Config",
        {"logit_scale": 0.3, "tie_word_embeddings": True, "sliding_window": 11, "num_hidden_layers": 5},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rope_parameters": _PARTIAL},
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            "head_dim": 32,
            "v_head_dim": 16,
            "num_key_value_heads": 1,
            "sliding_window": 11,
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 24}),
    "exaone4": ("Exaone4Config", {"sliding_window": 12, "num_hidden_layers": 5}),
    "gpt_neox": ("GPTNeoXConfig", {"num_attention_heads": 4, "rope_parameters": _PARTIAL}),
    "falcon": ("FalconConfig", {}),
    "gpt2": ("GPT2Config", {"n_inner": 112}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"n_inner": 112}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {"head_dim": 24}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"head_dim": 24, "num_experts": 6, "moe_topk": [2, 3]}),
    "stablelm": ("StableLmConfig", {"rope_parameters": _PARTIAL}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 13, "tie_word_embeddings": True}),
    "arcee": ("ArceeConfig", {}),
    "apertus": ("ApertusConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_LATENT,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {
            **_LATENT,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-3,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 18,
        },
    ),
    "minicpm3": (
        "MiniCPM3Config",
        {
            **_LATENT,
            "scale_emb": 3,
            "dim_model_base": 32,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 11,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "head_dim": 16,
        },
    ),
}


def make_tokenizer(
    directory: Path, *, vocab_size: int = VOCAB_SIZE, chat_template: str | None = None
) -> None:
    """Write a small byte-level BPE tokenizer with a chat template into `directory`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    corpus = ["the cache holds keys and values of the tokens that were computed before " * 4]
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 300),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE if chat_template is None else chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def randomize(model: torch.nn.Module, *, seed: int) -> None:
    """Fill a model with random weights, norms and biases, too."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if "norm" in name:
            values = parameter.detach().float() + 0.2 * noise
        elif parameter.ndim == 1:
            values = 0.2 * noise
        elif "embed" in name:
            values = 0.5 * noise
        elif "adapter" in name or name.endswith(".linear.weight"):  # of Zamba2
            values = 0.3 * noise / parameter.shape[-1] ** 0.5
        else:
            values = 1.5 * noise / parameter.shape[-1] ** 0.5
        with torch.no_grad():
            parameter.copy_(values)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "layer_scalar")):
            buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))


def make_model(family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Any:
    """Return a random `transformers` model of `family`; `overrides` replace fields of its config."""
    import transformers

    transformers.logging.disable_progress_bar()
    class_name, differences = FAMILIES[family]
    config = getattr(transformers, class_name)(**{**_COMMON, **differences, **overrides})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, seed=seed)
    model.generation_config.eos_token_id = config.eos_token_id
    # Not model.to(dtype): that would round the rotary frequencies too, which loading a checkpoint does not.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    return model.eval()


def save_checkpoint(model: Any, directory: Path, *, max_shard_size: str | int = "5GB") -> Path:
    """Write a model and a tokenizer into `directory`; a `max_shard_size` such as "60KB" makes shards."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer(directory)
    return directory


def make_checkpoint(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | int = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` with a tokenizer into `directory` and return `directory`."""
    key = repr((family, seed, dtype, max_shard_size, sorted(overrides.items())))
    if key not in _files:
        with tempfile.TemporaryDirectory() as temporary:
            model = make_model(family, seed=seed, dtype=dtype, **overrides)
            written = save_checkpoint(model, Path(temporary), max_shard_size=max_shard_size)
            _files[key] = {path.name: path.read_bytes() for path in written.iterdir()}
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in _files[key].items():
        (directory / name).write_bytes(content)
    return directory


_files: dict[str, dict[str, bytes]] = {}  # of each checkpoint that has been asked for: contents by name
