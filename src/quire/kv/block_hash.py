"""Names for the contents of full KV blocks: a hash chained over parent, tokens and extra keys.

Two blocks have the same key exactly if the whole token sequence up to their end, and the request's extra
keys, are the same. The digest finds a candidate; the tokens kept in the key are compared before it is used,
so a collision costs a miss and never a wrong answer.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from quire.step import IntArray

DIGEST_BYTES = 16


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
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for source, value in sorted(extra_keys.items()):
        if value:
            for part in (source.encode(), value.encode()):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
    return digest.digest()


def extend_keys(keys: list[BlockKey], root: bytes, token_ids: IntArray, block_size: int) -> None:
    """Append to `keys` the keys of the full blocks of `token_ids` ([tokens]) that it does not have yet."""
    parent = keys[-1].digest if keys else root
    tokens = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
    width = block_size * 4
    for start in range(len(keys) * width, len(tokens) - width + 1, width):
        block = tokens[start : start + width]
        digest = hashlib.blake2b(parent + block, digest_size=DIGEST_BYTES).digest()
        keys.append(BlockKey(digest, parent, block))
        parent = digest
