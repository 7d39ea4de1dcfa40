"""The part of a prompt whose KV engines share, which the two sides must agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from quire.datadist.caches.spans import Int64Array
from quire.datadist.loans.arriving_blocks import NO_BLOCK
from quire.kv.blocks.block_hash import DIGEST_BYTES, SequenceKeys, root_digest
from quire.kv.blocks.groups import NULL_BLOCK, first_moved
from quire.request import Request
from quire.step import IntArray


def num_cacheable_blocks(request: Request, block_size: int) -> int:
    """Return the number of full blocks, but for that of the last token: it is computed, for its logits."""
    return (request.num_prompt_tokens - 1) // block_size


def cacheable_keys(request: Request, block_size: int) -> SequenceKeys:
    """Return the keys of these blocks."""
    keys = SequenceKeys(root_digest(salt=request.cache_salt), block_size)
    keys.extend(request.prompt_array[:-1])
    return keys


@dataclasses.dataclass(frozen=True, slots=True)
class StateBlocks:
    """The pieces of checkpoints as blocks, which have the next numbers behind those of the KV cache.

    Attributes:
        first_block: number of the first piece of the first checkpoint.
        num_pieces: of each; 0: there are no states.
    """

    first_block: int = 0
    num_pieces: int = 0

    def of(self, checkpoint: int) -> range:
        """Return the blocks of a checkpoint."""
        start = self.first_block + checkpoint * self.num_pieces
        return range(start, start + self.num_pieces)


NO_STATES = StateBlocks()
"""Of a model without recurrent layers."""


def num_lendable_tokens(request: Request, block_size: int, states: StateBlocks) -> int:
    """Return how many tokens of a prompt are lent: all but the last; with states, those of full blocks."""
    num_tokens = request.num_prompt_tokens - 1
    return num_tokens // block_size * block_size if states.num_pieces else num_tokens


def lendable_digest(request: Request) -> bytes:
    """Return the digest of the tokens of a prompt but the last, and its salt: the same for any block size."""
    tokens = request.prompt_array[:-1].tobytes()
    return blake2b(root_digest(salt=request.cache_salt) + tokens, digest_size=DIGEST_BYTES).digest()


def lendable_keys(request: Request, block_size: int, num_tokens: int) -> SequenceKeys:
    """Return the keys of all blocks of the first tokens of a prompt; the last of them may not be full."""
    keys = SequenceKeys(root_digest(salt=request.cache_salt), block_size)
    keys.end_with(request.prompt_array[:num_tokens])
    return keys


def firsts_moved(windows: Sequence[int], num_tokens: int, block_size: int) -> list[int]:
    """Return the number of the first block of each cache group that is moved with a prefix, [G].

    Args:
        windows: [G - 1] of each group but the first, in tokens.
        num_tokens: of the prefix.
        block_size: tokens per block.
    """
    return [0, *(int(first_moved(num_tokens, window, block_size)) for window in windows)]


def moved_blocks(block_ids: IntArray, first_block: int, firsts: Sequence[int]) -> Int64Array:
    """Return blocks with `NO_BLOCK` in place of what is not moved with a prefix.

    Args:
        block_ids: of a sequence, from `first_block` on, of each group [G, N].
        first_block: number of the first of them.
        firsts: as `firsts_moved` returns them.

    Raises:
        ValueError: one that is to be moved is not there.
    """
    moved = block_ids.astype(np.int64)
    for ids, first in zip(moved, firsts, strict=True):
        ids[: max(0, first - first_block)] = NO_BLOCK
    if (moved[1:] == NULL_BLOCK).any():
        raise ValueError(f"blocks {block_ids.tolist()} from {first_block} on are before a window of {firsts}")
    return moved
