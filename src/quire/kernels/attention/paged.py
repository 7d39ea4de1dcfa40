"""Attention over the paged KV cache in plain torch: ragged, grouped, windowed.

The bits of a row do not depend on the rest of the batch; `attention.tiles` says in which order it adds.
"""

from __future__ import annotations

import dataclasses

import torch

from quire.kernels.attention.key_scores import NOWHERE, KeyScores
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.kv_quantizers import PageQuantizer
from quire.kernels.attention.tiles import HeadLayout, TileWork
from quire.kernels.bounds import SCORE_UNIT, TILE


@dataclasses.dataclass(slots=True, frozen=True)
class DistanceBias:
    """What is added to scores, by the place of the key less that of the token."""

    table: torch.Tensor  # [heads, 2 * D + 1], from a distance of -D to D
    places: torch.Tensor  # [T] of the step's tokens


@dataclasses.dataclass(slots=True, frozen=True)
class Scores:
    """How scores become weights."""

    scale: float
    softcap: float
    sinks: torch.Tensor | None
    bias: DistanceBias | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class SeenBlocks:
    """Which key blocks each token sees."""

    seen: torch.Tensor  # [T, heads, key blocks] bool
    block_size: int  # tokens, a multiple of `TILE`


def attend(
    query: torch.Tensor,
    kv: KVLayer,
    work: TileWork,
    *,
    heads: HeadLayout,
    how: Scores,
    key_scores: KeyScores | None,
    seen: SeenBlocks | None = None,
) -> torch.Tensor:
    """Return the attention of the rows of `work`, [Q * R, heads, D] float32.

    Below: I items, H KV heads, M = R * group rows, D the features of a head, of keys or of values.
    """
    num_items = len(work.item_query)
    num_masked = work.hidden.shape[0]
    rows = _query_blocks(query, work, heads).mul_(how.scale).index_select(0, work.item_query)  # [I, H, M, D]
    keys = _tiles(kv.key_pages, kv.key_scales, kv.quantizer, work, num_items)  # [I, H, TILE, D]
    scores = torch.bmm(rows.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    if how.softcap:
        scores = scores.div_(how.softcap).tanh_().mul_(how.softcap)
    scores = scores.view(num_items, heads.num_kv_heads, work.rows, work.group, TILE)
    if how.bias is not None:
        _add_bias(scores, how.bias, work, heads)
    scores[:num_masked].masked_fill_(work.hidden, float("-inf"))
    if seen is not None:
        scores.masked_fill_(~_seen_tiles(seen, work, heads), float("-inf"))
    scores = scores.flatten(2, 3)  # [I, H, M, TILE]
    best = _block_max(scores.amax(-1), work)  # [Q, H, M]
    sinks = None if how.sinks is None else _padded_sinks(how.sinks, work, heads)
    if sinks is not None:
        best = torch.maximum(best, sinks)
    weights = scores.sub_(best.index_select(0, work.item_query).unsqueeze(-1)).exp_()
    values = _tiles(kv.value_pages, kv.value_scales, kv.quantizer, work, num_items)
    # The weight of an unseen place is zero, but zero times NaN would be NaN.
    values.view(-1, values.shape[-1]).index_fill_(0, work.unseen, 0.0)
    sums = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1))
    sums = sums.view(*scores.shape[:3], values.shape[-1])
    total = _tree_sum(sums, work)
    weight_sum = _tree_sum(weights.sum(-1), work)
    if sinks is not None:
        weight_sum += sinks.sub(best).exp_()
    if key_scores is not None:
        _write_key_scores(key_scores, weights, weight_sum, work, heads)
    total /= weight_sum.unsqueeze(-1)
    total = total.view(-1, heads.num_kv_heads, work.rows, work.group, values.shape[-1])
    total = total[:, :, :, : heads.group].transpose(1, 2)  # [Q, R, H, group, D]
    return total.reshape(-1, heads.num_heads, values.shape[-1])


def _add_bias(scores: torch.Tensor, bias: DistanceBias, work: TileWork, heads: HeadLayout) -> None:
    """Add to scores [I, H, R, padded group, TILE] what their distances have."""
    places = bias.places[work.query_rows].view(-1, work.rows)[work.item_query]  # [I, R]
    keys = work.tiles[:, None] * TILE + torch.arange(TILE)
    most = bias.table.shape[1] // 2
    distances = (keys[:, None] - places[:, :, None]).clamp_(-most, most)  # [I, R, TILE]
    of_heads = bias.table[:, distances + most].view(heads.num_kv_heads, heads.group, *distances.shape)
    scores[:, :, :, : heads.group].add_(of_heads.permute(2, 0, 3, 1, 4))


