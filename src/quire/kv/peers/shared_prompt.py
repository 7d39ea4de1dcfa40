"""The part of a prompt whose KV engines share, which the two sides must agree on."""

from __future__ import annotations

from hashlib import blake2b

from quire.kv.blocks.block_hash import DIGEST_BYTES, SequenceKeys, root_digest
from quire.request import Request


def num_cacheable_blocks(request: Request, block_size: int) -> int:
    """Return the number of full blocks, but for that of the last token: it is computed, for its logits."""
    return (request.num_prompt_tokens - 1) // block_size


def cacheable_keys(request: Request, block_size: int) -> SequenceKeys:
    """Return the keys of these blocks."""
    keys = SequenceKeys(root_digest(salt=request.cache_salt), block_size)
    keys.extend(request.prompt_array[:-1])
    return keys


def lendable_digest(request: Request) -> bytes:
    """Return the digest of the tokens of a prompt but the last, and its salt: the same for any block size."""
    tokens = request.prompt_array[:-1].tobytes()
    return blake2b(root_digest(salt=request.cache_salt) + tokens, digest_size=DIGEST_BYTES).digest()


def lendable_keys(request: Request, block_size: int) -> SequenceKeys:
    """Return the keys of all blocks of a prompt without its last token; the last of them may not be full."""
    keys = SequenceKeys(root_digest(salt=request.cache_salt), block_size)
    keys.end_with(request.prompt_array[:-1])
    return keys
