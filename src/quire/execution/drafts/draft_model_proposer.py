"""Drafts from a smaller model whose tokens are the same."""

from __future__ import annotations

import numpy as np
import torch
from typing_extensions import override

from quire.execution.drafts.draft_states import DraftStates
from quire.execution.drafts.proposer import Proposer, RowsToContinue
from quire.execution.step_graphs import StepGraphs
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.devices.device import array_to_device
from quire.kernels.interface import Capture
from quire.kernels.size_classes import wide_size_class
from quire.kv.cache.paged_cache import PagedAttentionCache
from quire.models.decoder import Decoder
from quire.step import NO_TOKEN, Int64Array, IntArray


class DraftGraphs:
    """`StepGraphs` whose token ids [T] come from the device.

    Args:
        model: the draft model.
        kv_cache: its own.
        capture: of the device.
        max_num_batched_tokens: maximum number of tokens of a step.
    """

    def __init__(
        self, model: Decoder, kv_cache: PagedAttentionCache, capture: Capture, max_num_batched_tokens: int
    ) -> None:
        num_rows = wide_size_class(max_num_batched_tokens)
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=model.kernels.device)
        self._graphs = StepGraphs(
            model.whole_step,
            kv_cache.views,
            capture,
            lambda unknown: self._token_ids[: len(unknown)],
            model.kernels,
        )

    @property
    def max_array_bytes(self) -> int:
        """See `StepGraphs.max_array_bytes`."""
        return self._graphs.max_array_bytes

    def logits(self, token_ids: torch.Tensor, batch: AttentionBatch, num_largest: int | None) -> torch.Tensor:
        """See `StepGraphs.logits`."""
        return self._graphs.logits(self._given(token_ids), batch, num_largest=num_largest).rows

    def forward(self, token_ids: torch.Tensor, batch: AttentionBatch) -> None:
        """See `StepGraphs.forward`."""
        self._graphs.forward(self._given(token_ids), batch)

    def _given(self, token_ids: torch.Tensor) -> Int64Array:
        """Put token ids where the graphs read them; return what to give the graphs in their place."""
        self._token_ids[: len(token_ids)].copy_(token_ids)
        return np.zeros(len(token_ids), dtype=np.int64)


