"""Pushes by a PROMPT: bytes and messages to the DECODER, at once or layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.datadist.argument_checks import OFFSET
from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.cache_holds import PooledCache
from quire.datadist.caches.cache_keys import BlocksCacheKey, CacheKeyByIdAndIndex
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans, block_spans, runs, slot_spans
from quire.datadist.interface.cache_tasks import LayerTransfer, TransferConfig, TransferWithCacheKeyConfig
from quire.datadist.interface.pulls import TransferOptions, block_parts, transferred_layers
from quire.datadist.status import invalid
from quire.datadist.wire.protocol import (
    BlocksSource,
    NumberedBlocksSource,
    SlotSource,
    encode_runs,
)
from quire.datadist.wire.push_protocol import (
    AddressedTarget,
    PushRequest,
)

Cache = PooledCache[CacheMemory]

Config = TransferConfig | TransferWithCacheKeyConfig

Blocks = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Source blocks and their destinations."""


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Names the destination's tensors by addresses announced by the peer."""

    values: tuple[int, ...]


PushKey = BlocksCacheKey | CacheKeyByIdAndIndex | Addresses


class PushingLink(Protocol):
    """A link end that pushes."""

    def push(self, request: PushRequest, memory: CacheMemory, spans: ByteSpans, deadline: float) -> None:
        """Push `spans` to the destination in `request`."""


@dataclasses.dataclass(frozen=True)
class Push:
    """A request and its source."""

    request: PushRequest
    cache: Cache
    spans: ByteSpans

    def run(self, link: PushingLink, deadline: float) -> None:
        """Run the push; raises like `PushSender.push`."""
        link.push(self.request, self.cache.memory, self.spans, deadline)


def slot_push(key: PushKey, cache: Cache, batch_index: int, size: int, options: TransferOptions) -> Push:
    """Return the push of a slot into a slot.

    Args:
        key: names the destination.
        cache: the source, a contiguous cache.
        batch_index: index of the source slot.
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
    request = PushRequest(0, target, desc.data_type, len(tensors), target_layers, num_bytes, 0)
    return Push(request, cache, slot_spans(tensors, batch_index * desc.slot_bytes, num_bytes))


def block_pushes(
    key: PushKey,
    cache: Cache,
    source_blocks: npt.NDArray[np.uint64],
    target_blocks: npt.NDArray[np.uint64],
    options: TransferOptions,
) -> Iterator[Push]:
    """Yield the pushes of blocks into blocks: one, or several if too long for one message.

    Raises:
        LLMException: LLM_PARAM_INVALID, before the first.
    """
    _require_blocks(key, cache, source_blocks, target_blocks)
    tensors, target_layers = transferred_layers(cache, options, is_source=True)
    order = np.argsort(target_blocks)  # so that neighbours are adjacent
    sources = source_blocks[order].astype(np.int64)
    targets = target_blocks[order].astype(np.int64)
    block_bytes, data_type = cache.desc.slot_bytes, cache.desc.data_type

    def push(part: slice) -> Push:
        target_runs = encode_runs(*runs(targets[part]))
        target = _blocks_target(key, block_bytes, target_runs)
        num_bytes = len(targets[part]) * block_bytes
        request = PushRequest(0, target, data_type, len(tensors), target_layers, num_bytes, 0)
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
        raise invalid(f"destination block {target_blocks.max()} is out of range")
    if len(np.unique(target_blocks)) != len(target_blocks):
        raise invalid("two blocks have the same destination")


def layer_transfers(
    cache: Cache,
    configs: Sequence[Config],
    blocks: Blocks | None,
    dst_block_bytes: int | None,
    move: Callable[[int, Callable[[Cache], list[Push]]], None],
) -> list[LayerTransfer]:
    """Return the transfers of all layers, in the order of layers.

    Args:
        cache: the source.
        configs: where to.
        blocks: blocks of a blocks cache; None: slots are moved.
        dst_block_bytes: bytes of a destination block, if given by the caller.
        move: runs the pushes made by a function, to a cluster.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if (blocks is not None) != cache.is_blocks:
        raise invalid("block indices are for blocks caches, which must have them")
    if dst_block_bytes is not None and dst_block_bytes != cache.desc.slot_bytes:
        raise invalid(
            f"dst_block_memory_size is {dst_block_bytes}; blocks have {cache.desc.slot_bytes} bytes"
        )
    transfers = [
        one
        for number, config in enumerate(configs)
        for one in _of_config(cache.desc, number, config, blocks, move)
    ]
    for config in configs:  # errors are the same in every layer
        source, target = _layers(cache.desc, config)
        _pushes(cache, config, source[0], target[0], 0, blocks)
    return sorted(transfers, key=lambda one: one.layer)


