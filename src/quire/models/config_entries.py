"""The entries of a config.json: those that Quire reads, and those that it may ignore.

Everything that follows from the numbers that it reads takes memory and time in proportion to them, so they
are checked before anything is built. Unread entries are logged, unless they are harmless.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType, UnionType
from typing import Any

from quire.errors import ModelError

logger = logging.getLogger(__name__)

MAX_LAYERS_TIMES_EXPERTS = 1 << 18  # each is an object while a model is loaded
SPLIT_GATES = "gguf.split_gates"
"""Entry that no config.json has: gates and what they multiply are matrices of their own."""
SPLIT_PROJECTIONS = "gguf.split_projections"
"""Another one: output gates of a DeltaNet are a matrix of their own beside queries, keys and values."""
_MAX_POSITION = 2**31 - 1  # kernels count positions in 32 bits
_SHOWN = 80  # characters of a wrong value
_SHOWN_NAMES = 500  # characters of names of entries


@dataclasses.dataclass(frozen=True, slots=True)
class _Integer:
    least: int
    most: int

    def describe(self) -> str:
        return f"an integer from {self.least} to {self.most}"

    def accepts(self, value: object) -> bool:
        return type(value) is int and self.least <= value <= self.most


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    least: float
    most: float
    has_least: bool = True  # `least` itself is accepted

    def describe(self) -> str:
        return f"a number {'from' if self.has_least else 'above'} {self.least:g} to {self.most:g}"

    def accepts(self, value: object) -> bool:
        if type(value) not in (int, float):
            return False
        assert isinstance(value, int | float)
        return self.least <= value <= self.most and (self.has_least or value != self.least)


@dataclasses.dataclass(frozen=True, slots=True)
class _Is:
    kind: type | UnionType
    description: str

    def describe(self) -> str:
        return self.description

    def accepts(self, value: object) -> bool:
        return isinstance(value, self.kind)


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
    most: int  # characters

    def describe(self) -> str:
        return f"a text of at most {self.most} characters"

    def accepts(self, value: object) -> bool:
        return isinstance(value, str) and len(value) <= self.most


@dataclasses.dataclass(frozen=True, slots=True)
class _ListOf:
    entries: _Integer | _Number | _Text
    most: int

    def describe(self) -> str:
        return f"a list of at most {self.most}, each {self.entries.describe()}"

    def accepts(self, value: object) -> bool:
        return isinstance(value, list) and len(value) <= self.most and all(map(self.entries.accepts, value))


@dataclasses.dataclass(frozen=True, slots=True)
class _IntegerOr:
    integer: _Integer
    other: _Text | _ListOf

    def describe(self) -> str:
        return f"{self.integer.describe()}, or {self.other.describe()}"

    def accepts(self, value: object) -> bool:
        return self.integer.accepts(value) or self.other.accepts(value)


_Rule = _Integer | _Number | _Is | _Text | _ListOf | _IntegerOr
_POSITIVE = _Number(0, 1e30, has_least=False)
_FACTOR = _Number(-1e30, 1e30)
_BOOLEAN, _OBJECT, _TEXT = _Is(bool, "true or false"), _Is(dict, "an object"), _Text(256)
_LENGTH = _Integer(1, _MAX_POSITION)
_LAYERS = 1 << 12
_BITS = _Integer(1, 64)
_GROUP_SIZE = _Integer(-1, 1 << 20)  # -1 and 0: a group is a row
_BLOCK = _ListOf(_Integer(1, 1 << 20), 2)

RULES: dict[str, _Rule] = {
    "architectures": _ListOf(_TEXT, 16),
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "quantization_config": _OBJECT,
    "text_config": _OBJECT,
    "vocab_size": _Integer(1, 1 << 24),
    "hidden_size": _Integer(1, 1 << 17),
    "intermediate_size": _Integer(1, 1 << 20),
    "num_hidden_layers": _Integer(1, _LAYERS),
    "num_attention_heads": _Integer(1, 1 << 12),
    "num_key_value_heads": _Integer(1, 1 << 12),
    "head_dim": _Integer(1, 1 << 12),
    "global_head_dim": _Integer(1, 1 << 12),
    "num_global_key_value_heads": _Integer(1, 1 << 12),
    "per_layer_config": _OBJECT,
    "attention_k_eq_v": _BOOLEAN,
    "num_kv_shared_layers": _Integer(0, _LAYERS),
    "use_double_wide_mlp": _BOOLEAN,
    "hidden_size_per_layer_input": _Integer(0, 1 << 17),
    "vocab_size_per_layer_input": _Integer(1, 1 << 24),
    "max_position_embeddings": _LENGTH,
    "tie_word_embeddings": _BOOLEAN,
    "attention_bias": _BOOLEAN,
    "mlp_bias": _BOOLEAN,
    "rms_norm_eps": _Number(0, 1),
    "layer_norm_eps": _Number(0, 1),
    "norm_epsilon": _Number(0, 1),
    "layer_norm_epsilon": _Number(0, 1),
    "attention_out_bias": _BOOLEAN,
    "qkv_bias": _BOOLEAN,
    "use_qkv_bias": _BOOLEAN,
    "use_bias": _BOOLEAN,
    "lm_head_bias": _BOOLEAN,
    "use_qk_norm": _BOOLEAN,
    "qk_layernorm": _BOOLEAN,
    "use_parallel_residual": _BOOLEAN,
    "activation": _TEXT,
    "activation_function": _TEXT,
    "add_cross_attention": _BOOLEAN,
    "scale_attn_weights": _BOOLEAN,
    "scale_attn_by_inverse_layer_idx": _BOOLEAN,
    "alibi": _BOOLEAN,
    "bias": _BOOLEAN,
    "multi_query": _BOOLEAN,
    "new_decoder_architecture": _BOOLEAN,
    "num_kv_heads": _Integer(1, 1 << 12),
    "num_ln_in_parallel_attn": _Integer(1, 2),
    "parallel_attn": _BOOLEAN,
    "sliding_window": _Integer(0, _MAX_POSITION),
    "use_sliding_window": _BOOLEAN,
    "max_window_layers": _Integer(0, _MAX_POSITION),
    "sliding_window_pattern": _IntegerOr(_Integer(0, _LAYERS), _TEXT),
    "layer_types": _ListOf(_TEXT, _LAYERS),
    "no_rope_layer_interval": _Integer(1, _LAYERS),
    "no_rope_layers": _ListOf(_Integer(0, 1), _LAYERS),
    "mlp_only_layers": _ListOf(_Integer(0, _LAYERS), _LAYERS),
    "decoder_sparse_step": _Integer(1, _LAYERS),
    "num_experts": _Integer(1, 1 << 16),
    "num_local_experts": _Integer(0, 1 << 16),
    "num_experts_per_tok": _Integer(1, 1 << 10),
    "moe_topk": _IntegerOr(_Integer(1, 1 << 10), _ListOf(_Integer(1, 1 << 10), _LAYERS)),
    "moe_intermediate_size": _Integer(1, 1 << 20),
    "top_k_experts": _Integer(1, 1 << 10),
    "enable_moe_block": _BOOLEAN,
    "q_lora_rank": _Integer(1, 1 << 17),
    "kv_lora_rank": _Integer(1, 1 << 12),
    "qk_nope_head_dim": _Integer(1, 1 << 12),
    "qk_rope_head_dim": _Integer(1, 1 << 12),
    "v_head_dim": _Integer(1, 1 << 12),
    "rope_interleave": _BOOLEAN,
    "topk_method": _TEXT,
    "scoring_func": _TEXT,
    "moe_layer_freq": _IntegerOr(_Integer(1, _LAYERS), _ListOf(_Integer(0, 1), _LAYERS)),
    "hybrid_layer_pattern": _ListOf(_Integer(0, 1), _LAYERS),
    "mlp_layer_types": _ListOf(_TEXT, _LAYERS),
    "scale_emb": _FACTOR,
    "scale_depth": _POSITIVE,
    "dim_model_base": _POSITIVE,
    "norm_topk_prob": _BOOLEAN,
    "shared_expert_intermediate_size": _Integer(1, 1 << 20),
    "router_jitter_noise": _Number(0, 1),
    "first_k_dense_replace": _Integer(0, _LAYERS),
    "num_nextn_predict_layers": _Integer(0, 64),
    "num_mtp_layers": _Integer(0, 64),
    "n_routed_experts": _Integer(1, 1 << 16),
    "n_shared_experts": _Integer(0, 1 << 10),
    "n_group": _Integer(1, 1 << 10),
    "topk_group": _Integer(1, 1 << 10),
    "routed_scaling_factor": _FACTOR,
    "num_dense_layers": _Integer(0, 1 << 12),
    "use_expert_bias": _BOOLEAN,
    "moe_k": _Integer(1, 1 << 10),
    "moe_num_experts": _Integer(1, 1 << 16),
    "moe_num_shared_experts": _Integer(0, 1 << 10),
    "moe_layer_start_index": _Integer(0, _LAYERS),
    "moe_layer_end_index": _Integer(-1, _LAYERS),
    "moe_layer_interval": _Integer(1, _LAYERS),
    "moe_norm_min": _Number(0, 1e30),
    "rotary_dim": _Integer(2, 1 << 12),
    "rotary_pct": _Number(0, 1, has_least=False),
    "rotary_emb_base": _POSITIVE,
    "logit_scale": _POSITIVE,
    "swiglu_alpha": _POSITIVE,
    "swiglu_limit": _POSITIVE,
    "query_pre_attn_scalar": _POSITIVE,
    "attn_logit_softcapping": _Number(0, 1e30),
    "final_logit_softcapping": _Number(0, 1e30),
    "embedding_multiplier": _FACTOR,
    "attention_multiplier": _FACTOR,
    "residual_multiplier": _FACTOR,
    "logits_scaling": _POSITIVE,
    "rope_theta": _POSITIVE,
    "rope_local_base_freq": _POSITIVE,
    "layer_rope_theta": _ListOf(_Number(0, 1e30), _LAYERS),
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "partial_rotary_factor": _Number(0, 1, has_least=False),
    "original_max_position_embeddings": _LENGTH,
    "norm_eps": _Number(0, 1),
    "tie_embedding": _BOOLEAN,
    "attn_output_gate": _BOOLEAN,
    "full_attention_interval": _Integer(1, _LAYERS),
    "linear_num_key_heads": _Integer(1, 1 << 12),
    "linear_num_value_heads": _Integer(1, 1 << 12),
    "linear_key_head_dim": _Integer(1, 1 << 12),
    "linear_value_head_dim": _Integer(1, 1 << 12),
    "linear_conv_kernel_dim": _Integer(2, 64),
    "linear_num_heads": _Integer(1, 1 << 12),
    "linear_head_dim": _Integer(1, 1 << 12),
    "linear_attn_config": _OBJECT,
    **dict.fromkeys(("full_attn_layers", "kda_layers"), _ListOf(_Integer(1, _LAYERS), _LAYERS)),
    "mla_use_nope": _BOOLEAN,
    "intermediate_size_mlp": _Integer(1, 1 << 20),
    "moe_layers": _ListOf(_Integer(0, _LAYERS), _LAYERS),
    "interleave_moe_layer_step": _Integer(1, _LAYERS),
    "attention_chunk_size": _LENGTH,
    "attn_temperature_tuning": _Is(int, "true, false or a number"),
    "floor_scale": _LENGTH,
    "attn_scale": _Number(0, 1e3),
    "attention_value_scale": _FACTOR,
    "swa_rope_theta": _POSITIVE,
    "sliding_window_size": _Integer(0, _MAX_POSITION - 1),
    "linear_allow_neg_eigval": _BOOLEAN,
    "full_attn_idxs": _ListOf(_Integer(0, _LAYERS), _LAYERS),
    "conv_L_cache": _Integer(2, 64),
    "conv_bias": _BOOLEAN,
    "mamba_n_heads": _Integer(1, 1 << 12),
    "mamba_d_head": _IntegerOr(_Integer(1, 1 << 12), _TEXT),
    "mamba_n_groups": _Integer(1, 1 << 12),
    "mamba_d_state": _Integer(1, 1 << 12),
    "mamba_d_conv": _Integer(2, 64),
    "mamba_expand": _Integer(1, 64),
    "mamba_conv_bias": _BOOLEAN,
    "mamba_proj_bias": _BOOLEAN,
    "attn_layer_indices": _ListOf(_Integer(0, _LAYERS), _LAYERS),
    "mamba_num_heads": _Integer(1, 1 << 12),
    "mamba_head_dim": _Integer(1, 1 << 12),
    "n_groups": _Integer(1, 1 << 12),
    "ssm_state_size": _Integer(1, 1 << 12),
    "conv_kernel": _Integer(2, 64),
    "use_conv_bias": _BOOLEAN,
    "mlp_hidden_act": _TEXT,
    "mamba_hidden_act": _TEXT,
    "time_step_min": _Number(0, 1e30),
    "layers_block_type": _ListOf(_TEXT, _LAYERS),
    "hybrid_override_pattern": _Text(_LAYERS),
    "moe_latent_size": _Integer(1, 1 << 17),
    "moe_shared_expert_intermediate_size": _Integer(1, 1 << 20),
    "mamba_d_ssm": _Integer(1, 1 << 18),
    "mamba_rms_norm": _BOOLEAN,
    "mamba_norm_before_gate": _BOOLEAN,
    "projectors_bias": _BOOLEAN,
    "key_multiplier": _FACTOR,
    "attention_in_multiplier": _FACTOR,
    "attention_out_multiplier": _FACTOR,
    "ssm_in_multiplier": _FACTOR,
    "ssm_out_multiplier": _FACTOR,
    "lm_head_multiplier": _POSITIVE,
    "mlp_multipliers": _ListOf(_FACTOR, 2),
    "ssm_multipliers": _ListOf(_FACTOR, 5),
    "shared_intermediate_size": _Integer(0, 1 << 20),
    "num_mem_blocks": _Integer(1, _LAYERS),
    "adapter_rank": _Integer(1, 1 << 16),
    "use_mem_rope": _BOOLEAN,
    "use_shared_attention_adapter": _BOOLEAN,
    "position_embedding_type": _TEXT,
    "type_vocab_size": _Integer(0, 1 << 10),
    "local_attention": _LENGTH,
    "global_attn_every_n_layers": _Integer(1, _LAYERS),
    "local_rope_theta": _POSITIVE,
    "global_rope_theta": _POSITIVE,
    "norm_bias": _BOOLEAN,
    "is_matryoshka": _BOOLEAN,
    "id2label": _OBJECT,
    "num_labels": _Integer(1, 1 << 16),
    "problem_type": _TEXT,
    "sentence_transformers": _OBJECT,
    "sbert_ce_default_activation_function": _TEXT,
    "classifier_pooling": _TEXT,
    "classifier_activation": _TEXT,
    "classifier_bias": _BOOLEAN,
    "matryoshka_dimensions": _ListOf(_Integer(1, 1 << 17), 1 << 10),
    "pad_token_id": _Integer(0, 1 << 20),
    "is_decoder": _BOOLEAN,
    "block_ff_dim": _Integer(1, 1 << 20),
    "block_auto_adjust_ff_dim": _BOOLEAN,
    "block_multiple_of": _Integer(1, 1 << 16),
    "block_ffn_dim_multiplier": _Number(0, 64, has_least=False),
}

ROPE_RULES: dict[str, _Rule] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": _Number(0, 1, has_least=False),
    "factor": _POSITIVE,
    "alpha": _POSITIVE,
    "original_max_position_embeddings": _LENGTH,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "truncate": _BOOLEAN,
    "attention_factor": _POSITIVE,
    "llama_4_scaling_beta": _Number(0, 1e3),
    "max_position_embeddings": _LENGTH,
    "mscale": _FACTOR,
    "mscale_all_dim": _FACTOR,
    "short_factor": _ListOf(_POSITIVE, 1 << 12),
    "long_factor": _ListOf(_POSITIVE, 1 << 12),
}

QUANTIZATION_RULES: dict[str, _Rule] = {
    "bits": _BITS,
    "w_bit": _BITS,
    "group_size": _GROUP_SIZE,
    "q_group_size": _GROUP_SIZE,
    "sym": _BOOLEAN,
    "desc_act": _BOOLEAN,
    "static_groups": _BOOLEAN,
    "checkpoint_format": _TEXT,
    "is_marlin_format": _BOOLEAN,
    "load_in_8bit": _BOOLEAN,
    "version": _TEXT,
    "zero_point": _BOOLEAN,
    "fmt": _TEXT,
    "weight_block_size": _BLOCK,
    "format": _TEXT,
    "config_groups": _OBJECT,
    "kv_cache_scheme": _OBJECT,
    "transform_config": _OBJECT,
    "sparsity_config": _OBJECT,
}
SPARSITY_RULES: dict[str, _Rule] = {"format": _TEXT}
CONFIG_GROUP_RULES: dict[str, _Rule] = {"format": _TEXT, "weights": _OBJECT}
GROUP_WEIGHTS_RULES: dict[str, _Rule] = {
    "num_bits": _BITS,
    "type": _TEXT,
    "strategy": _TEXT,
    "group_size": _GROUP_SIZE,
    "block_structure": _BLOCK,
    "symmetric": _BOOLEAN,
    "actorder": _Is(str | bool, "a text, true or false"),
}

SENTENCE_RULES: dict[str, _Rule] = {  # of the files of sentence-transformers' modules
    "max_seq_length": _LENGTH,
    "do_lower_case": _BOOLEAN,
    "include_prompt": _BOOLEAN,
    "in_features": _Integer(1, 1 << 17),
    "out_features": _Integer(1, 1 << 17),
    "bias": _BOOLEAN,
    "activation_function": _TEXT,
    "activation_fn": _TEXT,
    "prompts": _OBJECT,
    "default_prompt_name": _TEXT,
    "similarity_fn_name": _TEXT,
    "true_token_id": _Integer(0, 1 << 24),
    "false_token_id": _Integer(0, 1 << 24),
}

HARMLESS = frozenset(
    (
        # where the files come from, and how they are stored
        "architectures", "auto_map", "model_type", "name_or_path", "_name_or_path", "transformers_version",
        "_commit_hash", "custom_pipelines", "transformers.js_config", "unsloth_version", "unsloth_fixed",
        "tokenizer_class", "is_llama_config", "tensor_data_layout", "quantization_config",
        "compression_config",
        # tokens, which the tokenizer's files have or generation takes
        "bos_token_id", "eos_token_id", "eod_token_id", "pad_token_id", "sep_token_id",
        "decoder_start_token_id", "model_max_length", "max_sequence_length",
        # training
        "attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout", "attn_pdrop",
        "embd_pdrop", "resid_pdrop", "input_jitter_noise", "linear_a_log_min", "linear_a_log_max",
        "linear_dt_min", "linear_dt_max", "linear_dt_init_floor",
        "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "qa_dropout", "seq_classif_dropout",
        "classifier_dropout", "initializer_range", "router_aux_loss_coef", "router_jitter_noise",
        "output_router_logits", "gradient_checkpointing", "pretraining_tp", "aux_loss_alpha", "seq_aux",
        "ep_size", "z_loss_coefficient", "rescale_prenorm_residual", "time_step_max", "time_step_floor",
        "time_step_rank",
        # classification
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
        "prefix", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout",
        "mlp_dropout", "initializer_cutoff_factor", "classifier_activation", "classifier_bias",
        "classifier_pooling", "decoder_bias", "deterministic_flash_attn", "sparse_prediction",
        "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad", "cls_token_id",
        "mask_token_id", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "use_flash_attn",
        "use_xentropy", "pad_vocab_size_multiple", "parallel_block_tied_norm", "max_trained_positions",
        # of BERT's pooler, which no embedding is made by
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
        # how transformers computes and what it returns
        "use_cache", "cache_implementation", "attn_implementation", "_attn_implementation",
        "_attn_implementation_autoset", "experts_implementation", "return_dict", "use_return_dict",
        "output_attentions", "output_hidden_states", "torchscript", "chunk_size_feed_forward",
        "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "reorder_and_upcast_attn",
        "mamba_chunk_size", "num_logits_to_keep", "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap", "use_mem_eff_path",
        "is_encoder_decoder", "is_decoder", "tie_encoder_decoder", "use_bfloat16", "tie_last_hidden_states",
        # of other layers' windows than a family has; and what is refused unless it says nothing
        "max_window_layers", "_sliding_window_pattern", "is_causal",
        # follows from others, or from files
        "sinusoidal_pos_embds",
        "qk_head_dim", "expand", "kv_channels", "num_query_groups",
        # of layers that predict further tokens
        "mtp_layers_block_type", "mtp_hybrid_override_pattern",
        # published, and read by no class of transformers
        "sliding_window_size", "seq_length", "n_ctx", "normalization_function", "init_method",
        "mamba_use_mlp", "mlp_expansion_factor",
        "mamba_ssm_dtype", "mtp_num_hidden_layers", "use_grouped_topk",
        # generation, which has a file of its own
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
        "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p",
        "typical_p",
    )
)  # fmt: skip
"""Entries that Quire passes over, since they do not change what a decoder computes from token ids."""


class Entries(Mapping[str, Any]):
    """A model's config entries, with a record of which were read; null counts as missing.

    Entries are checked when they are read: what a model does not use may have any value.

    Args:
        values: as they are in the file.
        defaults: values of missing entries.
        nullable: entries with a default for which null means none.
        rules: what the values of some entries must be.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any] = MappingProxyType({}),
        nullable: Set[str] = frozenset(),
        rules: Mapping[str, _Rule] = MappingProxyType({}),
    ) -> None:
        self._given = {key: value for key, value in values.items() if value is not None}
        missing = {key: value for key, value in defaults.items() if not (key in nullable and key in values)}
        self._values = missing | self._given
        self._rules = rules
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """Return an entry, which counts as read from now on.

        Raises:
            ModelError: it is of a wrong type or out of range.
        """
        self._read.add(key)
        value = self._values[key]
        if key in self._rules:
            check_entry(f"config.json has {key}", value, self._rules[key])
        return value

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all entries."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._values)

    def unread(self) -> list[str]:
        """Return the names of unread entries that may matter."""
        return sorted(
            key
            for key, value in self._given.items()
            if key not in self._read and key not in HARMLESS and not _is_neutral(value)
        )

    def warn_of_unread(self, where: str) -> None:
        """Log the unread entries once; `where` names their origin in the message."""
        if unread := self.unread():
            names = ", ".join(unread)[:_SHOWN_NAMES].encode("unicode_escape").decode()
            warn_once(f"{where} has entries that Quire does not read: {names}; it computes without them")


