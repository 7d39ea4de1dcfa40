"""Pulls by a DECODER: checks against the destination, and messages to the PROMPT."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.datadist.argument_checks import OFFSET, U32, ArgumentChecks
from quire.datadist.caches.cache_holds import PooledCache
from quire.datadist.caches.cache_keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans, block_spans, runs, slot_spans
from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.links.pull_sources import layer_tensors
from quire.datadist.status import LLMStatusCode, failure, invalid
from quire.datadist.wire.protocol import (
    MAX_BLOCK_RUNS,
    BlocksSource,
    KeySource,
    LayerRange,
    NumberedBlocksSource,
    PullRequest,
    SlotSource,
    encode_runs,
)

LAYER_OPTIONS = ("src_layer_range", "dst_layer_range", "tensor_num_per_layer")
SLOT_OPTIONS = ("src_cache_offset", "dst_cache_offset", *LAYER_OPTIONS)

Cache = PooledCache[CacheMemory]


@dataclasses.dataclass(frozen=True)
class TransferOptions:
    """The keyword arguments of a pull or push."""

    src_cache_offset: int | None = None
    dst_cache_offset: int | None = None
    src_layer_range: range | None = None
    dst_layer_range: range | None = None
    tensor_num_per_layer: int = 2

    @property
    def is_partial(self) -> bool:
        """Whether only a part of a slot is moved, so that its key stays bound."""
        given = (self.src_cache_offset, self.dst_cache_offset, self.src_layer_range, self.dst_layer_range)
        return any(one is not None for one in given)


@dataclasses.dataclass(frozen=True)
class Pull:
    """A request and its destination."""

    request: PullRequest
    cache: Cache
    spans: ByteSpans

    def run(self, link: DecoderLink, deadline: float) -> None:
        """Run the pull; raises like `DecoderLink.pull`, and LLM_FAILED for a lost destination."""
        if self.cache.memory.is_lost:
            raise failure(
                LLMStatusCode.LLM_FAILED,
                f"cache {self.cache.cache_id} may still be written to by a transfer that was not cancelled; "
                "use another cache, and restart this process soon",
            )
        link.pull(self.request, self.cache.memory, self.spans, deadline)


def check_options(check: ArgumentChecks, given: dict[str, Any], known: Collection[str]) -> TransferOptions:
    """Check the keyword arguments of a pull.

    Raises:
        TypeError: a keyword is unknown, or its type is wrong.
    """
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"a pull has no keyword {name!r}; it has {', '.join(known)}")
        if name == "tensor_num_per_layer":
            check.integer(name, value, U32)
        elif value is not None and name.endswith("_offset"):
            check.integer(name, value, OFFSET)
        elif value is not None:
            check.instance(name, value, range)
    options = TransferOptions(**given)
    has_layers = options.src_layer_range is not None or options.dst_layer_range is not None
    check.require(
        not has_layers or options.tensor_num_per_layer >= 1, "tensor_num_per_layer is not at least 1"
    )
    return options


def slot_pull(
    key: CacheKey | CacheKeyByIdAndIndex, cache: Cache, batch_index: int, size: int, options: TransferOptions
) -> Pull:
    """Return the pull of a slot into a slot.

    Args:
        key: names the source.
        cache: the destination, a contiguous cache.
        batch_index: index of the destination slot.
        size: in bytes per tensor; -1: the rest of the destination slot.
        options: the keywords.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    desc = cache.desc
    source = _slot_source(key)
    if cache.is_blocks or batch_index >= desc.batch_size:
        what = "a blocks cache" if cache.is_blocks else f"{desc.batch_size} slots"
        raise invalid(f"batch_index is {batch_index}, but the destination has {what}")
    offset = options.dst_cache_offset or 0
    num_bytes = desc.slot_bytes - offset if size == -1 else size
    if num_bytes < 1 or offset + num_bytes > desc.slot_bytes:
        raise invalid(
            f"size {size} from dst_cache_offset {offset} is not within the destination slot, which has "
            f"{desc.slot_bytes} bytes"
        )
    tensors, source_layers = transferred_layers(cache, options, is_source=False)
    consume = isinstance(key, CacheKey) and not options.is_partial
    first = options.src_cache_offset or 0
    request = _request(source, cache, tensors, source_layers, num_bytes, offset=first, consume=consume)
    return Pull(request, cache, slot_spans(tensors, batch_index * desc.slot_bytes + offset, num_bytes))


def block_pulls(
    key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex,
    cache: Cache,
    source_blocks: npt.NDArray[np.uint64],
    target_blocks: npt.NDArray[np.uint64],
    options: TransferOptions,
) -> Iterator[Pull]:
    """Yield the pulls of blocks into blocks: one, or several if too long for one message; keys stay.

    Args:
        key: names a blocks cache; or without `source_blocks` a slot, whose start goes to `target_blocks` in
            their order.
        cache: the destination, a blocks cache.
        source_blocks: block `source_blocks[i]` goes to block `target_blocks[i]`.
        target_blocks: none twice.
        options: the keywords.

    Raises:
        LLMException: LLM_PARAM_INVALID, before the first.
    """
    _require_blocks(cache, target_blocks)
    if not isinstance(key, BlocksCacheKey) and not len(source_blocks):
        return iter([_spread_pull(key, cache, target_blocks, options)] if len(target_blocks) else [])
    if isinstance(key, CacheKey) or (isinstance(key, CacheKeyByIdAndIndex) and key.batch_index):
        raise invalid(
            f"{key} names a slot; source blocks are named with a key of a blocks cache, or by cache_id"
        )
    return _paired_pulls(key, cache, source_blocks, target_blocks, options)


