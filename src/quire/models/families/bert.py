"""BERT and its descendants: encoders, whose prompts become rows.

In all but ModernBERT, a sub-layer's result is added to the residual stream and the sum normalized. What of a
checkpoint predicts masked tokens is passed over.
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.classification import dense_head, two_layers
from quire.models.config import ModelConfig, RopeConfig, RowLayer
from quire.models.families.family import Family, two_sided, with_attention_biases, with_two_ropes
from quire.models.layer import SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.two_sided_attention import NUM_BUCKETS, TwoSidedAttentionConfig
from quire.models.ropes import HFConfig, read_two_ropes
from quire.pooling_params import PoolingType

_NAMES = {
    "embedding": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "token_types": "embeddings.token_type_embeddings.weight",
    "embedding_norm": "embeddings.LayerNorm.weight",
    "layer": "encoder.layer.{}.",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attention_stream_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_stream_norm": "output.LayerNorm",
}
_IGNORED = ("embeddings.position_ids", "pooler.", "cls.", "lm_head.", "vocab_")  # the last of DistilBERT


def _normed_sums(base: ModelConfig, **fields: Any) -> ModelConfig:
    """Return an encoder as BERT is one, with the other `fields` of the model."""
    config = two_sided(base).changed(AttentionConfig, rope=None, qkv_bias=True, output_bias=True)
    config = config.changed(FeedForwardConfig, gated=False, bias=True)
    config = config.changed(SubLayerConfig, pre_norm=False, norms_stream=True)
    return replace(
        config,
        norm_kind="layer",
        embedding_norm=True,
        final_norm=False,
        learned_positions=base.max_model_len,
        ignored_prefixes=_IGNORED,
        **fields,
    )


def _bert(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _normed_sums(base, token_types=hf["type_vocab_size"])


def _roberta(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Positions are counted from the one behind that of padding."""
    unused = hf["pad_token_id"] + 1
    if unused >= base.max_model_len:
        raise ModelError(
            f"config.json has pad_token_id {hf['pad_token_id']}, behind which positions begin, and only "
            f"{base.max_model_len} max_position_embeddings"
        )
    shorter = replace(base, max_model_len=base.max_model_len - unused)
    return replace(_bert(hf, shorter), unused_positions=unused)


