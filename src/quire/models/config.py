"""What a decoder is, in numbers: everything that the families differ in, without any tensor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self

from quire.config import config, knob
from quire.errors import ModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INT8_SCALE_BYTES = 4  # an int8 KV cache has a float32 scale for each head of a token
NO_ROPE = -1


@config
class RopeConfig:
    """One set of rotary position frequencies."""

    kind: str = knob(default="default", help="default, linear, dynamic, llama3, yarn or longrope.")
    theta: float = knob(default=10000.0, help="Base of the frequencies.")
    rotary_dim: int = knob(default=0, help="Features of each head that are rotated.")
    factor: float = knob(default=1.0, help="How many times longer than the original context.")
    original_max_len: int = knob(default=0, help="Context of the original training in tokens.")
    low_freq_factor: float = knob(default=1.0, help="llama3: waves longer than original/this are slowed.")
    high_freq_factor: float = knob(default=4.0, help="llama3: waves shorter than original/this are kept.")
    beta_fast: float = knob(
        default=32.0, help="yarn: turns in the original context from which on nothing is slowed."
    )
    beta_slow: float = knob(
        default=1.0, help="yarn: turns in the original context up to which all is slowed."
    )
    truncate: bool = knob(default=True, help="yarn: round the ramp's ends outwards to whole features.")
    attention_factor: float = knob(default=1.0, help="Multiplies cosines and sines.")
    short_factors: tuple[float, ...] = knob(
        default=(), help="longrope: divisors when max_model_len fits the original context."
    )
    long_factors: tuple[float, ...] = knob(default=(), help="longrope: divisors when it does not.")


@config
class ModelConfig:
    """A decoder-only transformer. Fields named in the plural have one entry per layer."""

    architecture: str = knob(default="", help="Class name in the checkpoint, such as LlamaForCausalLM.")
    family: str = knob(default="", help="Entry of `quire.models.families.FAMILIES` that knows its weights.")
    dtype: str = knob(default="float32", help="Type of the weights as stored.")
    stored_quantization: str = knob(
        default="none", help="What most stored matrices become in memory: none (dtype), int8 or int4."
    )
    stored_group_size: int = knob(default=128, help="Inputs that share a scale, for int4.")
    embedding_dtype: str = knob(
        default="", help="Type of the embedding as stored; empty: it is quantized there, or not known."
    )
    vocab_size: int = knob(default=0, help="Rows of the embedding.")
    hidden_size: int = knob(default=0, help="Features of the residual stream.")
    num_layers: int = knob(default=0, help="Decoder layers.")
    num_heads: int = knob(default=0, help="Query heads.")
    num_kv_heads: int = knob(default=0, help="Key and value heads.")
    head_dim: int = knob(default=0, help="Features per head.")
    intermediate_size: int = knob(default=0, help="Features inside the feed-forward layer.")
    max_model_len: int = knob(
        default=0,
        help="Longest sequence in tokens; replace it before loading to serve a shorter or longer one.",
    )
    tie_word_embeddings: bool = knob(default=False, help="The output layer is the embedding.")
    attention_bias: bool = knob(default=False, help="Query, key and value projections have a bias.")
    output_bias: bool = knob(default=False, help="The attention's output projection has a bias.")
    mlp_bias: bool = knob(default=False, help="The feed-forward projections have a bias.")
    activation: str = knob(default="silu", help="silu, gelu_tanh or gelu.")
    norm_eps: float = knob(default=1e-6, help="Added to the mean square in every norm.")
    norm_offset: float = knob(default=0.0, help="Added to the norms' weights; 1 in Gemma.")
    pre_norm: bool = knob(default=True, help="Attention and feed-forward normalize their input.")
    post_norm: bool = knob(default=False, help="Attention and feed-forward normalize their output.")
    qk_norm: str = knob(
        default="", help="Norm of queries and keys: none (empty), per head, or over all (full)."
    )
    attention_scale: float = knob(default=1.0, help="Multiplies attention scores.")
    embedding_scale: float = knob(default=1.0, help="Multiplies embeddings.")
    residual_scale: float = knob(default=1.0, help="Multiplies what is added to the residual stream.")
    logits_divisor: float = knob(default=1.0, help="Divides logits.")
    attention_softcap: float = knob(default=0.0, help="Soft cap of attention scores. 0: none.")
    logits_softcap: float = knob(default=0.0, help="Soft cap of logits. 0: none.")
    sliding_windows: tuple[int, ...] = knob(
        default=(), help="Tokens that a layer sees, itself included. 0: all."
    )
    ropes: tuple[RopeConfig, ...] = knob(default=(), help="The sets of rotary frequencies.")
    layer_ropes: tuple[int, ...] = knob(default=(), help="Index into ropes; -1: no rotation.")
    moe_layers: tuple[bool, ...] = knob(default=(), help="Layers whose feed-forward is a mixture of experts.")
    num_experts: int = knob(default=0, help="Experts per mixture.")
    num_experts_per_token: int = knob(default=0, help="Experts that each token goes to.")
    moe_intermediate_size: int = knob(default=0, help="Features inside one expert.")
    normalize_expert_weights: bool = knob(default=False, help="A token's expert weights sum to 1.")

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """Read `config.json` of a Hugging Face model directory, or the metadata of a GGUF file.

        Raises:
            UnknownArchitectureError: the architecture is not a known one; the message lists those.
            ModelError: the file is missing, cannot be read, or lacks or contradicts something needed.
        """
        from quire.models.checkpoints.gguf.config import read_gguf_config
        from quire.models.checkpoints.gguf.location import find_gguf
        from quire.models.families import read_config

        gguf = find_gguf(path)
        values = read_json(path / "config.json") if gguf is None else read_gguf_config(gguf)
        if values is None:
            raise ModelError(f"{path} holds no config.json; is it a Hugging Face model directory?")
        return cls(**read_config(values))

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied output layer counted once."""
        from quire.models.weights import weight_specs

        return sum(math.prod(source.shape) for spec in weight_specs(self) for source in spec.sources)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of one token's keys and values over all layers, held as `dtype`.

        With int8 that includes the scales; see `quire.kv.tensors.KVCacheTensors`.
        """
        is_int8 = dtype == "int8"
        head_bytes = self.head_dim + INT8_SCALE_BYTES if is_int8 else self.head_dim * DTYPE_BYTES[dtype]
        return 2 * self.num_layers * self.num_kv_heads * head_bytes


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no such file.

    Raises:
        ModelError: it holds anything else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds {type(values).__name__}, not an object")
    return values
