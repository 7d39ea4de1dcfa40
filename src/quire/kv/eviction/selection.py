"""Which blocks of one sequence are evicted, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.config import AggregationMode, CacheEvictionConfig
from quire.kv.eviction.kvcrush import KVCrush
from quire.kv.eviction.lengths import EvictionLengths
from quire.kv.eviction.scores import FloatArray, SummedScores, WeightArray, token_scores_of
from quire.step import Int64Array

Diversity = Callable[[int, Int64Array, Int64Array], FloatArray]
"""Given a layer, the numbers of its evictable blocks, and which of these are the rest (by their place among
them), returns `quire.kv.eviction.diversity.diversity`."""


class BlockSelection:
    """The scores of one sequence, and the choice that they lead to.

    A block's number is its place in the order of the sequence, from 0 at the start of the cache; it differs
    from layer to layer which tokens that is. L layers.

    Args:
        config: how to score and choose.
        lengths: its sizes in blocks.
        num_layers: L.
    """

    def __init__(self, config: CacheEvictionConfig, lengths: EvictionLengths, num_layers: int) -> None:
        self._config = config
        self._lengths = lengths
        self._adaptive = config.adaptive_rkv_config
        self._scores = token_scores_of(config, num_layers)
        self._kvcrush = None
        if lengths.num_retained_blocks:
            self._kvcrush = KVCrush(config.kvcrush_config, lengths.block_size)

    def register(self, weights: WeightArray, num_queries: int) -> None:
        """Take the attention weights of all cached tokens [L, tokens], in the order of the sequence.

        Args:
            weights: summed over heads and queries.
            num_queries: the queries that they come from.
        """
        scored = weights[:, self._lengths.start_size :]
        if scored.shape[1]:
            self._scores.register(scored, num_queries)

    def choose(self, num_held: int, diversity: Diversity) -> Int64Array:
        """Return the numbers of the blocks to evict from a cache of `num_held` tokens, ascending.

        Returns:
            [L, `EvictionLengths.num_blocks_to_evict(num_held)`].
        """
        lengths = self._lengths
        first = lengths.num_start_blocks
        num_evictable = num_held // lengths.block_size - lengths.num_recent_blocks - first
        tokens = slice(0, num_evictable * lengths.block_size)
        block_scores = (
            self._scores.token_scores()[:, tokens].reshape(-1, num_evictable, lengths.block_size).sum(axis=2)
        )
        overflow = num_evictable - lengths.num_evictable_blocks
        if self._config.aggregation_mode == AggregationMode.ADAPTIVE_RKV:
            return first + self._least_needed(block_scores, overflow, diversity)
        lowest = np.sort(np.argsort(block_scores, axis=1, kind="stable")[:, :overflow], axis=1)
        return first + self._without_retained(lowest, tokens)

    def remove(self, evicted: Int64Array, num_held: int) -> None:
        """Forget the scores of evicted blocks [L, any] of a cache of `num_held` tokens."""
        lengths = self._lengths
        num_layers = len(evicted)
        kept = np.ones((num_layers, num_held - lengths.start_size), dtype=np.bool_)
        first_tokens = (evicted - lengths.num_start_blocks)[:, :, None] * lengths.block_size
        tokens = (first_tokens + np.arange(lengths.block_size)).reshape(num_layers, -1)
        np.put_along_axis(kept, tokens, values=False, axis=1)
        self._scores.keep(kept)

    def _without_retained(self, lowest: Int64Array, tokens: slice) -> Int64Array:
        """Return the overflowing blocks [L, overflow] without those that KVCrush retains."""
        overflow = lowest.shape[1]
        if self._kvcrush is None or overflow < self._lengths.num_retained_blocks:
            return lowest
        assert isinstance(self._scores, SummedScores)
        sums = self._scores.sums[:, tokens]
        evicted = [
            np.setdiff1d(of_layer, self._kvcrush.retained(layer_sums, of_layer))
            for layer_sums, of_layer in zip(sums, lowest, strict=True)
        ]
        return np.stack(evicted)

    def _least_needed(self, block_scores: FloatArray, overflow: int, diversity: Diversity) -> Int64Array:
        """Return the blocks that neither their share of the attention nor their diversity keeps."""
        evicted = [
            self._least_needed_in(layer, scores, overflow, diversity)
            for layer, scores in enumerate(block_scores)
        ]
        return np.stack(evicted)

    def _least_needed_in(
        self, layer: int, scores: FloatArray, overflow: int, diversity: Diversity
    ) -> Int64Array:
        by_score = np.argsort(-scores, kind="stable")
        sum_before = np.cumsum(np.append(0.0, scores[by_score]))[:-1]
        num_needed = int(np.count_nonzero(sum_before < self._adaptive.attention_mass * np.cumsum(scores)[-1]))
        num_kept = len(scores) - overflow
        rest = np.sort(by_score[min(num_needed, num_kept) :])
        num_places = len(rest) - overflow
        if not num_places:
            return rest
        blocks = self._lengths.num_start_blocks + np.arange(len(scores))
        by_diversity = np.argsort(-diversity(layer, blocks, rest), kind="stable")
        return np.sort(rest[by_diversity[num_places:]])
