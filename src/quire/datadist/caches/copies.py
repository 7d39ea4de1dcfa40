"""Copying between caches of one side."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.datadist.caches.cache_holds import PooledCache
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.status import invalid


def copy_slot(
    target: PooledCache[CacheMemory],
    to_slot: int,
    source: PooledCache[CacheMemory],
    from_slot: int,
    *,
    offset: int = 0,
    size: int = -1,
) -> None:
    """Copy bytes of a slot; size -1: up to the end of the target slot.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    to_desc, from_desc = target.desc, source.desc
    if target.is_blocks or source.is_blocks:
        raise invalid("slots are copied between contiguous caches, not blocks caches")
    if (to_desc.num_tensors, to_desc.data_type) != (from_desc.num_tensors, from_desc.data_type):
        raise invalid(f"{from_desc} cannot be copied to {to_desc}: tensors or data type differ")
    if to_slot >= to_desc.batch_size or from_slot >= from_desc.batch_size:
        raise invalid(
            f"slot {from_slot} of {from_desc.batch_size} cannot be copied to slot {to_slot} of "
            f"{to_desc.batch_size}"
        )
    num_bytes = to_desc.slot_bytes - offset if size == -1 else size
    if num_bytes < 1 or offset + num_bytes > min(to_desc.slot_bytes, from_desc.slot_bytes):
        raise invalid(
            f"{num_bytes} bytes from byte {offset} are not within both slots, which have "
            f"{from_desc.slot_bytes} and {to_desc.slot_bytes}"
        )
    if (target, to_slot) != (source, from_slot):
        to_offset = to_slot * to_desc.slot_bytes + offset
        from_offset = from_slot * from_desc.slot_bytes + offset
        target.memory.copy_from(source.memory, to_offset, from_offset, num_bytes)


def check_blocks(cache: PooledCache[CacheMemory], blocks: npt.NDArray[np.uint64]) -> None:
    """Check that a cache has blocks.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if int(blocks.max(initial=0)) >= cache.desc.batch_size:
        raise invalid(f"block {blocks.max()} is out of range: there are {cache.desc.batch_size}")


def copy_blocks_between(
    source: PooledCache[CacheMemory],
    from_blocks: npt.NDArray[np.uint64],
    target: PooledCache[CacheMemory],
    to_blocks: npt.NDArray[np.uint64],
) -> None:
    """Copy block `from_blocks[i]` to block `to_blocks[i]`; all are read before any is written.

    Raises:
        LLMException: LLM_PARAM_INVALID; nothing is written.
    """
    described = [(one.desc.num_tensors, one.desc.data_type, one.desc.slot_bytes) for one in (source, target)]
    if described[0] != described[1]:
        raise invalid(
            f"{source.desc} cannot be copied to {target.desc}: tensors, data type or size of blocks differ"
        )
    if len(np.unique(to_blocks)) != len(to_blocks):
        raise invalid("two blocks have the same destination")
    check_blocks(source, from_blocks)
    check_blocks(target, to_blocks)
    block_bytes = source.desc.slot_bytes
    target.memory.copy_blocks_from(source.memory, block_bytes, from_blocks.tolist(), to_blocks.tolist())
