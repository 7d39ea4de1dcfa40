"""The models that cache eviction supports, and the memory of its scores.

What the scores of cached tokens take grows with the cache; what those of a step take, with its tokens. An
engine on a GPU has those of a step there until its forward pass has ended, and all others in the host's
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.config import AggregationMode
from quire.errors import ConfigError
from quire.kernels import bounds
from quire.kv.eviction import diversity
from quire.kv.eviction.lengths import eviction_lengths
from quire.models.layers.attention import attention_of

if TYPE_CHECKING:
    from quire.config import CacheEvictionConfig, SchedulerConfig
    from quire.models.config import ModelConfig

FLOAT32_BYTES = 4
SCORE_BYTES = 8  # sums of a prompt's scores, and of scores after it
PADDING = 128  # tokens: sums end with a tile, and kept scores have room for more
PLACE_BYTES = 9 * 8  # of a GPU: where the keys and scores of a scoring token are
ANGLE_POSITIONS = 2048  # whose angles are computed at once


def score_bytes_per_token(scheduler: SchedulerConfig, model: ModelConfig, *, on_gpu: bool = False) -> int:
    """Return the most bytes that the scores of one token in the cache take, those of a step included.

    With `on_gpu`, only what is in the GPU's memory counts.
    """
    if not scheduler.use_cache_eviction:
        return 0
    of_step = model.num_layers * SCORE_BYTES
    if on_gpu:
        return of_step
    return of_step + model.num_layers * max(SCORE_BYTES, _kept_bytes(scheduler.cache_eviction_config))


def _kept_bytes(config: CacheEvictionConfig) -> int:
    """Return the bytes that a sequence's scores of a token and layer take; arrays grow by an eighth."""
    match config.aggregation_mode:
        case AggregationMode.SUM:
            return SCORE_BYTES * 9 // 8
        case AggregationMode.NORM_SUM:
            return 2 * SCORE_BYTES * 9 // 8
        case AggregationMode.ADAPTIVE_RKV:
            return FLOAT32_BYTES * config.adaptive_rkv_config.window_size


def eviction_bytes(
    scheduler: SchedulerConfig, model: ModelConfig, max_model_len: int, *, on_gpu: bool = False
) -> int:
    """Return the most bytes that scores and evictions take besides `score_bytes_per_token`.

    The most comes about when all tokens of a step follow prompts: each has a row, of all keys that its
    sequence holds, in each layer, and on a CPU in each head while attention runs. When a sequence's scores
    are registered, its rows or the sums of its prompt are there more than once.
    """
    lengths = eviction_lengths(scheduler)
    if lengths is None:
        return 0
    num_layers, tokens = model.num_layers, scheduler.max_num_batched_tokens
    num_keys = min(max_model_len, int(lengths.max_held_after_prompt(np.array(max_model_len))))
    numbers = _padded(num_keys) * min(tokens, scheduler.max_num_seqs * num_keys)
    num_heads = max(part.num_heads for part in attention_of(model))
    normalizers = 2 * tokens * num_heads
    # The start of a sequence may be shared, and is counted only once as a part of the cache.
    unshared = scheduler.max_num_seqs * (lengths.start_size + PADDING)
    unshared_bytes = unshared * score_bytes_per_token(scheduler, model, on_gpu=on_gpu)
    if on_gpu:
        scores = (numbers * num_layers + normalizers) * FLOAT32_BYTES + tokens * PLACE_BYTES
        keys = _gpu_key_bytes(scheduler.cache_eviction_config, model, num_keys, max_model_len)
        return scores + unshared_bytes + keys
    of_one = _padded(num_keys) * min(tokens, num_keys)
    rows = numbers * (num_layers + num_heads) + of_one * num_layers
    rows += numbers // bounds.TILE * num_heads  # the largest weight of each tile
    registered = 2 * SCORE_BYTES * num_layers * max_model_len
    return (
        (rows + normalizers) * FLOAT32_BYTES
        + registered
        + unshared_bytes
        + _diversity_bytes(scheduler.cache_eviction_config, model, max_model_len)
    )


def _gpu_key_bytes(config: CacheEvictionConfig, model: ModelConfig, num_kept: int, max_model_len: int) -> int:
    """Return the most bytes of a GPU that an eviction takes, which reads and writes keys layer by layer.

    Keys that stay are moved, those of a whole prompt fetched as they are stored, and those that are rotated
    in float32 in between, by angles of all positions, in tables that double when they grow.
    """
    of_token = _key_features(model) * FLOAT32_BYTES
    changed = num_kept * of_token
    if config.apply_rotation:
        head_dim = max(spec.key_head_dim for spec in model.kv_specs)
        changed = 3 * changed + 3 * (max_model_len + ANGLE_POSITIONS) * head_dim * FLOAT32_BYTES
    compared = 0
    if config.aggregation_mode == AggregationMode.ADAPTIVE_RKV:
        compared = max_model_len * of_token
    return max(changed, compared)


def _diversity_bytes(config: CacheEvictionConfig, model: ModelConfig, max_model_len: int) -> int:
    """Return the most bytes that comparing keys takes: those of one layer and prompt, all with each other."""
    if config.aggregation_mode != AggregationMode.ADAPTIVE_RKV:
        return 0
    keys = 3 * _key_features(model) * FLOAT32_BYTES  # as stored, in float32, and normalized
    similarities = diversity.ROWS * (2 * FLOAT32_BYTES + 1)  # all, those counted, and which these are
    return max_model_len * (keys + similarities)


def _padded(num_keys: int) -> int:
    return -(-num_keys // bounds.TILE) * bounds.TILE


def _key_features(model: ModelConfig) -> int:
    """Return the features of a token's keys in the layer that has most."""
    return max(spec.num_kv_heads * spec.key_head_dim for spec in model.kv_specs)


def refuse_model_beside_eviction(config: SchedulerConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if `config` evicts KV in a way that does not fit `model`."""
    if not config.use_cache_eviction:
        return
    num_without = model.num_layers - len(model.kv_specs)
    if num_without:
        raise ConfigError(
            f"SchedulerConfig.use_cache_eviction is on, but {num_without} layers of {model.architecture} "
            "keep no KV of their own to score; turn it off"
        )
    windows = [spec.window for spec in model.kv_specs if spec.window]
    if windows:
        raise ConfigError(
            f"SchedulerConfig.use_cache_eviction is on, but {len(windows)} layers of {model.architecture} "
            f"see only the last {min(windows)} tokens, which cannot be counted when tokens between them are "
            "evicted; turn it off"
        )
    reason = _cannot_rotate(model)
    if config.cache_eviction_config.apply_rotation and reason:
        raise ConfigError(
            f"CacheEvictionConfig.apply_rotation is on, but {model.architecture} {reason}; turn it off: "
            "positions then keep the gaps of what was evicted"
        )


def _cannot_rotate(model: ModelConfig) -> str:
    """Return how the rotary embedding differs from Llama's; empty if it does not."""
    layers = attention_of(model)
    [rope, *others] = {layer.rope for layer in layers}
    if rope is None or others:
        return "has several rotary embeddings, or layers without one"
    if rope.kind != "default":
        return f"has a scaled rotary embedding, {rope.kind}"
    head_dim = max(layer.head_dim for layer in layers)
    if rope.rotary_dim != head_dim:
        return f"rotates only {rope.rotary_dim} of the {head_dim} features of a head"
    return ""
