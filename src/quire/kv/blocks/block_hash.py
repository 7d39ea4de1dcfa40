"""Keys of full KV blocks: a hash chained over parent, tokens and extra keys.

Two blocks have the same key exactly if the whole token sequence up to their end, and the request's extra
keys, are the same. The digest finds a candidate; the tokens kept in the key are compared before it is used,
so a collision costs a miss and never a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from quire.step import IntArray

DIGEST_BYTES = 16
TOKEN_BYTES = 4

BLOCKS_AHEAD = 64
"""Blocks that are hashed at a time, at least: fewer calls for some 50 microseconds."""


class BlockKey(NamedTuple):
    """The content of one block: its digest, its parent's digest, and its tokens as int32 bytes."""

    digest: bytes
    parent: bytes
    tokens: bytes


def root_digest(**extra_keys: str) -> bytes:
    """Return the digest that starts a chain, from extra keys such as `salt="tenant-1"`.

    Each key is tagged with its source and both are length-prefixed, so that no choice of values makes one
    source imitate another. Empty values count as absent.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for source, value in sorted(extra_keys.items()):
        if value:
            for part in (source.encode(), value.encode()):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
    return digest.digest()


class SequenceKeys:
    """The keys of one sequence's full blocks, in order, as far as its tokens are known.

    A digest is computed when it is first asked for, together with some that follow: what a long prompt costs
    is spread over the steps that find or compute its blocks.

    Args:
        root: the digest that starts the chain, see `root_digest`.
        block_size: tokens per block.
        salt: the cache salt that the root was made of.
    """

    __slots__ = ("_chain", "_tokens", "_width", "salt")

    def __init__(self, root: bytes, block_size: int, salt: str = "") -> None:
        self.salt = salt
        self._width = block_size * TOKEN_BYTES
        self._chain = [root]  # the digest of block number i is at i + 1
        self._tokens = bytearray()

    def __len__(self) -> int:
        return math.ceil(len(self._tokens) / self._width)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the blocks."""
        return len(self._tokens) // TOKEN_BYTES

    def __getitem__(self, index: int) -> BlockKey:
        self._hash(index + 1)
        tokens = bytes(self._tokens[index * self._width : (index + 1) * self._width])
        return BlockKey(self._chain[index + 1], self._chain[index], tokens)

    def extend(self, token_ids: IntArray) -> None:
        """Add the keys of the full blocks of `token_ids` ([tokens]), which follow those known already."""
        tokens = token_ids.tobytes()
        self._tokens += tokens[: len(tokens) - len(tokens) % self._width]

    def end_with(self, token_ids: IntArray) -> None:
        """Add `token_ids` ([tokens]), the last ones: those behind the last full block get a key, too."""
        self._tokens += token_ids.tobytes()

    def digest(self, num_blocks: int) -> bytes:
        """Return the digest of the last of the first `num_blocks` blocks; of none, it is the root."""
        self._hash(num_blocks)
        return self._chain[num_blocks]

    def digests(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the digests of the blocks from number `start` up to `end`, as far as there are any."""
        end = min(end, len(self))
        while start < end:
            self._hash(start + 1)
            known = self._chain[start + 1 : min(end, start + BLOCKS_AHEAD) + 1]
            yield from known
            start += len(known)

    def _hash(self, num_blocks: int) -> None:
        """Have the digests of the first `num_blocks` blocks."""
        num_known = len(self._chain) - 1
        if num_blocks <= num_known:
            return
        end = min(max(num_blocks, num_known + BLOCKS_AHEAD), len(self))
        tokens = bytes(self._tokens[num_known * self._width : end * self._width])
        digest = self._chain[-1]
        for start in range(0, len(tokens), self._width):
            block = tokens[start : start + self._width]
            digest = blake2b(digest + block, digest_size=DIGEST_BYTES).digest()
            self._chain.append(digest)
