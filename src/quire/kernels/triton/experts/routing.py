"""Which experts compute which rows, found on the device; the host neither waits nor reads back.

A *pair* is a row and one of its k experts, numbered row * k + rank, the best expert first. Pairs are sorted
by expert and, among those of one expert, by number. Tiles of them go to programs, whose number the host
knows: the maximum that any choice needs.
"""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from quire.kernels.layers.experts import Mixture, choose_experts
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import MULTIPROCESSORS, await_previous, loop_end
from quire.kernels.triton.kernel import kernel

MAX_EXPERTS = 1024  # a program counts the pairs of all at once
_COUNTED = 1024  # pairs that a program counts at once
_PARTS = 16, 512  # pairs that a program sorts: the first that makes no more programs than there is room for
_MAX_COMPARISONS = 1 << 13  # of pairs with experts at once


@dataclasses.dataclass(slots=True, frozen=True)
class Routing:
    """Where each row goes."""

    weights: torch.Tensor  # [T, k] float32, of the results of a row's experts, from the best to the least
    pairs: torch.Tensor  # [T * k] int32, sorted by expert
    tiles: torch.Tensor  # [3, tiles] int32: expert, and first place and end in `pairs`; unused: end is 0

    @property
    def num_tiles(self) -> int:
        """Number of tiles, used or not."""
        return self.tiles.shape[1]


@kernel()
def choose_experts_kernel(
    scores,
    chosen,
    weights,
    num_experts,
    score_stride,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Choose the K likeliest experts of a row, the first of equals, and how much each of them counts.

    Whatever the scores are, NaN included, those chosen are K different experts.
    """
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    score = tl.load(scores + row * score_stride + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    probability = tl.exp(score - tl.max(score, axis=0))
    # Numbers that are not negative are in the order of their bits. Below these, the first expert is largest.
    bits = (probability.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    key = tl.where(is_expert, (bits << 32) | (EXPERTS - 1 - expert).to(tl.int64), -1)
    rank = tl.arange(0, CHOSEN)
    best = tl.zeros((CHOSEN,), tl.int64)
    total = tl.zeros((), tl.float32)
    for place in range(0, K):
        largest = tl.max(key, axis=0)
        best = tl.where(rank == place, largest, best)
        key = tl.where(key == largest, -1, key)
        total += (largest >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if not NORMALIZE:
        total = tl.sum(tl.where(is_expert, probability, 0.0), axis=0)
    weight = tl.div_rn((best >> 32).to(tl.int32).to(tl.float32, bitcast=True), total)
    tl.store(chosen + row * K + rank, EXPERTS - 1 - (best & 0x7FFFFFFF).to(tl.int32), mask=rank < K)
    tl.store(weights + row * K + rank, weight, mask=rank < K)


@kernel(do_not_specialize=["num_pairs", "num_tiles"])
def sort_by_expert_kernel(
    chosen,
    pairs,
    tiles,
    num_pairs,
    num_tiles,
    TILE_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTED: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sort pairs by expert, and cut those of each expert into tiles of TILE_ROWS.

    Each program counts all pairs by itself, COUNTED at once, and sorts a part of them.
    """
    await_previous()
    part = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = tl.zeros((EXPERTS,), tl.int32)
    count_before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, loop_end(num_pairs), COUNTED):
        pair = start + tl.arange(0, COUNTED)
        is_pair = pair < num_pairs
        choice = tl.load(chosen + pair, mask=is_pair, other=0)
        count += tl.histogram(choice, EXPERTS, mask=is_pair)
        count_before += tl.histogram(choice, EXPERTS, mask=is_pair & (pair < part * PART))
    end = tl.cumsum(count, axis=0)
    next_place = end - count + count_before
    part_end = tl.minimum((part + 1) * PART, num_pairs)
    for start in range(loop_end(part * PART), loop_end(part_end), CHUNK):
        pair = start + tl.arange(0, CHUNK)
        is_pair = pair < num_pairs
        choice = tl.load(chosen + pair, mask=is_pair, other=-1)
        is_choice = (choice[:, None] == expert[None, :]).to(tl.int32)
        place = next_place[None, :] + tl.cumsum(is_choice, axis=0) - 1
        tl.store(pairs + tl.sum(is_choice * place, axis=1), pair, mask=is_pair)
        next_place += tl.sum(is_choice, axis=0)
    num_own_tiles = (count + TILE_ROWS - 1) // TILE_ROWS
    end_tile = tl.cumsum(num_own_tiles, axis=0)
    place_of_tile_0 = end - count - (end_tile - num_own_tiles) * TILE_ROWS
    step = loop_end(tl.num_programs(0) * CHUNK)
    for start in range(loop_end(part * CHUNK), loop_end(num_tiles), step):
        tile = start + tl.arange(0, CHUNK)
        owner = tl.sum((end_tile[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        is_owner = (owner[:, None] == expert[None, :]).to(tl.int32)
        first = tl.sum(is_owner * place_of_tile_0[None, :], axis=1) + tile * TILE_ROWS
        end_of_owner = tl.sum(is_owner * end[None, :], axis=1)
        is_tile = tile < num_tiles
        tl.store(tiles + tile, owner, mask=is_tile)
        tl.store(tiles + num_tiles + tile, first, mask=is_tile)
        tl.store(tiles + 2 * num_tiles + tile, tl.minimum(first + TILE_ROWS, end_of_owner), mask=is_tile)


def route(scores: torch.Tensor, mixture: Mixture, tile_rows: int) -> Routing:
    """Return where rows go.

    Args:
        scores: [T, experts] of at least one row.
        mixture: of at most `MAX_EXPERTS` experts.
        tile_rows: the most pairs of a tile.
    """
    num_rows, num_experts = scores.shape
    k = mixture.experts_per_token
    num_pairs = num_rows * k
    width = max(next_power_of_2(num_experts), 2)
    if mixture.is_plain:
        chosen = scores.new_empty(num_rows, k, dtype=torch.int32)
        weights = scores.new_empty(num_rows, k, dtype=torch.float32)
        choose_experts_kernel[(num_rows,)](
            scores,
            chosen,
            weights,
            num_experts,
            scores.stride(0),
            K=k,
            NORMALIZE=mixture.normalize,
            EXPERTS=width,
            CHOSEN=next_power_of_2(k),
            num_warps=1,
        )
    else:
        weights, chosen = choose_experts(scores, mixture)
        weights, chosen = weights.contiguous(), chosen.to(torch.int32).contiguous()
    pairs = torch.empty_like(chosen).flatten()
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    tiles = chosen.new_empty(3, num_tiles)
    part = next((part for part in _PARTS if num_pairs <= part * MULTIPROCESSORS), _PARTS[-1])
    sort_by_expert_kernel[(-(-num_pairs // part),)](
        chosen,
        pairs,
        tiles,
        num_pairs,
        num_tiles,
        TILE_ROWS=tile_rows,
        EXPERTS=width,
        COUNTED=_COUNTED,
        PART=part,
        CHUNK=min(max(_MAX_COMPARISONS // width, 16), part),
        num_warps=8,
    )
    return Routing(weights, pairs, tiles)


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return the maximum number of tiles for these pairs: each expert with any begins a tile of its own."""
    num_begun = min(num_pairs, num_experts)
    return num_begun + (num_pairs - num_begun) // tile_rows
