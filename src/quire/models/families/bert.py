"""BERT and its descendants: encoders, whose prompts become rows.

A sub-layer's result is added to the residual stream and the sum normalized; norms, matrices and biases are
otherwise alike in all of them. What of a checkpoint predicts masked tokens is passed over.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from quire.errors import ModelError
from quire.models.config import ModelConfig
from quire.models.families.family import Family
from quire.models.layer import LayerConfig, SubLayerConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.two_sided_attention import TwoSidedAttentionConfig
from quire.models.ropes import HFConfig
from quire.pooling_params import PoolingParams

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


def encoder(base: ModelConfig, **fields: Any) -> ModelConfig:
    """Return a model whose attention is two-sided, and whose prompts become the means of their states.

    Args:
        base: a model of equal layers.
        fields: of the attention, that are otherwise.
    """
    attention, feed_forward = base.layers[0].parts
    usual = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
    layer = LayerConfig((TwoSidedAttentionConfig(**{**usual, **fields}), feed_forward))
    return replace(
        base,
        layers=(layer,) * base.num_layers,
        tie_word_embeddings=False,
        pooling=PoolingParams(pooling_type="mean", normalize=False),
    )


def _normed_sums(base: ModelConfig, **fields: Any) -> ModelConfig:
    """Return an encoder as BERT is one, with the other `fields` of the model."""
    config = encoder(base, rope=None, qkv_bias=True, output_bias=True)
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
    _check_is_encoder(hf)
    return _normed_sums(base, token_types=hf["type_vocab_size"])


def _check_is_encoder(hf: HFConfig) -> None:
    if (positions := hf.get("position_embedding_type", "absolute")) != "absolute":
        raise ModelError(f"config.json has position_embedding_type {positions!r}; only absolute is supported")
    for name in ("is_decoder", "add_cross_attention"):
        if hf.get(name):
            raise ModelError(f"config.json has {name} true; only encoders by themselves are supported")


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


def _distilbert(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    return _normed_sums(base)


_BERT_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}
_ROBERTA = Family(
    _roberta,
    _NAMES,
    _BERT_DEFAULTS | {"pad_token_id": 1},
    architectures=("RobertaModel", "RobertaForMaskedLM"),
    norm_eps="layer_norm_eps",
)

FAMILIES: dict[str, Family] = {
    "bert": Family(
        _bert,
        _NAMES,
        _BERT_DEFAULTS,
        architectures=("BertModel", "BertForMaskedLM"),
        norm_eps="layer_norm_eps",
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": replace(_ROBERTA, architectures=("XLMRobertaModel", "XLMRobertaForMaskedLM")),
    "camembert": replace(_ROBERTA, architectures=("CamembertModel", "CamembertForMaskedLM")),
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
        architectures=("DistilBertModel", "DistilBertForMaskedLM"),
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
