"""Drafts from a smaller model of the same vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from quire.execution.arrays import BoolArray, Int64Array
from quire.execution.proposer import Proposer, RowsToContinue
from quire.kernels.batch import AttentionBatch
from quire.kernels.devices import array_to_device
from quire.kv.paged_cache import PagedAttentionCache
from quire.models.decoder import Decoder
from quire.step import NO_TOKEN, IntArray


class DraftModelProposer(Proposer):
    """Computes every token that the target model computes, and then decodes a few more greedily.

    Its cache has the target's blocks and block tables, so its KV is valid wherever the target's is: prefix
    hits, preemption and forks need nothing of their own. Only KV that the target loads from elsewhere is
    missing here, and spoils the proposals that rest on it. What it writes past a request's known tokens goes
    into places of the request's own blocks that no valid KV is in; where a table has no more of them it
    proposes less.

    Args:
        model: of the target's vocabulary.
        kv_cache: its own, with as many blocks, of as many tokens, as the target's.
    """

    follows_tokens = True

    def __init__(self, model: Decoder, kv_cache: PagedAttentionCache) -> None:
        self._model = model
        self._kv_cache = kv_cache

    def copy_blocks(self, copies: IntArray) -> None:
        """Take part in the KV cache's copies [N, 2] of blocks (from, to)."""
        self._kv_cache.copy_blocks(copies)

    def follow(self, token_ids: torch.Tensor, batch: AttentionBatch) -> None:
        """Compute the tokens [T] of a step."""
        self._model.forward(token_ids, self._kv_cache, batch)

    def propose(self, rows: RowsToContinue, num_drafts: int) -> IntArray:
        """Return tokens that may follow in each row, padded with NO_TOKEN: [S, num_drafts]."""
        drafts = np.full((len(rows.slots), num_drafts), NO_TOKEN, dtype=np.int32)
        positions_left = rows.num_blocks[rows.slots] * self._kv_cache.block_size - (rows.num_tokens - 1)
        count = np.minimum(rows.max_drafts, positions_left)
        token_ids = rows.token_ids[rows.slots, rows.num_tokens - 1].astype(np.int64)
        live = np.arange(len(count))
        for number in range(num_drafts):
            live = live[number < count[live]]
            if not live.size:
                break
            next_ids, is_finite = self._decode(rows, live, number, token_ids[live])
            live = live[is_finite]
            token_ids[live] = drafts[live, number] = next_ids[is_finite]
        return drafts

    def _decode(
        self, rows: RowsToContinue, live: Int64Array, number: int, token_ids: Int64Array
    ) -> tuple[Int64Array, BoolArray]:
        """Compute one token [L] of each `live` row, `number` after its last known one.

        Returns:
            The most likely next token of each, and whether its logits were finite.
        """
        slots = rows.slots[live]
        batch = AttentionBatch.build(
            rows.num_tokens[live] - 1 + number,
            np.ones(len(live), dtype=np.int64),
            rows.block_tables[slots, : rows.num_blocks[slots].max()],
            self._kv_cache.block_size,
        )
        on_device = array_to_device(token_ids, self._model.kernels.device)
        logits = self._model.logits(self._model.forward(on_device, self._kv_cache, batch))
        maxima, next_ids = logits.max(dim=1)
        return next_ids.cpu().numpy(), torch.isfinite(maxima).cpu().numpy()