def _is_neutral(value: object) -> bool:
    """Return whether a value means "none", or multiplies by one."""
    return value is not True and value in (False, 0, 1, "", [], {})


@functools.lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Log a message, unless it has been logged lately: configs are read several times at a start."""
    logger.warning(message)


def check_objects(values: Mapping[str, Any]) -> None:
    """Check the objects in a config.json, and what Quire reads in rotary settings; null counts as missing.

    Raises:
        ModelError: an entry is of a wrong type or out of range.
    """
    for name in ("rope_scaling", "rope_parameters", "quantization_config"):
        check_entry(f"config.json has {name}", values.get(name), RULES[name])
    for name in ("rope_scaling", "rope_parameters"):
        _check_rope(name, values.get(name) or {})


def check_quantization(values: Mapping[str, Any]) -> None:
    """Check every entry of a config.json's `quantization_config` that Quire reads; null counts as missing.

    Raises:
        ModelError: an entry is of a wrong type or out of range.
    """
    name = "quantization_config."
    _check_all(name, values, QUANTIZATION_RULES)
    _check_all(f"{name}sparsity_config.", values.get("sparsity_config") or {}, SPARSITY_RULES)
    for key, group in (values.get("config_groups") or {}).items():
        place = f"{name}config_groups.{key:.{_SHOWN}}"
        check_entry(f"config.json has {place}", group, _OBJECT)
        _check_all(f"{place}.", group or {}, CONFIG_GROUP_RULES)
        _check_all(f"{place}.weights.", (group or {}).get("weights") or {}, GROUP_WEIGHTS_RULES)


def check_entry(what: str, value: object, rule: _Rule) -> None:
    """Raise `ModelError` unless `value` is None or as `rule` says.

    Args:
        what: file and key, for the error.
        value: the entry.
        rule: one of `RULES`.
    """
    if value is not None and not rule.accepts(value):
        raise ModelError(f"{what} {_shown(value)}; it must be {rule.describe()}")


def _check_all(prefix: str, values: Mapping[str, Any], rules: Mapping[str, _Rule]) -> None:
    for key, rule in rules.items():
        check_entry(f"config.json has {prefix}{key}", values.get(key), rule)


def _check_rope(name: str, values: Mapping[str, Any]) -> None:
    nested = {key: value for key, value in values.items() if isinstance(value, dict)}
    for key, inner in nested.items():  # by layer type
        if any(isinstance(value, dict) for value in inner.values()):
            raise ModelError(f"config.json has {name}.{key} {_shown(inner)}; it must not be nested further")
        _check_rope(f"{name}.{key}", inner)
    _check_all(f"{name}.", values, ROPE_RULES)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, int | float | bool) and abs(value) < 1e99 else _repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _repr(value: object) -> str:
    if isinstance(value, int):
        return f"of {value.bit_length()} bits"
    if isinstance(value, str | list | dict) and len(value) > _SHOWN:
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)
