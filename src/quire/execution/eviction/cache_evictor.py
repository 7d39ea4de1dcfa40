"""Cache eviction beside the model: scores out of attention, and each layer's blocks out of the cache.

How many blocks are evicted, and when, is in the plan; which ones is decided here, for each layer by itself. A
prompt's scores are registered once, when its last chunk is computed, and those of later tokens one by one,
even if a preempted request computes several of them at once: so evictions do not depend on how a sequence was
cut. L layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from quire.config import CacheEvictionConfig
from quire.execution.eviction.evicted_keys import KeyRotation, by_layer, cached_keys, copy_blocks
from quire.execution.eviction.sequence_scores import SequenceScores
from quire.execution.persistent_batch import PersistentBatch
from quire.kernels.attention.key_scores import KeyScores
from quire.kernels.attention.sparse_prefill import SkippedKeys
from quire.kernels.devices.device import HostCopy
from quire.kv.cache.paged_cache import PagedAttentionCache
from quire.kv.eviction.diversity import diversity
from quire.kv.eviction.lengths import EvictionLengths
from quire.kv.eviction.places import Moves, positions_to_move_back
from quire.kv.eviction.scores import FloatArray
from quire.models.config import ModelConfig
from quire.step import BoolArray, EvictionData, Int64Array, SchedulerOutput


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
        self._device = kv_cache.tensor.device
        self._rotation = KeyRotation(model, self._device) if config.apply_rotation else None
        self._sequences: dict[int, SequenceScores] = {}  # by slot
        self._step_scores: KeyScores | None = None
        self._on_host: list[HostCopy] = []  # of its rows and sums

    def positions_in_text(self, positions: Int64Array, output: SchedulerOutput) -> Int64Array:
        """Return the positions in their sequences of tokens [T] whose rotary positions are `positions`."""
        if self._rotation is None or output.evictions is None:
            return positions
        return positions + np.repeat(output.evictions.num_evicted_tokens, output.num_tokens)

    def open(self, slot: int, num_prompt_tokens: int) -> None:
        """Begin a sequence in a slot; nothing of it is evicted yet."""
        self._sequences[slot] = SequenceScores(
            self._config, self._lengths, self._num_layers, num_prompt_tokens=num_prompt_tokens
        )

    def close(self, slot: int) -> None:
        """Forget what was in a slot."""
        self._sequences.pop(slot, None)

    # -- scores of a step ----------------------------------------------------------------------------------

    def batch_options(
        self, output: SchedulerOutput, evictions: EvictionData, skipped_keys: SkippedKeys | None
    ) -> dict[str, Any]:
        """Return the arguments of `AttentionBatch.build` about evicted tokens and scores.

        With rotation, a token's rotary position is its place in the cache.
        """
        num_computed, num_evicted = output.num_computed_tokens, evictions.num_evicted_tokens
        if self._rotation is not None:  # as if what was evicted had never been there
            num_computed, num_evicted = num_computed - num_evicted, np.zeros_like(num_evicted)
        first_scoring = self.first_scoring_token(output)
        if skipped_keys is not None:
            first_scoring = np.where(skipped_keys.is_any, output.num_tokens, first_scoring)
        return {
            "num_computed_tokens": num_computed,
            "num_evicted_tokens": num_evicted,
            "first_scoring_token": first_scoring,
            "sums_scores": self.is_in_prompt(output),
            "num_scored_layers": self._num_layers,
            "scores_on": self._device,
        }

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
        """Prepare for the scores of a step, which are those of all layers."""
        self._step_scores = scores

    def before_layer(self, layer: int) -> None:
        """Say where the scores of a layer go."""
        if self._step_scores is not None:
            self._step_scores.layer = layer

    def after_attention(self, layer: int) -> None:
        """Start copying the scores to the host after the last layer, without waiting."""
        scores = self._step_scores
        if scores is not None and layer == self._num_layers - 1:
            self._on_host = [HostCopy(part) for part in (scores.layer_rows, scores.layer_sums)]

    def end(self, output: SchedulerOutput) -> None:
        """Wait for the scores of a step, register them, and evict what its plan says."""
        scores, self._step_scores = self._step_scores, None
        if scores is not None:
            rows, sums = (copy.wait() for copy in self._on_host)
            scores = dataclasses.replace(scores, layer_rows=rows, layer_sums=sums)
        self._on_host = []
        if output.evictions is None:
            return
        num_computed = output.num_computed_tokens + output.num_tokens
        num_held = num_computed - output.evictions.num_evicted_tokens
        in_prompt = self.is_in_prompt(output)
        for row, slot in enumerate(output.slots.tolist()):
            sequence = self._sequences[slot]
            if in_prompt[row]:
                if scores is not None and scores.num_scoring_tokens[row]:
                    sequence.add_prompt_sums(scores.sums_of(row).numpy())
                if num_computed[row] == sequence.num_prompt_tokens:
                    sequence.end_prompt()
            else:
                assert scores is not None
                sequence.register_rows(scores.rows_of(row).numpy())
            if output.evictions.num_blocks[row]:
                self._evict(slot, sequence, int(num_held[row]))

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
            self._turn_back(self._rotation, table[sequence.places.of(len(table))], distances)

    def _move(self, moves: Moves, table: Int64Array) -> None:
        """Copy layers' parts of blocks; all of a sequence's blocks behind its start area are its own."""
        blocks = table[np.stack((moves.sources, moves.targets))]
        for layer, (sources, targets) in by_layer(moves.layers, blocks, self._device):
            copy_blocks(self._kv_cache.views[layer], sources, targets)

    def _turn_back(self, rotation: KeyRotation, blocks: Int64Array, distances: Int64Array) -> None:
        """Turn keys in each layer's blocks [L, N] back by distances [L, N], most of which are the same."""
        layers, numbers = np.nonzero(distances)
        columns = np.stack((blocks[layers, numbers], distances[layers, numbers]))
        farthest = int(distances.max())
        for layer, (turned, back) in by_layer(layers, columns, self._device):
            rotation.turn_back(self._kv_cache.views[layer], turned, back, farthest=farthest)
