"""What the runner knows of a sequence whose KV may be evicted: scores, and where its blocks lie."""

from __future__ import annotations

import numpy as np

from quire.config import CacheEvictionConfig
from quire.kernels.bounds import SCORE_UNIT
from quire.kv.eviction.lengths import EvictionLengths
from quire.kv.eviction.places import BlockPlaces
from quire.kv.eviction.scores import WeightArray
from quire.kv.eviction.selection import BlockSelection
from quire.step import Int64Array


class SequenceScores:
    """One sequence from its first token on.

    Args:
        config: of the eviction.
        lengths: its sizes in blocks.
        num_layers: L.
        num_prompt_tokens: of the sequence.
    """

    def __init__(
        self,
        config: CacheEvictionConfig,
        lengths: EvictionLengths,
        num_layers: int,
        *,
        num_prompt_tokens: int,
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        window = config.snapkv_window_size
        self._num_prompt_queries = min(window, num_prompt_tokens) if window else num_prompt_tokens
        self._block_size = lengths.block_size
        self._prompt_sums: Int64Array = np.zeros((num_layers, num_prompt_tokens), dtype=np.int64)
        self.selection = BlockSelection(config, lengths, num_layers)
        self.places = BlockPlaces(num_layers, lengths.num_start_blocks)

    @property
    def first_scoring_query(self) -> int:
        """Position of the first token whose attention scores."""
        return self.num_prompt_tokens - self._num_prompt_queries

    def add_prompt_sums(self, sums: Int64Array) -> None:
        """Add the sums of a chunk of the prompt, [L, keys] in `SCORE_UNIT`."""
        self._prompt_sums[:, : sums.shape[1]] += sums

    def end_prompt(self) -> None:
        """Register the scores of the whole prompt, as if it had been computed at once."""
        weights = (self._prompt_sums * SCORE_UNIT).astype(np.float32)
        self.selection.register(weights, self._num_prompt_queries)
        self._prompt_sums = np.empty((len(weights), 0), dtype=np.int64)

    def register_rows(self, rows: WeightArray) -> None:
        """Register the scores of successive tokens [L, tokens, keys], each as a step of its own.

        Keys are in the order of the block table, the last one being that of the last token.
        """
        num_keys = rows.shape[2]
        first_end = num_keys - rows.shape[1] + 1
        if not self.places.are_in_order:
            rows = np.take_along_axis(rows, self._tokens(num_keys)[:, None, :], axis=2)
        for number in range(rows.shape[1]):
            self.selection.register(rows[:, number, : first_end + number], 1)

    def _tokens(self, num_keys: int) -> Int64Array:
        """Return where in the cache the tokens lie, in their order: [L, num_keys]."""
        places = self.places.of(-(-num_keys // self._block_size))
        tokens = places[:, :, None] * self._block_size + np.arange(self._block_size)
        return tokens.reshape(len(places), -1)[:, :num_keys]
