"""Names for the contents of full KV blocks: a hash chained over parent, tokens and extra keys.

Two blocks have the same key exactly if the whole token sequence up to their end, and the request's extra
keys, are the same. The digest finds a candidate; the tokens kept in the key are compared before it is used,
so a collision costs a miss and never a wrong answer.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from quire.step import IntArray

DIGEST_BYTES = 16
TOKEN_BYTES = 4


class BlockKey(NamedTuple):
    """The content of one full block: its digest, its parent's digest, and its tokens as int32 bytes."""

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


def extend_chain(chain: list[bytes], tokens: bytes, block_size: int) -> None:
    """Append the digests of the full blocks of `tokens` to a chain, whose last digest is their parent.

    Args:
        chain: begins with the root; the digest of full block number i is `chain[i + 1]`.
        tokens: token ids as int32 bytes, from the first block that is not in the chain yet.
        block_size: tokens per block.
    """
    width = block_size * TOKEN_BYTES
    parent = chain[-1]
    for start in range(0, len(tokens) - width + 1, width):
        parent = blake2b(parent + tokens[start : start + width], digest_size=DIGEST_BYTES).digest()
        chain.append(parent)


class SequenceKeys:
    """The keys of one sequence's full blocks, in order, as far as its tokens have been told.

    Args:
        root: the digest that starts the chain, see `root_digest`.
        block_size: tokens per block.
    """

    __slots__ = ("_block_size", "_chain", "_tokens")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._block_size = block_size
        self._chain = [root]
        self._tokens = bytearray()

    def __len__(self) -> int:
        return len(self._chain) - 1

    def __getitem__(self, index: int) -> BlockKey:
        width = self._block_size * TOKEN_BYTES
        tokens = bytes(self._tokens[index * width : (index + 1) * width])
        return BlockKey(self._chain[index + 1], self._chain[index], tokens)

    def extend(self, token_ids: IntArray) -> None:
        """Add the keys of the full blocks of `token_ids` ([tokens]), which follow those known already."""
        tokens = token_ids.tobytes()
        extend_chain(self._chain, tokens, self._block_size)
        self._tokens += tokens[: len(tokens) - len(tokens) % (self._block_size * TOKEN_BYTES)]
