"""Cache eviction beside the model: scores out of attention, and each layer's blocks out of the cache.

How many blocks go, and when, is in the plan; which ones is decided here, for each layer by itself. A prompt's
scores are registered once, when its last chunk is computed, and those of later tokens one by one, even if a
preempted request computes several of them at once: so evictions do not depend on how a sequence was cut.
L layers.
"""

from __future__ import annotations

import numpy as np

from quire.config import CacheEvictionConfig
from quire.execution.evicted_keys import KeyRotation, cached_keys, copy_blocks
from quire.execution.persistent_batch import PersistentBatch
from quire.execution.sequence_scores import SequenceScores
from quire.kernels.bounds import TILE
from quire.kernels.key_scores import Int64Array, KeyScores
from quire.kv.eviction.diversity import diversity
from quire.kv.eviction.lengths import EvictionLengths
from quire.kv.eviction.places import Moves
from quire.kv.eviction.rotation import positions_to_move_back
from quire.kv.eviction.scores import FloatArray, WeightArray
from quire.kv.paged_cache import PagedAttentionCache
from quire.models.config import ModelConfig
from quire.step import BoolArray, SchedulerOutput


class CacheEvictor:
    """Scores what running sequences have cached, and evicts what the plan says; is a pass's `LayerHook`.

    Args:
        config: of the eviction.
        model: whose keys they are.
        kv_cache: the tensors.
        batch: the runner's rows, whose block tables get shorter.
        block_size: tokens per block.
    """

    def __init__(
        self,
        config: CacheEvictionConfig,
        model: ModelConfig,
        kv_cache: PagedAttentionCache,
        batch: PersistentBatch,
        block_size: int,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._batch = batch
        self._lengths = EvictionLengths(config, block_size)
        self._num_layers = model.num_layers
        self._rotation = KeyRotation(model) if config.apply_rotation else None
        self._sequences: dict[int, SequenceScores] = {}  # by slot
        self._step_scores: KeyScores | None = None
        self._rows = np.empty((self._num_layers, 0), dtype=np.float32)
        self._sums = np.empty((self._num_layers, 0), dtype=np.int64)

    @property
    def keeps_positions_contiguous(self) -> bool:
        """Whether a token's rotary position is its place in the cache, and not its position."""
        return self._rotation is not None

    def positions_in_text(self, positions: Int64Array, output: SchedulerOutput) -> Int64Array:
        """Return the positions in their sequences of tokens [T] whose rotary positions are `positions`."""
        if self._rotation is None or output.evictions is None:
            return positions
        return positions + np.repeat(output.evictions.num_evicted_tokens, output.num_tokens)

    def open(self, slot: int, num_prompt_tokens: int) -> None:
        """Begin a sequence, of which nothing is evicted yet, in a slot."""
        self._sequences[slot] = SequenceScores(
            self._config, self._lengths, self._num_layers, num_prompt_tokens=num_prompt_tokens
        )

    def close(self, slot: int) -> None:
        """Forget what was in a slot."""
        self._sequences.pop(slot, None)

    # -- scores of a step ----------------------------------------------------------------------------------

    def first_scoring_token(self, output: SchedulerOutput) -> Int64Array:
        """Return which token of the step is the first whose attention scores, for each row: [R]."""
        firsts = [self._sequences[slot].first_scoring_query for slot in output.slots.tolist()]
        first: Int64Array = np.maximum(np.array(firsts, dtype=np.int64) - output.num_computed_tokens, 0)
        return first

    def is_in_prompt(self, output: SchedulerOutput) -> BoolArray:
        """Return which rows compute tokens of their prompt, whose scores are summed: [R]."""
        lengths = [self._sequences[slot].num_prompt_tokens for slot in output.slots.tolist()]
        in_prompt: BoolArray = output.num_computed_tokens < np.array(lengths)
        return in_prompt

    def begin(self, scores: KeyScores | None) -> None:
        """Prepare for the scores of a step."""
        self._step_scores = scores
        if scores is not None:
            self._rows = np.empty((self._num_layers, scores.rows.numel()), dtype=np.float32)
            self._sums = np.empty((self._num_layers, scores.sums.numel()), dtype=np.int64)

    def before_layer(self, layer: int) -> None:
        """Nothing is to be done before a layer."""

    def after_attention(self, layer: int) -> None:
        """Take the scores of one layer."""
        if self._step_scores is not None:
            self._rows[layer] = self._step_scores.rows.numpy()
            self._sums[layer] = self._step_scores.sums.numpy()

    def end(self, output: SchedulerOutput) -> None:
        """Register the scores of a step, and evict what its plan says."""
        if output.evictions is None:
            return
        num_computed = output.num_computed_tokens + output.num_tokens
        num_held = num_computed - output.evictions.num_evicted_tokens
        in_prompt = self.is_in_prompt(output)
        scores = self._step_scores
        for row, slot in enumerate(output.slots.tolist()):
            sequence = self._sequences[slot]
            if in_prompt[row]:
                if scores is not None and scores.num_scoring_tokens[row]:
                    sequence.add_prompt_sums(self._sums_of(row))
                if num_computed[row] == sequence.num_prompt_tokens:
                    sequence.end_prompt()
            else:
                sequence.register_rows(self._rows_of(row))
            if output.evictions.num_blocks[row]:
                self._evict(slot, sequence, int(num_held[row]))

    def _sums_of(self, row: int) -> Int64Array:
        """Return the scores of a row of the plan, summed over its tokens: [L, keys] in `SCORE_UNIT`."""
        assert self._step_scores is not None
        start = int(self._step_scores.first_sum[row])
        return self._sums[:, start : start + int(self._step_scores.num_keys[row])]

    def _rows_of(self, row: int) -> WeightArray:
        """Return the scores by each token of a row of the plan: [L, tokens, keys]."""
        scores = self._step_scores
        assert scores is not None
        count, num_keys = int(scores.num_rows[row]), int(scores.num_keys[row])
        stride = -(-num_keys // TILE) * TILE
        start = int(scores.first_row[row])
        rows = self._rows[:, start : start + count * stride].reshape(self._num_layers, count, stride)
        return rows[:, :, :num_keys]

    # -- eviction ------------------------------------------------------------------------------------------

    def _evict(self, slot: int, sequence: SequenceScores, num_held: int) -> None:
        table = self._batch.block_table(slot).astype(np.int64)
        places = sequence.places.of(len(table))

        def layer_diversity(layer: int, blocks: Int64Array, rest: Int64Array) -> FloatArray:
            keys = cached_keys(self._kv_cache.views[layer], table[places[layer, blocks]])
            return diversity(keys, self._lengths.block_size, rest)

        evicted = sequence.selection.choose(num_held, layer_diversity)
        sequence.selection.remove(evicted, num_held)
        self._move(sequence.places.evict(evicted, len(table)), table)
        count = evicted.shape[1]
        self._batch.shorten_block_table(slot, self._lengths.num_start_blocks, count)
        if self._rotation is not None:
            table = self._batch.block_table(slot).astype(np.int64)
            distances = positions_to_move_back(evicted, len(table) + count, self._lengths.block_size)
            blocks = table[sequence.places.of(len(table))]
            for layer in range(self._num_layers):
                self._rotation.turn_back(self._kv_cache.views[layer], blocks[layer], distances[layer])

    def _move(self, moves: Moves, table: Int64Array) -> None:
        """Copy layers' parts of blocks; all of a sequence's blocks behind its start area are its own."""
        for layer in np.unique(moves.layers).tolist():
            of_layer = moves.layers == layer
            copy_blocks(
                self._kv_cache.views[layer], table[moves.sources[of_layer]], table[moves.targets[of_layer]]
            )