class DraftModelProposer(Proposer):
    """Computes every token that the target model computes, and then decodes a few more greedily.

    Its cache has the target's blocks and block tables, so its KV is valid wherever the target's is: prefix
    hits, preemption and forks need nothing of their own. Only KV that the target loads from elsewhere is
    missing here, and spoils the proposals that rest on it. What it writes past a request's known tokens goes
    into places of the request's own blocks that no valid KV is in; where a table has no more of them it
    proposes less.

    A token that it has chosen stays on the device for the next one, and the host waits for all of them once.

    States of its recurrent layers are part of the target's, so they lie before the last tokens that were
    accepted; it computes these again on copies, which go on with its drafts.

    A token id that only the target has, such as one that pads its vocabulary, is computed as the last one of
    the model; one that only the model has is never proposed.

    Args:
        model: its tokens are those of the target, as far as both have ids.
        kv_cache: its own, with as many blocks, of as many tokens, as the target's.
        graphs: of the model and the cache; None: nothing is captured.
        vocab_size: number of token ids that the target has; None: as many as the model.
        states: of its recurrent layers, without graphs; None: it has no such layers.
    """

    follows_tokens = True

    def __init__(
        self,
        model: Decoder,
        kv_cache: PagedAttentionCache,
        graphs: DraftGraphs | None = None,
        *,
        vocab_size: int | None = None,
        states: DraftStates | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._graphs = graphs
        self._states = states
        self._num_ids = model.config.vocab_size
        self._target_ids = self._num_ids if vocab_size is None else vocab_size
        self._num_largest: int | None = None
        if model.finds_largest_logits:
            self._num_largest = 0 if self._target_ids < self._num_ids else 1

    @property
    @override
    def max_array_bytes(self) -> int:
        return 0 if self._graphs is None else self._graphs.max_array_bytes

    @override
    def copy_blocks(self, copies: IntArray) -> None:
        self._kv_cache.copy_blocks(copies)

    @override
    def follow(self, token_ids: torch.Tensor, batch: AttentionBatch, *, is_captured: bool) -> None:
        if self._target_ids > self._num_ids:
            token_ids = token_ids.clamp(max=self._num_ids - 1)
        if self._states is not None:
            batch = self._states.followed(batch)
        if self._graphs is not None and is_captured:
            self._graphs.forward(token_ids, batch)
        else:
            self._model.forward(token_ids, self._kv_cache.views, batch)

    @override
    def propose(self, rows: RowsToContinue, num_drafts: int) -> IntArray:
        """Return tokens that may follow in each row, padded with NO_TOKEN: [S, num_drafts]."""
        positions_left = rows.num_blocks[rows.slots] * self._kv_cache.block_size - (rows.num_tokens - 1)
        count = np.minimum(rows.max_drafts, positions_left)
        device = self._model.kernels.device
        last = torch.zeros(len(count), dtype=torch.int64, device=device)
        drafts = last.new_full((num_drafts, len(count)), NO_TOKEN)
        for number in range(min(num_drafts, int(count.max(initial=0)))):
            live = np.flatnonzero(count > number)
            places = array_to_device(live, device)
            if number:
                start = rows.num_tokens[live] - 1 + number
                token_ids = last[places]
            else:
                start = self._first_to_compute(rows, live)
                token_ids = array_to_device(self._known(rows, live, start), device)
            logits = self._logits(token_ids, self._batch(rows, live, start, number))
            maxima, chosen = logits[:, : self._target_ids].max(dim=1)
            last[places] = chosen
            drafts[number, places] = torch.where(maxima.isfinite(), chosen, NO_TOKEN)
        return _until_missing(drafts.T.cpu().numpy().astype(np.int32))

    def _first_to_compute(self, rows: RowsToContinue, live: Int64Array) -> Int64Array:
        """Return where each `live` row is computed from, its last known token or one before it."""
        if self._states is None:
            return rows.num_tokens[live] - 1
        return self._states.begin(rows.slots[live])

    def _known(self, rows: RowsToContinue, live: Int64Array, start: Int64Array) -> Int64Array:
        """Return the known tokens of each `live` row from a place on, row after row."""
        counts = rows.num_tokens[live] - start
        first = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) + np.repeat(start - first, counts)
        token_ids = rows.token_ids[np.repeat(rows.slots[live], counts), places].astype(np.int64)
        known: Int64Array = np.minimum(token_ids, self._num_ids - 1)
        return known

    def _batch(
        self, rows: RowsToContinue, live: Int64Array, start: Int64Array, number: int
    ) -> AttentionBatch:
        """Return the step of each `live` row from a place to `number` tokens after its last known one."""
        slots = rows.slots[live]
        return AttentionBatch.build(
            start,
            rows.num_tokens[live] + number - start,
            rows.block_tables[slots, : rows.num_blocks[slots].max()],
            self._kv_cache.block_size,
            states=None if self._states is None else self._states.of_drafts(slots),
        )

    def _logits(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the logits of the last token of each sequence."""
        if self._graphs is not None:  # one token of each
            return self._graphs.logits(token_ids, batch, self._num_largest)
        hidden = self._model.forward(token_ids, self._kv_cache.views, batch)
        last = array_to_device(np.cumsum(batch.num_tokens) - 1, hidden.device)
        return self._model.logits(hidden[last], self._num_largest)


def _until_missing(drafts: IntArray) -> IntArray:
    """Return drafts [S, K] without those behind a NO_TOKEN."""
    return np.where(np.logical_and.accumulate(drafts != NO_TOKEN, axis=1), drafts, NO_TOKEN)