def _of_config(
    desc: CacheDesc,
    number: int,
    config: Config,
    blocks: Blocks | None,
    move: Callable[[int, Callable[[Cache], list[Push]]], None],
) -> Iterator[LayerTransfer]:
    source, target = _layers(desc, config)
    key = config.cache_key if isinstance(config, TransferWithCacheKeyConfig) else None
    cluster_id = config.dst_cluster_id if isinstance(config, TransferConfig) else config.cache_key.cluster_id
    if blocks is None and isinstance(key, BlocksCacheKey):
        raise invalid(f"{key} names a blocks cache; slots go to a CacheKeyByIdAndIndex")

    def transfer(position: int, layer: int, target_layer: int) -> LayerTransfer:
        def pushes(cache: Cache) -> list[Push]:
            return _pushes(cache, config, layer, target_layer, position, blocks)

        return LayerTransfer(layer, number, lambda: move(cluster_id, pushes))

    for position, (layer, target_layer) in enumerate(zip(source, target, strict=True)):
        yield transfer(position, layer, target_layer)


def _layers(desc: CacheDesc, config: Config) -> tuple[range, range]:
    """Return the layers of the source, and of the destination if it has any."""
    num_layers = desc.num_tensors // _per_layer(desc)
    source = range(num_layers) if config.src_layer_range is None else config.src_layer_range
    if source.step != 1 or not 0 <= source.start < source.stop <= num_layers:
        raise invalid(f"src_layer_range is {source} of {num_layers} layers; it must have layers, and step 1")
    if isinstance(config, TransferConfig):
        if len(config.dst_addrs) != len(source) * _per_layer(desc):
            raise invalid(f"there are {len(config.dst_addrs)} dst_addrs for {len(source)} layers")
        return source, source
    target = source if config.dst_layer_range is None else config.dst_layer_range
    if target.step != 1 or target.start < 0 or len(target) != len(source):
        raise invalid(f"dst_layer_range is {target}; it must be as long as {source}, with step 1")
    return source, target


def _pushes(  # noqa: PLR0917 - what one layer of one configuration is
    cache: Cache, config: Config, layer: int, target_layer: int, position: int, blocks: Blocks | None
) -> list[Push]:
    per_layer = _per_layer(cache.desc)
    source = range(layer, layer + 1)
    if isinstance(config, TransferConfig):
        options = TransferOptions(src_layer_range=source, tensor_num_per_layer=per_layer)
        addresses = config.dst_addrs[position * per_layer : (position + 1) * per_layer]
        key: PushKey = Addresses(tuple(addresses))
    else:
        target = range(target_layer, target_layer + 1)
        options = TransferOptions(
            src_layer_range=source, dst_layer_range=target, tensor_num_per_layer=per_layer
        )
        key = config.cache_key
    if blocks is not None:
        return list(block_pushes(key, cache, *blocks, options))
    return [slot_push(key, cache, config.src_batch_index, -1, options)]


def _per_layer(desc: CacheDesc) -> int:
    """Return the number of tensors of a layer: K and V, unless there is an odd number."""
    return 1 if desc.num_tensors % 2 else 2
