"""Attention over the paged KV cache in plain torch: ragged, grouped, windowed.

The bits of a row do not depend on the rest of the batch; `quire.kernels.tiles` says in which order it adds.
"""

from __future__ import annotations

import torch

from quire.kernels.batch import AttentionBatch
from quire.kernels.tiles import TILE, HeadLayout, TileWork


def paged_attention(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Return the attention of every token of the step over its sequence's cache, itself included.

    Args:
        query: [T, heads, head_dim].
        key_blocks, value_blocks: [num_blocks, kv_heads, block_size, head_dim], any strides; the step's own
            keys and values are already written. Places that were never written may hold anything.
        batch: the step.
        scale: multiplies the scores.
        window: a token sees itself and the `window - 1` tokens before it; 0: all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: no cap (Gemma 2, section 2.4).

    Returns:
        [T, heads, head_dim], in the query's type; computed in float32.
    """
    heads = HeadLayout(query.shape[1], key_blocks.shape[1], query.shape[2])
    output = torch.empty_like(query)
    for work in batch.plan(heads, window):
        attended = _attend(query, key_blocks, value_blocks, work, heads=heads, scale=scale, softcap=softcap)
        output.index_copy_(0, work.query_rows, attended.to(query.dtype))
    return output


def _attend(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    work: TileWork,
    *,
    heads: HeadLayout,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Return [Q * R, heads, head_dim] float32. Below: I items, H KV heads, M = R * group rows, D head_dim."""
    num_items = len(work.item_query)
    num_masked = work.hidden.shape[0]
    rows = _query_blocks(query, work, heads).mul_(scale).index_select(0, work.item_query)  # [I, H, M, D]
    keys = _tiles(key_blocks, work, num_items)  # [I, H, TILE, D]
    scores = torch.bmm(rows.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(num_items, heads.num_kv_heads, work.rows, work.group, TILE)
    scores[:num_masked].masked_fill_(work.hidden, float("-inf"))
    scores = scores.flatten(2, 3)  # [I, H, M, TILE]
    best = _block_max(scores.amax(-1), work)  # [Q, H, M]
    weights = scores.sub_(best.index_select(0, work.item_query).unsqueeze(-1)).exp_()
    values = _tiles(value_blocks, work, num_items)
    # The weight of an unseen place is zero, but zero times NaN would be NaN.
    values.view(-1, heads.head_dim).index_fill_(0, work.unseen, 0.0)
    sums = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(num_items, *rows.shape[1:])
    total = _tree_sum(sums, work)
    total /= _tree_sum(weights.sum(-1), work).unsqueeze(-1)
    total = total.view(-1, heads.num_kv_heads, work.rows, work.group, heads.head_dim)
    total = total[:, :, :, : heads.group].transpose(1, 2)  # [Q, R, H, group, D]
    return total.reshape(-1, heads.num_heads, heads.head_dim)


def _query_blocks(query: torch.Tensor, work: TileWork, heads: HeadLayout) -> torch.Tensor:
    """Return a new [Q, H, R * padded group, D] float32."""
    rows = query.index_select(0, work.query_rows)
    rows = rows.view(-1, work.rows, heads.num_kv_heads, heads.group, heads.head_dim).transpose(1, 2)
    shape = (*rows.shape[:3], work.group, heads.head_dim)
    padded = rows.new_zeros(shape, dtype=torch.float32)
    padded[:, :, :, : heads.group] = rows
    return padded.flatten(2, 3)


def _tiles(blocks: torch.Tensor, work: TileWork, num_items: int) -> torch.Tensor:
    """Gather [I, H, TILE, D] float32 out of the paged cache."""
    num_heads, head_dim = blocks.shape[1], blocks.shape[3]
    tiles = torch.empty(num_items, num_heads, TILE, head_dim)
    if work.offsets is None:
        gathered = blocks.index_select(0, work.blocks)  # [I * per tile, H, block_size, D]
        gathered = gathered.view(num_items, -1, *gathered.shape[1:]).transpose(1, 2)
        tiles.view(gathered.shape).copy_(gathered)
    else:
        gathered = blocks.transpose(1, 2)[work.blocks, work.offsets]  # [I * TILE, H, D]
        tiles.copy_(gathered.view(num_items, TILE, num_heads, head_dim).transpose(1, 2))
    return tiles


def _block_max(item_max: torch.Tensor, work: TileWork) -> torch.Tensor:
    """Return [Q, H, M], the largest of [I, H, M] over each query block's items."""
    per_block = item_max.index_select(0, work.query_items)
    return per_block.view(len(work.roots), -1, *item_max.shape[1:]).amax(1)


def _tree_sum(items: torch.Tensor, work: TileWork) -> torch.Tensor:
    """Return each query block's sum over its items [I, ...], in the tree's order; `items` is overwritten."""
    for to, added in work.tree:
        items.index_copy_(0, to, items.index_select(0, to).add_(items.index_select(0, added)))
    return items.index_select(0, work.roots)
