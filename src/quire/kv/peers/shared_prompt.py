"""The part of a prompt whose KV engines share, which the two sides must agree on."""

from __future__ import annotations

from quire.kv.block_hash import SequenceKeys, root_digest
from quire.request import Request


def num_shared_blocks(request: Request, block_size: int) -> int:
    """Return the number of full blocks, but for that of the last token: it is computed, for its logits."""
    return (request.num_prompt_tokens - 1) // block_size


def shared_keys(request: Request, block_size: int) -> SequenceKeys:
    """Return the keys of these blocks."""
    keys = SequenceKeys(root_digest(salt=request.cache_salt), block_size)
    keys.extend(request.prompt_array[: num_shared_blocks(request, block_size) * block_size])
    return keys