def _paired_pulls(
    key: BlocksCacheKey | CacheKeyByIdAndIndex,
    cache: Cache,
    source_blocks: npt.NDArray[np.uint64],
    target_blocks: npt.NDArray[np.uint64],
    options: TransferOptions,
) -> Iterator[Pull]:
    if len(source_blocks) != len(target_blocks):
        raise invalid(f"there are {len(source_blocks)} source blocks for {len(target_blocks)} destinations")
    if len(source_blocks) and int(source_blocks.max()) > OFFSET.greatest:
        raise invalid(f"source block {source_blocks.max()} is out of range")
    tensors, source_layers = transferred_layers(cache, options, is_source=False)
    order = np.argsort(target_blocks)  # so that neighbours are adjacent
    sources = source_blocks[order].astype(np.int64)
    targets = target_blocks[order].astype(np.int64)
    block_bytes = cache.desc.slot_bytes

    def pull(part: slice) -> Pull:
        source_runs = encode_runs(*runs(sources[part]))
        source = (
            BlocksSource(key.model_id, block_bytes, source_runs)
            if isinstance(key, BlocksCacheKey)
            else NumberedBlocksSource(key.cache_id, block_bytes, source_runs)
        )
        spans = block_spans(tensors, *runs(targets[part]), block_bytes)
        num_bytes = len(targets[part]) * block_bytes
        request = _request(source, cache, tensors, source_layers, num_bytes)
        return Pull(request, cache, spans)

    return (pull(part) for part in block_parts(len(targets)))


def _spread_pull(
    key: CacheKey | CacheKeyByIdAndIndex,
    cache: Cache,
    target_blocks: npt.NDArray[np.uint64],
    options: TransferOptions,
) -> Pull:
    tensors, source_layers = transferred_layers(cache, options, is_source=False)
    num_bytes = len(target_blocks) * cache.desc.slot_bytes
    request = _request(_slot_source(key), cache, tensors, source_layers, num_bytes)
    starts, counts = runs(target_blocks.astype(np.int64))
    return Pull(request, cache, block_spans(tensors, starts, counts, cache.desc.slot_bytes))


def _slot_source(key: CacheKey | CacheKeyByIdAndIndex) -> KeySource | SlotSource:
    if isinstance(key, CacheKeyByIdAndIndex):
        return SlotSource(key.cache_id, key.batch_index)
    if key.is_placeholder:
        raise invalid("the key is a placeholder; it needs a req_id or a prefix_id")
    return KeySource(key.req_id, key.model_id, key.prefix_id)


def block_parts(num_blocks: int) -> Iterator[slice]:
    """Yield parts of lists of blocks, each short enough for one message."""
    for start in range(0, num_blocks, MAX_BLOCK_RUNS):
        yield slice(start, start + MAX_BLOCK_RUNS)


def _require_blocks(cache: Cache, target_blocks: npt.NDArray[np.uint64]) -> None:
    if not cache.is_blocks:
        raise invalid("the destination is a contiguous cache; blocks are pulled into a blocks cache")
    if len(target_blocks) and int(target_blocks.max()) >= cache.desc.batch_size:
        raise invalid(f"there is a destination block {target_blocks.max()} of {cache.desc.batch_size} blocks")
    if len(np.unique(target_blocks)) != len(target_blocks):
        raise invalid("two blocks have the same destination")


def transferred_layers(
    cache: Cache, options: TransferOptions, *, is_source: bool
) -> tuple[range, LayerRange | None]:
    """Return the tensors of this side's cache, and the layers of the peer's.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    source, target = options.src_layer_range, options.dst_layer_range
    if source is None and target is None:
        return range(cache.desc.num_tensors), None
    for name, layers in (("src_layer_range", source), ("dst_layer_range", target)):
        if layers is not None and (layers.step != 1 or not 0 <= layers.start < layers.stop <= U32.greatest):
            raise invalid(f"{name} is {layers}; it must have layers, and step 1")
    if source is not None and target is not None and len(source) != len(target):
        raise invalid(f"src_layer_range {source} and dst_layer_range {target} have different lengths")
    name, own, peers = (
        ("src_layer_range", source, target) if is_source else ("dst_layer_range", target, source)
    )
    tensors = layer_tensors(name, _layer_range(own, options), cache.desc.num_tensors)
    return tensors, _layer_range(peers, options)


def _layer_range(layers: range | None, options: TransferOptions) -> LayerRange | None:
    return None if layers is None else LayerRange(layers.start, layers.stop, options.tensor_num_per_layer)


def _request(
    source: KeySource | SlotSource | BlocksSource | NumberedBlocksSource,
    cache: Cache,
    tensors: range,
    layers: LayerRange | None,
    num_bytes: int,
    *,
    offset: int = 0,
    consume: bool = False,
) -> PullRequest:
    data_type = cache.desc.data_type
    return PullRequest(0, 0, source, data_type, len(tensors), layers, offset, num_bytes, consume, 0)
