"""Sparse attention of prompts: the cached keys that a step's tokens leave out, in layers without a window."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.kv_layer import KVLayer, keys_of
from quire.kernels.devices.device import array_to_device
from quire.step import Int64Array


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class SkippedKeys:
    """Places of the cache that no token of a sequence sees in this step; [S] each."""

    start: Int64Array
    end: Int64Array  # `start` or less: none are skipped; at most the tokens cached before the step

    @property
    def is_any(self) -> npt.NDArray[np.bool_]:
        """Whether a sequence skips any."""
        return self.start < self.end


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class KeySelection:
    """Tokens that see only the key blocks that each head estimates to matter (XAttention, Xu et al. 2025).

    Queries and keys are cut into blocks at multiples of `block_size` places. The estimate takes the scores
    of a query block and the keys before it along antidiagonals: of each `stride` queries and `stride` keys,
    the first query with the last key, the second with the last but one, and so on. Their mean stands for all
    scores of these queries and keys; tokens that are not in the step or in the cache count as zeros. The
    softmax of the means, in one row for each `stride` queries, summed over a key block, is its mass. The
    query block's own key block and the first one are selected; then the others in falling order of mass,
    lower blocks first among equals, while the mass selected so far is below `threshold` times the total.
    """

    end: Int64Array  # [S] the tokens of the step before this place select; the others see all keys
    threshold: float
    block_size: int  # tokens, a multiple of `TILE` and of `stride`
    stride: int  # tokens, at most `MAX_STRIDE`


@dataclasses.dataclass(slots=True, frozen=True)
class QueryBlock:
    """Tokens of one sequence in one query block."""

    sequence: int
    first_row: int  # of the batch
    first_place: int
    num_tokens: int
    num_keys: int  # in the sequence's cache


def selected_keys(
    query: torch.Tensor,
    kv: KVLayer,
    selection: KeySelection,
    *,
    num_cached_tokens: Int64Array,
    num_tokens: Int64Array,
    block_tables: npt.NDArray[np.int32],
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Return which key blocks each token sees, [T, heads, key blocks] bool; all where it does not select.

    Args:
        query: [T, heads, head_dim].
        kv: the layer's cache.
        selection: which tokens select, and how.
        num_cached_tokens, num_tokens, block_tables: as in `AttentionBatch`.
        scale, softcap: as for `paged_attention`.
    """
    longest = int((num_cached_tokens + num_tokens).max())
    size = selection.block_size
    seen = torch.ones(len(query), query.shape[1], -(-longest // size), dtype=torch.bool, device=query.device)
    for block in query_blocks(selection, num_cached_tokens, num_tokens):
        diagonal = block.first_place // size
        rows = slice(block.first_row, block.first_row + block.num_tokens)
        keys = _keys(kv, block_tables[block.sequence], min(block.num_keys, (diagonal + 1) * size))
        scores = _mean_scores(query[rows], keys, block.first_place, selection) * scale
        if softcap:
            scores = (scores / softcap).tanh() * softcap
        masses = _masses(scores, block, selection)
        seen[rows, :, : diagonal + 1] = _select(masses, selection.threshold)
    return seen


def query_blocks(
    selection: KeySelection, num_cached_tokens: Int64Array, num_tokens: Int64Array
) -> list[QueryBlock]:
    """Return the query blocks that may leave out a key block; with two key blocks, both are seen.

    Args:
        selection: which tokens select.
        num_cached_tokens, num_tokens: [S] as in `AttentionBatch`.
    """
    blocks = []
    first_row = 0
    counts = zip(num_cached_tokens.tolist(), num_tokens.tolist(), strict=True)
    for sequence, (cached, count) in enumerate(counts):
        place, end = cached, min(cached + count, int(selection.end[sequence]))
        while place < end:
            stop = min((place // selection.block_size + 1) * selection.block_size, end)
            if place >= 2 * selection.block_size:
                row = first_row + place - cached
                blocks.append(QueryBlock(sequence, row, place, stop - place, cached + count))
            place = stop
        first_row += count
    return blocks


def _keys(kv: KVLayer, table: npt.NDArray[np.int32], num_keys: int) -> torch.Tensor:
    """Return the first keys of a sequence, [keys, kv_heads, head_dim] float32."""
    page_size = kv.key_pages.shape[2]
    pages = array_to_device(table[: -(-num_keys // page_size)].astype(np.int64), kv.key_pages.device)
    return keys_of(kv, pages)[:, :num_keys].transpose(0, 1)


def _mean_scores(
    query: torch.Tensor, keys: torch.Tensor, first_place: int, selection: KeySelection
) -> torch.Tensor:
    """Return the mean products [heads, rows, columns] of the `stride` queries of a row and keys of a column.

    The matrix products have the same shape for every query block; their number is the number of key blocks.
    """
    stride, size = selection.stride, selection.block_size
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    before = first_place % size
    rows = query.new_zeros(size, num_heads, head_dim, dtype=torch.float32)
    rows[before : before + num_tokens] = query
    rows = rows.view(size // stride, stride, num_heads, head_dim).flip(1).permute(2, 0, 1, 3).flatten(2)
    num_blocks = -(-len(keys) // size)
    columns = keys.new_zeros(num_blocks * size, num_kv_heads, head_dim)
    columns[: len(keys)] = keys
    columns = columns.view(num_blocks, size // stride, stride, num_kv_heads, head_dim)
    columns = columns.permute(3, 0, 1, 2, 4).flatten(3)  # [KV heads, blocks, columns, stride * head_dim]
    group = num_heads // num_kv_heads
    columns = columns.repeat_interleave(group, dim=0).flatten(0, 1)
    rows = rows.repeat_interleave(num_blocks, dim=0)
    products = torch.bmm(rows, columns.transpose(1, 2)).view(num_heads, num_blocks, size // stride, -1)
    return products.transpose(1, 2).flatten(2) / stride


def _masses(scores: torch.Tensor, block: QueryBlock, selection: KeySelection) -> torch.Tensor:
    """Return the mass of each key block, [heads, key blocks] float64, of scores [heads, rows, columns]."""
    stride, size = selection.stride, selection.block_size
    first = block.first_place % size // stride
    last = (block.first_place % size + block.num_tokens - 1) // stride
    num_rows, num_columns = scores.shape[1:]
    row, column = (torch.arange(count, device=scores.device) for count in (num_rows, num_columns))
    row_column = row + num_columns - num_rows  # the column that a row ends with
    scores = scores.masked_fill(column > row_column[:, None], -torch.inf)
    weights = scores.softmax(-1)[:, first : last + 1].double()
    return weights.view(*weights.shape[:2], -1, num_rows).sum((1, 3))


def _select(masses: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return which blocks are selected of [heads, key blocks]; the last one is the query block's own.

    All are where masses are not finite.
    """
    order = masses[:, 1:-1].argsort(dim=1, descending=True, stable=True) + 1
    falling = masses.gather(1, order)
    before = torch.cat([masses[:, :1] + masses[:, -1:], falling[:, :-1]], dim=1).cumsum(1)
    total = masses.sum(1, keepdim=True)
    is_selected = (before < threshold * total) | ~total.isfinite()
    return torch.ones_like(masses, dtype=torch.bool).scatter_(1, order, is_selected)
