"""What a step has to read and to compute at least: numbers of the model's shape, nothing measured."""

from __future__ import annotations

import dataclasses
import math

from quire.kernels.triton.linear.tiled import MAX_ROWS_APART
from quire.kernels.triton.linear.tma_products import MIN_ROWS
from quire.kv import PagedAttentionCacheMetaData
from quire.models.config import ModelConfig
from quire.models.layers.attention import attention_of
from quire.models.layers.experts import ExpertsConfig
from quire.models.layers.feed_forward import FeedForwardConfig
from quire.models.weights import weight_specs

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Work:
    """What a kernel has to do at least."""

    bytes: float  # that it reads and writes
    operations: float = 0.0  # multiplications and additions

    def seconds(self, bandwidth: float, rate: float) -> float:
        """Return how long it takes with so many bytes and operations per second."""
        return max(self.bytes / bandwidth, self.operations / rate)


def decode_work(
    config: ModelConfig, num_requests: int, context: int, read_share: float | None = None
) -> dict[str, Work]:
    """Return what each kernel of a decode step in bfloat16 does, by name, in all layers together.

    What is small beside these is left out. Requests have `context` tokens, and tokens are the likeliest ones.
    `read_share` is as in `decode_bytes`.
    """
    rows = num_requests
    is_gated_at_once = rows > MAX_ROWS_APART
    matrices = expert_matrices = 0.0
    features = expert_features = 0.0  # of rows, that products read and write
    for spec in weight_specs(config):
        shapes = [source.shape for source in spec.sources]
        if len(shapes[0]) != 2 or (spec.field == "embedding" and not config.tie_word_embeddings):
            continue
        outputs = sum(shape[0] for shape in shapes)
        if spec.field == "expert_gate_up" or (spec.field == "gate_up" and is_gated_at_once):
            outputs //= 2
        size, both = sum(map(math.prod, shapes)), shapes[0][1] + outputs
        if spec.field.startswith("expert_"):
            expert_matrices, expert_features = expert_matrices + size, expert_features + both
        else:
            matrices, features = matrices + size, features + both
    layers, hidden = config.num_layers, config.hidden_size
    attention = attention_of(config)
    heads = sum(part.num_heads * part.head_dim for part in attention)
    kv_heads = sum(part.num_kv_heads * part.head_dim for part in attention)
    kv = cache_bytes_per_token(config)
    work = {
        "tma_linear_kernel" if rows >= MIN_ROWS else "linear_kernel": Work(
            (matrices + rows * features) * BFLOAT16_BYTES, 2 * rows * matrices
        ),
        "attend": Work(
            kv * context * rows + 2 * rows * heads * BFLOAT16_BYTES,
            4 * rows * context * heads,
        ),
        "_rotary_and_write_kv_kernel": Work(rows * (2 * heads + 4 * kv_heads) * BFLOAT16_BYTES),
        "_rms_norm_kernel": Work((8 * layers + 2) * rows * hidden * BFLOAT16_BYTES),
        "_largest_kernel": Work(rows * config.vocab_size * FLOAT32_BYTES),
    }
    mixture = _mixture(config)
    if mixture is None:
        inner = sum(part.inner_size for part in config.parts if isinstance(part, FeedForwardConfig))
        gated = Work(rows * 3 * inner * BFLOAT16_BYTES)
        return work if is_gated_at_once else {**work, "_gated_activation_kernel": gated}
    chosen = mixture.experts_per_token
    pairs = rows * chosen / mixture.num_experts  # of each expert
    read = _read_share(config, rows) if read_share is None else read_share
    return {
        **work,
        "expert_product_kernel": Work(
            (expert_matrices * read + pairs * expert_features) * BFLOAT16_BYTES, 2 * pairs * expert_matrices
        ),
        "add_results_kernel": Work(layers * rows * (chosen + 1) * hidden * BFLOAT16_BYTES),
    }


def decode_bytes(
    config: ModelConfig, num_requests: int, context: int, read_share: float | None = None
) -> float:
    """Return the bytes that a decode step in bfloat16 reads: weights once, and the KV of all requests.

    A request has `context` tokens. Of a mixture it reads the experts that any token has chosen, `read_share`
    of all; None: all are as likely, and tokens choose independently. Of the embedding it reads a row a
    request, which is nothing.
    """
    if read_share is None:
        read_share = _read_share(config, num_requests)
    weights = 0.0
    for spec in weight_specs(config):
        size = sum(math.prod(source.shape) for source in spec.sources)
        if spec.field == "embedding" and not config.tie_word_embeddings:
            continue
        weights += size * (read_share if spec.field.startswith("expert_") else 1.0)
    return weights * BFLOAT16_BYTES + cache_bytes_per_token(config) * context * num_requests


def cache_bytes_per_token(config: ModelConfig) -> int:
    """Return the bytes of a token's keys and values in bfloat16, of all layers."""
    return PagedAttentionCacheMetaData.for_layers(
        config.kv_layers, page_size=1, dtype="bfloat16", num_pages=1
    ).bytes_per_token


def _read_share(config: ModelConfig, num_requests: int) -> float:
    """Return the share of experts that any of the requests' tokens have chosen."""
    mixture = _mixture(config)
    return 1.0 if mixture is None else 1.0 - (1 - _chosen_share(mixture)) ** num_requests


def _mixture(config: ModelConfig) -> ExpertsConfig | None:
    """Return the mixture of experts that layers have; None: they have none."""
    return next((part for part in config.parts if isinstance(part, ExpertsConfig)), None)


def num_experts(config: ModelConfig) -> int:
    """Return how many experts each mixture has; 0: there are none."""
    mixture = _mixture(config)
    return mixture.num_experts if mixture else 0


def _chosen_share(mixture: ExpertsConfig | None) -> float:
    return mixture.experts_per_token / mixture.num_experts if mixture else 1.0


def prefill_operations(config: ModelConfig, num_prompts: int, length: int) -> float:
    """Return the multiplications and additions of prompts' matrices and attention, without their logits.

    A token sees itself and those before it; windows are not counted.
    """
    per_token = 0.0
    for spec in weight_specs(config):
        size = sum(math.prod(source.shape) for source in spec.sources)
        if spec.field in ("embedding", "output"):
            continue
        chosen = _chosen_share(_mixture(config))
        per_token += 2 * size * (chosen if spec.field.startswith("expert_") else 1.0)
    pairs = length * (length + 1) / 2
    attention = 4 * pairs * sum(part.num_heads * part.head_dim for part in attention_of(config))
    return num_prompts * (length * per_token + attention)
