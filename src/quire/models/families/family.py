"""What a family says of its checkpoints, and what families have in common.

Most differ from Llama in a few fields; `common` reads what all share. Configs are read in the form that the
hub's files have had since 2023 (`rope_theta`, `rope_scaling`) and in the newer one (`rope_parameters`, nested
by layer type where there are two).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quire.errors import ModelError, nearest_name
from quire.models.classification import Head, one_matrix
from quire.models.config import DTYPE_BYTES, ModelConfig, RopeConfig
from quire.models.layer import LayerConfig, SubLayerConfig
from quire.models.layers.attention import AttentionConfig
from quire.models.layers.delta_net import DeltaNetConfig
from quire.models.layers.experts import ExpertsConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.layers.two_sided_attention import TwoSidedAttentionConfig
from quire.models.ropes import HFConfig, read_rope
from quire.pooling_params import PoolingParams

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "output": "lm_head.weight",
    "layer": "model.layers.{}.",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
FOUR_NORM_NAMES = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
NUMBERED_EXPERT_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}
ROUTED_DEFAULTS: dict[str, Any] = {
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
"""Of most families with experts as `with_corrected_experts` gives them."""
MEAN_POOLING = PoolingParams(pooling_type="mean", normalize=False)
"""Of models that do not generate, where nothing else is published; as in sentence-transformers."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}


@dataclass(slots=True, frozen=True)
class Family:
    """How to read one family's checkpoints.

    `specialize` takes the config that `common` reads and returns it with what the family does otherwise. A
    weight name belongs to the whole model ("embedding", "norm", "output", "layer"), to a layer's norms or,
    where that differs from its own `weight_names`, to a sub-layer; these end before ".weight" or ".bias".
    `defaults` count where config.json lacks an entry, `architectures` are its names there, `activation` and
    `norm_eps` the entries with the activation and what norms add, `model_type` stands in config.json if it is
    not the family's name, `layer_types` are those that it may name, `layer_entries` those that a
    `per_layer_config` may have, `ropes` reads the sets of rotary frequencies for a head size, and `aliases`
    has what the usual entries are called by names of its own. Entries must say what `fixed` says, if they are
    there. `derived` returns defaults that follow from a
    config.json, whatever that holds. `may_look_ahead` says that a config.json may ask for bidirectional
    attention. `head` returns, for a number of labels, the pooling and the layers that make scores of them.
    """

    specialize: Callable[[HFConfig, ModelConfig], ModelConfig]
    weight_names: dict[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    activation: str = "hidden_act"
    norm_eps: str = "rms_norm_eps"
    model_type: str = ""
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")
    layer_entries: tuple[str, ...] = ()
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    ropes: Callable[[HFConfig, int], tuple[RopeConfig, ...]] = lambda hf, head_dim: (read_rope(hf, head_dim),)
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    may_look_ahead: bool = False
    head: Head = one_matrix

    def usual_entries(self, values: HFConfig) -> HFConfig:
        """Return a config's entries by their usual names; those by an alias come first."""
        entries = {name: value for name, value in values.items() if name not in self.aliases}
        given = ((name, values.get(name)) for name in self.aliases)
        return entries | {self.aliases[name]: value for name, value in given if value is not None}


def four_times_as_wide(values: Mapping[str, Any]) -> dict[str, int]:
    """Return `intermediate_size` as a default that follows from `hidden_size`; see `Family.derived`."""
    hidden_size = values.get("hidden_size")
    return {"intermediate_size": 4 * hidden_size} if isinstance(hidden_size, int) else {}


def check_fixed(hf: HFConfig, fixed: Mapping[str, Any]) -> None:
    """Refuse entries that are there and say otherwise than what an architecture computes."""
    for name, value in fixed.items():
        if hf.get(name, value) != value:
            raise ModelError(
                f"config.json has {name} {hf[name]!r:.100}; it must be {value!r:.100} in this architecture"
            )


def common(hf: HFConfig, architecture: str, family_name: str, family: Family) -> ModelConfig:
    """Return what all families read alike."""
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim", 0) or hf["hidden_size"] // heads
    if not head_dim:
        raise ModelError(
            f"config.json has num_attention_heads {heads} and hidden_size {hf['hidden_size']}, which leaves "
            "no feature for a head; head_dim must say how many they have"
        )
    dtype = _stored_dtype(hf)
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=family.ropes(hf, head_dim)[0],
        scale=head_dim**-0.5,
    )
    feed_forward = FeedForwardConfig(
        inner_size=hf["intermediate_size"], activation=_activation(hf[family.activation])
    )
    return ModelConfig(
        architecture=architecture,
        family=family_name,
        dtype=dtype,
        embedding_dtype=hf.get("embedding_dtype", dtype),
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        layers=(LayerConfig((attention, feed_forward)),) * hf["num_hidden_layers"],
        max_model_len=hf["max_position_embeddings"],
        tie_word_embeddings=hf["tie_word_embeddings"],
        norm_eps=hf[family.norm_eps],
    )


