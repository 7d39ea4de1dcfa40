"""Cuts a step's attention into items; the programs of one query tile compute an item.

How it is cut decides only how long the step takes, see `attention_kernels`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.sparse_prefill import KeySelection
from quire.kernels.attention.step_arrays import HostArrays, lengthened
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.bounds import GPU_PART_BYTES, TILE
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.attention.kernels import ITEM_FIELDS, MERGE_FIELDS, SPAN_TILES
from quire.kernels.triton.device import MULTIPROCESSORS
from quire.step import Int64Array, IntArray

PROGRAMS = 3 * MULTIPROCESSORS // 4
"""Tiles that keep a GPU busy, however many keys each has: tiles are divided that have more spans than so many
programs would have on average. With as many tiles, all alike, none is: in parts, these are more than a GPU
computes at a time, and what is left over takes as long as all others."""

MAX_PART_BYTES = GPU_PART_BYTES

WHOLE_FEATURES = 256
"""Of heads that are one tile whatever their size. Latents of 512 features and 64 more are two."""

_SPAN_TILES = SPAN_TILES.value
FIRST_PLACE, _FIRST_TILE, END_TILE, _GAP_TILE, _GAP_END_TILE, _GAP, _GAP_END = range(3, 10)
"""Fields of `_QueryTiles`, and of items."""

_NUM_FIELDS = 10
_PART, _FIRST_VISIT = 10, 11  # fields of an item behind those of its tile
_NOTHING = -1  # in these
_NO_END = 2**31 - 1  # of a gap


@dataclasses.dataclass(slots=True, frozen=True)
class _QueryTiles:
    """N tiles of consecutive tokens of one sequence each, all heads of a group.

    Attributes:
        fields: [_NUM_FIELDS, N] the sequence; the first token, of the batch; tokens; the first one's place in
            the sequence's cache, or the last place that it sees; the first tile of the keys that are seen,
            and the end of the last; the first tile and the end of a gap within, of which no tile is seen; the
            first key and the end of the gap, which may lie behind the sequence.
        has_gaps: whether there are any; else those of the fields are empty.
    """

    fields: Int64Array
    has_gaps: bool

    def __len__(self) -> int:
        return int(self.fields.shape[1])

    def pick(self, which: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> _QueryTiles:
        return _QueryTiles(self.fields[:, which], self.has_gaps)

    @property
    def num_tiles(self) -> Int64Array:
        """Key tiles that are seen."""
        fields = self.fields
        num_tiles: Int64Array = fields[END_TILE] - fields[_FIRST_TILE]
        if self.has_gaps:
            num_tiles -= fields[_GAP_END_TILE] - fields[_GAP_TILE]
        return num_tiles


def plan_arrays(
    heads: HeadLayout, window: int, classes: tuple[int, ...], batch: AttentionBatch
) -> HostArrays:
    """Return items and merges of each class, and numbers.

    A token of a two-sided batch is treated as the one `window // 2` places behind it, or as the last one if
    there is no window: it sees the keys from there backwards, but for those behind the sequence.

    The numbers are the parts of each class, the tiles that its selecting items may visit, and whether there
    are gaps. An item [ITEM_FIELDS] int32 is as in `_QueryTiles`, then its part, and where in a list the tiles
    are that it visits, or `_NOTHING`; a merge [MERGE_FIELDS] int32 has the first token, tokens, the first
    part and parts. Items, merges and parts are rounded up to
    sizes that steps have again and again; those that are added do nothing, but for the items of padding rows.
    """
    row_starts = np.cumsum(batch.num_tokens) - batch.num_tokens
    cut = [
        _query_tiles(batch, row_starts, sequences, rows // heads.group, window)
        for rows, sequences in zip(classes, _by_class(batch.num_tokens * heads.group, classes), strict=True)
    ]
    num_spans = sum(int(_span_end(tiles.num_tiles).sum()) for tiles in cut if len(tiles))
    most_spans = max(1, num_spans * heads.num_kv_heads // PROGRAMS)  # of one program
    selection = None if window else batch.key_selection
    arrays: list[IntArray] = []
    numbers: list[int] = []
    num_visits: list[int] = []
    for rows, tiles in zip(classes, cut, strict=True):
        items, merges, num_parts, most_parts = _NO_ITEMS, _NO_MERGES, 0, 0
        if len(tiles):
            most_parts = MAX_PART_BYTES // _part_bytes(rows, heads)
            items, merges, num_parts = _divided(tiles, most_spans, most_parts)
        num_visits.append(0 if selection is None else _note_visits(items, selection))
        if rows == classes[0]:
            items = _with_padding_rows(items, batch)
        arrays.append(lengthened(items, batch.sizes.plans(len(items)), _NO_ITEM))
        arrays.append(lengthened(merges, batch.sizes.plans(len(merges))))
        numbers.append(min(batch.sizes.parts(num_parts), most_parts))
    has_gaps = any(tiles.has_gaps for tiles in cut)
    return HostArrays(tuple(arrays), (*numbers, *num_visits, int(has_gaps)))


def _by_class(num_rows: Int64Array, classes: tuple[int, ...]) -> list[Int64Array]:
    """Return the sequences of each class: of the smallest with room for their rows [S], or the largest."""
    if int(num_rows.max(initial=0)) <= classes[0]:
        return [np.arange(len(num_rows)), *[_NO_SEQUENCES] * (len(classes) - 1)]
    which_class = np.searchsorted(classes[:-1], num_rows)
    return [np.flatnonzero(which_class == number) for number in range(len(classes))]


def _span_end(tile: Int64Array) -> Int64Array:
    """Return the end of the spans that the tiles before each of `tile` are in."""
    end: Int64Array = (tile + (_SPAN_TILES - 1)) // _SPAN_TILES
    return end


def numbered(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return for each of `counts` [N] things of N kinds its kind, and its number among those of its kind."""
    kinds = np.arange(len(counts))
    if (counts == 1).all():
        return kinds, np.zeros(len(counts), dtype=np.int64)
    which = np.repeat(kinds, counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


def _with_padding_rows(items: IntArray, batch: AttentionBatch) -> IntArray:
    """Return items with one without keys for each row after the step's tokens, whose attention is then 0."""
    num_tokens = int(batch.num_tokens.sum())
    if num_tokens == batch.num_rows:
        return items
    added = lengthened(_NO_ITEMS, batch.num_rows - num_tokens, _NO_ITEM)
    added[:, 1] = np.arange(num_tokens, batch.num_rows)
    added[:, 2] = 1
    return np.concatenate([items, added])


def _query_tiles(
    batch: AttentionBatch, row_starts: Int64Array, sequences: Int64Array, tokens_per_tile: int, window: int
) -> _QueryTiles:
    if not sequences.size:
        return _NO_TILES
    num_tokens = batch.num_tokens[sequences]
    which, number = numbered((num_tokens + (tokens_per_tile - 1)) // tokens_per_tile)
    first = number * tokens_per_tile
    skipped = None if window else batch.skipped_keys
    fields = np.zeros((_NUM_FIELDS, len(which)), dtype=np.int64)
    sequence, first_token, count, place, first_tile, end_tile, gap_tile, gap_end_tile, gap, gap_end = fields
    sequence[:] = sequences[which]
    first_token[:] = row_starts[sequence] + first
    count[:] = np.minimum(num_tokens[which] - first, tokens_per_tile)
    place[:] = batch.num_cached_tokens[sequence] + first
    if batch.is_two_sided:
        place += window // 2 if window else num_tokens[which] - 1
    if window:
        first_tile[:] = np.maximum(place - window + 1, 0) // TILE
    end_tile[:] = (place + count - 1) // TILE + 1
    if batch.is_two_sided:
        gap[:], gap_end[:] = num_tokens[which], _NO_END
        end_tile[:] = np.minimum(end_tile, (gap - 1) // TILE + 1)
        gap_tile[:] = gap_end_tile[:] = end_tile
        return _QueryTiles(fields, has_gaps=True)
    if skipped is None:
        return _QueryTiles(fields, has_gaps=False)
    gap[:] = skipped.start[sequence]
    gap_end[:] = np.maximum(gap, skipped.end[sequence])
    gap_tile[:] = np.clip(-(-gap // TILE), first_tile, end_tile)
    gap_end_tile[:] = np.clip(gap_end // TILE, gap_tile, end_tile)
    return _QueryTiles(fields, has_gaps=bool((gap < gap_end).any()))


def _divided(tiles: _QueryTiles, most_spans: int, most_parts: int) -> tuple[IntArray, IntArray, int]:
    """Return items, merges and the number of parts of tiles of one height."""
    num_tiles = tiles.num_tiles
    is_divided = num_tiles > most_spans * _SPAN_TILES
    if not is_divided.any():
        return _items(tiles, num_tiles), _NO_MERGES, 0
    num_spans = _span_end(tiles.fields[END_TILE]) - tiles.fields[_FIRST_TILE] // _SPAN_TILES
    is_divided &= np.cumsum(np.where(is_divided, num_spans, 0)) <= most_parts
    pieces, which = _spans(tiles, np.where(is_divided, num_spans, 1), is_divided)
    is_part = is_divided[which]
    part = np.where(is_part, np.cumsum(is_part) - 1, _NOTHING)
    num_parts = np.bincount(which[is_part], minlength=len(tiles))[is_divided]
    merges = np.empty((len(num_parts), MERGE_FIELDS.value), dtype=np.int32)
    merges[:, :2] = tiles.fields[1:3, is_divided].T
    merges[:, 2], merges[:, 3] = np.cumsum(num_parts) - num_parts, num_parts
    return _items(pieces, pieces.num_tiles, part), merges, int(num_parts.sum())


def _part_bytes(rows: int, heads: HeadLayout) -> int:
    """Return the bytes of what is kept of a span: sums and statistics in float32."""
    return heads.num_kv_heads * rows * (sum(feature_parts(heads.head_dim)) + 2) * 4


def _spans(
    tiles: _QueryTiles, counts: Int64Array, is_divided: npt.NDArray[np.bool_]
) -> tuple[_QueryTiles, Int64Array]:
    """Return pieces of tiles, and of which each is: the spans that are seen of those that are divided.

    Args:
        tiles: N of them.
        counts: [N] pieces of each.
        is_divided: [N] which of them are divided.
    """
    which, number = numbered(counts)
    is_part = is_divided[which]
    fields = tiles.fields[:, which]
    start, end = fields[_FIRST_TILE], fields[END_TILE]
    first = (start // _SPAN_TILES + number) * _SPAN_TILES
    np.maximum(start, first, out=start, where=is_part)
    np.minimum(end, first + _SPAN_TILES, out=end, where=is_part)
    pieces = _QueryTiles(fields, tiles.has_gaps)
    if not tiles.has_gaps:
        return pieces, which
    fields[_GAP_TILE] = np.clip(fields[_GAP_TILE], start, end)
    fields[_GAP_END_TILE] = np.clip(fields[_GAP_END_TILE], fields[_GAP_TILE], end)
    is_seen = pieces.num_tiles > 0
    return pieces.pick(is_seen), which[is_seen]


def _items(tiles: _QueryTiles, num_tiles: Int64Array, part: Int64Array | None = None) -> IntArray:
    """Return items, the longest first, so that all end at about one time."""
    items = np.empty((len(tiles), ITEM_FIELDS.value), dtype=np.int32)
    items[:, :_NUM_FIELDS] = tiles.fields.T
    items[:, _PART:] = _NOTHING
    if part is not None:
        items[:, _PART] = part
    return items[np.argsort(-num_tiles, kind="stable")]


def _note_visits(items: IntArray, selection: KeySelection) -> int:
    """Give items with tokens that may leave out keys places in a list, one for each tile that they could see.

    Returns:
        The number of all places.
    """
    sequence, count, place = (items[:, field].astype(np.int64) for field in (0, 2, FIRST_PLACE))
    first, end = (
        np.maximum(place, 2 * selection.block_size),
        np.minimum(place + count, selection.end[sequence]),
    )
    num_tiles = np.where(first < end, items[:, END_TILE] - items[:, _FIRST_TILE], 0)
    items[:, _FIRST_VISIT] = np.where(first < end, np.cumsum(num_tiles) - num_tiles, _NOTHING)
    return int(num_tiles.sum())


def padded_features(head_dim: int) -> int:
    """Return the features of a head's tile, as many as products need at least."""
    return max(16, next_power_of_2(head_dim))


def feature_parts(head_dim: int) -> tuple[int, int]:
    """Return the features of the tiles that attention has of a head: of most of it, and of the rest or 0."""
    features = padded_features(head_dim)
    if head_dim <= WHOLE_FEATURES or head_dim == features:
        return features, 0
    return features // 2, padded_features(head_dim - features // 2)


_NO_SEQUENCES: Int64Array = np.zeros(0, dtype=np.int64)
_NO_TILES = _QueryTiles(np.zeros((_NUM_FIELDS, 0), dtype=np.int64), has_gaps=False)
_NO_ITEM = np.zeros(ITEM_FIELDS.value, dtype=np.int32)  # without tokens
_NO_ITEM[_PART:] = _NOTHING
_NO_ITEMS = np.zeros((0, ITEM_FIELDS.value), dtype=np.int32)
_NO_MERGES = np.zeros((0, MERGE_FIELDS.value), dtype=np.int32)
