"""The configuration of a decoder: its layers and their common settings, without any tensor."""

from __future__ import annotations

import dataclasses
from typing import Any

from quire.kv.cache.page_layout import KVLayerSpec
from quire.kv.cache.state_layout import StateSpec
from quire.models.layer import LayerConfig, SubLayerConfig
from quire.pooling_params import PoolingParams

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")  # as sentence-transformers calls them
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """One set of rotary position frequencies."""

    kind: str = "default"  # default, linear, dynamic, llama3, yarn, longrope or proportional
    theta: float = 10000.0  # base of the frequencies
    rotary_dim: int = 0  # features of each head that are rotated
    factor: float = 1.0  # how many times longer than the original context
    original_max_len: int = 0  # context of the original training in tokens
    low_freq_factor: float = 1.0  # llama3: waves longer than original / this are slowed
    high_freq_factor: float = 4.0  # llama3: waves shorter than original / this are kept
    beta_fast: float = 32.0  # yarn: turns in the original context from which on nothing is slowed
    beta_slow: float = 1.0  # yarn: turns in the original context up to which all is slowed
    turning_pairs: int = 0  # proportional: of rotary_dim / 2; the others, which would turn slowest, stay
    truncate: bool = True  # yarn: round the ramp's ends outwards to whole features
    attention_factor: float = 1.0  # multiplies cosines and sines
    query_beta: float = 0.0
    """Queries at position p are multiplied by 1 + query_beta * ln(1 + (p + query_offset) // original_max_len)
    (Llama 4).
    """
    query_offset: int = 0
    short_factors: tuple[float, ...] = ()  # longrope: divisors when max_model_len fits the original context
    long_factors: tuple[float, ...] = ()  # longrope: divisors when it does not


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowLayer:
    """A dense layer that pooled rows go through."""

    name: str  # in files, before ".weight" and ".bias"
    inputs: int
    outputs: int
    bias: bool = False
    tokens: tuple[int, ...] = ()
    """Whose rows of the output layer make the one row, in place of what `name` says: that of the last, less
    the one before it, if any.
    """
    activation: str = ""  # tanh, relu, gelu or silu; empty: none
    norm: str = (
        ""  # name of a layer norm behind that, with the model's `norm_kind` and `norm_eps`; empty: none
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer."""

    architecture: str = ""  # class name in the checkpoint, such as LlamaForCausalLM
    family: str = ""  # entry of `quire.models.families.FAMILIES` that knows its weights
    dtype: str = "float32"  # of the weights as stored
    stored_quantization: str = "none"
    """What most quantized matrices become: int8, int4, grouped_int8, int6 and mxfp4 (on a GPU grouped_int8),
    on a GPU fp8, fp8_blocks; none if there are no such matrices.
    """
    stored_group_size: int = 128  # inputs that share a scale, of all kinds in groups and blocks
    stored_otherwise: tuple[tuple[int, str, str, int], ...] = ()
    """(layer, field, quantization, group size) of matrices that are not as most, see `WeightSpec`; and of
    parts in groups of different kinds, which native kernels hold apart.
    """
    embedding_dtype: str = ""  # of the embedding as stored; empty: it is quantized there
    vocab_size: int = 0  # rows of the embedding
    hidden_size: int = 0  # features of the residual stream
    layers: tuple[LayerConfig, ...] = ()
    max_model_len: int = 0  # in tokens; replace it before loading to serve longer or only shorter sequences
    tie_word_embeddings: bool = False  # the output layer is the embedding
    output_bias: bool = False  # the output layer has a bias
    learned_positions: int = 0  # for how many positions a trained vector is added to embeddings; 0: none
    unused_positions: int = 0  # vectors in files before that of the first position
    token_types: int = 0  # for how many types of tokens a trained vector is added; 0: none
    embedding_norm: bool = False  # the residual stream begins normalized
    final_norm: bool = True  # it ends normalized
    embedding_field: str = "embedding"  # its name in files; "output": files have only the tied output matrix
    per_layer_size: int = 0  # features of what each layer gets of a token by itself; 0: nothing
    per_layer_vocab_size: int = 0  # rows of the embedding of that
    per_layer_dtype: str = ""  # of that embedding as stored; empty: it is quantized there
    norm_kind: str = "rms"  # of the residual stream: rms, layer, or layer_without_bias
    norm_eps: float = 1e-6  # added to the mean square, or the variance, in every norm
    norm_offset: float = 0.0  # added to the norms' weights; 1 in Gemma
    embedding_scale: float = 1.0  # multiplies embeddings
    residual_scale: float = 1.0  # multiplies what is added to the residual stream
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0  # soft cap of logits; 0: none
    ignored_prefixes: tuple[str, ...] = ()
    """Of the names of tensors in files that are passed over: what no token is computed from."""
    pooling: PoolingParams | None = None  # how a prompt becomes a row, in place of logits; None: it generates
    row_layers: tuple[RowLayer, ...] = ()  # what the row goes through
    labels: tuple[str, ...] = ()  # whose scores the row's numbers are; none: it is an embedding
    label_activation: str = ""  # makes probabilities of scores: softmax or sigmoid; empty: nothing does
    prompts: tuple[tuple[str, str], ...] = ()  # names, and what comes before texts that become rows
    prompt_name: str = ""  # of the prompt that does if a request names none; empty: none
    similarity: str = "cosine"  # how two rows are compared: one of SIMILARITIES
    row_sizes: tuple[int, ...] | None = None
    """To how many of their first numbers rows may be cut; none: to any; None: they may not be cut."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def kv_layers(self) -> tuple[KVLayerSpec | None, ...]:
        """The KV of each layer per token; None: the layer has none."""
        return tuple(layer.kv for layer in self.layers)

    @property
    def state_layers(self) -> tuple[StateSpec | None, ...]:
        """What each layer keeps of a sequence, however long that is; None: nothing."""
        return tuple(layer.state for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether any layer is recurrent."""
        return any(self.state_layers)

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """The specifications of the layers that have KV."""
        return tuple(spec for spec in self.kv_layers if spec is not None)

    @property
    def parts(self) -> tuple[SubLayerConfig, ...]:
        """The sub-layers of all layers, in order."""
        return tuple(part for layer in self.layers for part in layer.parts)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotary frequencies of its layers, in the order in which they come."""
        return tuple(dict.fromkeys(part.rope for part in self.parts if part.rope is not None))

    @property
    def row_size(self) -> int:
        """Numbers of the row that a prompt becomes."""
        return self.row_layers[-1].outputs if self.row_layers else self.hidden_size

    @property
    def is_causal(self) -> bool:
        """Whether no token's hidden state depends on a later token."""
        return all(part.is_causal for part in self.parts)

    def changed(self, kind: type[Any], **changes: Any) -> ModelConfig:
        """Return a model whose sub-layers of `kind` have other values in some fields; lists are by layer."""
        layers = (
            layer.changed(kind, **{k: v[index] if isinstance(v, list) else v for k, v in changes.items()})
            for index, layer in enumerate(self.layers)
        )
        return dataclasses.replace(self, layers=tuple(layers))
