"""What a step has to read and to compute at least: numbers of the model's shape, nothing measured."""

from __future__ import annotations

import math

from quire.kv import PagedAttentionCacheMetaData
from quire.models.config import ModelConfig
from quire.models.weights import weight_specs


def decode_bytes(config: ModelConfig, num_requests: int, context: int) -> float:
    """Return the bytes that a decode step in bfloat16 reads: weights once, and the KV of all requests.

    A request has `context` tokens. Of a mixture it reads the experts that any token has chosen: all are as
    likely, and tokens choose independently. Of the embedding it reads a row a request, which is nothing.
    """
    read_share = 1.0
    if config.num_experts:
        read_share -= (1 - config.num_experts_per_token / config.num_experts) ** num_requests
    weights = 0.0
    for spec in weight_specs(config):
        size = sum(math.prod(source.shape) for source in spec.sources)
        if spec.field == "embedding" and not config.tie_word_embeddings:
            continue
        weights += size * (read_share if spec.field.startswith("expert_") else 1.0)
    cache = PagedAttentionCacheMetaData.for_layers(
        config.kv_layers, page_size=1, dtype="bfloat16", num_pages=1
    )
    return weights * 2 + cache.bytes_per_token * context * num_requests


def prefill_operations(config: ModelConfig, num_prompts: int, length: int) -> float:
    """Return the multiplications and additions of prompts' matrices and attention, without their logits.

    A token sees itself and those before it; windows are not counted.
    """
    per_token = 0.0
    for spec in weight_specs(config):
        size = sum(math.prod(source.shape) for source in spec.sources)
        if spec.field in ("embedding", "output"):
            continue
        chosen = config.num_experts_per_token / config.num_experts if config.num_experts else 1.0
        per_token += 2 * size * (chosen if spec.field.startswith("expert_") else 1.0)
    pairs = length * (length + 1) / 2
    attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
    return num_prompts * (length * per_token + attention)
