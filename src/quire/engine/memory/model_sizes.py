"""The size of a model's weights and the layout of its KV, by the engine's configuration."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.kernels import has_native_kernels, native_output_bits
from quire.kv.cache.page_layout import FEATURE_MULTIPLES, KVLayerSpec
from quire.models.shard import Shard
from quire.models.weights import count_parameters, weight_bytes

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.models.config import ModelConfig


def dtype_of(config: EngineConfig, model: ModelConfig) -> str:
    """Return the dtype of a model's weights and activations."""
    return model.dtype if config.dtype == "auto" else config.dtype


def kv_dtype_of(config: EngineConfig, model: ModelConfig) -> str:
    """Return the dtype of a model's KV cache, as `PagedAttentionCacheMetaData` names it.

    Raises:
        ConfigError: the head size of the model does not allow it.
    """
    if config.kv_cache_dtype == "auto":
        return dtype_of(config, model)
    sizes = {size for spec in model.kv_specs for size in (spec.key_head_dim, spec.value_head_dim)}
    multiple = FEATURE_MULTIPLES.get(config.kv_cache_dtype, 1)
    odd = min((size for size in sizes if size % multiple), default=0)
    if odd:
        raise ConfigError(
            f"EngineConfig.kv_cache_dtype is {config.kv_cache_dtype!r}, which needs a head size that is a "
            f"multiple of {multiple}; this model's is {odd}: set it to 'auto'"
        )
    return "float8_e4m3fn" if config.kv_cache_dtype == "fp8" else config.kv_cache_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of the target or the draft model, on the rank that needs most."""

    model: ModelConfig  # of that rank
    kv_layers: tuple[KVLayerSpec | None, ...]  # KV heads are divided among `kv_head_shards` ranks
    kv_head_shards: int
    num_ranks: int
    dtype: str
    kv_dtype: str
    num_parameters: int  # counted once: it visits all weights
    weight_bytes: int


def model_sizes(config: EngineConfig, model: ModelConfig, num_ranks: int) -> ModelSizes:
    """Return the sizes of a model that `num_ranks` ranks compute together.

    Raises:
        ConfigError: as `kv_dtype_of`.
    """
    dtype = dtype_of(config, model)
    # The shares of the last rank are the largest; some biases are only on the first.
    ends = [Shard(rank, num_ranks) for rank in {0, num_ranks - 1}]
    shard_model = Shard(num_ranks - 1, num_ranks).model(model)
    is_divided = all(spec.num_kv_heads % num_ranks == 0 for spec in model.kv_specs)
    return ModelSizes(
        shard_model,
        model.kv_layers if is_divided else shard_model.kv_layers,
        num_ranks if is_divided else 1,
        num_ranks,
        dtype,
        kv_dtype_of(config, model),
        count_parameters(model),
        max(
            weight_bytes(
                model,
                dtype,
                config.quantization,
                config.quantization_group_size,
                is_native=has_native(config),
                output_bits=output_bits(config),
                has_float8=has_float8(config),
                on_gpu=config.device == "cuda",
                shard=shard,
            )
            for shard in ends
        ),
    )


def has_native(config: EngineConfig) -> bool:
    """Return whether the kernels in C++ compute."""
    return config.kernels in ("auto", "native") and has_native_kernels()


def output_bits(config: EngineConfig) -> int:
    """Return the bits of the output layer of a model in int4."""
    return native_output_bits(config.int4_activations) if has_native(config) else 8


def has_float8(config: EngineConfig) -> bool:
    """Return whether the kernels multiply float8."""
    return config.kernels == "triton"
