"""What `transfer_cache_async` pushes, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.cache_keys import BlocksCacheKey
from quire.datadist.interface.cache_tasks import LayerTransfer, TransferConfig, TransferWithCacheKeyConfig
from quire.datadist.interface.pulls import TransferOptions
from quire.datadist.interface.pushes import Addresses, Cache, Push, PushKey, block_pushes, slot_push
from quire.datadist.status import invalid

Config = TransferConfig | TransferWithCacheKeyConfig
Blocks = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Source blocks, and where each goes."""


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
        blocks: of a blocks cache; None: slots are moved.
        dst_block_bytes: bytes of a block of the destination, if the caller has said so.
        move: runs the pushes that it is given a function for, to a cluster.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if (blocks is not None) != cache.is_blocks:
        raise invalid("block indices are given for a blocks cache, and for no other")
    if dst_block_bytes is not None and dst_block_bytes != cache.desc.slot_bytes:
        raise invalid(
            f"dst_block_memory_size is {dst_block_bytes}; blocks have {cache.desc.slot_bytes} bytes"
        )
    transfers = [
        one
        for number, config in enumerate(configs)
        for one in _of_config(cache.desc, number, config, blocks, move)
    ]
    for config in configs:  # what can be wrong is the same in every layer
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
    """Return the layers of the source, and of the destination as far as it has any."""
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
