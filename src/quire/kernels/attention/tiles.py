"""Cuts a step's attention into tiles, so that every sum has one order whatever the batch and the chunking.

The keys of a sequence are cut into tiles of `TILE` tokens at fixed places of its cache. A *work item* is one
block of query rows against one tile; its matrix products have the same inner shapes in every step. Softmax
sums of a row are then added over the tiles by the binary tree over tile numbers: node j of one level is the
sum of nodes 2j and 2j + 1 of the level below. A tile that a row does not see contributes an exact zero, so
leaving it out changes no bit. The maximum needs no order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.sparse_prefill import SkippedKeys
from quire.kernels.bounds import SCRATCH_FLOATS, TILE
from quire.step import Int64Array

ROW_CLASSES = (1, 8, 64)  # query rows per block: decodes, a few tokens, prefill chunks
ROW_MULTIPLE = 16  # float32 batched products on CPU give a row the same bits for every such number of rows


@dataclasses.dataclass(slots=True, frozen=True)
class HeadLayout:
    """The shape of a layer's attention heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # features of a head of values; None: as of keys; 0: keys are the values

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_size(self) -> int:
        """Features of a head of values beside its keys."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclasses.dataclass(slots=True, frozen=True)
class TileWork:
    """Query blocks of equal height against all tiles that they see. Q query blocks, I items, R rows.

    The first E items need a mask: E = `hidden.shape[0]`. Rows that pad a query block repeat its last row.
    """

    rows: int  # R, query rows per block
    group: int  # query heads per KV head and row, padded so that R * group is a multiple of ROW_MULTIPLE
    num_items: int  # I, without the idle one that there may be at the end
    query_rows: torch.Tensor  # [Q * R] token of each row
    is_row: torch.Tensor  # [Q, R] bool, False for rows that pad
    item_query: torch.Tensor  # [I] query block of each item
    tiles: torch.Tensor  # [I] tile of each item
    blocks: torch.Tensor  # [I * blocks per tile], or [I * TILE] if tiles are not whole blocks
    offsets: torch.Tensor | None  # [I * TILE] place in the block, if tiles are not whole blocks
    hidden: torch.Tensor  # [E, 1, R, 1, TILE] bool, keys that a row must not see
    unseen: torch.Tensor  # [U] values that no row sees and that may be NaN: rows of [I * kv_heads * TILE]
    query_items: torch.Tensor  # [Q * most items] items of each query block, padded by repetition
    tree: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # per level: (items to add to, items to add)
    roots: torch.Tensor  # [Q] item that ends up with each query block's sum


AttentionPlan = tuple[TileWork, ...]


@dataclasses.dataclass(slots=True, frozen=True)
class _QueryBlocks:
    """Blocks of up to R consecutive query rows, each of one sequence; arrays are [Q]."""

    sequence: Int64Array
    first_row: Int64Array  # token of the batch
    first_position: Int64Array
    last_position: Int64Array
    first_tile: Int64Array
    num_tiles: Int64Array
    end_key: Int64Array  # keys from here on are not seen
    skipped_start: Int64Array  # keys from here to `skipped_end` are not seen
    skipped_end: Int64Array

    def part(self, start: int, stop: int) -> _QueryBlocks:
        """Return the blocks from `start` to `stop`."""
        return _QueryBlocks(*(getattr(self, field.name)[start:stop] for field in dataclasses.fields(self)))


def plan_attention(
    num_cached_tokens: Int64Array,
    num_tokens: Int64Array,
    block_tables: npt.NDArray[np.int32],
    *,
    block_size: int,
    heads: HeadLayout,
    window: int,
    skipped_keys: SkippedKeys | None = None,
    is_two_sided: bool = False,
) -> AttentionPlan:
    """Return the work of one step for layers of this shape; `window` 0 means that all earlier keys are seen.

    Arguments as for `AttentionBatch`; a token's position is here the last place in the cache that it sees,
    which may be beyond the end. Each work's intermediates stay near `SCRATCH_FLOATS`.
    """
    end = num_cached_tokens + num_tokens
    first_position = num_cached_tokens
    if is_two_sided:
        first_position = first_position + (window - 1 if window else num_tokens - 1)
        window = max(2 * window - 1, 0)
    row_start = np.cumsum(num_tokens) - num_tokens
    skipped = skipped_keys or SkippedKeys(np.zeros_like(num_tokens), np.zeros_like(num_tokens))
    works = []
    lower = 0
    for rows in ROW_CLASSES:
        in_class = (num_tokens > lower) & ((num_tokens <= rows) | (rows == ROW_CLASSES[-1]))
        lower = rows
        sequences = np.flatnonzero(in_class)
        if not len(sequences):
            continue
        blocks = _cut_rows(
            sequences, first_position, num_tokens, row_start, skipped, end=end, rows=rows, window=window
        )
        for part in _parts_within_scratch(blocks, heads, rows):
            works.append(_build_work(part, block_tables, block_size, heads=heads, rows=rows, window=window))
    return tuple(works)


def _cut_rows(
    sequences: Int64Array,
    start: Int64Array,
    num_tokens: Int64Array,
    row_start: Int64Array,
    skipped: SkippedKeys,
    *,
    end: Int64Array,
    rows: int,
    window: int,
) -> _QueryBlocks:
    counts = -(-num_tokens[sequences] // rows)
    sequence = np.repeat(sequences, counts)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = number * rows
    last = np.minimum(first + rows, num_tokens[sequence]) - 1
    first_position = start[sequence] + first
    last_position = start[sequence] + last
    end_key = np.minimum(last_position + 1, end[sequence])
    oldest = np.maximum(first_position - window + 1, 0) if window else np.zeros_like(first_position)
    first_tile = oldest // TILE
    num_tiles = (end_key - 1) // TILE + 1 - first_tile
    first_row = row_start[sequence] + first
    return _QueryBlocks(
        sequence,
        first_row,
        first_position,
        last_position,
        first_tile,
        num_tiles,
        end_key,
        skipped.start[sequence],
        skipped.end[sequence],
    )


def _parts_within_scratch(blocks: _QueryBlocks, heads: HeadLayout, rows: int) -> Iterator[_QueryBlocks]:
    query_rows = _padded_group(heads, rows) * rows
    floats = heads.num_kv_heads * max(TILE * heads.head_dim, query_rows * max(TILE, heads.head_dim))
    most_items = max(SCRATCH_FLOATS // floats, 1)
    ends = np.cumsum(blocks.num_tiles)
    start = 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + most_items, side="right")), start + 1)
        yield blocks.part(start, stop)
        start = stop


def _padded_group(heads: HeadLayout, rows: int) -> int:
    group = heads.group
    while group * rows % ROW_MULTIPLE:
        group += 1
    return group


def _build_work(
    blocks: _QueryBlocks,
    block_tables: npt.NDArray[np.int32],
    block_size: int,
    *,
    heads: HeadLayout,
    rows: int,
    window: int,
) -> TileWork:
    item_query = np.repeat(np.arange(len(blocks.num_tiles)), blocks.num_tiles)
    starts = np.cumsum(blocks.num_tiles) - blocks.num_tiles
    tile = np.arange(len(item_query)) - starts[item_query] + blocks.first_tile[item_query]
    order, num_masked = _masked_first(blocks, item_query, tile, window)
    place = np.empty_like(order)  # where the item that is n-th by (query block, tile) lies
    place[order] = np.arange(len(order))
    tree, roots = _addition_tree(item_query, tile, place)
    query_items = place[
        starts[:, None] + np.minimum(np.arange(blocks.num_tiles.max()), blocks.num_tiles[:, None] - 1)
    ]
    num_items = len(order)
    if num_items * heads.num_kv_heads == 1:
        order = np.repeat(order, 2)  # an idle second item: a batch of one matrix takes another path in torch
    item_query, tile = item_query[order], tile[order]
    hidden = _hidden_keys(blocks, item_query[:num_masked], tile[:num_masked], rows, window)
    block_ids, offsets = _tile_places(blocks, item_query, tile, block_tables, block_size)
    last_row = (blocks.last_position - blocks.first_position)[:, None]
    row = np.arange(rows)
    return TileWork(
        rows=rows,
        group=_padded_group(heads, rows),
        num_items=num_items,
        query_rows=torch.from_numpy((blocks.first_row[:, None] + np.minimum(row, last_row)).ravel()),
        is_row=torch.from_numpy(row <= last_row),
        item_query=torch.from_numpy(item_query),
        tiles=torch.from_numpy(tile),
        blocks=torch.from_numpy(block_ids.ravel()),
        offsets=None if offsets is None else torch.from_numpy(offsets.ravel()),
        hidden=torch.from_numpy(hidden[:, None, :, None, :]),
        unseen=torch.from_numpy(_unseen_places(hidden, heads.num_kv_heads)),
        query_items=torch.from_numpy(query_items.ravel()),
        tree=tuple((torch.from_numpy(to), torch.from_numpy(added)) for to, added in tree),
        roots=torch.from_numpy(roots),
    )


def _masked_first(
    blocks: _QueryBlocks, item_query: Int64Array, tile: Int64Array, window: int
) -> tuple[Int64Array, int]:
    """Return an order that puts items first that some row must not wholly see, and their count."""
    last_key = np.minimum(blocks.first_position, blocks.end_key - 1)[item_query]
    masked = tile * TILE + TILE - 1 > last_key
    if window:
        masked |= tile * TILE <= (blocks.last_position - window)[item_query]
    skipped_start, skipped_end = blocks.skipped_start[item_query], blocks.skipped_end[item_query]
    masked |= np.maximum(skipped_start, tile * TILE) < np.minimum(skipped_end, (tile + 1) * TILE)
    return np.argsort(~masked, kind="stable"), int(masked.sum())


def _hidden_keys(
    blocks: _QueryBlocks, item_query: Int64Array, tile: Int64Array, rows: int, window: int
) -> npt.NDArray[np.bool_]:
    """Return [E, R, TILE]: which keys of an item's tile each of its rows must not see."""
    first, last = blocks.first_position[item_query], blocks.last_position[item_query]
    position = np.minimum(first[:, None] + np.arange(rows), last[:, None])[:, :, None]
    key = (tile[:, None] * TILE + np.arange(TILE))[:, None, :]
    hidden: npt.NDArray[np.bool_] = (key > position) | (key >= blocks.end_key[item_query, None, None])
    if window:
        hidden |= key <= position - window
    skipped_start, skipped_end = blocks.skipped_start[item_query], blocks.skipped_end[item_query]
    hidden |= (key >= skipped_start[:, None, None]) & (key < skipped_end[:, None, None])
    return hidden


