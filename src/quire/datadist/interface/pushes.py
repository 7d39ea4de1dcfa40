"""Pushes as a PROMPT asks for them: what it sends, and what the DECODER is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.datadist.argument_checks import OFFSET
from quire.datadist.caches.cache_holds import PooledCache
from quire.datadist.caches.cache_keys import BlocksCacheKey, CacheKeyByIdAndIndex
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans, block_spans, runs, slot_spans
from quire.datadist.interface.pulls import TransferOptions, block_parts, transferred_layers
from quire.datadist.status import invalid
from quire.datadist.wire.protocol import (
    BlocksSource,
    LayerRange,
    NumberedBlocksSource,
    SlotSource,
    encode_runs,
)
from quire.datadist.wire.push_protocol import (
    AddressedTarget,
    PushRequest,
)

Cache = PooledCache[CacheMemory]


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Names the destination's tensors by what the peer has told of them."""

    values: tuple[int, ...]


PushKey = BlocksCacheKey | CacheKeyByIdAndIndex | Addresses


class PushingLink(Protocol):
    """An end of a link that pushes."""

    def push(self, request: PushRequest, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        """Have the peer take `spans` to where `request` says."""


@dataclasses.dataclass(frozen=True)
class Push:
    """A request and where its bytes are."""

    request: PushRequest
    cache: Cache
    spans: ByteSpans

    def run(self, link: PushingLink, deadline: float) -> None:
        """Raises what `PushSender.push` does."""
        link.push(self.request, self.cache.memory, self.spans, deadline)


def slot_push(key: PushKey, cache: Cache, batch_index: int, size: int, options: TransferOptions) -> Push:
    """Return the push of a slot into a slot.

    Args:
        key: names the destination.
        cache: the source, a contiguous cache.
        batch_index: of the source slot.
        size: in bytes per tensor; -1: the whole source slot.
        options: the layer keywords.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    desc = cache.desc
    if cache.is_blocks or batch_index >= desc.batch_size:
        what = "a blocks cache" if cache.is_blocks else f"{desc.batch_size} slots"
        raise invalid(f"src_batch_index is {batch_index}, but the source has {what}")
    num_bytes = desc.slot_bytes if size == -1 else size
    if num_bytes > desc.slot_bytes:
        raise invalid(f"size is {size}, but the source slot has {desc.slot_bytes} bytes")
    if isinstance(key, BlocksCacheKey):
        raise invalid(f"{key} names a blocks cache, but slots are pushed")
    target = (
        AddressedTarget(list(key.values), 0, b"")
        if isinstance(key, Addresses)
        else SlotSource(key.cache_id, key.batch_index)
    )
    tensors, target_layers = transferred_layers(cache, options, is_source=True)
    request = _request(target, cache, tensors, num_bytes, target_layers)
    return Push(request, cache, slot_spans(tensors, batch_index * desc.slot_bytes, num_bytes))


def block_pushes(
    key: PushKey,
    cache: Cache,
    source_blocks: npt.NDArray[np.uint64],
    target_blocks: npt.NDArray[np.uint64],
    options: TransferOptions,
) -> Iterator[Push]:
    """Yield the pushes of blocks into blocks: one, unless there are too many for a message.

    Raises:
        LLMException: LLM_PARAM_INVALID, before the first.
    """
    _require_blocks(key, cache, source_blocks, target_blocks)
    tensors, target_layers = transferred_layers(cache, options, is_source=True)
    order = np.argsort(target_blocks)  # so that neighbours stand beside each other
    sources = source_blocks[order].astype(np.int64)
    targets = target_blocks[order].astype(np.int64)
    block_bytes = cache.desc.slot_bytes

    def push(part: slice) -> Push:
        target_runs = encode_runs(*runs(targets[part]))
        target = _blocks_target(key, block_bytes, target_runs)
        num_bytes = len(targets[part]) * block_bytes
        request = _request(target, cache, tensors, num_bytes, target_layers)
        return Push(request, cache, block_spans(tensors, *runs(sources[part]), block_bytes))

    return (push(part) for part in block_parts(len(targets)))


def _blocks_target(
    key: PushKey, block_bytes: int, target_runs: bytes
) -> BlocksSource | NumberedBlocksSource | AddressedTarget:
    if isinstance(key, Addresses):
        return AddressedTarget(list(key.values), block_bytes, target_runs)
    if isinstance(key, BlocksCacheKey):
        return BlocksSource(key.model_id, block_bytes, target_runs)
    return NumberedBlocksSource(key.cache_id, block_bytes, target_runs)


def _require_blocks(
    key: PushKey,
    cache: Cache,
    source_blocks: npt.NDArray[np.uint64],
    target_blocks: npt.NDArray[np.uint64],
) -> None:
    if not cache.is_blocks:
        raise invalid("the source is a contiguous cache; blocks are pushed from a blocks cache")
    if isinstance(key, CacheKeyByIdAndIndex) and key.batch_index:
        raise invalid(f"{key} names a slot; blocks are named with batch_index 0")
    if len(source_blocks) != len(target_blocks):
        raise invalid(f"there are {len(source_blocks)} source blocks for {len(target_blocks)} destinations")
    if len(source_blocks) and int(source_blocks.max()) >= cache.desc.batch_size:
        raise invalid(f"there is a source block {source_blocks.max()} of {cache.desc.batch_size} blocks")
    if len(target_blocks) and int(target_blocks.max()) > OFFSET.greatest:
        raise invalid(f"there is a destination block {target_blocks.max()}, which no cache has")
    if len(np.unique(target_blocks)) != len(target_blocks):
        raise invalid("a block is a destination twice")


def _request(
    target: SlotSource | BlocksSource | NumberedBlocksSource | AddressedTarget,
    cache: Cache,
    tensors: range,
    num_bytes: int,
    layers: LayerRange | None,
) -> PushRequest:
    return PushRequest(
        transfer_id=0,
        target=target,
        data_type=cache.desc.data_type,
        num_tensors=len(tensors),
        layers=layers,
        num_bytes=num_bytes,
        timeout_ms=0,
    )
