"""Where a push goes that names tensors of a cache by their addresses.

The addresses are the peer's words, and only looked up: which bytes are written follows from the cache itself.
"""

from __future__ import annotations

from quire.datadist.caches.cache_holds import PooledCache
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans, slot_spans
from quire.datadist.links.pull_sources import block_spans_of, require_data_type
from quire.datadist.status import invalid
from quire.datadist.wire.push_protocol import (
    AddressedTarget,
    PushRequest,
)

Place = tuple[range, int]
"""Tensors, and the first byte in each."""


def addressed_place(cache: PooledCache[CacheMemory], target: AddressedTarget) -> Place | None:
    """Return which neighbouring tensors of a cache the addresses are in, all at the same byte, if any."""
    mine, theirs = cache.memory.addresses(), target.addresses
    for first, base in enumerate(mine):
        offset = theirs[0] - base
        if 0 <= offset < cache.desc.tensor_bytes:
            tensors = range(first, first + len(theirs))
            expected = [one + offset for one in mine[first : tensors.stop]]
            return (tensors, offset) if expected == theirs else None
    return None


def addressed_spans(
    cache: PooledCache[CacheMemory], target: AddressedTarget, request: PushRequest
) -> ByteSpans:
    """Return the bytes that a push may write.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    desc, place = cache.desc, addressed_place(cache, target)
    assert place is not None  # or it would not be held
    tensors, offset = place
    require_data_type(desc, request)
    if request.layers is not None or len(tensors) != request.num_tensors:
        raise invalid(f"{len(tensors)} addresses stand against {request.num_tensors} tensors")
    if cache.is_blocks:
        if offset or not target.runs:
            raise invalid(f"blocks are named by indices, not from byte {offset} of their tensors on")
        return block_spans_of(desc, tensors, target, request.num_bytes)
    left = desc.slot_bytes - offset % desc.slot_bytes
    if target.runs or not 1 <= request.num_bytes <= left:
        raise invalid(f"{request.num_bytes} bytes do not fit the {left} that are left of the peer's slot")
    return slot_spans(tensors, offset, request.num_bytes)