def _unseen_places(hidden: npt.NDArray[np.bool_], num_kv_heads: int) -> Int64Array:
    item, place = np.nonzero(hidden.all(axis=1))
    head = np.arange(num_kv_heads)
    return np.ravel((item[:, None] * num_kv_heads + head) * TILE + place[:, None])


def _tile_places(
    blocks: _QueryBlocks,
    item_query: Int64Array,
    tile: Int64Array,
    block_tables: npt.NDArray[np.int32],
    block_size: int,
) -> tuple[Int64Array, Int64Array | None]:
    """Return the blocks of each item's tile, and the places in them unless tiles are whole blocks.

    Places past the last key that the query block sees read that one's block instead; they are masked.
    """
    whole_blocks = TILE % block_size == 0
    step = block_size if whole_blocks else 1
    position = tile[:, None] * TILE + np.arange(0, TILE, step)
    entry = np.minimum(position, blocks.end_key[item_query, None] - 1) // block_size
    block_ids = block_tables[blocks.sequence[item_query, None], entry].astype(np.int64)
    return block_ids, None if whole_blocks else position % block_size


def _addition_tree(
    item_query: Int64Array, tile: Int64Array, place: Int64Array
) -> tuple[list[tuple[Int64Array, Int64Array]], Int64Array]:
    """Return the additions of each level, and the place of each query block's sum.

    Items come sorted by query block, then tile. A node without its sibling moves up unchanged.
    """
    levels = []
    query, node, slot = item_query, tile, place
    num_queries = int(item_query[-1]) + 1
    while len(slot) > num_queries:
        node = node >> 1
        joins_previous = np.zeros(len(slot), dtype=bool)
        joins_previous[1:] = (query[1:] == query[:-1]) & (node[1:] == node[:-1])
        added = np.flatnonzero(joins_previous)
        if len(added):
            levels.append((slot[added - 1], slot[added]))
            query, node, slot = (array[~joins_previous] for array in (query, node, slot))
    return levels, slot