def _stored_dtype(hf: HFConfig) -> str:
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"config.json says dtype {dtype!r}; {nearest_name(str(dtype), DTYPE_BYTES)}")
    return str(dtype)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ModelError(f"config.json says activation {name!r}; {nearest_name(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def layer_windows(hf: HFConfig, is_sliding: Callable[[int], bool]) -> list[int]:
    """Return the window of each layer: by `layer_types` where the config has them, else by `is_sliding`."""
    window = hf.get("sliding_window", 0)
    layers = range(hf["num_hidden_layers"])
    types = hf.get("layer_types")
    if types is not None:
        return [window if types[i] == "sliding_attention" else 0 for i in layers]
    return [window if is_sliding(i) else 0 for i in layers]


def by_layer(hf: HFConfig, name: str, value: int) -> list[int]:
    """Return an entry of each layer: as `per_layer_config` says, else `value`."""
    own = {int(layer): entries or {} for layer, entries in hf["per_layer_config"].items()}
    return [own.get(layer, {}).get(name, value) for layer in range(hf["num_hidden_layers"])]


def two_sided(base: ModelConfig) -> ModelConfig:
    """Return a model whose attention is two-sided, and whose prompts become the means of their states."""
    return replace(
        base,
        layers=tuple(LayerConfig(tuple(map(_two_sided, layer.parts))) for layer in base.layers),
        tie_word_embeddings=False,
        pooling=MEAN_POOLING,
    )


def _two_sided(part: SubLayerConfig) -> SubLayerConfig:
    if not isinstance(part, AttentionConfig):
        return part
    return TwoSidedAttentionConfig(**{one.name: getattr(part, one.name) for one in fields(part)})


def with_attention_biases(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Give projections of attention their biases, if `attention_bias` says so."""
    bias = bool(hf.get("attention_bias", False))
    return base.changed(AttentionConfig, qkv_bias=bias, output_bias=bias)


def all_sliding(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Mistral, Mixtral and Phi-3: every layer has the window, if there is one."""
    return base.changed(AttentionConfig, window=hf.get("sliding_window", 0))


def with_mixers(base: ModelConfig, mixer: SubLayerConfig, has_mixer: Iterable[bool]) -> ModelConfig:
    """Give some layers, as `has_mixer` says of each, a sub-layer in place of attention."""
    layers = (
        LayerConfig((mixer, *layer.parts[1:])) if has else layer
        for layer, has in zip(base.layers, has_mixer, strict=True)
    )
    return replace(base, layers=tuple(layers))


def with_parallel_blocks(base: ModelConfig) -> ModelConfig:
    """Let feed-forward layers read what the attention before them reads."""
    return base.changed(FeedForwardConfig, is_parallel=True, pre_norm=False)


def with_experts(
    base: ModelConfig,
    has_experts: list[bool],
    *,
    shared_inner_size: int = 0,
    shared_gate: bool = False,
    **fields: Any,
) -> ModelConfig:
    """Give some layers a mixture of experts in place of the feed-forward layer.

    Args:
        base: all layers are attention and a feed-forward layer.
        has_experts: of each layer.
        shared_inner_size: of an expert beside them that computes all tokens; 0: there is none.
        shared_gate: that one has an output gate.
        fields: of `ExpertsConfig`; its activation is that of the feed-forward layer if they do not say it.
    """

    def changed(layer: LayerConfig) -> LayerConfig:
        attention, dense = layer.parts
        assert isinstance(dense, FeedForwardConfig)
        experts = ExpertsConfig(**{"activation": dense.activation, **fields})
        if not shared_inner_size:
            return LayerConfig((attention, experts))
        shared = replace(
            dense,
            inner_size=shared_inner_size,
            output_gate=shared_gate,
            is_shared_expert=True,
            is_parallel=True,
            pre_norm=False,
        )
        return LayerConfig((attention, experts, shared))

    layers = zip(base.layers, has_experts, strict=True)
    return replace(base, layers=tuple(changed(layer) if has else layer for layer, has in layers))


def sparse_layers(hf: HFConfig, num_layers: int, num_dense: int) -> list[bool]:
    """Return which layers have experts: as `mlp_layer_types` says, or all but the first."""
    layers = range(num_layers)
    types = hf.get("mlp_layer_types") or ["dense" if layer < num_dense else "sparse" for layer in layers]
    if not set(types) <= {"dense", "sparse"}:
        raise ModelError(f"config.json has mlp_layer_types {types!r:.100}; each must be dense or sparse")
    return [types[layer] == "sparse" for layer in layers]


def with_routed_experts(
    hf: HFConfig, base: ModelConfig, has_experts: list[bool], **fields: Any
) -> ModelConfig:
    """Give layers experts as DeepSeek and GLM name them, of which some compute all tokens.

    What files have of layers after the last, which predict further tokens, is passed over.
    """
    config = with_experts(
        base,
        has_experts,
        shared_inner_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
        num_experts=hf["n_routed_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        inner_size=hf["moe_intermediate_size"],
        scale=float(hf["routed_scaling_factor"]),
        **fields,
    )
    further = max(hf.get("num_nextn_predict_layers", 0), hf.get("num_mtp_layers", 0))
    ignored = (f"model.layers.{base.num_layers + number}." for number in range(further))
    return replace(config, ignored_prefixes=tuple(ignored))


def with_corrected_experts(hf: HFConfig, base: ModelConfig, has_experts: list[bool]) -> ModelConfig:
    """Give layers experts of groups that are chosen by corrected sigmoids (DeepSeek-V3, 2024)."""
    return with_routed_experts(
        hf,
        base,
        has_experts,
        scoring="sigmoid",
        normalize=bool(hf["norm_topk_prob"]),
        num_groups=hf["n_group"],
        groups_per_token=hf["topk_group"],
        correction=(hf["n_routed_experts"],),
    )


def read_delta_net(hf: HFConfig, **fields: Any) -> DeltaNetConfig:
    """Return the linear attention of a config; `fields` are others than those that it names."""
    keys, values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    if values % keys:
        raise ModelError(
            f"config.json has {values} linear_num_value_heads, which the {keys} linear_num_key_heads cannot "
            "serve evenly"
        )
    if _activation(hf["hidden_act"]) != "silu":
        raise ModelError(f"config.json has hidden_act {hf['hidden_act']!r}; linear attention has only silu")
    return DeltaNetConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=hf["linear_key_head_dim"],
        value_dim=hf["linear_value_head_dim"],
        num_taps=hf["linear_conv_kernel_dim"],
        **fields,
    )


def with_two_ropes(base: ModelConfig, windows: list[int], two: tuple[RopeConfig, RopeConfig]) -> ModelConfig:
    """Give layers their windows, and those with a window the second set of frequencies."""
    full, sliding = two
    ropes = [sliding if window else full for window in windows]
    return base.changed(AttentionConfig, window=windows, rope=ropes)