def _mpnet(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = replace(_roberta(hf, base), token_types=0)
    return config.changed(TwoSidedAttentionConfig, has_distance_bias=True)


def _distilbert(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _normed_sums(base)


def _modernbert(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Most layers see a window, half of it on each side; the first attention reads the norm of embeddings."""
    types, pattern = hf.get("layer_types"), hf["global_attn_every_n_layers"]
    slides = [
        bool(layer % pattern) if types is None else types[layer] == "sliding_attention"
        for layer in range(base.num_layers)
    ]
    window = hf["local_attention"] // 2 + 1
    config = with_two_ropes(
        two_sided(with_attention_biases(hf, base)),
        [window * is_sliding for is_sliding in slides],
        _modernbert_ropes(hf, hf["hidden_size"] // hf["num_attention_heads"]),
    )
    config = config.changed(FeedForwardConfig, bias=bool(hf.get("mlp_bias", False)))
    return replace(
        config,
        layers=(config.layers[0].changed(AttentionConfig, pre_norm=False), *config.layers[1:]),
        norm_kind="layer" if hf.get("norm_bias", False) else "layer_without_bias",
        embedding_norm=True,
        ignored_prefixes=("head.", "decoder."),
    )


def _modernbert_ropes(hf: HFConfig, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """`rope_theta` does not count, as in transformers, where `rope_scaling` is of both types."""
    if hf.get("rope_scaling"):
        raise ModelError("config.json has rope_scaling; this architecture has rope_parameters by layer type")
    full = ChainMap({"rope_theta": hf["global_rope_theta"]}, hf)  # type: ignore[arg-type]
    return read_two_ropes(full, head_dim, sliding_theta=hf["local_rope_theta"])


def _nomic(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    config = two_sided(base).changed(SubLayerConfig, pre_norm=False, norms_stream=True)
    return replace(
        config,
        norm_kind="layer",
        embedding_norm=True,
        final_norm=False,
        token_types=hf["type_vocab_size"],
        ignored_prefixes=_IGNORED,
    )


def _modernbert_head(
    hf: HFConfig, base: ModelConfig, num_labels: int
) -> tuple[PoolingType, tuple[RowLayer, ...]]:
    pooling, activation = hf.get("classifier_pooling", "cls"), hf.get("classifier_activation", "gelu")
    if pooling not in ("cls", "mean") or activation not in ("gelu", "silu", "relu"):
        raise ModelError(
            f"config.json has classifier_pooling {pooling!r:.100} and classifier_activation "
            f"{activation!r:.100}; these must be cls or mean, and gelu, silu or relu"
        )
    layers = two_layers(
        base,
        "head.dense",
        "classifier",
        num_labels,
        bias=bool(hf.get("classifier_bias", False)),
        activation=activation,
        norm="head.norm",
    )
    return pooling, layers


_FIXED_OF_BERT = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
_FIXED_OF_NOMIC: dict[str, Any] = {
    "activation_function": "swiglu",
    "causal": False,
    "parallel_block": False,
    "prenorm": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
    "rotary_emb_scale_base": None,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}
_BERT_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}
_ROBERTA = Family(
    _roberta,
    _NAMES,
    _BERT_DEFAULTS | {"pad_token_id": 1},
    architectures=(
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "RobertaForTokenClassification",
    ),
    head=dense_head("classifier.dense", "classifier.out_proj", "tanh"),
    norm_eps="layer_norm_eps",
    fixed=_FIXED_OF_BERT,
)

FAMILIES: dict[str, Family] = {
    "bert": Family(
        _bert,
        _NAMES,
        _BERT_DEFAULTS,
        architectures=(
            "BertModel",
            "BertForMaskedLM",
            "BertForSequenceClassification",
            "BertForTokenClassification",
        ),
        head=dense_head("pooler.dense", "classifier", "tanh"),
        norm_eps="layer_norm_eps",
        fixed=_FIXED_OF_BERT,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": replace(
        _ROBERTA,
        architectures=(
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
            "XLMRobertaForTokenClassification",
        ),
    ),
    "camembert": replace(
        _ROBERTA,
        architectures=(
            "CamembertModel",
            "CamembertForMaskedLM",
            "CamembertForSequenceClassification",
            "CamembertForTokenClassification",
        ),
    ),
    "mpnet": replace(
        _ROBERTA,
        specialize=_mpnet,
        weight_names=_NAMES
        | {name: f"attention.attn.{name}" for name in "qkvo"}
        | {
            "attention_stream_norm": "attention.LayerNorm",
            "distance_bias": "attention.relative_attention_bias",
        },
        architectures=(
            "MPNetModel",
            "MPNetForMaskedLM",
            "MPNetForSequenceClassification",
            "MPNetForTokenClassification",
        ),
        fixed=_FIXED_OF_BERT | {"pad_token_id": 1, "relative_attention_num_buckets": NUM_BUCKETS},
    ),
    "modernbert": Family(
        _modernbert,
        {
            "embedding": "embeddings.tok_embeddings.weight",
            "embedding_norm": "embeddings.norm.weight",
            "layer": "model.layers.{}.",
            "attention_norm": "attn_norm",
            "qkv": "attn.Wqkv",
            "o": "attn.Wo",
            "mlp_norm": "mlp_norm",
            "gate_up": "mlp.Wi",
            "down": "mlp.Wo",
            "norm": "final_norm.weight",
        },
        {
            "hidden_activation": "gelu",
            "norm_eps": 1e-5,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 1e4,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
        },
        architectures=(
            "ModernBertModel",
            "ModernBertForMaskedLM",
            "ModernBertForSequenceClassification",
            "ModernBertForTokenClassification",
        ),
        head=_modernbert_head,
        activation="hidden_activation",
        norm_eps="norm_eps",
        ropes=_modernbert_ropes,
    ),
    "nomic_bert": Family(
        _nomic,
        {
            "embedding": "embeddings.word_embeddings.weight",
            "token_types": "embeddings.token_type_embeddings.weight",
            "embedding_norm": "emb_ln.weight",
            "layer": "encoder.layers.{}.",
            "qkv": "attn.Wqkv",
            "o": "attn.out_proj",
            "attention_stream_norm": "norm1",
            "gate": "mlp.fc12",
            "up": "mlp.fc11",
            "down": "mlp.fc2",
            "mlp_stream_norm": "norm2",
        },
        {"layer_norm_eps": 1e-12, "type_vocab_size": 2, "rope_theta": 1000.0},
        architectures=("NomicBertModel",),
        fixed=_FIXED_OF_NOMIC,
        norm_eps="layer_norm_eps",
        aliases={
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
            "rotary_emb_base": "rope_theta",
        },
    ),
    "distilbert": Family(
        _distilbert,
        _NAMES
        | {
            "layer": "transformer.layer.{}.",
            "q": "attention.q_lin",
            "k": "attention.k_lin",
            "v": "attention.v_lin",
            "o": "attention.out_lin",
            "attention_stream_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "mlp_stream_norm": "output_layer_norm",
        },
        {"activation": "gelu", "layer_norm_eps": 1e-12},
        architectures=(
            "DistilBertModel",
            "DistilBertForMaskedLM",
            "DistilBertForSequenceClassification",
            "DistilBertForTokenClassification",
        ),
        head=dense_head("pre_classifier", "classifier", "relu"),
        activation="activation",
        norm_eps="layer_norm_eps",
        aliases={
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
        },
    ),
}
