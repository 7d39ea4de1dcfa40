"""Attention in which each token of a prompt sees all others, or those within a window: that of encoders.

Nothing is kept of a prompt, which is computed in one step: keys and values are read where they are projected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from quire.models.layer import LayerLoader, LayerWeight, Step, StepSizes, SubLayer
from quire.models.layers.attention import Attention, AttentionConfig, head_section
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

    from quire.kernels.attention.batch import AttentionBatch
    from quire.kernels.attention.kv_layer import KVLayer

NUM_BUCKETS = 32  # of distances that have a bias in common
_MAX_DISTANCE = 128  # beyond which all have
_INT32_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TwoSidedAttentionConfig(AttentionConfig):
    """The numbers of one layer's attention. With a window, a token sees `window - 1` others on each side."""

    has_distance_bias: bool = False
    """Scores get a trained number of each head for the distance of the key, which all layers share."""

    @property
    @override
    def kv(self) -> None:
        return None

    @property
    @override
    def is_causal(self) -> bool:
        return False

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        yield from AttentionConfig.weights(self, hidden_size, names, shard)
        if self.has_distance_bias:
            source = "distance_bias.weight", (NUM_BUCKETS, self.num_heads)
            heads = head_section(self.num_heads, 1, shard.query_heads(self.num_heads))
            yield LayerWeight("distance_bias", (source,), axis=1, sections=(heads,), layer=0)

    @override
    def peak_bytes(self, step: StepSizes) -> int:
        rows_of_tokens = step.tokens * min(step.scheduler.max_num_seqs, step.tokens) * _INT32_BYTES
        return AttentionConfig.peak_bytes(self, step) + rows_of_tokens

    @override
    def load(self, loader: LayerLoader) -> SubLayer:
        return TwoSidedAttention(self, loader)


class TwoSidedAttention(Attention):
    """Two-sided attention with its weights."""

    def __init__(self, whole: TwoSidedAttentionConfig, loader: LayerLoader) -> None:
        super().__init__(whole, loader)
        of_buckets = loader.tensor("distance_bias")
        if of_buckets is not None:
            distances = range(-_MAX_DISTANCE, _MAX_DISTANCE + 1)
            of_distances = of_buckets[[bucket_of(distance) for distance in distances]]
            self._distance_bias = of_distances.t().contiguous()

    @override
    def _keys_and_values(
        self, step: Step, buffers: Mapping[str, torch.Tensor]
    ) -> tuple[KVLayer, AttentionBatch]:
        batch = step.batches[0].over_rows()
        return batch.kv_of_rows(buffers["qkv"], self._heads), batch


def bucket_of(distance: int) -> int:
    """Return which bias belongs to how many places a key lies behind the token (T5, Raffel et al. 2020).

    Keys behind it and the others have half of the buckets each. Of these, the first 8 are of one distance
    each, and the others widen by the square root of 2.
    """
    places = abs(distance)
    bucket = places if places < 8 else min(7 + (places * places // 64).bit_length(), 15)
    return bucket + NUM_BUCKETS // 2 * (distance > 0)
