"""What a decoder is, in numbers: everything that the families differ in, without any tensor."""

from __future__ import annotations

import dataclasses

from quire.kv.cache.page_layout import KVLayerSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NO_ROPE = -1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """One set of rotary position frequencies."""

    kind: str = "default"  # default, linear, dynamic, llama3, yarn or longrope
    theta: float = 10000.0  # base of the frequencies
    rotary_dim: int = 0  # features of each head that are rotated
    factor: float = 1.0  # how many times longer than the original context
    original_max_len: int = 0  # context of the original training in tokens
    low_freq_factor: float = 1.0  # llama3: waves longer than original / this are slowed
    high_freq_factor: float = 4.0  # llama3: waves shorter than original / this are kept
    beta_fast: float = 32.0  # yarn: turns in the original context from which on nothing is slowed
    beta_slow: float = 1.0  # yarn: turns in the original context up to which all is slowed
    truncate: bool = True  # yarn: round the ramp's ends outwards to whole features
    attention_factor: float = 1.0  # multiplies cosines and sines
    short_factors: tuple[float, ...] = ()  # longrope: divisors when max_model_len fits the original context
    long_factors: tuple[float, ...] = ()  # longrope: divisors when it does not


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Fields named in the plural have one entry per layer, but for `ropes`."""

    architecture: str = ""  # class name in the checkpoint, such as LlamaForCausalLM
    family: str = ""  # entry of `quire.models.families.FAMILIES` that knows its weights
    dtype: str = "float32"  # of the weights as stored
    stored_quantization: str = "none"
    """What most quantized matrices become: int8, int4, grouped_int8, on a GPU fp8, fp8_blocks; none if there
    are no such matrices."""
    stored_group_size: int = 128  # inputs that share a scale, for int4, grouped_int8 and fp8_blocks
    stored_otherwise: tuple[tuple[int, str, str, int], ...] = ()
    """(layer, field, quantization, group size) of matrices that are not as most; see `WeightSpec`."""
    embedding_dtype: str = ""  # of the embedding as stored; empty: it is quantized there
    vocab_size: int = 0  # rows of the embedding
    hidden_size: int = 0  # features of the residual stream
    num_layers: int = 0
    num_heads: int = 0  # query heads
    num_kv_heads: int = 0
    head_dim: int = 0  # features per head
    intermediate_size: int = 0  # features inside the feed-forward layer
    max_model_len: int = 0  # in tokens; replace it before loading to serve longer or only shorter sequences
    tie_word_embeddings: bool = False  # the output layer is the embedding
    embedding_field: str = "embedding"  # as which it is stored; "output": files have the tied matrix so only
    attention_bias: bool = False  # query, key and value projections have a bias
    output_bias: bool = False  # the attention's output projection has a bias
    mlp_bias: bool = False  # the feed-forward projections have a bias
    activation: str = "silu"  # silu, gelu_tanh or gelu
    norm_eps: float = 1e-6  # added to the mean square in every norm
    norm_offset: float = 0.0  # added to the norms' weights; 1 in Gemma
    pre_norm: bool = True  # attention and feed-forward normalize their input
    post_norm: bool = False  # attention and feed-forward normalize their output
    qk_norm: str = ""  # norm of queries and keys: none (empty), per head ("head"), or over all ("full")
    attention_scale: float = 1.0  # multiplies attention scores
    embedding_scale: float = 1.0  # multiplies embeddings
    residual_scale: float = 1.0  # multiplies what is added to the residual stream
    logits_divisor: float = 1.0
    attention_softcap: float = 0.0  # soft cap of attention scores; 0: none
    logits_softcap: float = 0.0  # soft cap of logits; 0: none
    sliding_windows: tuple[int, ...] = ()  # tokens that a layer sees, itself included; 0: all
    ropes: tuple[RopeConfig, ...] = ()  # the sets of rotary frequencies
    layer_ropes: tuple[int, ...] = ()  # index into ropes; NO_ROPE: no rotation
    moe_layers: tuple[bool, ...] = ()  # layers whose feed-forward is a mixture of experts
    num_experts: int = 0  # per mixture
    num_experts_per_token: int = 0  # that each token goes to
    moe_intermediate_size: int = 0  # features inside one expert
    normalize_expert_weights: bool = False  # a token's expert weights sum to 1

    @property
    def kv_layers(self) -> tuple[KVLayerSpec, ...]:
        """What each layer keeps of a token in the KV cache."""
        windows = self.sliding_windows or (0,) * self.num_layers
        return tuple(
            KVLayerSpec(self.num_kv_heads, self.head_dim, self.head_dim, window)
            for window in windows[: self.num_layers]
        )