def _seen_tiles(seen: SeenBlocks, work: TileWork, heads: HeadLayout) -> torch.Tensor:
    """Return which tiles each row sees, [I, H, R, padded group, 1]."""
    rows = work.query_rows.view(-1, work.rows)[work.item_query]  # [I, R]
    tiles = seen.seen[rows, :, (work.tiles * TILE // seen.block_size)[:, None]]  # [I, R, heads]
    tiles = tiles.view(*rows.shape, heads.num_kv_heads, heads.group).transpose(1, 2)
    padded = tiles.new_ones(*tiles.shape[:3], work.group)
    padded[..., : heads.group] = tiles
    return padded.unsqueeze(-1)


def _padded_sinks(sinks: torch.Tensor, work: TileWork, heads: HeadLayout) -> torch.Tensor:
    """Return [H, M]."""
    padded = sinks.new_zeros(heads.num_kv_heads, work.rows, work.group)
    padded[:, :, : heads.group] = sinks.view(heads.num_kv_heads, 1, heads.group)
    return padded.flatten(1)


def _write_key_scores(
    key_scores: KeyScores,
    weights: torch.Tensor,
    weight_sum: torch.Tensor,
    work: TileWork,
    heads: HeadLayout,
) -> None:
    """Write weights [I, H, M, TILE], divided by sums [Q, H, M], to the rows and sums of their tokens."""
    rows = work.query_rows.view(-1, work.rows)
    by_row = -1, heads.num_kv_heads, work.rows, work.group
    for starts, is_summed in ((key_scores.row_starts, False), (key_scores.sum_starts, True)):
        starts_of = torch.from_numpy(starts)[rows].masked_fill_(~work.is_row, NOWHERE)  # [Q, R]
        item, row = torch.nonzero(starts_of[work.item_query[: work.num_items]] != NOWHERE, as_tuple=True)
        query = work.item_query[item]
        shares = weights.view(*by_row, TILE)[item, :, row, : heads.group]  # [N, H, group, TILE]
        row_sums = weight_sum.view(by_row)[query, :, row, : heads.group].unsqueeze(-1)
        shares = torch.where(row_sums > 0.0, shares / row_sums, 0.0)
        places = starts_of[query, row] // TILE + work.tiles[item]
        shares = shares.flatten(1, 2)  # [N, heads, TILE]
        if is_summed:
            units = (shares / SCORE_UNIT).to(torch.int64).sum(1)
            key_scores.sums.view(-1, TILE).index_add_(0, places, units)
        else:
            first, *others = shares.unbind(1)
            key_scores.rows.view(-1, TILE).index_copy_(0, places, sum(others, start=first))


def _query_blocks(query: torch.Tensor, work: TileWork, heads: HeadLayout) -> torch.Tensor:
    """Return a new [Q, H, R * padded group, D] float32."""
    rows = query.index_select(0, work.query_rows)
    rows = rows.view(-1, work.rows, heads.num_kv_heads, heads.group, heads.head_dim).transpose(1, 2)
    shape = (*rows.shape[:3], work.group, heads.head_dim)
    padded = rows.new_zeros(shape, dtype=torch.float32)
    padded[:, :, :, : heads.group] = rows
    return padded.flatten(2, 3)


def _tiles(
    pages: torch.Tensor,
    scales: torch.Tensor | None,
    quantizer: PageQuantizer | None,
    work: TileWork,
    num_items: int,
) -> torch.Tensor:
    """Gather [I, H, TILE, D] float32 out of the paged cache."""
    if quantizer is None:
        return _gather(pages, work, num_items, torch.float32)
    numbers = _gather(pages, work, num_items, pages.dtype)
    if scales is None:
        return quantizer.dequantize(numbers, None).float()
    of_vectors = _gather(
        scales.flatten(3) if scales.dim() > 3 else scales.unsqueeze(3), work, num_items, scales.dtype
    )
    return quantizer.dequantize(numbers, of_vectors.view(*numbers.shape[:3], *scales.shape[3:])).float()


def _gather(pages: torch.Tensor, work: TileWork, num_items: int, dtype: torch.dtype) -> torch.Tensor:
    """Gather [I, H, TILE, n] of pages [H, num_pages, page_size, n]."""
    num_heads, _, _, size = pages.shape
    tiles = torch.empty(num_items, num_heads, TILE, size, dtype=dtype)
    if work.offsets is None:
        gathered = pages.transpose(0, 1).index_select(0, work.blocks)  # [I * per tile, H, page_size, n]
        gathered = gathered.view(num_items, -1, *gathered.shape[1:]).transpose(1, 2)
        tiles.view(gathered.shape).copy_(gathered)
    else:
        gathered = pages.movedim(0, 2)[work.blocks, work.offsets]  # [I * TILE, H, n]
        tiles.copy_(gathered.view(num_items, TILE, num_heads, size).transpose(1, 2))
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
